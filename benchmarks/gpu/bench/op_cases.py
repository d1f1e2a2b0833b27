"""Arguments of the fused ops in the shapes that models have, and what a step of each must move."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpu.bench.roofline import chain_work

MLP = [479, 1024, 1024, 512, 256, 1]
ROWS = 1_000_000  # of a table


class Case(NamedTuple):
    """A call of an op: bytes and operations of forward and backward, and of forward alone."""

    op: str
    args: list[Any]
    moved: float
    flops: float
    forward: tuple[float, float]


def case(op: str, args: list[Any], forward: float, backward: float, flops: float = 0.0) -> Case:
    """A case from the bytes of each direction; backward has two thirds of the operations."""
    return Case(op, args, forward + backward, flops, (forward, flops / 3))


def lookup(
    tables: int, ids: int, dim: int, dtype: torch.dtype, device: torch.device, batch: int
) -> Case:
    count = ROWS if batch > 64 else 50
    weights = [torch.randn(count, dim, device=device, dtype=dtype) for _ in range(tables)]
    given = [torch.randint(count, (batch, ids), device=device) for _ in range(tables)]
    none: list[None] = [None] * tables
    off, modes = [False] * tables, ["sum"] * tables
    args = [weights, given, none, none, [*range(tables)], modes, none, off, off]
    width = weights[0].element_size()
    moved = tables * batch * (ids * 8.0 + ids * dim * width + dim * width)
    # Its gradient stays (ids, rows), so backward moves nothing: the rest is the update's.
    return case("embedding_bags", args, moved, 0.0)


def beside(tables: int, dim: int, dtype: torch.dtype, device: torch.device, batch: int) -> Case:
    """Lookups of one id and a dense vector side by side, as an MLP reads them."""
    found = lookup(tables, 1, dim, dtype, device, batch)
    args, ids = found.args, [i.reshape(-1) for i in found.args[1]]
    x = torch.randn(batch, dim, device=device, dtype=dtype)
    args = [args[0], ids, *args[2:5], ["none"] * tables, *args[6:], [x], [-1, *range(tables)]]
    return case("embedding_cat", args, found.moved + 2.0 * x.numel() * x.element_size(), 0.0)


def dot(count: int, dim: int, dtype: torch.dtype, device: torch.device, batch: int) -> Case:
    features = [torch.randn(batch, dim, device=device, dtype=dtype) for _ in range(count)]
    li, lj = torch.tril_indices(count, count, -1, device=device)
    args = [features, features[0], li, lj, 1]
    width = features[0].element_size()
    read, written = count * dim, dim + count * (count - 1) / 2
    ways = batch * width * (read + written), batch * width * (2 * read + written)
    return case("dot_interaction", args, *ways, 6.0 * batch * count * count * dim)


def gathered(tables: int, dim: int, dtype: torch.dtype, device: torch.device, batch: int) -> Case:
    """One id per field, looked up by the interaction, and read again in backward."""
    count = ROWS if batch > 64 else 50
    weights = [torch.randn(count, dim, device=device, dtype=dtype) for _ in range(tables)]
    ids = [torch.randint(count, (batch,), device=device) for _ in range(tables)]
    x = torch.randn(batch, dim, device=device, dtype=dtype)
    li, lj = torch.tril_indices(tables + 1, tables + 1, -1, device=device)
    none, off = [None] * tables, [False] * tables
    lookups = [weights, ids, none, [*range(tables)], ["none"] * tables, none, off, False]
    args = [*lookups, [x], [-1, *range(tables)], x, li, lj, 1]
    pairs = tables * (tables + 1) / 2
    # Each way: ids and rows read; forward the result, backward its gradient and those of the rows.
    rows = float(batch * (tables + 1) * dim * weights[0].element_size())
    way = rows + 8.0 * batch * tables + batch * (dim + pairs) * weights[0].itemsize
    return case("gathered_dots", args, way, way + rows, 6.0 * batch * (tables + 1) ** 2 * dim)


def apart(*args: Any) -> Tensor:
    """``gathered_dots`` as two ops, one after the other."""
    weights, ids, offsets, table, mode, padding, last, narrow, features, order, *rest = args
    off = [False] * len(ids)
    given = (weights, ids, offsets, [None] * len(ids), table, mode, padding, last, off, narrow)
    rows = torch.ops.recast.embedding_bags(*given)
    chosen = [rows[k] if k >= 0 else features[-1 - k] for k in order]
    out: Tensor = torch.ops.recast.dot_interaction(chosen, *rest)
    return out


def fm(count: int, dim: int, dtype: torch.dtype, device: torch.device, batch: int) -> Case:
    features = [torch.randn(batch, dim, device=device, dtype=dtype) for _ in range(count)]
    numbers, size = count * dim, batch * features[0].element_size()
    ways = ((numbers + 1.0) * size, (2.0 * numbers + 1) * size)
    return case("fm_interaction", [features, 0.5, True], *ways)


def mlp(sizes: list[int], dtype: torch.dtype, device: torch.device, batch: int) -> Case:
    sizes = sizes if batch > 64 else [16, 8, 1]
    params: list[Tensor] = []
    for a, b in pairwise(sizes):
        weight = torch.randn(b, a, device=device, dtype=dtype) * a**-0.5
        params += [weight, torch.randn(b, device=device, dtype=dtype)]
    steps = ["linear", "relu"] * (len(sizes) - 2) + ["linear"]
    x = torch.randn(batch, sizes[0], device=device, dtype=dtype)
    moved, flops = chain_work(sizes, batch, x.element_size())
    return case("mlp", [x, params, [], steps, [], []], moved / 3, 2 * moved / 3, flops)


def vectors(layers: int, dim: int, dtype: torch.dtype, device: torch.device, batch: int) -> Case:
    """A cross network of vectors."""
    x = torch.randn(batch, dim, device=device, dtype=dtype)
    weights = [torch.randn(dim, device=device, dtype=dtype) / dim for _ in range(layers)]
    biases = [torch.randn(dim, device=device, dtype=dtype) for _ in range(layers)]
    # Forward: read, written; backward: read with the gradient, its own written.
    way = float(batch * dim * x.element_size())
    return case("cross_vector", [x, x, weights, [None] * layers, biases], 2 * way, 3 * way)


def full(layers: int, dim: int, dtype: torch.dtype, device: torch.device, batch: int) -> Case:
    """A cross network of full matrices."""
    x = torch.randn(batch, dim, device=device, dtype=dtype)
    weights = [torch.randn(dim, dim, device=device, dtype=dtype) * dim**-0.5 for _ in range(layers)]
    inner = [torch.randn(dim, device=device, dtype=dtype) for _ in range(layers)]
    none: list[None] = [None] * layers
    args = [x, x, weights, inner, none * 2, none, [1] * layers]
    flops = 3 * 2.0 * layers * batch * dim * dim
    way = float(layers * batch * dim * x.element_size())
    return case("cross_matrix", args, 4 * way, 8 * way, flops)


def mixture(
    experts: int, dim: int, rank: int, dtype: torch.dtype, device: torch.device, batch: int
) -> Case:
    """A cross layer that mixes experts of low rank."""

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype) * shape[-1] ** -0.5

    x = torch.randn(batch, dim, device=device, dtype=dtype)
    v, core, u = rand(experts, rank, dim), rand(experts, rank, rank), rand(experts, dim, rank)
    args = [x, x, v, core, u, rand(experts, dim), None, rand(dim), None, "tanh", 0.0, True]
    way = 2.0 * batch * (dim + experts * rank) * x.element_size()
    flops = 3 * 2.0 * batch * experts * rank * (2 * dim + rank)
    return case("cross_mixture", args, way, 2 * way, flops)


def outer(
    vectors: int, outputs: int, dim: int, dtype: torch.dtype, device: torch.device, batch: int
) -> Case:
    """The products of an outer product network."""
    a = torch.randn(batch, vectors, dim, device=device, dtype=dtype)
    b = torch.randn(outputs, vectors, dim, device=device, dtype=dtype)
    size = float(batch * vectors * a.element_size())
    ways = size * (dim + outputs), size * (2 * dim + outputs)
    return case(
        "contraction", [a, b, "acd,bcd->abc"], *ways, 6.0 * batch * vectors * outputs * dim
    )  # fmt: skip


def scaled(experts: int, dim: int, dtype: torch.dtype, device: torch.device, batch: int) -> Case:
    """The experts of a mixture as one product, scaled by their input."""
    x = torch.randn(batch, dim, device=device, dtype=dtype)
    weight = torch.randn(experts, dim, dim, device=device, dtype=dtype) * dim**-0.5
    # Forward: read, written; backward: read with the gradient, its own written.
    way, flops = float(batch * dim * x.element_size()), 6.0 * batch * experts * dim * dim
    ways = (1 + experts) * way, (2 + experts) * way
    return case("scaled_einsum", [x, weight, x, "bi,eij,bj->bei"], *ways, flops)


def activation(width: int, dtype: torch.dtype, device: torch.device, batch: int) -> Case:
    """relu and dropout; the mask of one bit per element is left out."""
    x = torch.randn(batch, width, device=device, dtype=dtype)
    way = 2.0 * x.numel() * x.element_size()
    return case("relu_dropout", [x, 0.2, True], way, way)


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
    way = float(layers * batch * dim * x.element_size())
    flops = 3 * 2 * 2.0 * layers * batch * dim * rank
    args = [x, x, weights, inner, none * 2, none, [2] * layers]
    return case("cross_matrix", args, 4 * way, 8 * way, flops)


def pairs(
    count: int, dim: int, sum: str, dtype: torch.dtype, device: torch.device, batch: int
) -> Case:
    features = [torch.randn(batch, count, dim, device=device, dtype=dtype)]
    li, lj = torch.triu_indices(count, count, 1, device=device)
    out = len(li) * (dim if sum == "none" else 1)
    size = float(batch * features[0].element_size())
    ways = size * (count * dim + out), size * (2 * count * dim + out)
    return case("pair_products", [features, [], li, lj, None, sum], *ways)


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
    way = float(batch * dim * x.element_size() * (left + right + outputs))
    flops = 6.0 * batch * dim * outputs * left * right
    return case("compressed_interaction", [x, y, weight, bias, True], way, 2 * way, flops)


def attention(
    fields: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device, batch: int
) -> Case:
    """Attention between the fields of a sample; heads are views."""

    def cut() -> Tensor:
        return torch.randn(batch, fields, heads, dim, device=device, dtype=dtype).transpose(1, 2)

    q, k, v = cut(), cut(), cut()
    # Forward: three read, one written; backward: four read, three written.
    way, product = float(q.numel() * q.element_size()), 2.0 * batch * heads * fields**2 * dim
    args = [q, k, v, dim**-0.5, 0.0, True, False]
    # Two products, and five in backward, which repeats the first.
    return Case("field_attention", args, 11 * way, 7 * product, (4 * way, 2 * product))


def gates(
    experts: int, tasks: int, dim: int, dtype: torch.dtype, device: torch.device, batch: int
) -> Case:
    """The mixtures of an MMoE."""
    vectors = [torch.randn(batch, dim, device=device, dtype=dtype) for _ in range(experts)]
    logits = [torch.randn(batch, experts, device=device, dtype=dtype) for _ in range(tasks)]
    size, each = float(batch * vectors[0].element_size()), tasks * experts
    rows = (experts + tasks) * dim + each, (2 * experts + tasks) * dim + 2 * each
    args = [vectors, logits, [*range(experts)] * tasks, True, True]
    return case("gated_sums", args, size * rows[0], size * rows[1])


def dice(width: int, dtype: torch.dtype, device: torch.device, batch: int) -> Case:
    """Dice, once its input is normalised."""
    x, gate = (torch.randn(batch, width, device=device, dtype=dtype) for _ in range(2))
    alpha = torch.randn(width, device=device, dtype=dtype)
    way = float(x.numel() * x.element_size())
    return case("dice", [x, gate, alpha], 3 * way, 5 * way)


FULL, HALF = torch.float32, torch.bfloat16

# Name, op, function that makes its arguments, dtype: each op with GPU kernels, in shapes of models.
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
