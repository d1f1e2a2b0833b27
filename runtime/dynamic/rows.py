"""``find_rows``: the ids of lookups in dynamic tables as rows of matrices, a node of the graph.

    matrices, rows = find_rows(tables, weights, ids, table, training)
    out[k] = lookup of rows[k] in matrices[table[k]]

A matrix is usually the table's weight. If some id is not stored and must not be (in eval mode, or
without gradients), it holds the rows of this call only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from recast.errors import DtypeError, NotBuiltError
from recast.runtime.dynamic.table import DynamicTable
from recast.runtime.op import tracing


@_disable_dynamo
def find_rows(
    tables: Sequence[DynamicTable],
    weights: Sequence[Tensor],
    ids: Sequence[Tensor],
    table: Sequence[int],
    training: Sequence[bool],
) -> list[Tensor]:
    """The matrices of ``tables``, then the rows of each lookup.

    Args:
        tables: (T) the dynamic tables, each once.
        weights: (T) their slabs, (rows, D).
        ids: (L) int64 or int32 ids of any value and shape.
        table: (L) the index of each lookup's table.
        training: (L) whether to store new ids, if gradients are recorded.

    Raises:
        DtypeError: ids are neither int64 nor int32.
        UsageError: a table is full.
        NotBuiltError: the model is being traced.
    """
    for k, x in enumerate(ids):
        if x.dtype not in (torch.int64, torch.int32):
            raise DtypeError(
                f"ids of lookup {k} (table {table[k]}) are {str(x.dtype).removeprefix('torch.')}",
                why="ids must be int64 or int32",
                tries=["ids.long()"],
            )
    if any(x.is_meta for x in ids):  # shapes only
        return [*weights, *(x.long() for x in ids)]
    if torch._C._get_tracing_state() is not None or tracing():
        raise NotBuiltError(
            f"{tables[0].name} is a dynamic table, and is traced",
            why="which row an id has is asked of the table at each call: a trace would keep the"
            " rows of this batch",
            tries=("recast.dynamic.export, and a plain table of its rows for the exported model",
                   "torch.compile, without fullgraph=True"),
        )  # fmt: skip
    matrices, rows = list(weights), list(ids)
    for t, (one, weight) in enumerate(zip(tables, weights, strict=True)):
        own = [k for k, of in enumerate(table) if of == t]
        trains = any(training[k] for k in own)
        matrices[t], found = one.find(weight, [ids[k] for k in own], trains)
        for k, r in zip(own, found, strict=True):
            rows[k] = r
    return [*matrices, *rows]


@_disable_dynamo
def fetch_rows(
    tables: Sequence[DynamicTable],
    weights: Sequence[Tensor],
    ids: Sequence[Tensor],
    table: Sequence[int],
    training: Sequence[bool],
) -> list[Tensor]:
    """Bring rows from lower tiers to memory, and return ``ids``; arguments as in ``find_rows``.

    Only if ``find_rows`` would store new ids: lookups without gradients move no rows.

    Raises:
        UsageError: there is no room.
        TierError: the disk does not work.
    """
    if not any(x.is_meta or x.dtype not in (torch.int64, torch.int32) for x in ids):
        for t, (one, weight) in enumerate(zip(tables, weights, strict=True)):
            own = [k for k, of in enumerate(table) if of == t]
            one.fetch(weight, [ids[k] for k in own], any(training[k] for k in own))
    return list(ids)
