"""Sends ids to the owners of their rows: one collective for all lookups of a call.

``send_ids`` sorts them by owner, tells every rank how many are coming, and sends; ``wait_ids``
gives the owner what all ranks look up in its part of the tables, in the order of the ranks, as the
ids, offsets and weights of one ``embedding_bags``. So an owner of whole rows does exactly what one
process does with the batches of all ranks, joined.

On the wire, for each destination and each lookup in turn, in words of four bytes: the ids, the
lengths of the bags unless they have one size, the per-sample weights. Per-sample weights get their
gradient back the same way. Ids and offsets are checked before anything is sent, and the result of
the check travels with the counts: a bad batch on one rank is an error on all, and none is left
waiting. The mode, and whether gradients are recorded, travel too: a rank that evaluates while
others train is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from recast.errors import InputError, UsageError
from recast.runtime.batched_grads import one_at_a_time
from recast.runtime.embedding.call import call_of
from recast.runtime.op import wants_grad
from recast.runtime.ranks import collectives
from recast.runtime.ranks.collectives import Pending
from recast.runtime.ranks.exchange_buckets import Bucket, Local, prepare
from recast.runtime.ranks.exchange_counts import HEAD, announce, head_of, recorded_grads
from recast.runtime.ranks.exchange_route import Route

_WORD = torch.int32


class Exchange:
    """The state of one call: what this rank has sent, and what the others have announced."""

    def __init__(self, route: Route, padding: list[int | None], where: torch.device) -> None:
        self.route, self.where, self.rank = route, where, collectives.rank()
        self.padding = padding
        self.local: list[Local] = []
        self.weighted: list[int] = []  # lookups with per-sample weights
        self.heads: list[list[int]] = []  # per source: HEAD numbers for each lookup we own
        self.ids: Pending | None = None
        self.rows: Pending | None = None
        self.arrived: Any = None  # ids and offsets, passed from _receive to wait_ids
        self.back: dict[str, Pending] = {}  # gradients on their way
        self.wrong: Exception | None = None  # of the lookups here; raised once all ranks know
        self.states: Pending | None = None  # whether the lookups on other ranks succeeded

    @property
    def owned(self) -> tuple[int, ...]:
        """The lookups that this rank answers."""
        return self.route.owned(self.rank)

    def bucket(self, rank: int, k: int) -> Bucket:
        """The part of lookup ``k`` that goes to ``rank``."""
        return self.local[k].buckets[self.route.range_of(rank, k)]

    def head(self, source: int, k: int) -> tuple[int, int, int]:
        """``(ids, bags, fixed)`` of what ``source`` sends for lookup ``k``, which we own."""
        at = HEAD * self.owned.index(k)
        ids, bags, fixed = self.heads[source][at : at + HEAD]
        return ids, bags, fixed


class Sent(NamedTuple):
    """Ids on their way; ``token`` stands for them in autograd's graph."""

    exchange: Exchange
    token: Tensor | None


@_disable_dynamo
def send_ids(
    weights: Sequence[Tensor],
    ids: Sequence[Tensor],
    route: Route,
    *,
    padding_idx: Sequence[int | None],
    offsets: Sequence[Tensor | None] | None = None,
    per_sample_weights: Sequence[Tensor | None] | None = None,
) -> Sent:
    """Check the lookups of this rank's batch and send each id to the owners of its row.

    Args:
        weights: the local parts of the tables; only their dtypes are looked at.
        ids, offsets, per_sample_weights, padding_idx: for each lookup, as in ``embedding_bags``;
            for a dynamic table, raw ids.

    Raises:
        IdError, InputError: on every rank, if any rank's batch is wrong.
        UsageError: on every rank, if ranks call in different modes; or a table was cast.
    """
    if ids[0].is_meta:
        raise InputError("ids without values cannot be sent to their owners")
    none: list[None] = [None] * len(ids)
    factors = list(per_sample_weights or none)
    raw = [p if route.hashed(k) else None for k, p in enumerate(padding_idx)]
    rows = [None if route.hashed(k) else p for k, p in enumerate(padding_idx)]
    call = call_of(
        route.metas, ids, offsets or none, factors, route.table, route.mode, rows,
        route.include_last_offset, [False] * len(ids),
    )  # fmt: skip
    padding = [call.padding(k) if p is None else p for k, p in enumerate(raw)]
    x = Exchange(route, padding, ids[0].device)
    wrong: Exception | None = None
    try:
        _check_dtypes(route, weights)
        x.local = prepare(call, route, padding)
    except Exception as error:
        wrong = error
    announce(x, wrong, recorded_grads([*weights, *factors]))
    x.weighted = [k for k, w in enumerate(factors) if w is not None]
    given = [w for w in factors if w is not None]
    token = None
    if wants_grad(given):
        token = _SendIds.apply(x, *given)
    else:
        _send(x, given)
    return Sent(x, token)


@_disable_dynamo
def wait_ids(sent: Sent) -> tuple[Any, ...]:
    """``(ids, offsets, per_sample_weights, padding_idx, exchange)`` for the lookups of all ranks.

    The first four are arguments of ``embedding_bags`` on the local parts of the tables, with
    ``include_last_offset``; lookups in tables that are not here are empty.
    """
    x, token = sent
    given = _receive(x) if token is None else list(_WaitIds.apply(x, token))
    weights: list[Tensor | None] = [None] * len(x.local)
    for k, w in zip(x.weighted, given, strict=True):
        weights[k] = w
    ids, offsets = x.arrived
    x.arrived = None
    return ids, offsets, weights, _local_padding(x), x


def _check_dtypes(route: Route, weights: Sequence[Tensor]) -> None:
    """Raise UsageError if a table was cast: rows travel in the dtype of the plan."""
    for table, meta, weight in zip(route.tables, route.metas, weights, strict=True):
        if weight.dtype is not meta.dtype:
            now = str(weight.dtype).removeprefix("torch.")
            raise UsageError(
                f"{table.name} is {now}, and was {table.dtype} when it was spread over ranks",
                why="all ranks send and take its rows in one dtype, which the plan says",
                tries=("convert the model first, then optimize()",),
            )


def _local_padding(x: Exchange) -> list[int | None]:
    """``padding_idx`` counted from the first local row; None if that row is not here."""
    found: list[int | None] = [None] * len(x.local)
    for k in x.owned:
        index, (first, end) = x.padding[k], x.route.own(x.rank, k).rows
        if x.route.hashed(k):
            found[k] = None if index is None else 0  # ``find_rows`` maps padding to row 0
        elif index is not None and first <= index < end:
            found[k] = index - first
    return found


# ---------------------------------------------------------------- messages


def _words(values: Tensor, dtype: torch.dtype) -> Tensor:
    """``values`` cast to ``dtype``, viewed as words."""
    return values.to(dtype).contiguous().view(_WORD)


def _weight_dtype(x: Exchange, k: int) -> torch.dtype:
    """The dtype in which per-sample weights travel: 16 bits are widened, which is lossless."""
    own = getattr(torch, x.route.tables[x.route.table[k]].dtype)
    return torch.promote_types(own, torch.float32)


def _sizes(x: Exchange, k: int, head: tuple[int, int, int]) -> tuple[int, int, int]:
    """How many words the ids, the lengths and the weights of a lookup take."""
    ids, bags, fixed = head
    words = x.route.id_dtype(k).itemsize // _WORD.itemsize
    factors = _weight_dtype(x, k).itemsize // _WORD.itemsize if k in x.weighted else 0
    return ids * words, bags if fixed < 0 else 0, ids * factors


def _send(x: Exchange, weights: Sequence[Tensor]) -> None:
    factors = {k: w.detach().reshape(-1) for k, w in zip(x.weighted, weights, strict=True)}
    parts: list[Tensor] = [torch.empty(0, dtype=_WORD, device=x.where)]
    send, known = [], {}
    for rank in range(x.route.world_size):
        size = 0
        for k in x.route.owned(rank):
            bucket = x.bucket(rank, k)
            if id(bucket) not in known:
                known[id(bucket)] = _message(x, k, bucket, factors.get(k))
            parts += known[id(bucket)]
            size += sum(_sizes(x, k, head_of(bucket)))
        send.append(size)
    receive = [
        sum(sum(_sizes(x, k, x.head(rank, k))) for k in x.owned)
        for rank in range(x.route.world_size)
    ]
    x.ids = collectives.all_to_all(torch.cat(parts), send, receive, "ids")
    for local in x.local:
        for bucket in local.buckets:
            bucket.ids = bucket.ids.new_empty(0)  # they have been copied


def _message(x: Exchange, k: int, bucket: Bucket, factors: Tensor | None) -> list[Tensor]:
    parts = [_words(bucket.ids, x.route.id_dtype(k))]
    if bucket.lengths is not None:
        parts.append(_words(bucket.lengths, _WORD))
    if factors is not None:
        own = factors[: bucket.count] if bucket.entry is None else factors[bucket.entry]
        parts.append(_words(own, _weight_dtype(x, k)))
    return parts


def _receive(x: Exchange) -> list[Tensor]:
    """Unpack; returns the per-sample weights of the weighted lookups, and sets ``x.arrived``."""
    assert x.ids is not None
    words = iter(_split(x))
    count = len(x.local)
    parts: dict[int, list[tuple[Tensor, Tensor, Tensor, tuple[int, int, int]]]] = {}
    for source in range(x.route.world_size):
        for k in x.owned:
            head = x.head(source, k)
            parts.setdefault(k, []).append((next(words), next(words), next(words), head))
    ids: list[Tensor] = []
    offsets: list[Tensor | None] = []
    weights: list[Tensor] = []
    for k in range(count):
        found, own = _joined(x, k, parts.get(k, []))
        ids.append(found[0])
        offsets.append(found[1])
        if k in x.weighted:
            weights.append(own.reshape(found[0].shape))
    x.ids = None
    x.arrived = ids, offsets
    return weights


def _split(x: Exchange) -> Sequence[Tensor]:
    assert x.ids is not None
    sizes: list[int] = []
    for source in range(x.route.world_size):
        for k in x.owned:
            sizes += _sizes(x, k, x.head(source, k))
    return x.ids.wait().split(sizes)


def _joined(
    x: Exchange, k: int, parts: Sequence[tuple[Tensor, Tensor, Tensor, tuple[int, int, int]]]
) -> tuple[tuple[Tensor, Tensor | None], Tensor]:
    """``((ids, offsets), weights)`` of lookup ``k``, with the ids of all ranks, rank by rank."""
    empty = torch.empty(0, dtype=_WORD, device=x.where)
    # Copied, as parts of a word buffer may not be aligned for a wider dtype.
    ids = torch.cat([empty, *(p[0] for p in parts)]).view(x.route.id_dtype(k))
    weights = torch.cat([empty, *(p[2] for p in parts)]).view(_weight_dtype(x, k))
    weights = weights.to(getattr(torch, x.route.tables[x.route.table[k]].dtype))
    if x.route.mode[k] == "none":
        return (ids, None), weights
    heads = [p[3] for p in parts]
    sizes = {fixed for _, bags, fixed in heads if bags} or {1}
    if len(sizes) == 1 and -1 not in sizes:
        bags = sum(bags for _, bags, _ in heads)
        return (ids.view(bags, sizes.pop()), None), weights
    lengths = [
        p[1] if fixed < 0 else p[1].new_full((bags,), fixed)
        for p, (_, bags, fixed) in zip(parts, heads, strict=True)
    ]
    offsets = torch.cat([empty.new_zeros(1), *lengths]).cumsum(0)
    return (ids, offsets), weights


# ---------------------------------------------------------------- gradients of per-sample weights


class _SendIds(torch.autograd.Function):
    """Inputs: the exchange, and the per-sample weights that are not None."""

    @staticmethod
    def forward(ctx: Any, x: Exchange, *weights: Tensor) -> Tensor:
        _send(x, weights)
        ctx.x = x
        ctx.like = [(w.shape, w.dtype) for w in weights]
        return torch.empty(0, device=x.where)

    @staticmethod
    @one_at_a_time
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        x: Exchange = ctx.x
        buffer = x.back.pop("weights").wait()
        order = [(r, k) for r in range(x.route.world_size) for k in _weighted(x, r)]
        parts = buffer.split([x.bucket(r, k).count for r, k in order])
        grads = {
            k: torch.zeros(shape, dtype=buffer.dtype, device=x.where).view(-1)
            for k, (shape, _) in zip(x.weighted, ctx.like, strict=True)
        }
        for (rank, k), part in zip(order, parts, strict=True):
            entry = x.bucket(rank, k).entry
            if entry is None:
                grads[k][: len(part)] += part
            else:
                grads[k].index_add_(0, entry, part)
        shaped = (
            grads[k].view(shape).to(dtype)
            for k, (shape, dtype) in zip(x.weighted, ctx.like, strict=True)
        )
        return None, *shaped


class _WaitIds(torch.autograd.Function):
    """Inputs: the exchange and its token; outputs: the per-sample weights of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Exchange, token: Tensor) -> tuple[Tensor, ...]:
        ctx.x = x
        return tuple(_receive(x))

    @staticmethod
    @one_at_a_time
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        x: Exchange = ctx.x
        ranks = range(x.route.world_size)
        own = _weighted(x, x.rank)
        flat = {k: g.reshape(-1) for k, g in zip(x.weighted, grads, strict=True)}
        dtype = torch.float32
        for k in x.weighted:
            dtype = torch.promote_types(dtype, _weight_dtype(x, k))
        cut = {k: flat[k].split([x.head(r, k)[0] for r in ranks]) for k in own}
        parts = [cut[k][r].to(dtype) for r in ranks for k in own]
        # Gradients are divided by the number of ranks on their way here, which is right for tables.
        # These belong to one rank's own loss: undo it.
        buffer = torch.cat([torch.empty(0, dtype=dtype, device=x.where), *parts]).mul_(len(ranks))
        send = [sum(x.head(r, k)[0] for k in own) for r in ranks]
        receive = [sum(x.bucket(r, k).count for k in _weighted(x, r)) for r in ranks]
        what = "gradients of per-sample weights"
        x.back["weights"] = collectives.all_to_all(buffer, send, receive, what)
        return None, torch.empty(0, device=x.where)


def _weighted(x: Exchange, rank: int) -> list[int]:
    """The weighted lookups that ``rank`` answers."""
    return [k for k in x.route.owned(rank) if k in x.weighted]
