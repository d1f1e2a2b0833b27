"""Sends rows back to the ranks that asked for them, and their gradients to the owners.

``send_rows`` sends what the owners looked up, one collective for all tables; ``wait_rows`` combines
the answers:

    a whole row            as it came
    parts of columns       side by side
    parts of rows          Σ over owners, in the order of the ranks; a mean is divided here

The backward of ``wait_rows`` sends the gradients of the rows to their owners, that of ``send_rows``
waits for them, so work between the two in the forward pass overlaps with the communication in both
directions. The owner divides the gradients of all ranks by the number of ranks, as DDP does for
dense parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from recast.errors import InputError, UsageError
from recast.runtime.batched_grads import one_at_a_time
from recast.runtime.op import wants_grad
from recast.runtime.ranks import collectives, wire
from recast.runtime.ranks.exchange_ids import Exchange

Parts = list[tuple[int, int, int, int]]  # see _asked and _answered


class Rows(NamedTuple):
    """Rows on their way; ``token`` stands for them in autograd's graph."""

    exchange: Exchange
    token: Tensor | None


@_disable_dynamo
def send_rows(rows: Sequence[Tensor], exchange: Exchange) -> Rows:
    """Send looked-up rows, (bags of all ranks, local columns) per lookup, to those who asked."""
    if rows[0].is_meta:
        raise InputError("rows without values cannot be sent")
    if wants_grad([list(rows)]):
        return Rows(exchange, _SendRows.apply(exchange, *rows))
    _send(exchange, rows)
    return Rows(exchange, None)


@_disable_dynamo
def wait_rows(rows: Rows) -> list[Tensor]:
    """The rows of this rank's own lookups, as ``embedding_bags`` on whole tables returns them.

    Raises, on every rank, if a lookup failed on any.
    """
    x, token = rows
    return _receive(x) if token is None else list(_WaitRows.apply(x, token))


# ---------------------------------------------------------------- messages


def _codec(x: Exchange, backward: bool) -> wire.Codec:
    return wire.Codec(x.route.wire[backward])


def _own(x: Exchange) -> torch.dtype:
    """The dtype of rows on the wire without a codec: that of the tables, the widest if mixed."""
    return reduce(torch.promote_types, (getattr(torch, t.dtype) for t in x.route.tables))


def _dtype(x: Exchange, k: int) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, x.route.tables[x.route.table[k]].dtype)
    return dtype


def _asked(x: Exchange) -> Parts:
    """``(owner, lookup, bags, columns)`` of every part that comes to this rank, in order."""
    return [
        (rank, k, x.bucket(rank, k).bags, x.route.own(rank, k).width)
        for rank in range(x.route.world_size)
        for k in x.route.owned(rank)
    ]


def _answered(x: Exchange) -> Parts:
    """``(source, lookup, bags, columns)`` of every part that this rank looked up, in order."""
    return [
        (rank, k, x.head(rank, k)[1], x.route.own(x.rank, k).width)
        for rank in range(x.route.world_size)
        for k in x.owned
    ]


def _sizes(codec: wire.Codec, parts: Parts) -> list[int]:
    """Elements on the wire of each part."""
    return [codec.elements(bags, columns) for _, _, bags, columns in parts]


def _totals(x: Exchange, codec: wire.Codec, parts: Parts) -> list[int]:
    """Elements on the wire for each rank."""
    totals = [0] * x.route.world_size
    for (rank, _, _, _), size in zip(parts, _sizes(codec, parts), strict=True):
        totals[rank] += size
    return totals


def _send_parts(
    x: Exchange, codec: wire.Codec, rows: Sequence[Tensor], there: Parts, back: Parts, what: str
) -> collectives.Pending:
    sizes = _sizes(codec, there)
    buffer = torch.empty(sum(sizes), dtype=codec.dtype or _own(x), device=x.where)
    for part, out in zip(rows, buffer.split(sizes), strict=False):  # no parts: one empty split
        codec.encode(part, out)
    return collectives.all_to_all(buffer, _totals(x, codec, there), _totals(x, codec, back), what)


def _received_parts(
    x: Exchange, pending: collectives.Pending, codec: wire.Codec, parts: Parts
) -> list[Tensor]:
    """The parts that arrived, (bags, columns) each, none a view of another."""
    buffer = pending.wait()
    flat = torch.unsafe_split_with_sizes(buffer, _sizes(codec, parts)) if parts else ()
    received = []
    for piece, (_, k, bags, columns) in zip(flat, parts, strict=True):
        if codec.dtype is None:
            rows: Tensor = torch.ops.aten._unsafe_view(piece, (bags, columns))
            received.append(rows.to(_dtype(x, k)))
        else:
            received.append(codec.decode(piece, bags, columns, _dtype(x, k)))
    return received


def _send(x: Exchange, rows: Sequence[Tensor]) -> None:
    there = _answered(x)
    bags = {k: [b for _, j, b, _ in there if j == k] for k in x.owned}
    cut = {k: rows[k].detach().split(bags[k]) for k in x.owned}
    parts = [cut[k][rank] for rank, k, _, _ in there]
    x.rows = _send_parts(x, _codec(x, False), parts, there, _asked(x), "rows")
    if x.route.some_hashed:
        _tell(x)


def _receive(x: Exchange) -> list[Tensor]:
    assert x.rows is not None
    asked = _asked(x)
    received = _received_parts(x, x.rows, _codec(x, False), asked)
    x.rows = None
    if x.states is not None:
        _check(x, x.states)
    found: dict[int, list[tuple[int, Tensor]]] = {}
    for (rank, k, _, _), part in zip(asked, received, strict=True):
        repeat = x.bucket(rank, k).repeat
        whole = part if repeat is None else part.index_select(0, repeat)
        found.setdefault(k, []).append((rank, whole))
    return [_together(x, k, found[k]) for k in range(len(x.local))]


def _tell(x: Exchange) -> None:
    """Tell every rank whether the lookups here succeeded: a dynamic table may be full."""
    ones = [1] * x.route.world_size
    wrong = torch.full((len(ones),), int(x.wrong is not None), device=x.where)
    x.states = collectives.all_to_all(wrong, ones, ones, "state of lookups")


def _check(x: Exchange, states: collectives.Pending) -> None:
    """Raise, on every rank, if the lookups failed on any."""
    x.states = None
    told = states.read()
    if x.wrong is not None:
        raise x.wrong
    if any(told):
        raise UsageError(
            f"rank {told.index(1)} could not look up what it was sent",
            why="all ranks compute one step together; the error of that rank says more",
        )


def _together(x: Exchange, k: int, parts: Sequence[tuple[int, Tensor]]) -> Tensor:
    """The rows of lookup ``k``, combined from its owners' parts."""
    local, table = x.local[k], x.route.tables[x.route.table[k]]
    rank, out = parts[0]
    if len(parts) > 1 or x.route.own(rank, k).width != table.dim:
        out = _assembled(x, k, parts)
    if local.counts is not None:
        out = out / local.counts
    out = out.to(_dtype(x, k))
    if x.route.mode[k] != "none" or len(local.shape) == 1:
        return out
    whole: Tensor = torch.ops.aten._unsafe_view(out, (*local.shape, table.dim))
    return whole


def _assembled(x: Exchange, k: int, parts: Sequence[tuple[int, Tensor]]) -> Tensor:
    table = x.route.tables[x.route.table[k]]
    dtype = torch.promote_types(_dtype(x, k), torch.float32)
    out = torch.zeros(x.local[k].bags, table.dim, dtype=dtype, device=x.where)
    for rank, part in parts:
        place, at = x.bucket(rank, k).place, 0
        for first, end in x.route.own(rank, k).columns:
            piece = part[:, at : at + end - first].to(dtype)
            at += end - first
            if place is None:
                out[:, first:end] = piece
            else:
                out[:, first:end].index_add_(0, place, piece)
    return out


def _parted(x: Exchange, k: int, rank: int, grad: Tensor) -> Tensor:
    """The part of the gradient (bags, dim) of lookup ``k`` that goes to owner ``rank``."""
    columns, bucket = x.route.own(rank, k).columns, x.bucket(rank, k)
    if bucket.place is not None:
        grad = grad.index_select(0, bucket.place)
    if len(columns) != 1 or columns[0] != (0, grad.shape[1]):
        grad = torch.cat([grad[:, first:end] for first, end in columns], 1)
    if bucket.repeat is None:
        return grad
    wide = torch.promote_types(grad.dtype, torch.float32)
    sums = torch.zeros(bucket.bags, grad.shape[1], dtype=wide, device=x.where)
    return sums.index_add_(0, bucket.repeat, grad.to(wide)).to(grad.dtype)


# ---------------------------------------------------------------- autograd


class _SendRows(torch.autograd.Function):
    """Inputs: the exchange, and the rows of all ranks for each lookup."""

    @staticmethod
    def forward(ctx: Any, x: Exchange, *rows: Tensor) -> Tensor:
        _send(x, rows)
        ctx.x = x
        ctx.like = [(r.shape, r.dtype) for r in rows]
        return torch.empty(0, device=x.where)

    @staticmethod
    @one_at_a_time
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        x: Exchange = ctx.x
        parts = _answered(x)
        received = _received_parts(x, x.back.pop("rows"), _codec(x, True), parts)
        found: dict[int, list[Tensor]] = {}
        for (_, lookup, _, _), part in zip(parts, received, strict=True):
            found.setdefault(lookup, []).append(part)
        return None, *(
            _gradient(x, found.get(k), shape, dtype) for k, (shape, dtype) in enumerate(ctx.like)
        )


def _gradient(
    x: Exchange, parts: Sequence[Tensor] | None, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """The gradients of all ranks for one lookup, divided by the number of ranks."""
    if not parts:
        return torch.zeros(shape, dtype=dtype, device=x.where)
    return (torch.cat(list(parts)) / x.route.world_size).to(dtype)


class _WaitRows(torch.autograd.Function):
    """Inputs: the exchange and its token; outputs: the rows of this rank's lookups."""

    @staticmethod
    def forward(ctx: Any, x: Exchange, token: Tensor) -> tuple[Tensor, ...]:
        ctx.x = x
        return tuple(_receive(x))

    @staticmethod
    @one_at_a_time
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        x: Exchange = ctx.x
        flat: list[Tensor] = []
        for k, grad in enumerate(grads):
            grad = grad.reshape(-1, grad.shape[-1])
            counts = x.local[k].counts
            flat.append(grad if counts is None else grad / counts)
        asked = _asked(x)
        parts = [_parted(x, k, rank, flat[k]) for rank, k, _, _ in asked]
        x.back["rows"] = _send_parts(
            x, _codec(x, True), parts, asked, _answered(x), "gradients of rows"
        )
        return None, torch.empty(0, device=x.where)
