"""All embedding lookups of a step in one call.

For lookup k with table ``W = weights[table[k]]`` of shape (rows, dim)::

    "none"  out[s]   = W[ids[s]]                                   ids (S...), out (S..., dim)
    "sum"   out[b,:] = Σ_i  w[i] W[ids[i],:]     i in bag b        out (bags, dim)
    "mean"  out[b,:] = Σ_i  W[ids[i],:] / n_b    n_b ids in bag b
    "max"   out[b,:] = max_i W[ids[i],:]         column by column
    "total" out[b,:] = Σ_i  w[i] W[ids[i],:]

A bag is a row of two-dimensional ids, or ``ids[offsets[b]:offsets[b+1]]``. Ids equal to
``padding_idx`` do not count, neither in the pooling nor in gradients; an empty bag gives zeros.
These are the semantics of ``torch.nn.functional.embedding`` and ``embedding_bag``. In a "total" the
padding's row counts, and gets no gradient, as in ``embedding(ids).sum(1)``.

Ids and offsets are int64 or int32, tables and outputs of any float dtype. A wrong shape raises
InputError, a wrong dtype DtypeError; an id outside its table and wrong offsets raise IdError.

The gradient of a table is a RowGrad (ids and upstream rows, never a dense matrix); if the user made
the table with ``sparse=True`` and no fused optimizer owns it, torch's sparse COO.

``narrow`` says that every reader of the outputs casts them to autocast's dtype: on a GPU under
autocast, outputs of float32 tables then have that dtype, rounded once from float32 sums.

``whole``, a flag per lookup, says that the model also reads the table as a whole, so the table's
gradient is dense. Then the lookup's gradient is dense too, not rows that would be added to it.

On a GPU no value is read: ids outside their tables are left out and counted (see ``checked``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.runtime import checked, device
from recast.runtime.batched_grads import each_of_batch
from recast.runtime.cost import Cost, moved
from recast.runtime.embedding import cuda as embedding_cuda
from recast.runtime.embedding.assign_grads import left_after_assignment
from recast.runtime.embedding.backward import Backward, lot_of, sparse_owner
from recast.runtime.embedding.call import (
    MODES,
    Call,
    Found,
    Layout,
    Stacks,
    call_of,
    check,
    check_values,
    id_error,
    offset_error,
    widen,
)
from recast.runtime.embedding.outputs import (
    Failure,
    allocate,
    run_new,
    unstacked,
)
from recast.runtime.embedding.samples import samples
from recast.runtime.embedding.unread_rows import UnreadRows
from recast.runtime.gpu import cuda_launch
from recast.runtime.op import Kernel, Op, cpu_kernels, register, transformed, wants_grad
from recast.runtime.ranks import shards

SCHEMA = (
    "(Tensor[] weights, Tensor[] ids, Tensor?[] offsets, Tensor?[] per_sample_weights, int[] table,"
    " str[] mode, int?[] padding_idx, bool[] include_last_offset, bool[] sparse,"
    " bool narrow=False, bool[] whole=[]) -> Tensor[]"
)
_CONDITION = "float32, float16 or bfloat16 tables with contiguous rows"
# With up to so many ids, in tables that are also read whole, torch's lookups make the faster step:
# 0.91 of our time with 6,144 ids in 300 rows of 16, 1.3 with 20,480 (one AMD EPYC core).
_MOST_IDS = 8192

# ---------------------------------------------------------------- the definition


def reference(*args: Any) -> list[Tensor]:
    """Plain torch, one lookup after the other. See the module docstring for shapes."""
    call = call_of(*args)
    widen(call)
    check(call)
    return [_reference_lookup(call, k) for k in range(len(call.ids))]


def _reference_lookup(call: Call, k: int) -> Tensor:
    weight, ids, mode = call.weight(k), call.ids[k], call.layout.mode[k]
    sparse, padding = call.layout.sparse[k], call.layout.padding_idx[k]
    if mode == "none":
        return F.embedding(ids, weight, padding_idx=padding, sparse=sparse)
    if mode == "total" or (mode != "max" and transformed()):
        return _pooled_rows(call, k)
    weights = call.per_sample_weights[k]
    starts, ended = call.starts(k)
    return F.embedding_bag(
        ids.reshape(-1),
        weight,
        starts,
        mode=mode,
        sparse=sparse,
        per_sample_weights=None if weights is None else weights.reshape(-1),
        include_last_offset=ended,
        padding_idx=padding,
    )


def _pooled_rows(call: Call, k: int) -> Tensor:
    """A sum or mean from rows: a total, and for function transforms and forward AD all others, as
    torch's ``embedding_bag`` has no forward derivative, and no batching rule.
    """
    weight, ids, padding = call.weight(k), call.ids[k].reshape(-1), call.padding(k)
    left_out = call.left_out(k)
    starts, bags = call.starts(k)[0], call.bags(k)
    places = torch.arange(len(ids), dtype=starts.dtype, device=ids.device)
    bag = torch.searchsorted(starts, places, right=True) - 1  # ids behind the last end: bag `bags`
    rows = F.embedding(ids, weight, padding_idx=padding, sparse=call.layout.sparse[k])
    rows = rows.to(torch.promote_types(weight.dtype, torch.float32))  # sums of halves, too
    counts = torch.ones_like(ids, dtype=rows.dtype)
    weights = call.per_sample_weights[k]
    if weights is not None:
        rows = rows * weights.reshape(-1, 1)
    if left_out is not None:
        rows = rows.masked_fill((ids == left_out).unsqueeze(-1), 0.0)
        counts = counts.masked_fill(ids == left_out, 0.0)
    sums = rows.new_zeros(bags + 1, weight.shape[1]).index_add(0, bag, rows)[:bags]
    if call.layout.mode[k] == "mean":
        found = counts.new_zeros(bags + 1).index_add(0, bag, counts)[:bags]
        sums = sums / found.clamp(min=1.0).unsqueeze(-1)
    return sums.to(weight.dtype)


def fake(*args: Any) -> list[Tensor]:
    """Shapes and dtypes of the result."""
    call = call_of(*args)
    outs = []
    for k, ids in enumerate(call.ids):
        weight = call.weight(k)
        shape = tuple(ids.shape) if call.layout.mode[k] == "none" else (call.bags(k),)
        outs.append(weight.new_empty((*shape, weight.shape[1])))
    return outs


# ---------------------------------------------------------------- forward


def forward(*args: Any) -> list[Tensor]:
    """All lookups, without autograd; each output has its own storage, as compilers expect."""
    return run(call_of(*args), apart=True)


def run(call: Call, apart: bool) -> list[Tensor]:
    """The outputs of ``call``, without autograd; ``apart``: each has its own storage."""
    return _forward(call, winners=False, apart=apart).outs


def _forward(call: Call, winners: bool, apart: bool = False) -> Found:
    first = call.weights[0]
    where = embedding_cuda.serving(first)
    if where is not None:
        found = embedding_cuda.forward(call, where, winners, apart)
        if found is not None:
            return found
    if call.columns is not None:
        found = _forward(dataclasses.replace(call, columns=None), winners, apart)
        return found._replace(outs=call.columns.joined(found.outs, call.others))
    step = _step(call) if where is None else None
    if step is not None:
        return _run(step, call, winners, apart)
    widen(call)
    check(call)
    if first.is_cpu or checked.is_checked():  # reading values synchronises with a device
        check_values(call)
    outs, won = [], []
    for k in range(len(call.ids)):
        out, winner = _torch_lookup(call, k)
        outs.append(out)
        if winners and winner is not None:
            won.append(winner)
    return Found(outs, won)


def _step(call: Call) -> Any:
    """The call in the form that the C++ kernels read; None if they do not take it."""
    extension = device.extension() if call.weights[0].is_cpu else None
    if extension is None:
        return None
    return extension.embedding_step(
        _native(extension, call.layout), call.weights, call.ids, call.offsets,
        call.per_sample_weights,
    )  # fmt: skip


def _native(extension: Any, layout: Layout) -> Any:
    if layout.native is None:
        modes = [MODES[mode] for mode in layout.mode]
        layout.native = extension.EmbeddingLayout(
            layout.table, modes, layout.left_out(), layout.include_last_offset
        )
    return layout.native


def _run(step: Any, call: Call, winners: bool, apart: bool) -> Found:
    dtypes = [call.weights[table].dtype for table in call.layout.table]
    won: list[Tensor] = []
    if winners and "max" in call.layout.mode:
        modes = zip(step.shapes(), call.layout.mode, strict=True)
        won = [torch.empty(shape, dtype=torch.int64) for shape, mode in modes if mode == "max"]
    stacks = call.stacks if call.stacks and not (apart or won) and step.stack(call.stacks) else ()
    if apart or won:
        outs = allocate(call, step.shapes(), dtypes, torch.device("cpu"), apart)
        failure = step.run(outs, won, device.threads())
    else:
        outs, failure = run_new(step, dtypes)
    _raise(failure, call)
    return Found(outs, won, stacks=stacks)


def _raise(failure: Failure, call: Call) -> None:
    if failure is not None:
        k, is_offset, position = failure
        raise offset_error(call, k, position) if is_offset else id_error(call, k, position)


def _torch_lookup(call: Call, k: int) -> tuple[Tensor, Tensor | None]:
    mode = call.layout.mode[k]
    if mode != "max":
        return _reference_lookup(call, k), None
    starts, ended = call.starts(k)
    padding = call.padding(k)
    out, _, sizes, winner = torch.embedding_bag(
        call.weight(k),
        call.ids[k].reshape(-1),
        starts,
        False,
        MODES[mode],
        False,
        None,
        ended,
        padding,
    )
    if out.shape[0] == 0:
        return out, winner.new_empty(out.shape)
    return out, winner.reshape(out.shape).masked_fill(sizes[: len(out), None] == 0, -1)


# ---------------------------------------------------------------- backward


class EmbeddingBags(torch.autograd.Function):
    """Inputs: the call, all its tables, the per-sample weights that are not None, its others."""

    @staticmethod
    def forward(ctx: Any, call: Call, *floats: Tensor) -> tuple[Tensor, ...]:
        layout, count = call.layout, len(call.weights)
        seen = torch._C._len_torch_dispatch_stack() and call.columns is None
        if seen and "max" not in layout.mode:
            found = Found(_below(*call.arguments()), [])  # a user's dispatch mode sees the op
        else:
            found = _forward(call, winners=True)
        outs, winners, ctx.by_place, ctx.stacks = found
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.tables, ctx.weights = layout, count, call.weights
        ctx.like = [(w.shape, w.dtype) for w in call.weights]
        # Saved tables must not be written before backward, as an optimizer might: they are saved
        # only for the gradient of per-sample weights.
        ctx.columns, ctx.others = call.columns, [x.dtype for x in call.others]
        keeps = any(ctx.needs_input_grad[1 + count : 1 + len(floats) - len(call.others)])
        ctx.parts = [call.ids, call.offsets, call.per_sample_weights, winners]
        ctx.parts = [[t is not None for t in part] for part in ctx.parts]
        ctx.parts.append([keeps] * count)
        saved = [*call.ids, *call.offsets, *call.per_sample_weights, *winners]
        saved += call.weights if keeps else []
        ctx.save_for_backward(*(t for t in saved if t is not None))
        ctx.claimed = [sparse_owner(w) for w in call.weights] if any(layout.sparse) else None
        ctx.shards = shards.among(call.weights)
        ctx.whole = call.whole
        needs = ctx.needs_input_grad[1 : 1 + count]
        if not all(needs) and len(outs) == len(layout.table) and call.columns is None:
            pairs = zip(outs, layout.table, call.per_sample_weights, strict=True)
            ctx.mark_non_differentiable(
                *(
                    o
                    for o, t, w in pairs
                    if not needs[t] and not (w is not None and w.requires_grad)
                )
            )
        return tuple(outs)

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        lot = lot_of(ctx, ctx.layout, kept, grads)
        if lot is not None:
            return (None, *left_after_assignment(ctx, ctx.weights, lot))
        if ctx.stacks:
            grads = tuple(unstacked(ctx.stacks, grads, len(ctx.layout.table)))
        others: Sequence[Tensor | None] = ()
        if ctx.columns is not None:
            dtypes = [ctx.like[t][1] for t in ctx.layout.table]
            grads, others = ctx.columns.split(grads, dtypes, ctx.others)
        saved = iter(kept)
        parts = [[next(saved) if there else None for there in part] for part in ctx.parts]
        ids, offsets, sample_weights, winners, weights = parts
        call = Call(weights, ids, offsets, sample_weights, ctx.layout)  # type: ignore[arg-type]
        back = Backward(call, ctx.like, grads, iter(winners), ctx.by_place, ctx.shards)
        n = ctx.tables
        tables = back.tables(ctx.needs_input_grad[1 : 1 + n], ctx.claimed, ctx.whole)
        given = [k for k, w in enumerate(sample_weights) if w is not None]
        samples = [
            back.sample_weights(k) if needed else None
            for k, needed in zip(given, ctx.needs_input_grad[1 + n :], strict=False)
        ]
        return (None, *left_after_assignment(ctx, ctx.weights, tables), *samples, *others)


def differentiable(*args: Any) -> list[Tensor]:
    """All lookups, recorded by autograd if a table or a per-sample weight requires a gradient."""
    records = wants_grad((args[0], args[3]))
    if not records and torch._C._len_torch_dispatch_stack():
        return _below(*args)
    return recorded(call_of(*args), records)


def stacked(stacks: Stacks, *args: Any) -> list[Tensor]:
    """The same, but if that can be, each of ``stacks``, of two lookups or more, gives one tensor
    (bags, lookups, dim); behind them are the outputs of the other lookups.
    """
    call = call_of(*args)
    call.stacks = stacks
    return recorded(call, wants_grad((args[0], args[3])))


def unread(stacks: Stacks, *args: Any) -> list[Any]:
    """The same for one stack of all lookups, but without gradients, ids of one-id bags are checked
    and their rows are not read yet: UnreadRows.
    """
    if torch.is_grad_enabled():
        return stacked(stacks, *args)
    call = call_of(*args)
    call.stacks = stacks
    gpu = embedding_cuda.serving(call.weights[0]) is not None
    step = None if gpu or call.columns is not None else _step(call)
    if step is None:
        return run(call, apart=False)
    if not step.gives_rows():
        return _run(step, call, winners=False, apart=False).outs
    _raise(step.check_rows(), call)

    def finish() -> list[Tensor]:
        return _run(step, call, winners=False, apart=False).outs

    return [UnreadRows(step, call.bags(0), finish, call)]


def narrowed(dtype: torch.dtype, *args: Any) -> list[Tensor]:
    """The same under autocast to ``dtype``."""
    call = call_of(*args)
    call.autocast = dtype
    return recorded(call, wants_grad((args[0], args[3])))


def recorded(call: Call, records: bool) -> list[Tensor]:
    """The outputs of ``call``; ``records``: whether autograd records it."""
    if not records:
        return run(call, apart=False)
    if call.whole and _is_torchs(call):
        return _by_torch(call)
    given = [w for w in call.per_sample_weights if w is not None]
    return list(EmbeddingBags.apply(call, *call.weights, *given, *call.others))


def _is_torchs(call: Call) -> bool:
    """Whether torch's lookups are faster: there are few ids, and every gradient is to be dense."""
    table = call.weights[0]
    if not all(call.whole) or any(call.layout.sparse) or call.stacks or device.forced():
        return False
    if any(w is not None for w in call.per_sample_weights):
        return False  # its bag of weighted rows has no second derivative
    if not table.is_cpu or embedding_cuda.serving(table) is not None:
        return False
    return sum(ids.numel() for ids in call.ids) <= _MOST_IDS


def _by_torch(call: Call) -> list[Tensor]:
    widen(call)
    check(call)
    try:
        return [_reference_lookup(call, k) for k in range(len(call.ids))]
    except IndexError:
        check_values(call)  # its error names the table and the position
        raise


def _below(*args: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return embedding_bags.target(*args)


# ---------------------------------------------------------------- cost


def cost(*args: Any) -> Cost:
    """Each id reads one row; each output is written once."""
    call = call_of(*args)
    flops = traffic = 0
    for k, ids in enumerate(call.ids):
        weight = call.weight(k)
        dim, size = weight.shape[1], weight.element_size()
        per_id = (
            0 if call.layout.mode[k] == "none" else 1 + (call.per_sample_weights[k] is not None)
        )
        flops += per_id * ids.numel() * dim
        outputs = call.bags(k) * dim * size
        traffic += moved(ids, call.offsets[k], call.per_sample_weights[k])
        traffic += ids.numel() * dim * size + outputs
    return Cost(flops, traffic)


embedding_bags = register(
    Op(
        name="embedding_bags",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        stacked=stacked,
        unread=unread,
        # On several ranks the ids are a single value: what arrived from the others.
        count=lambda weights, ids, *_: len(ids) if isinstance(ids, list) else None,
        samples=samples,
        devices=("cpu", "cuda"),
        autocast=narrowed,
        cost=cost,
        kernels=(
            *cpu_kernels(_CONDITION),
            Kernel("cuda", "cuda", embedding_cuda.CONDITION, cuda_launch.why_not),
            Kernel("torch", "cpu", "any other table; row gradients all the same", lambda: None),
        ),
    )
)
