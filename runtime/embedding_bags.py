"""All embedding lookups of a step in one call.

For lookup k with table ``W = weights[table[k]]`` of shape (rows, dim)::

    "none"  out[s]   = W[ids[s]]                                   ids (S...), out (S..., dim)
    "sum"   out[b,:] = Σ_i  w[i] W[ids[i],:]     i in bag b        out (bags, dim)
    "mean"  out[b,:] = Σ_i  W[ids[i],:] / n_b    n_b ids in bag b
    "max"   out[b,:] = max_i W[ids[i],:]         column by column

A bag is a row of two-dimensional ids, or ``ids[offsets[b]:offsets[b+1]]``. Ids equal to
``padding_idx`` do not count, neither in the pooling nor in gradients; an empty bag gives zeros.
These are the semantics of ``torch.nn.functional.embedding`` and ``embedding_bag``.

The gradient of a table is a RowGrad (ids and upstream rows, never a dense matrix); of a table that
the user made with ``sparse=True`` and that no fused optimizer owns, torch's sparse COO.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.errors import DtypeError, IdError, InputError
from recast.runtime import device
from recast.runtime.cost import Cost, moved
from recast.runtime.op import Kernel, Op, Sample, register, wants_grad

SCHEMA = (
    "(Tensor[] weights, Tensor[] ids, Tensor?[] offsets, Tensor?[] per_sample_weights, int[] table,"
    " str[] mode, int?[] padding_idx, bool[] include_last_offset, bool[] sparse) -> Tensor[]"
)
MODES = {"sum": 0, "mean": 1, "max": 2, "none": 3}  # torch's numbers, and one more
_INTS = (torch.int64, torch.int32)


@dataclass(slots=True, eq=False)
class Layout:
    """What is constant from call to call: for each lookup its table, mode and flags."""

    table: tuple[int, ...]
    mode: tuple[str, ...]
    padding_idx: tuple[int | None, ...]
    include_last_offset: tuple[bool, ...]
    sparse: tuple[bool, ...]
    native: Any = None  # the same for the C++ kernels, made at first use


@lru_cache(maxsize=256)
def _layout(*fields: tuple[Any, ...]) -> Layout:
    layout = Layout(*fields)
    unknown = set(layout.mode) - set(MODES)
    if unknown:
        raise InputError(
            f"unknown pooling mode {sorted(unknown)[0]!r}", tries=[f"one of {', '.join(MODES)}"]
        )
    return layout


@dataclass(slots=True)
class Call:
    """The arguments of one call. Lists are per lookup but ``weights``, which is per table."""

    weights: Sequence[Tensor]
    ids: Sequence[Tensor]
    offsets: Sequence[Tensor | None]
    per_sample_weights: Sequence[Tensor | None]
    layout: Layout

    def weight(self, k: int) -> Tensor:
        return self.weights[self.layout.table[k]]

    def padding(self, k: int) -> int | None:
        """``padding_idx`` of lookup k, counted from the first row."""
        index = self.layout.padding_idx[k]
        return index + self.weight(k).shape[0] if index is not None and index < 0 else index

    def bags(self, k: int) -> int:
        """How many bags lookup k has; ids for "none"."""
        if self.layout.mode[k] == "none":
            return self.ids[k].numel()
        offsets = self.offsets[k]
        if offsets is None:
            return self.ids[k].shape[0]
        return offsets.shape[0] - self.layout.include_last_offset[k]

    def starts(self, k: int) -> tuple[Tensor, bool]:
        """Offsets of lookup k in the dtype of its ids, and whether the last one is an end."""
        ids, offsets = self.ids[k], self.offsets[k]
        if offsets is not None:
            return offsets.to(ids.dtype), self.layout.include_last_offset[k]
        ends = torch.arange(ids.shape[0] + 1, dtype=ids.dtype, device=ids.device) * ids.shape[1]
        return ends, True


def _call(
    weights: Sequence[Tensor],
    ids: Sequence[Tensor],
    offsets: Sequence[Tensor | None],
    per_sample_weights: Sequence[Tensor | None],
    *constants: Sequence[Any],
) -> Call:
    return Call(weights, ids, offsets, per_sample_weights, _layout(*map(tuple, constants)))


# ---------------------------------------------------------------- the definition


def reference(*args: Any) -> list[Tensor]:
    """Plain torch, one lookup after the other. See the module docstring for shapes."""
    call = _call(*args)
    check(call)
    return [_reference_lookup(call, k) for k in range(len(call.ids))]


def _reference_lookup(call: Call, k: int) -> Tensor:
    weight, ids, mode = call.weight(k), call.ids[k], call.layout.mode[k]
    sparse, padding = call.layout.sparse[k], call.layout.padding_idx[k]
    if mode == "none":
        return F.embedding(ids, weight, padding_idx=padding, sparse=sparse)
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


def fake(*args: Any) -> list[Tensor]:
    """Shapes and dtypes of the result."""
    call = _call(*args)
    outs = []
    for k, ids in enumerate(call.ids):
        weight = call.weight(k)
        shape = tuple(ids.shape) if call.layout.mode[k] == "none" else (call.bags(k),)
        outs.append(weight.new_empty((*shape, weight.shape[1])))
    return outs


# ---------------------------------------------------------------- bad input


def check(call: Call) -> None:
    """Raise what is wrong with the shapes and dtypes of ``call``; values are not read."""
    for k, ids in enumerate(call.ids):
        _check_lookup(call, k, ids, f"lookup {k} (table {call.layout.table[k]})")


def _check_lookup(call: Call, k: int, ids: Tensor, name: str) -> None:
    weight, offsets, weights = call.weight(k), call.offsets[k], call.per_sample_weights[k]
    mode, padding = call.layout.mode[k], call.layout.padding_idx[k]
    if weight.dim() != 2:
        raise InputError(f"the table of {name} has shape {tuple(weight.shape)}, not (rows, dim)")
    if ids.dtype not in _INTS:
        raise DtypeError(
            f"ids of {name} are {_short(ids.dtype)}",
            why="ids must be int64 or int32; torch refuses others too",
            tries=["ids.long()", "give features as floats to the dense part instead"],
        )
    rows = weight.shape[0]
    if padding is not None and not -rows <= padding < rows:
        raise InputError(f"padding_idx {padding} of {name} is outside its {rows} rows")
    if weights is not None:
        _check_sample_weights(weights, ids, weight, mode, name)
    if mode == "none":
        return
    if offsets is None:
        if ids.dim() != 2:
            raise InputError(
                f"ids of {name} have {ids.dim()} dimensions and no offsets",
                why="a bag is a row of (batch, ids per bag), or is cut out of flat ids by offsets",
                tries=["pass offsets", "reshape the ids to (batch, ids per bag)"],
            )
        return
    if ids.dim() != 1:
        raise InputError(
            f"ids of {name} have {ids.dim()} dimensions and offsets",
            why="offsets cut flat ids into bags; ids of two dimensions are cut already",
            tries=["drop the offsets", "flatten the ids"],
        )
    if offsets.dim() != 1 or offsets.shape[0] < call.layout.include_last_offset[k]:
        raise InputError(
            f"offsets of {name} have shape {tuple(offsets.shape)}",
            why="offsets are one-dimensional, one start per bag"
            + (" and the end" if call.layout.include_last_offset[k] else ""),
        )
    if offsets.dtype not in _INTS:
        raise DtypeError(
            f"offsets of {name} are {_short(offsets.dtype)}",
            why="offsets must be int64 or int32",
            tries=["offsets.long()"],
        )


def _check_sample_weights(
    weights: Tensor, ids: Tensor, table: Tensor, mode: str, name: str
) -> None:
    if mode != "sum":
        raise InputError(
            f"per_sample_weights of {name} are given with mode {mode!r}",
            why="torch defines them for sums only",
            tries=["mode='sum'", "drop per_sample_weights"],
        )
    if weights.shape != ids.shape:
        raise InputError(
            f"per_sample_weights of {name} have shape {tuple(weights.shape)}, its ids"
            f" {tuple(ids.shape)}",
            why="each id has one weight",
        )
    if weights.dtype != table.dtype:
        raise DtypeError(
            f"per_sample_weights of {name} are {_short(weights.dtype)}, its table"
            f" {_short(table.dtype)}",
            why="torch asks for one dtype",
            tries=["weights.to(table.weight.dtype)"],
        )


def check_values(call: Call) -> None:
    """Raise the first id outside its table and the first wrong offset. Reads every value."""
    for k, ids in enumerate(call.ids):
        rows, offsets = call.weight(k).shape[0], call.offsets[k]
        bad = ((ids < 0) | (ids >= rows)).reshape(-1).nonzero()
        if offsets is not None and call.layout.mode[k] != "none":
            _check_offsets(call, k, offsets)
        if len(bad):
            raise id_error(call, k, int(bad[0]))


def _check_offsets(call: Call, k: int, offsets: Tensor) -> None:
    if not len(offsets):
        return
    steps = torch.cat((offsets.new_zeros(1), offsets)).diff()
    wrong = ((steps < 0) | (offsets > call.ids[k].shape[0])).nonzero()
    if offsets[0] != 0:
        raise offset_error(call, k, 0)
    if len(wrong):
        raise offset_error(call, k, int(wrong[0]))


def id_error(call: Call, k: int, position: int) -> IdError:
    """The error for the id at flat ``position`` of lookup ``k``."""
    ids, table, rows = call.ids[k], call.layout.table[k], call.weight(k).shape[0]
    value = int(ids.reshape(-1)[position])
    place = str(position)
    if ids.dim() > 1:
        index = torch.unravel_index(torch.tensor(position), tuple(ids.shape))
        place = f"[{', '.join(str(int(i)) for i in index)}]"
    remedies = [f"map ids into 0..{rows - 1} where the batch is made"]
    if value >= rows:
        remedies.append(f"give the table at least {value + 1} rows")
    else:
        remedies.append("give missing values an id of their own, and name it padding_idx")
    return IdError(
        f"id {value} of lookup {k} (table {table}) is outside its {rows} rows",
        why=f"it stands at ids[{place.strip('[]')}]; valid ids are 0..{rows - 1}",
        tries=remedies,
    )


def offset_error(call: Call, k: int, position: int) -> IdError:
    """The error for the offset at ``position`` of lookup ``k``."""
    offsets, count = call.offsets[k], call.ids[k].shape[0]
    assert offsets is not None
    value = int(offsets[position])
    name = f"lookup {k} (table {call.layout.table[k]})"
    if position == 0 and value != 0:
        what = f"offsets of {name} start at {value}, not at 0"
    elif value > count:
        what = f"offsets[{position}] = {value} of {name} runs past its {count} ids"
    else:
        before = int(offsets[position - 1])
        what = f"offsets of {name} decrease: {before} then {value} at position {position}"
    return IdError(
        what,
        why="offsets are the starts of the bags: from 0, never decreasing, within the ids",
        tries=["torch.cumsum of the bag sizes, shifted by one"],
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------- forward


def forward(*args: Any) -> list[Tensor]:
    """All lookups, no autograd; every output with a storage of its own, as compilers expect."""
    return _forward(_call(*args), winners=False, apart=True)[0]


def _forward(call: Call, winners: bool, apart: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and for each "max" lookup the winning row of each output element (-1: none)."""
    extension = device.extension()
    if extension is not None:
        step = extension.embedding_step(
            _native(extension, call.layout),
            call.weights,
            call.ids,
            call.offsets,
            call.per_sample_weights,
        )
        if step is not None:
            return _run(step, call, winners, apart)
    check(call)
    check_values(call)
    outs, won = [], []
    for k in range(len(call.ids)):
        out, winner = _torch_lookup(call, k)
        outs.append(out)
        if winners and winner is not None:
            won.append(winner)
    return outs, won


def _native(extension: Any, layout: Layout) -> Any:
    if layout.native is None:
        modes = [MODES[mode] for mode in layout.mode]
        layout.native = extension.EmbeddingLayout(
            layout.table, modes, layout.padding_idx, layout.include_last_offset
        )
    return layout.native


def _run(step: Any, call: Call, winners: bool, apart: bool) -> tuple[list[Tensor], list[Tensor]]:
    shapes = step.shapes()
    outs = _allocate(call, shapes, apart)
    won = []
    if winners and "max" in call.layout.mode:
        modes = zip(shapes, call.layout.mode, strict=True)
        won = [torch.empty(shape, dtype=torch.int64) for shape, mode in modes if mode == "max"]
    failure = step.run(outs, won, device.threads())
    if failure is not None:
        k, is_offset, position = failure
        raise offset_error(call, k, position) if is_offset else id_error(call, k, position)
    return outs, won


def _allocate(call: Call, shapes: list[tuple[int, int]], apart: bool) -> list[Tensor]:
    """One output a lookup. Those of one width are cut from one allocation: 6 us for 26, not 28.

    They are no views of each other: ``unsafe_split`` gives each its own version counter.
    """
    outs: dict[int, Tensor] = {}
    widths: dict[int, list[int]] = {}
    for k, (_, dim) in enumerate(shapes):
        gathers = call.layout.mode[k] == "none"
        if apart or (gathers and call.ids[k].dim() != 1):
            shape = call.ids[k].shape if gathers else (shapes[k][0],)
            outs[k] = torch.empty((*shape, dim), dtype=torch.float32)
        else:
            widths.setdefault(dim, []).append(k)
    for dim, lookups in widths.items():
        bags = [shapes[k][0] for k in lookups]
        whole = torch.empty((sum(bags), dim), dtype=torch.float32)
        outs.update(zip(lookups, torch.unsafe_split_with_sizes(whole, bags), strict=True))
    return [outs[k] for k in range(len(shapes))]


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
    """Inputs: the call, all tables, the per-sample weights that are given."""

    @staticmethod
    def forward(ctx: Any, call: Call, *floats: Tensor) -> tuple[Tensor, ...]:
        layout, count = call.layout, len(call.weights)
        winners: list[Tensor] = []
        if torch._C._len_torch_dispatch_stack() and "max" not in layout.mode:
            outs = _below(*_arguments(call))  # a user's dispatch mode sees the op
        else:
            outs, winners = _forward(call, winners=True)
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.tables = layout, count
        ctx.shapes = [w.shape for w in call.weights]
        # Tables are kept only for the gradient of per-sample weights: an optimizer may write them.
        keeps = any(ctx.needs_input_grad[1 + count :])
        ctx.parts = [call.ids, call.offsets, call.per_sample_weights, winners]
        ctx.parts = [[t is not None for t in part] for part in ctx.parts]
        ctx.parts.append([keeps] * count)
        saved = [*call.ids, *call.offsets, *call.per_sample_weights, *winners]
        saved += call.weights if keeps else []
        ctx.save_for_backward(*(t for t in saved if t is not None))
        ctx.owned = [sparse_owner(w) for w in call.weights] if any(layout.sparse) else None
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        parts = [[next(saved) if there else None for there in part] for part in ctx.parts]
        ids, offsets, sample_weights, winners, weights = parts
        call = Call(weights, ids, offsets, sample_weights, ctx.layout)  # type: ignore[arg-type]
        back = Backward(call, ctx.shapes, grads, iter(winners))
        n = ctx.tables
        tables = [
            back.table(t, ctx.owned) if ctx.needs_input_grad[1 + t] else None for t in range(n)
        ]
        given = [k for k, w in enumerate(sample_weights) if w is not None]
        samples = [
            back.sample_weights(k) if needed else None
            for k, needed in zip(given, ctx.needs_input_grad[1 + n :], strict=True)
        ]
        return (None, *tables, *samples)


def sparse_owner(weight: Tensor) -> Any:
    """Whether a fused optimizer owns ``weight``: asked in backward, when training is set up."""
    from recast.runtime.row_grad import claimed

    return lambda: claimed(weight)


def _arguments(call: Call) -> tuple[Any, ...]:
    layout = call.layout
    constants = (
        layout.table,
        layout.mode,
        layout.padding_idx,
        layout.include_last_offset,
        layout.sparse,
    )
    tensors = (call.weights, call.ids, call.offsets, call.per_sample_weights)
    return tuple(list(x) for x in (*tensors, *constants))


class Backward:
    """The gradients of one call from the upstream gradient of each lookup."""

    def __init__(
        self,
        call: Call,
        shapes: Sequence[torch.Size],
        grads: Sequence[Tensor | None],
        winners: Iterator[Tensor | None],
    ) -> None:
        self.call, self.shapes, self.grads = call, shapes, grads
        modes = call.layout.mode
        self.winners = {k: next(winners) for k, mode in enumerate(modes) if mode == "max"}
        self.lookups: dict[int, list[int]] = {}
        for k, t in enumerate(call.layout.table):
            if grads[k] is not None:
                self.lookups.setdefault(t, []).append(k)

    def table(self, t: int, owned: Sequence[Any] | None) -> Tensor | None:
        """The gradient of table ``t``: RowGrad, sparse COO, or dense with ``create_graph``."""
        from recast.runtime.row_grad import row_grad

        lookups = self.lookups.get(t)
        if not lookups:
            return None
        first = self.grads[lookups[0]]
        assert first is not None
        pieces = [self.piece(k) for k in lookups]
        differentiable = torch.is_grad_enabled()
        sparse = all(self.call.layout.sparse[k] for k in lookups)
        if sparse and not (owned is not None and owned[t]()):
            ids, rows = _cat([expanded(p) for p in pieces])
            return torch.sparse_coo_tensor(
                ids.unsqueeze(0), rows, tuple(self.shapes[t]), check_invariants=False
            )
        if differentiable:
            ids, rows = _cat([expanded(p) for p in pieces])
            return rows.new_zeros(tuple(self.shapes[t])).index_add(0, ids, rows)
        return row_grad(self.shapes[t], first.dtype, first.device, pieces)

    def piece(self, k: int) -> Any:
        """The gradient of lookup ``k`` as (ids, upstream rows) still to be expanded."""
        from recast.runtime.row_grad import Piece

        grad, layout = self.grads[k], self.call.layout
        assert grad is not None
        mode, ids = layout.mode[k], self.call.ids[k]
        padding, rows = layout.padding_idx[k], self.shapes[layout.table[k]][0]
        padding = padding + rows if padding is not None and padding < 0 else padding
        if grad.dim() != 2:
            grad = grad.reshape(-1, grad.shape[-1])
        if grad.stride(1) != 1:
            grad = grad.contiguous()
        if mode == "max":
            winner = self.winners[k]
            assert winner is not None
            ids, grad = won_rows(winner, grad, rows)
            return Piece(ids, grad, None, 1, None, False, None, None)
        flat = (ids if ids.dim() == 1 else ids.reshape(-1)).contiguous()
        offsets, fixed = self.call.offsets[k], 1
        if mode == "none":
            offsets = None
        elif offsets is None:
            fixed = ids.shape[1]
        weights = self.call.per_sample_weights[k]
        weights = None if weights is None else weights.reshape(-1).contiguous()
        return Piece(flat, grad, offsets, fixed, weights, mode == "mean", padding, None)

    def sample_weights(self, k: int) -> Tensor | None:
        """The gradient of the per-sample weights of lookup ``k``: (grad of the bag) · (row)."""
        grad = self.grads[k]
        if grad is None:
            return None
        call, ids = self.call, self.call.ids[k]
        flat = ids.reshape(-1)
        bag = bag_of(call.offsets[k], ids.shape[-1], len(flat), len(grad), flat.device)
        products = grad.index_select(0, bag.clamp(max=len(grad) - 1)) * F.embedding(
            flat, call.weight(k)
        )
        out = products.sum(1)
        padding = call.padding(k)
        dead = bag >= len(grad)
        if padding is not None:
            dead = dead | (flat == padding)
        return out.masked_fill(dead, 0).reshape(ids.shape)


def bag_of(
    offsets: Tensor | None, fixed: int, count: int, bags: int, where: torch.device
) -> Tensor:
    """The bag of each of ``count`` ids; ``bags`` for ids after the last end."""
    place = torch.arange(count, device=where)
    if offsets is None:
        return place // max(fixed, 1)
    bag = torch.searchsorted(offsets.long().contiguous(), place, right=True) - 1
    return bag.clamp(max=bags)


def expanded(piece: Any) -> tuple[Tensor, Tensor]:
    """``(ids, rows)`` of a Piece, one row per id, padding left out; differentiable in its rows."""
    ids, rows = piece.ids.long(), piece.rows
    bag = bag_of(piece.offsets, piece.fixed, len(ids), len(rows), ids.device)
    keep = bag < len(rows)
    if piece.padding_idx is not None:
        keep = keep & (ids != piece.padding_idx)
    if piece.mean:
        counts = torch.zeros(len(rows) + 1, dtype=rows.dtype, device=rows.device)
        counts = counts.index_add(0, bag, keep.to(rows.dtype))[: len(rows)]
        rows = rows / counts.clamp(min=1).unsqueeze(1)
    kept = keep.nonzero().squeeze(1)
    out = rows.index_select(0, bag.index_select(0, kept))
    if piece.weights is not None:
        out = out * piece.weights.index_select(0, kept).unsqueeze(1)
    if piece.scale is not None:
        out = out * piece.scale
    return ids.index_select(0, kept), out


def won_rows(winner: Tensor, grad: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """``(ids, rows)``: for each bag, one row per id that won a column, zero in the others.

    ``winner``: (bags, dim) row ids, -1 in empty bags; ``grad``: (bags, dim).
    """
    bags, dim = grad.shape
    bag = torch.arange(bags, device=grad.device).unsqueeze(1)
    live = winner >= 0
    keys = (bag * rows + winner)[live]
    unique, inverse = torch.unique(keys, return_inverse=True)
    column = torch.arange(dim, device=grad.device).expand(bags, dim)[live]
    out = grad.new_zeros(len(unique), dim).index_put((inverse, column), grad[live])
    return unique % rows, out


def _cat(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(pairs) == 1:
        return pairs[0]
    return torch.cat([ids for ids, _ in pairs]), torch.cat([rows for _, rows in pairs])


def differentiable(*args: Any) -> list[Tensor]:
    """All lookups, recorded by autograd where a table or a per-sample weight wants a gradient."""
    records = wants_grad((args[0], args[3]))
    if not records and torch._C._len_torch_dispatch_stack():
        return _below(*args)
    call = _call(*args)
    if not records:
        return _forward(call, winners=False)[0]
    given = [w for w in call.per_sample_weights if w is not None]
    return list(EmbeddingBags.apply(call, *call.weights, *given))


def _below(*args: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return embedding_bags.target(*args)


# ---------------------------------------------------------------- cost, samples


def cost(*args: Any) -> Cost:
    """Each id reads one row; each output is written once."""
    call = _call(*args)
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


def samples() -> list[Sample]:
    """Odd sizes, every mode and flag, empty bags, one row, shared tables, empty batch."""
    g = torch.Generator().manual_seed(7)

    def ids(rows: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(0, rows, shape, generator=g, dtype=dtype)

    def table(rows: int, dim: int) -> Tensor:
        return torch.randn(rows, dim, generator=g)

    def one(label: str, weight: Tensor, i: Tensor, **flags: Any) -> Sample:
        f = {
            "offsets": None, "weights": None, "mode": "sum", "padding": None, "last": False,
            "sparse": False,
        } | flags  # fmt: skip
        per_lookup = [f["mode"]], [f["padding"]], [f["last"]], [f["sparse"]]
        return Sample(label, ([weight], [i], [f["offsets"]], [f["weights"]], [0], *per_lookup))

    i32 = torch.int32
    starts = torch.tensor([0, 0, 1, 3, 3, 8, 12])
    ends = torch.tensor([0, 4, 4, 9, 12], dtype=torch.int32)
    wide = torch.randn(12, generator=g)
    found = [
        one("gather", table(11, 7), ids(11, 5), mode="none"),
        one("gather 3-d", table(11, 16), ids(11, 3, 2, 4), mode="none"),
        one("gather scalar", table(11, 16), ids(11), mode="none"),
        one("gather padding int32", table(4, 33), ids(4, 9, 2, dtype=i32), mode="none", padding=-1),
        one("one row", table(1, 5), ids(1, 6, 3)),
        one("one column", table(9, 1), ids(9, 6, 3)),
        one("transposed ids", table(9, 8), ids(9, 6, 3).t()),
        one("strided ids", table(9, 8), ids(9, 12, 3)[::2], mode="mean"),
        one("empty batch", table(9, 8), ids(9, 0, 3)),
        one("empty gather", table(9, 8), ids(9, 0), mode="none"),
        one("no bags", table(9, 8), ids(9, 0), offsets=starts[:0]),
        one("all bags empty", table(9, 8), ids(9, 0), offsets=starts[:2] * 0, mode="max"),
        one("table is a transpose", table(6, 9).t(), ids(9, 4, 2)),
        one("table is a column slice", table(9, 12)[:, 2:9], ids(9, 4, 2), mode="max"),
        one("ties", table(9, 20).sign(), ids(9, 7, 4), mode="max"),
        one("weights 2-d", table(9, 24), ids(9, 4, 3), weights=wide.reshape(4, 3)),
        one("weights strided", table(9, 24), ids(9, 6), offsets=starts[:4], weights=wide[::2]),
    ]  # fmt: skip
    for mode in ("sum", "mean", "max"):
        found += [
            one(f"ragged {mode}", table(13, 17), ids(13, 12), offsets=starts, mode=mode),
            one(f"ends {mode}", table(3, 33), ids(3, 12), offsets=ends, mode=mode, last=True),
            one(f"padding {mode}", table(3, 19), ids(3, 12), offsets=starts, mode=mode, padding=1),
            one(f"fixed {mode}", table(40, 48), ids(40, 5, 4, dtype=i32), mode=mode, padding=-2),
            one(f"repeats {mode}", table(2, 128), ids(2, 3, 20), mode=mode),
        ]  # fmt: skip
    found.append(
        one("all flags", table(5, 17), ids(5, 12), offsets=starts, weights=wide, padding=2)
    )  # fmt: skip
    weights = [table(30, 16), table(7, 16), table(50, 9)]
    lookups = [ids(30, 4), ids(7, 4, 3), ids(50, 12), ids(30, 4, 2), ids(7, 12, dtype=torch.int32)]
    found.append(
        Sample(
            "mixed and shared",
            (
                weights,
                lookups,
                [None, None, starts, None, ends],
                [None, None, wide, None, None],
                [0, 1, 2, 0, 1],
                ["none", "mean", "sum", "max", "sum"],
                [None, 0, None, None, -1],
                [False, False, False, False, True],
                [False] * 5,
            ),
        )
    )
    found.append(
        Sample(
            "many one-hot",
            (
                [table(20 + t, 8) for t in range(9)],
                [ids(20 + t, 33, 1) for t in range(9)],
                [None] * 9,
                [None] * 9,
                list(range(9)),
                ["sum"] * 9,
                [None] * 9,
                [False] * 9,
                [t % 2 == 1 for t in range(9)],
            ),
        )
    )
    return found


embedding_bags = register(
    Op(
        name="embedding_bags",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        samples=samples,
        cost=cost,
        kernels=(
            *(
                Kernel(isa, "cpu", "float32 tables with contiguous rows", device.why_not(isa))
                for isa in device.ISAS
            ),
            Kernel("torch", "cpu", "any other table; row gradients all the same", lambda: None),
        ),
    )
)
