"""The part of a dynamic table that belongs to one rank: its ids, by hash, and all their data."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from recast.runtime.dynamic.table import DynamicTable
from recast.runtime.ranks.hashed import part_of

BY_ROW = ("weight", "ids", "scores", "stamps")  # of the entries of a module's state


def kept(table: DynamicTable, ids: Tensor) -> Tensor:
    """The indices in ``ids`` of those of this rank's part; all of them on one rank."""
    if table.parts == 1:
        return torch.arange(len(ids))
    return (part_of(ids.cpu(), table.parts) == table.part).nonzero().squeeze(1)


def own_entries(table: DynamicTable, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of the state of a module, from the entries of all ranks or of this one.

    Entries by row that are shorter than ``ids`` have been cut already.
    """
    if table.parts == 1:
        return dict(state)
    ids, seen, clock = state["ids"], state["seen"], state["clock"].clone()
    own = kept(table, ids)
    cut = {
        key: value[own] if key in BY_ROW and len(value) == len(ids) else value
        for key, value in state.items()
    }
    share = len(own) / len(ids) if len(ids) else 1 / table.parts
    clock[2] = int(int(clock[2]) * share)  # lookups since counts were last halved
    return {**cut, "seen": seen[:, kept(table, seen[0])], "clock": clock}
