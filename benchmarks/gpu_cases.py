"""Arguments of the fused ops in the shapes that models have, and what a step of each must move."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from gpu_floor import chain_work
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
    moved = tables * batch * (ids * 8.0 + ids * dim * width + dim * width)
    return "embedding_bags", args, moved, 0.0


def forward_share(op: str) -> float:
    """How much of a step's bytes and operations are those of its forward.

    All of a lookup's: its gradient stays (ids, rows), and what it does later is the update's.
    """
    if op == "relu_dropout":
        return 1 / 2
    return 1.0 if op in ("embedding_bags", "embedding_cat") else 1 / 3


def beside(tables: int, dim: int, dtype: torch.dtype, device: torch.device, batch: int) -> Case:
    """Lookups of one id and a dense vector side by side, as an MLP reads them."""
    _, args, moved, _ = lookup(tables, 1, dim, dtype, device, batch)
    ids = [i.reshape(-1) for i in args[1]]
    x = torch.randn(batch, dim, device=device, dtype=dtype)
    args = [args[0], ids, *args[2:5], ["none"] * tables, *args[6:], [x], [-1, *range(tables)]]
    return "embedding_cat", args, moved + 2.0 * x.numel() * x.element_size(), 0.0


def dot(count: int, dim: int, dtype: torch.dtype, device: torch.device, batch: int) -> Case:
    features = [torch.randn(batch, dim, device=device, dtype=dtype) for _ in range(count)]
    li, lj = torch.tril_indices(count, count, -1, device=device)
    args = [features, features[0], li, lj, 1]
    width = features[0].element_size()
    moved = 3.0 * batch * width * (count * dim + dim + count * (count - 1) / 2)
    return "dot_interaction", args, moved, 6.0 * batch * count * count * dim


def gathered(tables: int, dim: int, dtype: torch.dtype, device: torch.device, batch: int) -> Case:
    """One id a field, looked up by the interaction; read again in backward."""
    count = 1_000_000 if batch > 64 else 50
    weights = [torch.randn(count, dim, device=device, dtype=dtype) for _ in range(tables)]
    ids = [torch.randint(count, (batch,), device=device) for _ in range(tables)]
    x = torch.randn(batch, dim, device=device, dtype=dtype)
    li, lj = torch.tril_indices(tables + 1, tables + 1, -1, device=device)
    none, off = [None] * tables, [False] * tables
    lookups = [weights, ids, none, [*range(tables)], ["none"] * tables, none, off, False]
    args = [*lookups, [x], [-1, *range(tables)], x, li, lj, 1]
    pairs = tables * (tables + 1) / 2
    # Each way: ids and rows read; forward the result, backward its gradient and those of the rows.
    rows = batch * (tables + 1) * dim * weights[0].element_size()
    moved = 3.0 * rows + 16.0 * batch * tables + 2 * batch * (dim + pairs) * weights[0].itemsize
    return "gathered_dots", args, moved, 6.0 * batch * (tables + 1) ** 2 * dim


def apart(*args: Any) -> Tensor:
    """``gathered_dots`` as the two ops one behind the other."""
    weights, ids, offsets, table, mode, padding, last, narrow, features, order, *rest = args
    off = [False] * len(ids)
    given = (weights, ids, offsets, [None] * len(ids), table, mode, padding, last, off, narrow)
    rows = torch.ops.recast.embedding_bags(*given)
    chosen = [rows[k] if k >= 0 else features[-1 - k] for k in order]
    out: Tensor = torch.ops.recast.dot_interaction(chosen, *rest)
    return out


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


def full(layers: int, dim: int, dtype: torch.dtype, device: torch.device, batch: int) -> Case:
    """A cross network of full matrices."""
    x = torch.randn(batch, dim, device=device, dtype=dtype)
    weights = [torch.randn(dim, dim, device=device, dtype=dtype) * dim**-0.5 for _ in range(layers)]
    inner = [torch.randn(dim, device=device, dtype=dtype) for _ in range(layers)]
    none: list[None] = [None] * layers
    args = [x, x, weights, inner, none * 2, none, [1] * layers]
    flops = 3 * 2.0 * layers * batch * dim * dim
    return "cross_matrix", args, 12.0 * layers * batch * dim * x.element_size(), flops


def mixture(
    experts: int, dim: int, rank: int, dtype: torch.dtype, device: torch.device, batch: int
) -> Case:
    """A cross layer that mixes experts of low rank."""

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype) * shape[-1] ** -0.5

    x = torch.randn(batch, dim, device=device, dtype=dtype)
    v, core, u = rand(experts, rank, dim), rand(experts, rank, rank), rand(experts, dim, rank)
    args = [x, x, v, core, u, rand(experts, dim), None, rand(dim), None, "tanh", 0.0, True]
    moved = 6.0 * batch * (dim + experts * rank) * x.element_size()
    return "cross_mixture", args, moved, 3 * 2.0 * batch * experts * rank * (2 * dim + rank)


def outer(
    vectors: int, outputs: int, dim: int, dtype: torch.dtype, device: torch.device, batch: int
) -> Case:
    """The products of an outer product network."""
    a = torch.randn(batch, vectors, dim, device=device, dtype=dtype)
    b = torch.randn(outputs, vectors, dim, device=device, dtype=dtype)
    moved = 3.0 * batch * vectors * (dim + outputs) * a.element_size()
    return "contraction", [a, b, "acd,bcd->abc"], moved, 6.0 * batch * vectors * outputs * dim


def scaled(experts: int, dim: int, dtype: torch.dtype, device: torch.device, batch: int) -> Case:
    """The experts of a mixture as one product, scaled by their input."""
    x = torch.randn(batch, dim, device=device, dtype=dtype)
    weight = torch.randn(experts, dim, dim, device=device, dtype=dtype) * dim**-0.5
    moved = 3.0 * batch * dim * (1 + experts) * x.element_size()
    flops = 6.0 * batch * experts * dim * dim
    return "scaled_einsum", [x, weight, x, "bi,eij,bj->bei"], moved, flops


def activation(width: int, dtype: torch.dtype, device: torch.device, batch: int) -> Case:
    """relu and dropout; backward needs a bit an element, which is left out."""
    x = torch.randn(batch, width, device=device, dtype=dtype)
    return "relu_dropout", [x, 0.2, True], 4.0 * x.numel() * x.element_size(), 0.0


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


def layer(
    left: int, right: int, outputs: int, dim: int, dtype: torch.dtype, device: torch.device,
    batch: int,
) -> Case:  # fmt: skip
    """A layer of a compressed interaction network."""
    x, y = (torch.randn(batch, n, dim, device=device, dtype=dtype) for n in (left, right))
    weight = torch.randn(outputs, left * right, 1, device=device, dtype=dtype)
    weight *= (left * right) ** -0.5
    bias = torch.randn(outputs, device=device, dtype=dtype)
    # Forward: read, written; backward: read with the result and its gradient, their own written.
    moved = batch * dim * x.element_size() * (3.0 * (left + right) + 3.0 * outputs)
    flops = 6.0 * batch * dim * outputs * left * right
    return "compressed_interaction", [x, y, weight, bias, True], moved, flops


def attention(
    fields: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device, batch: int
) -> Case:
    """Fields of a sample to each other; heads are views."""

    def cut() -> Tensor:
        return torch.randn(batch, fields, heads, dim, device=device, dtype=dtype).transpose(1, 2)

    q, k, v = cut(), cut(), cut()
    # Forward: three read, one written; backward: four read, three written.
    moved = 11.0 * q.numel() * q.element_size()
    flops = 14.0 * batch * heads * fields * fields * dim
    return "field_attention", [q, k, v, dim**-0.5, 0.0, True, False], moved, flops


def gates(
    experts: int, tasks: int, dim: int, dtype: torch.dtype, device: torch.device, batch: int
) -> Case:
    """The mixtures of an MMoE."""
    vectors = [torch.randn(batch, dim, device=device, dtype=dtype) for _ in range(experts)]
    logits = [torch.randn(batch, experts, device=device, dtype=dtype) for _ in range(tasks)]
    rows = (3.0 * experts + 2.0 * tasks) * dim + 3.0 * tasks * experts
    args = [vectors, logits, [*range(experts)] * tasks, True, True]
    return "gated_sums", args, batch * vectors[0].element_size() * rows, 0.0


def dice(width: int, dtype: torch.dtype, device: torch.device, batch: int) -> Case:
    """Dice, once its input is normalised."""
    x, gate = (torch.randn(batch, width, device=device, dtype=dtype) for _ in range(2))
    alpha = torch.randn(width, device=device, dtype=dtype)
    return "dice", [x, gate, alpha], 8.0 * x.numel() * x.element_size(), 0.0


FULL, HALF = torch.float32, torch.bfloat16

# Name, op, what makes its arguments, dtype: each op that runs on a GPU, in the shapes of models.
ALONE: tuple[tuple[str, str, Callable[..., Case], torch.dtype], ...] = (
    ("dots, 27 x 128", "dot_interaction", partial(dot, 27, 128), FULL),
    ("dots, 27 x 128", "dot_interaction", partial(dot, 27, 128), HALF),
    ("factorisation machine, 39 x 16", "fm_interaction", partial(fm, 39, 16), FULL),
    ("cross network, 4 vectors of 624", "cross_vector", partial(vectors, 4, 624), FULL),
    ("cross network, 3 x 1024, full", "cross_matrix", partial(full, 3, 1024), FULL),
    (
        "cross network, 3 x 3456, rank 512", "cross_matrix", partial(matrices, 3, 3456, 512), FULL,
    ),
    ("cross mixture, 4 of 1024, rank 64", "cross_mixture", partial(mixture, 4, 1024, 64), FULL),
    (
        "CIN layer, 26 by 26 to 32, 16", "compressed_interaction", partial(layer, 26, 26, 32, 16),
        FULL,
    ),
    (
        "CIN layer, 26 by 26 to 128, 16", "compressed_interaction",
        partial(layer, 26, 26, 128, 16), HALF,
    ),
    ("products of pairs, 26 x 16", "pair_products", partial(pairs, 26, 16, "none"), FULL),
    ("inner products, 26 x 16", "pair_products", partial(pairs, 26, 16, "dim"), FULL),
    ("outer products, 45 x 16 to 16", "contraction", partial(outer, 45, 16, 16), FULL),
    ("scaled experts, 4 of 128", "scaled_einsum", partial(scaled, 4, 128), FULL),
    ("attention, 39 fields, 2 x 16", "field_attention", partial(attention, 39, 2, 16), FULL),
    ("gates, 8 experts, 3 tasks, 128", "gated_sums", partial(gates, 8, 3, 128), FULL),
    ("Dice, 200", "dice", partial(dice, 200), FULL),
    ("relu and dropout, 1024", "relu_dropout", partial(activation, 1024), HALF),
    ("MLP 479-1024-1024-512-256-1", "mlp", partial(mlp, MLP), FULL),
    ("MLP 479-1024-1024-512-256-1", "mlp", partial(mlp, MLP), HALF),
    ("dots with lookups, 26 x 128", "gathered_dots", partial(gathered, 26, 128), FULL),
    ("lookups and a vector, 26 x 64", "embedding_cat", partial(beside, 26, 64), FULL),
    ("lookups, one id, 26 x 128", "embedding_bags", partial(lookup, 26, 1, 128), FULL),
    ("lookups, one id, 26 x 128", "embedding_bags", partial(lookup, 26, 1, 128), HALF),
    ("lookups, 20 ids, 26 x 64", "embedding_bags", partial(lookup, 26, 20, 64), FULL),
)  # fmt: skip
