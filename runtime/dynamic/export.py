"""Rows of a dynamic table for others: whole, as a plain matrix with its ids, or what changed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recast.errors import UsageError
from recast.runtime.dynamic.module import _Dynamic, load
from recast.runtime.dynamic.table import empty


@dataclass(frozen=True, slots=True)
class Rows:
    """ids: (n,) int64; rows: (n, D), of the table's dtype."""

    ids: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class Changes:
    """What a copy of a table has to take over: ``gone`` (m,) ids that are stored no more, and then
    the ``rows`` of ids that were looked up in training since the mark.
    """

    rows: Rows
    gone: Tensor


def export(module: object) -> Rows:
    """All that is stored, as a plain matrix and the id of each of its rows.

    ``ids`` are sorted: ``torch.searchsorted(ids, raw)`` numbers raw ids for a plain
    ``nn.Embedding.from_pretrained(rows)``. Raises UsageError for a module that is not dynamic.
    """
    dynamic = _dynamic(module)
    return _rows(dynamic, 0)


def import_(module: object, ids: Tensor, rows: Tensor) -> None:
    """Store these ids with these rows, in place of all that is stored; as if looked up just now.

    The state of the optimizer begins anew. Not between a lookup and its step.

    Args:
        ids: (n,) integers, each once. rows: (n, D).

    Raises:
        UsageError: shapes that do not fit. CheckpointError: more ids than rows, or an id twice.
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
    before = table.ids()
    load(table, flat, torch.zeros_like(flat), torch.full_like(flat, table.index.step))
    dynamic.weight.data[1 : 1 + len(flat)] = rows.detach().to(dynamic.weight)
    table.renew(torch.arange(1, 1 + len(flat)), gone=before[~torch.isin(before, flat)])


def mark(module: object) -> int:
    """Begin to note what changes; the number to ask :func:`changed` with.

    To be taken between steps: a row that was looked up and not stepped yet counts as changed.
    """
    table = _dynamic(module).table
    return table.mark()


def changed(module: object, since: int) -> Changes:
    """What changed since ``since``, a mark of this table. Ids that went are told once.

    Raises UsageError where no mark was taken.
    """
    dynamic = _dynamic(module)
    gone = dynamic.table.take_log(since)
    rows = _rows(dynamic, since)
    return Changes(rows, gone[~torch.isin(gone, dynamic.table.ids())])


def _rows(dynamic: _Dynamic, since: int) -> Rows:
    ids, rows, _, _ = dynamic.table.index.stored(since, empty)
    ids, order = torch.sort(ids)
    return Rows(ids, dynamic.weight.detach()[rows[order]])


def _dynamic(module: object) -> _Dynamic:
    if isinstance(module, _Dynamic):
        return module
    raise UsageError(
        f"a {type(module).__name__} is no dynamic embedding",
        tries=('recast.dynamic.export(fast.get_submodule("user_emb"))',),
    )
