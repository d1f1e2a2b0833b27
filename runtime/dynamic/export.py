"""Exports rows of a dynamic table: all of them, as a plain matrix with its ids, or what changed.

On many ranks each has a part of the ids. ``ranks``: None gives every rank its own part; 0 gives
rank 0 all rows, and the others none; "all" gives every rank all rows. With 0 or "all" every rank
calls it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recast.errors import UsageError
from recast.runtime.dynamic import gather, parts
from recast.runtime.dynamic.module import _Dynamic
from recast.runtime.ranks import collectives


@dataclass(frozen=True, slots=True)
class Rows:
    """ids: (n,) int64; rows: (n, D), in the table's dtype."""

    ids: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class Changes:
    """What to apply to a copy of a table: first drop ``gone``, (m,) int64 ids that are no longer
    stored; then write ``rows``, those of ids that were looked up in training since the mark.
    """

    rows: Rows
    gone: Tensor


def export(module: object, *, ranks: gather.To | None = None) -> Rows:
    """All that is stored, as a plain matrix and the id of each of its rows.

    ``ids`` are sorted, so ``torch.searchsorted(ids, raw)`` maps raw ids to the rows of a plain
    ``nn.Embedding.from_pretrained(rows)``. Raises UsageError for a module that is not dynamic, and
    if the ranks that have the others of its rows are out of reach.
    """
    dynamic = _dynamic(module)
    _check_reach(dynamic, ranks)
    return _joined(_rows(dynamic, 0), ranks)


def import_(module: object, ids: Tensor, rows: Tensor) -> None:
    """Replace all that is stored by these ids and rows, as if they had just been looked up.

    Their optimizer state starts afresh. Not to be called between a lookup and its step. On many
    ranks, pass each rank all rows, or at least its own; it stores its own.

    Args:
        ids: (n,) integers, without duplicates.
        rows: (n, D).

    Raises:
        UsageError: the shapes do not fit, or the module is not dynamic.
        CheckpointError: there are more ids than rows in the table, or an id occurs twice.
    """
    dynamic = _dynamic(module)
    table = dynamic.table
    if ids.dim() != 1 or ids.is_floating_point() or rows.shape != (len(ids), table.dim):
        raise UsageError(
            f"{table.name}: ids of shape {tuple(ids.shape)} ({ids.dtype}), rows of shape"
            f" {tuple(rows.shape)}",
            why=f"one id for each row of {table.dim} numbers",
        )
    flat = ids.detach().cpu().long()
    if table.padding is not None and bool((flat == table.padding).any()):
        raise UsageError(f"{table.name}: id {table.padding} is its padding_idx and has no row")
    own = parts.kept(table, flat)
    flat, rows = flat[own], rows.detach()[own.to(rows.device)]
    before = table.ids().cpu()
    stamps = torch.full_like(flat, table.index.step)
    new = table.load(dynamic.weight.data, flat, torch.zeros_like(flat), stamps, rows)
    if table.tier is not None:
        table.index.step += 1  # else these rows could not leave memory until the next step
    table.renew(new, gone=before[~torch.isin(before, flat)])


def mark(module: object) -> int:
    """Start to track changes; returns the mark to pass to :func:`changed`.

    Call it between steps: a row that has been looked up but not stepped yet counts as changed.
    """
    table = _dynamic(module).table
    return table.mark()


def changed(module: object, since: int, *, ranks: gather.To | None = None) -> Changes:
    """What has changed since ``since``, a mark of this table. Dropped ids are reported only once.

    Ranks step together, so the mark of one rank is valid on all.

    Raises UsageError if there is no such mark, and as :func:`export` does.
    """
    dynamic = _dynamic(module)
    _check_reach(dynamic, ranks)
    gone = dynamic.table.take_log(since)
    gone = gone[~torch.isin(gone, dynamic.table.ids())]
    if ranks is not None:
        gone = torch.sort(gather.joined(gone, ranks)).values
    return Changes(_joined(_rows(dynamic, since), ranks), gone)


def _check_reach(dynamic: _Dynamic, ranks: gather.To | None) -> None:
    table = dynamic.table
    if ranks is not None and table.parts > 1 and collectives.ranks() == 1:
        raise UsageError(
            f"{table.name} is spread over {table.parts} ranks, and there is no process group",
            why=f"ranks={ranks!r} asks for the rows of all, and this one has only its own",
            tries=("export and changed before dist.destroy_process_group()",),
        )


def _joined(own: Rows, ranks: gather.To | None) -> Rows:
    if ranks is None:
        return own
    ids, order = torch.sort(gather.joined(own.ids, ranks))
    return Rows(ids, gather.joined(own.rows, ranks)[order])


def _rows(dynamic: _Dynamic, since: int) -> Rows:
    dynamic.table.check_generation(dynamic.weight)
    ids, rows, _, _ = dynamic.table.stored(since)
    ids, order = torch.sort(ids)
    return Rows(ids, dynamic.table.take("weight", dynamic.weight.detach(), rows[order]))


def _dynamic(module: object) -> _Dynamic:
    if isinstance(module, _Dynamic):
        return module
    raise UsageError(
        f"this {type(module).__name__} is no dynamic embedding",
        why="only those that tables= of optimize() named are",
        tries=('recast.dynamic.export(fast.get_submodule("user_emb"))',),
    )
