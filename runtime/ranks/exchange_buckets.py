"""Sorts ids by owner: which part of each lookup in this rank's batch goes to which owner.

If a table is cut by rows, only the non-empty parts of a bag travel, so a bag of one id costs one
row on the way back, whatever the number of owners. If ids repeat in a batch and each has a row of
its own (one id per bag, or no pooling), an id travels once: its row comes back once and is repeated
here, and its gradients are added up before they are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from recast.runtime.embedding.call import Call, check, check_values
from recast.runtime.ranks.exchange_route import Route
from recast.runtime.ranks.hashed import part_of


@dataclass(slots=True)
class Bucket:
    """The part of one lookup that goes to one row range of its table.

    ids: (n,) counted from the first row of the range, or raw ids of a dynamic table. lengths:
    (bags,) ids per bag, or None if every bag has ``fixed``. place: (bags,) which bags of the batch
    these are; None: all. entry: (n,) which ids of the lookup these are; None: all. count: n, which
    stays known after the ids are dropped. repeat: if each distinct id is sent once, the index in
    ``ids`` of every original id; ``place`` then refers to the original ids.
    """

    ids: Tensor
    lengths: Tensor | None
    fixed: int  # -1 if there are lengths
    bags: int
    place: Tensor | None = None
    entry: Tensor | None = None
    repeat: Tensor | None = None
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.count = len(self.ids)


@dataclass(slots=True)
class Local:
    """One lookup of this rank's batch.

    shape: that of its ids. bags: how many. counts: (bags, 1) ids per bag without padding, if it is
    a mean whose owners return sums. buckets: one per row range.
    """

    shape: torch.Size
    bags: int
    counts: Tensor | None
    buckets: list[Bucket]


def prepare(call: Call, route: Route, padding: Sequence[int | None] | None = None) -> list[Local]:
    """All lookups of ``call``, whose tables are the whole ones, sorted by owner.

    ``padding``: the padding id of each lookup, or None; by default that of ``call``. Raises what
    the checks of ``embedding_bags`` raise: InputError, DtypeError, IdError.
    """
    check(call)
    padding = [call.padding(k) for k in range(len(call.ids))] if padding is None else padding
    suspicious = False
    for k, ids in enumerate(call.ids):
        if ids.numel() and not route.hashed(k):
            low, high = (int(v) for v in torch.aminmax(ids))
            suspicious |= low < 0 or high >= call.weight(k).shape[0]
        offsets = call.offsets[k]
        if offsets is not None and len(offsets):
            suspicious |= bool((offsets[0] != 0) | (offsets[-1] > len(ids)))
            suspicious |= bool((offsets.diff() < 0).any())
    if suspicious:
        plain = [torch.zeros_like(x) if route.hashed(k) else x for k, x in enumerate(call.ids)]
        check_values(replace(call, ids=plain))
    found = [_local(call, route, k, padding[k]) for k in range(len(call.ids))]
    for k, local in enumerate(found):
        if route.repeats(k) and call.per_sample_weights[k] is None:
            local.buckets = [_once(b) if b.fixed == 1 else b for b in local.buckets]
    return found


def _once(bucket: Bucket) -> Bucket:
    ids, repeat = torch.unique(bucket.ids, return_inverse=True)
    return Bucket(ids, None, 1, len(ids), bucket.place, bucket.entry, repeat)


def _local(call: Call, route: Route, k: int, padding: int | None) -> Local:
    ids, offsets, mode = call.ids[k], call.offsets[k], call.layout.mode[k]
    flat = ids.reshape(-1).contiguous()
    lengths: Tensor | None = None
    if mode == "none":
        bags, fixed = len(flat), 1
    elif offsets is None:
        bags, fixed = ids.shape
    else:
        fixed, bags = -1, call.bags(k)
        ended = call.layout.include_last_offset[k]
        end = offsets[-1:] if ended else offsets.new_full((1,), len(flat))
        lengths = torch.cat((offsets[: len(offsets) - ended], end)).diff()
        flat = flat[: int(end) if bags else 0]
        if bags:
            low, high = (int(v) for v in torch.aminmax(lengths))
            if low == high:  # bags of one size, although given by offsets
                lengths, fixed = None, low
    ranges = route.ranges(route.table[k])
    if len(ranges) == 1:
        whole = Bucket(flat, lengths, fixed, bags)
        return Local(ids.shape, bags, None, [whole])
    bag = _bags(lengths, fixed, bags, flat.device)
    counts = _counts(flat, bag, bags, padding) if mode == "mean" else None
    if route.hashed(k):
        holder = part_of(flat, len(ranges))
        return Local(ids.shape, bags, counts, _cut(flat, bag, fixed, holder, [0] * len(ranges)))
    starts = [first for first, _ in ranges]
    holder = torch.bucketize(flat, flat.new_tensor(starts), right=True) - 1
    return Local(ids.shape, bags, counts, _cut(flat, bag, fixed, holder, starts))


def _bags(lengths: Tensor | None, fixed: int, bags: int, where: torch.device) -> Tensor:
    """The bag of each id."""
    place = torch.arange(bags, device=where)
    return place.repeat_interleave(lengths.long() if lengths is not None else fixed)


def _counts(flat: Tensor, bag: Tensor, bags: int, padding: int | None) -> Tensor:
    live = torch.ones_like(bag) if padding is None else (flat != padding).long()
    counted = torch.zeros(bags, dtype=torch.long, device=bag.device).index_add_(0, bag, live)
    return counted.clamp(min=1).unsqueeze(1)


def _cut(
    flat: Tensor, bag: Tensor, fixed: int, holder: Tensor, starts: Sequence[int]
) -> list[Bucket]:
    """A bucket for each holder, its ids in the order of the batch, counted from ``starts``."""
    order = holder.argsort(stable=True)
    sizes = torch.bincount(holder, minlength=len(starts)).tolist()
    found = []
    for first, entry in zip(starts, order.split(sizes), strict=True):
        ids, place = flat.index_select(0, entry) - first, bag.index_select(0, entry)
        if fixed == 1:
            found.append(Bucket(ids, None, 1, len(entry), place, entry))
        else:
            some, lengths = torch.unique_consecutive(place, return_counts=True)
            found.append(Bucket(ids, lengths, -1, len(some), some, entry))
    return found
