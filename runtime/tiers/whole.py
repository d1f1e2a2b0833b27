"""All rows of a table with tiers, for checkpoints, exports and lists of changes.

Rows in memory have their row number. Rows below are numbered after the end of the slab, by their
place in the files, which is valid until the next lookup in training.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from recast.errors import CheckpointError
from recast.runtime.tiers import folder
from recast.runtime.tiers import records as form
from recast.runtime.tiers.engine import Ids, Records, damaged, key_order
from recast.runtime.tiers.tier import Tier, _empty, _find

_CHUNK = 1 << 13
_IN_MEMORY = 1 << 26  # bytes; larger results are memory-mapped files


def stored(tier: Tier, since: int, first: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids, rows, scores and stamps (n,) of all rows looked up at ``since`` or later.

    ``first``: the number of the first row below.
    """
    tier.check()
    parts = [tuple(x.numpy() for x in tier.index.stored(since, _empty))]
    for place, ids, got in _below(tier):
        facts = form.known(got)
        keep = (facts[1] >= since) & ~tier._has_expired(facts[1])
        parts.append((ids[keep], first + place[keep], tier.scores(facts)[keep], facts[1][keep]))
    ids, rows, scores, stamps = (np.concatenate(x) for x in zip(*parts, strict=True))
    return tuple(torch.from_numpy(x) for x in (ids, rows, scores, stamps))  # type: ignore[return-value]


def take(tier: Tier, name: str, slab: Tensor, rows: Tensor, first: int) -> Tensor:
    """``slab[rows]``, where rows from ``first`` on are read from the files. A large result is a
    memory-mapped file.
    """
    out = _reserve(tier, (len(rows), *slab.shape[1:]), slab.dtype)
    above = (rows < first).nonzero().squeeze(1)
    for part in above.split(_CHUNK):
        out[part] = slab.detach()[rows[part]].cpu()
    wanted = (rows - first).numpy()
    order = np.argsort(wanted, kind="stable")[len(above) :]
    field = tier.kind.of(name)
    if field is None or not len(order):
        return out
    ranked = wanted[order]
    for place, _, got in _below(tier):
        if not len(place):
            continue
        low, high = np.searchsorted(ranked, [place[0], place[-1] + 1])
        mine = order[low:high]
        out[torch.from_numpy(mine)] = form.column(field, got)[ranked[low:high] - place[0]]
    return out


def put(tier: Tier, name: str, slab: Tensor, values: Tensor, ids: Tensor) -> None:
    """Write ``values`` (n, ...) to the rows of ``ids`` (n,), wherever they are."""
    field = tier.kind.of(name)
    for part in torch.arange(len(ids)).split(_CHUNK):
        some = ids[part]
        rows = _find(tier.index, some)
        above = rows >= 0
        slab[rows[above]] = values[part[above]].detach().to(slab)
        if field is None or bool(above.all()):
            continue
        cold, order = torch.sort(some[~above])
        found, got = tier.store.read(cold.numpy())
        if not found.all():
            raise CheckpointError(f"{tier.name}: the state of a row that is not stored")
        got = got.copy()
        form.write_column(field, got, values[part[~above][order]])
        tier.store.write(cold.numpy(), got)


def load(
    tier: Tier, slab: Tensor, ids: Tensor, scores: Tensor, stamps: Tensor, weight: Tensor
) -> Tensor:
    """Replace all that is stored by these rows: the highest scores in memory, the others on disk,
    all with initial optimizer state. Returns the rows in memory.

    Raises:
        CheckpointError: they do not all fit.
    """
    n = len(ids)
    if n > tier.rows + tier.capacity:
        raise _too_many(tier, n)
    order = np.lexsort((stamps.numpy(), scores.numpy()))
    hot = torch.from_numpy(np.sort(order[max(0, n - tier.rows) :]))
    cold = torch.from_numpy(np.sort(order[: max(0, n - tier.rows)]))
    rows = tier.fill(ids[hot], scores[hot], stamps[hot])
    cold = torch.cat([cold, hot[rows == 0]])
    hot, rows = hot[rows > 0], rows[rows > 0]
    if len(cold) > tier.capacity:  # on a GPU, a bucket may have had too few rows
        tier.fill(ids[:0], scores[:0], stamps[:0])
        tier.store.clear()
        tier.begin(0)
        raise _too_many(tier, n)
    if len(cold) or tier.records:
        tier.store.clear()
    for part, mine in zip(rows.split(_CHUNK), hot.split(_CHUNK), strict=True):
        slab[part] = weight[mine].detach().to(slab)
    tier.begin(len(cold))
    field = tier.kind.fields[0]
    cold = cold[torch.from_numpy(key_order(ids[cold].numpy()))]  # sorted: no rewrites
    for mine in cold.split(_CHUNK):
        if not len(mine):
            continue
        block = np.tile(tier.kind.start, (len(mine), 1))
        facts = [scores[mine].numpy(), stamps[mine].numpy(), np.zeros(len(mine), np.int64)]
        form.write_known(block, np.stack(facts))
        form.write_column(field, block, weight[mine])
        tier.store.write(ids[mine].numpy(), block)
    if len(cold):
        tier.store.settle()
    tier.order = ids
    return rows


def _too_many(tier: Tier, n: int) -> CheckpointError:
    return CheckpointError(
        f"{tier.name}: {n} ids for a table of {tier.rows} rows in memory and"
        f" {tier.capacity} on disk",
        tries=("larger budgets of its tiers",),
    )


def _below(tier: Tier) -> Iterator[tuple[np.ndarray, Ids, Records]]:
    """Rows that are on disk only, numbered as they come."""
    if tier.records == 0:
        return
    at = seen = 0
    for ids, got in tier.store.scan():
        seen += len(ids)
        mine = _find(tier.index, torch.from_numpy(ids)).numpy() < 0
        n = int(mine.sum())
        yield np.arange(at, at + n), ids[mine], got[mine]
        at += n
    if seen != tier.records:
        raise damaged(tier.path, f"{seen} records are there, of {tier.records}")


def _reserve(tier: Tier, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = int(np.prod(shape)) * dtype.itemsize
    if size < _IN_MEMORY:
        return torch.empty(shape, dtype=dtype)
    path = tier.path
    try:
        room = os.statvfs(path)
        if room.f_bavail * room.f_frsize < size:
            raise folder.full(path, f"{size} bytes are wanted for all rows of {tier.name}")
        with tempfile.TemporaryFile(dir=path) as file:
            file.truncate(size)
            raw = np.memmap(file, np.uint8, "r+", shape=(size,))
    except OSError as error:
        raise folder.named(error, path) from error
    return torch.from_numpy(raw).view(dtype).view(shape)
