"""Pairwise dot products of feature vectors, some of them looked up in the same call.

    x_f = the row (sum, mean) of a lookup, as embedding_bags gives it, or a given feature (B, D)
    out = dot_interaction(x_1 .. x_F)

``order[f]`` is the number of the lookup that gives x_f, or -1 - i for the i-th given feature. On a
GPU the interaction itself reads the looked-up rows from the tables, in forward and again in
backward, and they are never written: per row, this saves one write and two reads, and costs one
more read of the table. Elsewhere, and for calls that the kernels do not support, the two ops run
one after the other. Until backward the tables must not change, like any tensor that torch saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recast.runtime import partials
from recast.runtime.batched_grads import each_of_batch
from recast.runtime.cost import Cost, moved
from recast.runtime.embedding import cuda as lookups
from recast.runtime.embedding import embedding_bags
from recast.runtime.embedding.backward import Backward
from recast.runtime.embedding.call import Call, call_of, check
from recast.runtime.gpu import cuda_launch
from recast.runtime.interactions import dot_interaction, gathered_cuda
from recast.runtime.op import Kernel, Op, Sample, register, wants_grad
from recast.runtime.ranks import shards

SCHEMA = (
    "(Tensor[] weights, Tensor[] ids, Tensor?[] offsets, int[] table, str[] mode,"
    " int?[] padding_idx, bool[] include_last_offset, bool narrow, Tensor[] features, int[] order,"
    " Tensor? dense, Tensor li, Tensor lj, int pad, bool aligned=False) -> Tensor"
)


class Parts(NamedTuple):
    """The arguments, as the two ops take them."""

    lookup: tuple[Any, ...]  # the arguments of embedding_bags
    features: list[Tensor]
    order: list[int]
    dense: Tensor | None
    rest: tuple[Tensor, Tensor, int]  # li, lj, pad
    aligned: bool = False  # as of dot_interaction

    def interact(self, rows: Sequence[Tensor]) -> tuple[Any, ...]:
        """The arguments of dot_interaction, with these rows of the lookups."""
        chosen = [rows[k] if k >= 0 else self.features[-1 - k] for k in self.order]
        return chosen, self.dense, *self.rest, self.aligned

    def call(self, cast: torch.dtype | None) -> Call:
        made = call_of(*self.lookup)
        made.autocast = cast
        return made


def parts_of(
    weights: Sequence[Tensor], ids: Sequence[Tensor], offsets: Sequence[Tensor | None],
    table: Sequence[int], mode: Sequence[str], padding_idx: Sequence[int | None],
    include_last_offset: Sequence[bool], narrow: bool, features: Sequence[Tensor],
    order: Sequence[int], dense: Tensor | None, li: Tensor, lj: Tensor, pad: int,
    aligned: bool = False,
) -> Parts:  # fmt: skip
    """The arguments of the op."""
    n = len(ids)
    given = [list(weights), list(ids), list(offsets), [None] * n, list(table), list(mode)]
    flags = list(padding_idx), list(include_last_offset), [False] * n, narrow
    rest = li, lj, pad
    return Parts((*given, *flags), list(features), list(order), dense, rest, aligned)


# ---------------------------------------------------------------- the definition


def reference(*args: Any) -> Tensor:
    """Plain torch: the lookups, then the interaction. See the module docstring."""
    parts = parts_of(*args)
    rows = embedding_bags.reference(*parts.lookup)
    return dot_interaction.reference(*parts.interact(rows))


def fake(*args: Any) -> Tensor:
    """Shape and dtype of the result."""
    parts = parts_of(*args)
    return dot_interaction.fake(*parts.interact(embedding_bags.fake(*parts.lookup)))


# ---------------------------------------------------------------- forward


def _ready(
    parts: Parts, call: Call, cast: torch.dtype | None, counting: bool
) -> gathered_cuda.Ready | None:
    where = lookups.serving(parts.lookup[0][0]) if call.ids else None
    if where is None or not gathered_cuda.takes(call):
        return None
    check(call)
    li, lj, pad = parts.rest
    return gathered_cuda.ready(
        where, call, parts.features, parts.order, parts.dense, (li, lj), pad, cast, counting,
        aligned=parts.aligned,
    )  # fmt: skip


def forward(*args: Any) -> Tensor:
    """The result, not recorded by autograd; contiguous, as compilers expect."""
    return _forward(parts_of(*args)._replace(aligned=False), None)


def _forward(parts: Parts, cast: torch.dtype | None) -> Tensor:
    ready = _ready(parts, parts.call(cast), cast, counting=True)
    if ready is not None:
        return ready.interaction.forward()
    if cast is None:
        rows = embedding_bags.forward(*parts.lookup)
        return dot_interaction.forward(*parts.interact(rows))
    rows = embedding_bags.narrowed(cast, *parts.lookup)
    return dot_interaction.autocast(cast, *parts.interact(rows))


def differentiable(*args: Any) -> Tensor:
    """The result, recorded by autograd."""
    return _differentiable(parts_of(*args), None)


def autocast(dtype: torch.dtype, *args: Any) -> Tensor:
    """The result under autocast to ``dtype``, the same as that of the two ops."""
    return _differentiable(parts_of(*args), dtype)


def _differentiable(parts: Parts, cast: torch.dtype | None) -> Tensor:
    weights = parts.lookup[0]
    if torch._C._len_torch_dispatch_stack() and not _is_recorded():
        parts = parts._replace(aligned=False)
    if not wants_grad((weights, parts.features, parts.dense)):
        return _forward(parts, cast)
    call = parts.call(cast)
    taken = not torch._C._len_torch_dispatch_stack() or _is_recorded()
    ready = _ready(parts, call, cast, counting=True) if taken else None
    if ready is not None:
        floats = (*weights, *parts.features)
        return GatheredDots.apply(parts, call, ready, cast, parts.dense, *floats)
    if cast is None:
        rows = embedding_bags.differentiable(*parts.lookup)
        return dot_interaction.differentiable(*parts.interact(rows))
    rows = embedding_bags.narrowed(cast, *parts.lookup)
    return dot_interaction.autocast(cast, *parts.interact(rows))


def _is_recorded() -> bool:
    from recast.runtime.recorded import recording

    return recording.current() is not None


# ---------------------------------------------------------------- backward


class GatheredDots(torch.autograd.Function):
    """Inputs: the parts, the call, what is ready to run, autocast's dtype, dense, the tables, the
    given features.
    """

    @staticmethod
    def forward(
        ctx: Any, parts: Parts, call: Call, ready: gathered_cuda.Ready, cast: torch.dtype | None,
        dense: Tensor | None, *floats: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.cast, ctx.tables, ctx.order, ctx.rest = cast, len(call.weights), parts.order, parts.rest
        ctx.constants = (*parts.lookup[4:8], parts.lookup[9])
        ctx.has_dense, ctx.offsets = dense is not None, [o is not None for o in call.offsets]
        # A dense part that is one of the features gets its gradient in the same pass.
        ctx.same = next((k for k, f in enumerate(parts.features) if f is dense), -1)
        ctx.shards = shards.among(call.weights)
        given = [*call.ids, *(o for o in call.offsets if o is not None)]
        ctx.save_for_backward(*floats, *([] if dense is None else [dense]), *given)
        return ready.interaction.forward()

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, n = list(ctx.saved_tensors), len(ctx.offsets)
        floats = len(ctx.needs_input_grad) - 5
        held, rest = saved[:floats], saved[floats:]
        weights, features = held[: ctx.tables], held[ctx.tables :]
        dense = rest.pop(0) if ctx.has_dense else None
        ids, cuts = rest[:n], iter(rest[n:])
        offsets = [next(cuts) if there else None for there in ctx.offsets]
        table, mode, padding, last, narrow = ctx.constants
        args = (weights, ids, offsets, table, mode, padding, last, narrow)
        parts = parts_of(*args, features, ctx.order, dense, *ctx.rest)
        if torch.is_grad_enabled():
            return _differentiable_backward(ctx, parts, grad)
        return _backward(ctx, parts, grad)


def _backward(ctx: Any, parts: Parts, grad: Tensor) -> tuple[Tensor | None, ...]:
    call = parts.call(ctx.cast)
    ready = _ready(parts, call, ctx.cast, counting=False)
    assert ready is not None, "such tensors were taken in forward"
    width = 0 if parts.dense is None else parts.dense.shape[1]
    if width + parts.rest[0].shape[0] and grad.stride(1) != 1:
        grad = grad.contiguous()
    needs, n = ctx.needs_input_grad[5:], ctx.tables
    of_rows = [needs[call.layout.table[k]] if k >= 0 else needs[n - 1 - k] for k in parts.order]
    same = (
        parts.order.index(-1 - ctx.same) if ctx.same >= 0 and -1 - ctx.same in parts.order else -1
    )
    found = ready.interaction.backward(grad, same, of_rows)
    of_dense = None
    if parts.dense is not None and same < 0 and ctx.needs_input_grad[4]:
        of_dense = grad[:, :width]
    rows: list[Tensor | None] = [None] * len(call.ids)
    given: list[Tensor | None] = [None] * len(parts.features)
    for place, part in zip(parts.order, found, strict=True):
        if place >= 0:
            rows[place] = part
        else:
            given[-1 - place] = part
    like = [(w.shape, w.dtype) for w in call.weights]
    back = Backward(call, like, rows, iter(()), True, ctx.shards)
    tables = back.tables(needs[:n], None)
    return None, None, None, None, of_dense, *tables, *given


def _differentiable_backward(ctx: Any, parts: Parts, grad: Tensor) -> tuple[Tensor | None, ...]:
    """For ``create_graph``: through the reference."""
    own = partials.apart([parts.dense, *parts.lookup[0], *parts.features])
    dense, floats = own[0], own[1:]
    weights, features = floats[: ctx.tables], floats[ctx.tables :]
    rows = embedding_bags.reference(weights, *parts.lookup[1:])
    chosen, _, *rest = parts._replace(features=features).interact(rows)
    cast = [f if ctx.cast is None else f.to(ctx.cast) for f in chosen]
    out = dot_interaction.reference(cast, dense, *rest)
    found = partials.gradients([out], own, ctx.needs_input_grad[4:], [grad])
    return None, None, None, None, *found


# ---------------------------------------------------------------- cost, samples


def cost(*args: Any) -> Cost:
    """The products; each id reads a row, and only the result is written."""
    parts = parts_of(*args)
    rows = embedding_bags.fake(*parts.lookup)
    whole = dot_interaction.cost(*parts.interact(rows))
    read = embedding_bags.cost(*parts.lookup)
    return Cost(whole.flops + read.flops, whole.bytes + read.bytes - 2 * moved(*rows))


def samples() -> list[Sample]:
    """One id a row and several, empty bags, shared tables, padding, mixed id dtypes, few rows."""
    g = torch.Generator().manual_seed(71)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    def ids(rows: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(rows, shape, generator=g).to(dtype)

    def lower(n: int) -> tuple[Tensor, Tensor]:
        li, lj = torch.tril_indices(n, n, -1)
        return li, lj

    x, one = rand(6, 8), torch.arange(6)
    cuts, ends = torch.tensor([0, 1, 1, 4, 5, 7]), torch.tensor([0, 2, 2, 3, 3, 3, 5])
    many, y = [rand(n, 8) for n in (3, 40, 7)], rand(6, 16)
    return [
        Sample("dlrm", (
            many, [ids(3, 6), ids(40, 6), ids(7, 6)], [one, one, one], [0, 1, 2], ["sum"] * 3,
            [None] * 3, [False] * 3, False, [x], [-1, 0, 1, 2], x, *lower(4), 1,
        )),
        Sample("bags of several ids", (
            many, [ids(3, 9), ids(40, 6, 2), ids(7, 5, dtype=torch.int32), ids(3, 6)],
            [cuts, None, ends, None], [0, 1, 2, 0], ["mean", "sum", "mean", "none"],
            [None, 4, -1, None], [False, False, True, False], True, [], [2, 0, 1, 3], rand(6, 3),
            *lower(4), 0,
        )),
        Sample("a total", (
            [rand(7, 8)], [ids(7, 6, 3), ids(7, 6)], [None, None], [0, 0], ["total", "none"],
            [2, 2], [False] * 2, False, [x], [-1, 0, 1], x, *lower(3), 0,
        )),
        Sample("features between", (
            [rand(9, 5)], [ids(9, 6), ids(9, 6)], [None, None], [0, 0], ["none"] * 2, [None] * 2,
            [False] * 2, False, [rand(6, 5), rand(6, 5)], [0, -2, 1, -1], None, *lower(4), 2,
        )),
        Sample("a warp a sample", (
            [rand(9, 16), rand(40, 16)], [ids(9, 6), ids(40, 7)], [None, cuts], [0, 1],
            ["none", "mean"], [None, 4], [False] * 2, False, [y], [1, -1, 0], y, *lower(3), 5,
        )),
        Sample("one row", (
            [rand(4, 16)], [ids(4, 1)], [None], [0], ["none"], [None], [False], False,
            [rand(1, 16)], [-1, 0], None, *lower(2), 0,
        )),
        Sample("empty batch", (
            [rand(4, 8)], [ids(4, 0)], [None], [0], ["none"], [None], [False], False,
            [rand(0, 8)], [-1, 0], None, *lower(2), 0,
        )),
    ]  # fmt: skip


gathered_dots = register(
    Op(
        name="gathered_dots",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        samples=samples,
        cost=cost,
        casts=True,
        autocast=autocast,
        devices=("cpu", "cuda"),
        kernels=(
            Kernel("cuda", "cuda", gathered_cuda.CONDITION, cuda_launch.why_not),
            Kernel("torch", "cpu", "always: lookups, then the interaction", lambda: None),
        ),
    )
)
