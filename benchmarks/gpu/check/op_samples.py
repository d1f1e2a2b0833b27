"""Arguments of the ops in sizes that fill a GPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from recast.runtime.op import Sample

FEW = 4  # inputs that a unit of a large chain adds


def _large_lookups() -> list[Sample]:
    g = torch.Generator().manual_seed(1)
    found = []
    for dim in (8, 16, 33, 64, 128, 256):
        tables = [torch.randn(n, dim, generator=g) for n in (3, 1000, 50_000)]
        counts = torch.randint(0, 9, (4096,), generator=g)
        counts[7] = 3000  # one bag that is split
        ends = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
        total = int(ends[-1])
        # Squares of uniform numbers: few ids are hot.
        hot = (torch.rand(total, generator=g).square() * 50_000).long()
        ids = [
            torch.randint(3, (4096,), generator=g),
            torch.randint(1000, (4096, 5), generator=g, dtype=torch.int32),
            hot,
            hot,
        ]
        sample_weights = [None, None, None, torch.randn(total, generator=g)]
        table, mode = [0, 1, 2, 2], ["none", "mean", "sum", "sum"]
        off = [False] * 4
        args = (
            tables, ids, [None, None, ends, ends], sample_weights, table, mode, [None] * 4,
            [False, False, True, True], off,
        )  # fmt: skip
        found.append(Sample(f"large, width {dim}", args))
    return found


def _large_dots() -> list[Sample]:
    g = torch.Generator().manual_seed(2)
    found = []
    for rows, count, dim in ((4096, 27, 128), (4096, 27, 64), (1000, 9, 32), (777, 40, 16)):
        features = [torch.randn(rows, dim, generator=g) for _ in range(count)]
        li, lj = torch.tril_indices(count, count, -1)
        args = (features, features[0], li, lj, 1)
        found.append(Sample(f"large, {count} features of {dim}", args))
    return found


def _large_gathers() -> list[Sample]:
    g = torch.Generator().manual_seed(8)
    found = []
    for rows, tables, dim in ((4096, 26, 128), (777, 9, 16)):
        weights = [torch.randn(n, dim, generator=g) for n in [3, 50_000] * (tables // 2)]
        weights += [torch.randn(7, dim, generator=g)] * (tables % 2)
        ids = [torch.randint(w.shape[0], (rows,), generator=g) for w in weights]
        cuts = torch.arange(rows)
        li, lj = torch.tril_indices(tables + 1, tables + 1, -1)
        x, none, off = torch.randn(rows, dim, generator=g), [None] * tables, [False] * tables
        args = (
            weights, ids, [cuts] * tables, [*range(tables)], ["sum"] * tables, none, off, False,
            [x], [-1, *range(tables)], x, li, lj, 1,
        )  # fmt: skip
        found.append(Sample(f"large, {tables} lookups of {dim}", args))
    return found


def _large_mlps() -> list[Sample]:
    """Chains whose values before each relu are the same number in every dtype, and never near 0.

    Even the narrowest dtype holds every product and partial sum exactly: a unit adds few inputs,
    which are small multiples of a power of two, and its bias is an odd multiple of half of that.
    Otherwise rounding would move one value in a million across the relu and change its gradient.
    """
    g = torch.Generator().manual_seed(3)
    found = []
    chains = ((479, 1024, 512, 256, 1), 700), ((13, 512, 256, 128), 700), ((1000, 1000, 999), 700)
    for sizes, rows in (*chains, ((24, 16, 1), 5000)):  # so many that one output is a choice, too
        params: list[Tensor] = []
        unit = 1.0  # of what comes in
        for a, b in list(pairwise(sizes))[:-1]:
            weight = torch.zeros(b, a)
            places = torch.rand(b, a, generator=g).topk(min(a, FEW)).indices
            weight.scatter_(1, places, torch.randint(2, places.shape, generator=g) * 2.0 - 1)
            unit /= 2
            params += [weight, unit * (2 * torch.randint(-2, 2, (b,), generator=g) + 1)]
        a, b = sizes[-2:]
        params += [torch.randn(b, a, generator=g) * a**-0.5, torch.randn(b, generator=g)]
        steps = ["linear", "relu"] * (len(sizes) - 2) + ["linear"]
        x = torch.randint(-1, 2, (rows, sizes[0]), generator=g).float()
        found.append(Sample(f"large, {'-'.join(map(str, sizes))}", (x, params, [], steps, [], [])))
    return found


def _large_fields() -> list[Sample]:
    g = torch.Generator().manual_seed(4)
    found = []
    for batch, heads, fields, dim in ((700, 2, 39, 16), (300, 1, 26, 32), (90, 4, 130, 8)):
        q, k, v = (
            torch.randn(batch, fields, heads, dim, generator=g).transpose(1, 2) for _ in range(3)
        )
        args = (q, k, v, dim**-0.5, 0.0, True, fields == 26)
        found.append(Sample(f"large, {fields} fields of {dim}", args))
    return found


def _large_layers() -> list[Sample]:
    """Products of more samples than are processed at a time."""
    g = torch.Generator().manual_seed(5)
    found = []
    for batch, left, right, dim, outputs in ((1003, 26, 26, 16, 33), (301, 39, 100, 10, 64)):
        x, y = (torch.randn(batch, n, dim, generator=g) for n in (left, right))
        weight = torch.randn(outputs, left * right, generator=g) * (left * right) ** -0.5
        args = (x, y, weight, torch.randn(outputs, generator=g), True)
        found.append(Sample(f"large, {left} by {right} to {outputs}", args))
    return found


def _large_gates() -> list[Sample]:
    g = torch.Generator().manual_seed(6)
    found = []
    for rows, experts, dim in ((5000, 8, 128), (3001, 5, 67)):
        vectors = [torch.randn(rows, dim, generator=g) for _ in range(experts)]
        gates = [torch.randn(rows, experts, generator=g) for _ in range(3)]
        args = (vectors, gates, [*range(experts)] * 3, True, False)
        found.append(Sample(f"large, {experts} vectors of {dim}", args))
    return found


def _large_dice() -> list[Sample]:
    g = torch.Generator().manual_seed(7)
    return [
        Sample(f"large, {rows} x {width}", (
            torch.randn(rows, width, generator=g), torch.randn(rows, width, generator=g),
            torch.randn(width, generator=g),
        ))
        for rows, width in ((50_001, 200), (70_000, 1), (300, 3001))
    ]  # fmt: skip


def _large_experts() -> list[Sample]:
    g = torch.Generator().manual_seed(9)
    found = []
    for rows, experts, width, depth in ((5000, 4, 128, 128), (3001, 9, 36, 52)):
        scale, x = torch.randn(rows, width, generator=g), torch.randn(rows, depth, generator=g)
        weight = torch.randn(experts, width, depth, generator=g) * depth**-0.5
        args = (scale, weight, x, "bi,eij,bj->bei")
        found.append(Sample(f"large, {experts} of {width} by {depth}", args))
    return found


LARGE: dict[str, Callable[[], list[Sample]]] = {
    "embedding_bags": _large_lookups,
    "compressed_interaction": _large_layers,
    "dice": _large_dice,
    "dot_interaction": _large_dots,
    "field_attention": _large_fields,
    "gated_sums": _large_gates,
    "gathered_dots": _large_gathers,
    "mlp": _large_mlps,
    "scaled_einsum": _large_experts,
}
