"""How much tables that are stored in fewer bits change the outputs of a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from recast.rewriter.compiled.copies import same_random_numbers, seed_all
from recast.rewriter.compiled.trees import flatten, rebuild

Call = tuple[tuple[Any, ...], dict[str, Any]]


def sentence(plain: nn.Module, fast: nn.Module, calls: Iterable[Call]) -> str:
    """How far the outputs of ``fast`` are from those of ``plain``, both in eval mode."""
    most = total = largest = 0.0
    count = 0
    for call in calls:
        with torch.no_grad(), same_random_numbers():
            outputs = []
            for model in (plain, fast):
                args, kwargs = rebuild(call, torch.clone)  # forward may write to its arguments
                seed_all(0)
                outputs.append(_floats(model(*args, **kwargs)))
        wanted, got = outputs
        for a, b in zip(got, wanted, strict=True):
            error = (a.double() - b.double()).abs()
            most, total = max(most, float(error.max())), total + float(error.sum())
            largest, count = max(largest, float(b.abs().max())), count + b.numel()
    return (
        f"on the example, outputs differ by at most {most:.2g} ({total / max(count, 1):.2g} on"
        f" average); the largest is {largest:.2g}"
    )


def _floats(output: Any) -> list[torch.Tensor]:
    leaves: list[Any] = []
    flatten(output, leaves, [])
    return [t for t in leaves if t.is_floating_point() and t.numel()]
