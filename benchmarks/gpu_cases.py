"""Arguments of the fused ops in the shapes that models have, and what a step of each must move."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from gpu_measure import chain_work
from torch import Tensor

Case = tuple[str, list[Any], float, float]  # op, its arguments, bytes and operations of a step
MLP = [479, 1024, 1024, 512, 256, 1]


def lookup(
    tables: int, ids: int, dim: int, dtype: torch.dtype, device: torch.device, batch: int
) -> Case:
    count = 1_000_000 if batch > 64 else 50
    weights = [torch.randn(count, dim, device=device, dtype=dtype) for _ in range(tables)]
    given = [torch.randint(count, (batch, ids), device=device) for _ in range(tables)]
    none: list[None] = [None] * tables
    off, modes = [False] * tables, ["sum"] * tables
    args = [weights, given, none, none, [*range(tables)], modes, none, off, off]
    width = weights[0].element_size()
    # Forward: ids, rows, outputs; backward: ids and gradients of outputs are read.
    moved = tables * batch * (ids * 8.0 + ids * dim * width + dim * width) * 1.5
    return "embedding_bags", args, moved, 0.0


def dot(count: int, dim: int, dtype: torch.dtype, device: torch.device, batch: int) -> Case:
    features = [torch.randn(batch, dim, device=device, dtype=dtype) for _ in range(count)]
    li, lj = torch.tril_indices(count, count, -1, device=device)
    args = [features, features[0], li, lj, 1]
    width = features[0].element_size()
    moved = 3.0 * batch * width * (count * dim + dim + count * (count - 1) / 2)
    return "dot_interaction", args, moved, 6.0 * batch * count * count * dim


def fm(count: int, dim: int, dtype: torch.dtype, device: torch.device, batch: int) -> Case:
    features = [torch.randn(batch, dim, device=device, dtype=dtype) for _ in range(count)]
    moved = 3.0 * batch * features[0].element_size() * (count * dim + 1)
    return "fm_interaction", [features, 0.5, True], moved, 0.0


def mlp(sizes: list[int], dtype: torch.dtype, device: torch.device, batch: int) -> Case:
    sizes = sizes if batch > 64 else [16, 8, 1]
    params: list[Tensor] = []
    for a, b in pairwise(sizes):
        weight = torch.randn(b, a, device=device, dtype=dtype) * a**-0.5
        params += [weight, torch.randn(b, device=device, dtype=dtype)]
    steps = ["linear", "relu"] * (len(sizes) - 2) + ["linear"]
    x = torch.randn(batch, sizes[0], device=device, dtype=dtype)
    moved, flops = chain_work(sizes, batch, x.element_size())
    return "mlp", [x, params, [], steps, [], []], moved, flops
