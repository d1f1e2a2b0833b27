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


def vectors(layers: int, dim: int, dtype: torch.dtype, device: torch.device, batch: int) -> Case:
    """A cross network of vectors."""
    x = torch.randn(batch, dim, device=device, dtype=dtype)
    weights = [torch.randn(dim, device=device, dtype=dtype) / dim for _ in range(layers)]
    biases = [torch.randn(dim, device=device, dtype=dtype) for _ in range(layers)]
    # Forward: read, written; backward: read with the gradient, its own written.
    moved = 5.0 * batch * dim * x.element_size()
    return "cross_vector", [x, x, weights, [None] * layers, biases], moved, 0.0


def matrices(
    layers: int, dim: int, rank: int, dtype: torch.dtype, device: torch.device, batch: int
) -> Case:
    """A cross network of low rank."""
    x = torch.randn(batch, dim, device=device, dtype=dtype)
    weights: list[Tensor] = []
    for _ in range(layers):
        weights.append(torch.randn(rank, dim, device=device, dtype=dtype) * dim**-0.5)
        weights.append(torch.randn(dim, rank, device=device, dtype=dtype) * rank**-0.5)
    inner = [b for _ in range(layers) for b in (None, torch.randn(dim, device=device, dtype=dtype))]
    none: list[None] = [None] * layers
    moved = 12.0 * layers * batch * dim * x.element_size()
    flops = 3 * 2 * 2.0 * layers * batch * dim * rank
    args = [x, x, weights, inner, none * 2, none, [2] * layers]
    return "cross_matrix", args, moved, flops


def pairs(
    count: int, dim: int, sum: str, dtype: torch.dtype, device: torch.device, batch: int
) -> Case:
    features = [torch.randn(batch, count, dim, device=device, dtype=dtype)]
    li, lj = torch.triu_indices(count, count, 1, device=device)
    out = len(li) * (dim if sum == "none" else 1)
    moved = batch * features[0].element_size() * (3.0 * count * dim + 2.0 * out)
    return "pair_products", [features, [], li, lj, None, sum], moved, 0.0
