"""Checkpoints: saved on any number of ranks, loaded on any other, or into the plain model."""

from recast.runtime.checkpoint.api import Metadata, load, save

__all__ = ["Metadata", "load", "save"]
