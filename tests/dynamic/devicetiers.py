"""What the tests of tiers below a GPU share: models whose tables have few rows on the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from dynamickit import KINDS, Model, Stream, example

import recast
from recast.runtime.dynamic import convert
from recast.runtime.dynamic.cuda_tiered import TieredCudaTable
from recast.runtime.rows import optimizer as row_optimizer
from recast.runtime.tiers import records
from recast.runtime.tiers.engine import buffer_bytes, memory_of
from recast.runtime.tiers.store import rows_in

_OF_AN_ID = 25  # bytes on the GPU
_BELOW = 64 + 28  # bytes of a row of the host besides its record


def tiers(
    path: Path | None, numbers: int, rows: int, host: int, disk: int = 1 << 22, waiting: int = 0
) -> list[Any]:
    """Room for ``rows`` rows on the GPU, as many guests, and ``host`` rows in memory."""
    record = 4 * numbers + records.HEADER
    memory = host * (record + _BELOW)
    device = recast.Device((2 * rows + 1) * (4 * numbers + _OF_AN_ID + waiting) + 8)
    if path is None:
        return [device, recast.Host(memory)]
    memory += memory_of(buffer_bytes(1, 1), rows_in(disk, record + records.HEADER))
    return [device, recast.Host(memory), recast.Disk(path, disk)]


def made(
    path: Path | None, kind: str = "adagrad", *, many: int = 300, rows: int = 90, host: int = 60,
    plain: bool = False, graph: bool = False, seed: int = 3, disk: int = 1 << 22, **how: Any,
) -> tuple[Any, Any, Stream]:  # fmt: skip
    """A model over ``many`` users and items, with tiers or, if ``plain``, all rows on the GPU.

    Without ``graph`` its modules only become dynamic, which is quick.
    """
    torch.manual_seed(seed)
    stream, model = Stream(1, many=many), Model()
    make, options, numbers = KINDS[kind]
    waiting = 50 if "admit" in how else 0
    room = (
        {"max_rows": 2000} if plain else {"tiers": tiers(path, numbers, rows, host, disk, waiting)}
    )
    tables = {name: recast.Dynamic(**{"seed": 5, **room, **how}) for name in ("user", "items")}
    opt = make(model.parameters(), lr=0.1)
    if not graph:
        with convert.made(model, tables, opt, lazy=bool(options)):
            row_optimizer.attach(opt, lazy=bool(options))
        return model, opt, stream
    fast, opt = recast.optimize(model, opt, example=example(stream), tables=tables, **options)
    return fast, opt, stream


def table(fast: Any, name: str = "user") -> Any:
    found = recast.dynamic.tables(fast)[name]
    assert isinstance(found, TieredCudaTable)
    return found


def places(one: TieredCudaTable) -> list[set[int]]:
    """The ids that are on the GPU, in memory and on disk."""
    tier: Any = one.tier
    store = tier.store
    below = [ids for ids, _ in store.scan()]
    memory = store.index.stored(0, lambda n: torch.empty(n, dtype=torch.int64))[0]
    found = [set(tier.table.stored()[0].tolist()), set(memory.tolist())]
    joined = {int(i) for ids in below for i in ids}
    assert sum(len(ids) for ids in below) == len(joined)
    return [*found, joined - found[1]]


def in_one_place(one: TieredCudaTable) -> list[set[int]]:
    """Check that every id is in one place only, and that their number is the table's."""
    found = places(one)
    assert len(set.union(*found)) == sum(map(len, found)) == len(one)
    return found
