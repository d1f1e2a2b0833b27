"""A random generator for each thread, as each process has one."""

from __future__ import annotations

import threading

import torch

_SEEDS = threading.local()


def own_generator(seed: int) -> None:
    """Give this thread a generator of its own."""
    _SEEDS.generator = torch.Generator().manual_seed(seed)


def current() -> torch.Generator:
    """This thread's generator, or torch's own if it has none."""
    found: torch.Generator = getattr(_SEEDS, "generator", torch.default_generator)
    return found
