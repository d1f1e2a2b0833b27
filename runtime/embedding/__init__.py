"""Embedding lookups: those of a step in one call, on CPU and GPU, in tables of any precision."""
