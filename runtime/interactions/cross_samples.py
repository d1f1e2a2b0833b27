"""Calls of the cross networks of matrices on which the ops are tested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recast.runtime.op import Sample


def _random(seed: int) -> Callable[..., Tensor]:
    g = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=g)


def of_matrices() -> list[Sample]:
    """Full and low rank, gates, all biases and none, x apart, odd widths, strides, no rows."""
    rand = _random(41)

    def one(
        label: str, x0: Tensor, ranks: list[int], x: Tensor | None = None, **how: Any
    ) -> Sample:
        """``ranks``: 0 for a full matrix."""
        d = x0.shape[-1]
        weights: list[Tensor] = []
        inner: list[Tensor | None] = []
        gates: list[Tensor | None] = []
        outer: list[Tensor | None] = []
        for rank in ranks:
            sizes = [(d, d)] if not rank else [(rank, d), (d, rank)]
            weights += [rand(*size) / size[1] ** 0.5 for size in sizes]
            inner += [rand(size[0]) if how.get("inner") else None for size in sizes]
            gated = how.get("gated", False)
            gates += [rand(d, d) / d if gated else None, rand(d) if gated == "bias" else None]
            outer.append(rand(*how.get("shape", (d,))) if how.get("outer") else None)
        depths = [2 if rank else 1 for rank in ranks]
        start = x0 if x is None else x
        return Sample(label, (x0, start, weights, inner, gates, outer, depths))

    return [
        one("full", rand(6, 40), [0, 0, 0], inner=True),
        one("low rank", rand(5, 19), [4, 3], inner=True),
        one("outer bias", rand(5, 9), [0, 2], outer=True, shape=(9, 1)),
        one("gated", rand(5, 17), [0, 0], inner=True, gated=True),
        one("gated low rank", rand(4, 8), [3], outer=True, gated="bias"),
        one("apart", rand(6, 18), [0, 5], rand(6, 18), inner=True),
        one("no biases", rand(70, 5), [0]),
        one("empty batch", rand(0, 8), [0, 2], inner=True),
        one("3-d", rand(2, 3, 6), [0, 0], outer=True),
        one("strided", rand(8, 6).t(), [0, 0], rand(6, 16)[:, ::2]),
    ]


def of_mixtures() -> list[Sample]:
    """With and without every part, odd sizes, one expert, no rows."""
    rand = _random(43)

    def one(
        label: str, x0: Tensor, experts: int, rank: int, x: Tensor | None = None, **how: Any
    ) -> Sample:
        d = x0.shape[-1]
        v, u = rand(experts, rank, d) / d**0.5, rand(experts, d, rank) / rank**0.5
        core = rand(experts, rank, rank) if how.get("core", True) else None
        gate = rand(experts, d) / d**0.5 if how.get("gated", True) else None
        gate_bias = rand(experts) if how.get("gate_bias") else None
        inner = rand(d, 1) if how.get("inner", True) else None
        outer = rand(d) if how.get("outer") else None
        act = how.get("act", "tanh")
        return Sample(
            label,
            (x0, x0 if x is None else x, v, core, u, gate, gate_bias, inner, outer, act,
             how.get("p", 0.0), how.get("training", False)),
        )  # fmt: skip

    return [
        one("mixture", rand(6, 20), 4, 3),
        one("no core", rand(5, 9), 2, 4, core=False, outer=True, gate_bias=True, inner=False),
        one("one expert", rand(4, 7), 1, 3, gated=False, act="none"),
        one("apart", rand(5, 8), 3, 2, rand(5, 8), act="sigmoid"),
        one("drop", rand(6, 10), 3, 4, p=0.5, training=True),
        one("empty batch", rand(0, 6), 2, 3),
        one("3-d", rand(2, 3, 6), 2, 3),
    ]
