"""What Recast knows of recommendation models: one file a pass, and their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from recast.rewriter.pipeline import Pass

from .cleanup import CleanUp
from .dropout import FuseReluDropout
from .embeddings import GroupEmbeddings
from .interactions import FuseDotInteraction
from .mlp import FuseMlp
from .normalize import Normalize
from .sabotage import SABOTEURS

PIPELINE: tuple[Pass, ...] = (
    CleanUp(),  # first: what a model computes and forgets must not be fused into what it uses
    Normalize(),  # early: the others look for one spelling
    GroupEmbeddings(),  # before all fusion: nothing else may take a lookup's inputs away
    FuseDotInteraction(),  # after the lookups, whose rows it then takes without a copy
    FuseMlp(),  # after the interaction, whose cat and view would otherwise end no chain
    FuseReluDropout(),  # after the chains: only what they left
    CleanUp(),  # last: drops what the others no longer use
)

_PASSES = (Normalize, GroupEmbeddings, FuseDotInteraction, FuseMlp, FuseReluDropout, CleanUp)
REGISTRY: Mapping[str, Callable[..., Pass]] = {p.name: p for p in _PASSES} | dict(SABOTEURS)

__all__ = [
    "PIPELINE",
    "REGISTRY",
    "CleanUp",
    "FuseDotInteraction",
    "FuseMlp",
    "FuseReluDropout",
    "GroupEmbeddings",
    "Normalize",
]
