"""Dynamic tables over ranks: each rank has an id table, rows and optimizer state for the ids that
the hash assigns to it (``ranks.hashed``).

The initial row of an id depends only on the seed, the table and the id; lookups of an id, and its
gradients, arrive at its owner in the order of the ranks. So the numbers are those of one process.
Eviction is local to a part: its own least recently used id goes, which need not be that of the
whole table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from recast.errors import UsageError
from recast.runtime.dynamic import cuda_tiered
from recast.runtime.dynamic import table as dynamic_table
from recast.runtime.dynamic import tiers as dynamic_tiers
from recast.runtime.dynamic.cuda_tiered import TieredCudaTable
from recast.runtime.dynamic.module import _Dynamic
from recast.runtime.dynamic.rows import fetch_rows, find_rows
from recast.runtime.dynamic.settings import Initial
from recast.runtime.dynamic.slab import hold, reserve
from recast.runtime.dynamic.table import DynamicTable
from recast.runtime.ranks import collectives, shards
from recast.runtime.ranks.exchange_ids import Exchange
from recast.runtime.ranks.sums import gathered

BYTES_OF_AN_ID = 64  # as ``max_bytes`` counts it


def facts(root: nn.Module) -> Iterator[str]:
    """What must be the same on all ranks: a line for each dynamic table."""
    for path, module in root.named_modules():
        if isinstance(module, _Dynamic):
            table, how = module.table, module.table.settings
            yield (
                f"{path}: {table.capacity} rows, {how.policy}, admit={how.admit}, ttl={how.ttl},"
                f" seed={how.seed}, padding_idx={table.padding},"
                f" tiers={[tier.budget for tier in how.tiers]}"
            )


@_disable_dynamo
def fetch_own_rows(
    exchange: Exchange,
    tables: Sequence[DynamicTable],
    weights: Sequence[Tensor],
    ids: Sequence[Tensor],
    table: Sequence[int],
    training: Sequence[bool],
) -> list[Tensor]:
    """``fetch_rows`` for what all ranks look up here; errors as in :func:`find_own_rows`."""
    try:
        return fetch_rows(tables, weights, ids, table, training)
    except Exception as error:
        exchange.wrong = error
        return list(ids)


@_disable_dynamo
def find_own_rows(
    exchange: Exchange,
    tables: Sequence[DynamicTable],
    weights: Sequence[Tensor],
    ids: Sequence[Tensor],
    table: Sequence[int],
    training: Sequence[bool],
) -> list[Tensor]:
    """``find_rows`` for what all ranks look up here.

    An error is raised later, by ``wait_rows`` on every rank, as all of them wait for the rows.
    """
    try:
        if exchange.wrong is None:
            return find_rows(tables, weights, ids, table, training)
    except Exception as error:
        exchange.wrong = error
    return [*weights, *(torch.zeros_like(x, dtype=torch.int64) for x in ids)]


def place(weight: nn.Parameter, sharded: shards.ShardedTable, optimizer: Optimizer | None) -> None:
    """Make the dynamic table of ``weight``, which is empty, this rank's part. A collective.

    It has room for the rows of its shard. The distribution of initial rows, and the row of
    ``padding_idx``, are taken from rank 0.

    Raises:
        UsageError: it has rows already.
    """
    table = dynamic_table.of(weight)
    assert table is not None
    if len(table):
        raise UsageError(
            f"{table.name} holds {len(table)} rows: a table is spread over ranks while it is empty",
            tries=("recast.checkpoint.save before, and load after optimize",),
        )
    initial = table.initial.pack().to(collectives._device())
    padding = weight.detach()[:1].clone()
    collectives.broadcast([initial, padding])
    table.initial = Initial.unpack(initial)
    slabs = _states(weight, table, optimizer)
    table.take_part(sharded.local_shape[0], sharded.rank, sharded.world_size)
    if table.tier is not None:
        _take_tier(table)
    like = weight.stride(), weight.dtype
    in_record = [name for name, v in slabs.items() if (v.stride(), v.dtype) == like]
    where = weight.device
    record = reserve((table.slab_rows, table.dim * (1 + len(in_record))), weight.dtype, where)
    slab, *states = record.split(table.dim, 1)
    slab[:1] = padding
    weight.data = slab
    table.mark_generation(slab)
    hold(table, record, [weight, *states])
    if optimizer is not None and slabs:
        new = dict(zip(in_record, states, strict=True))
        for name, old in slabs.items():
            if name not in new:
                new[name] = reserve((table.slab_rows, *old.shape[1:]), old.dtype, where)
                hold(table, new[name], [new[name]])
        optimizer.state[weight].update(new)
    shards.register(weight, sharded)


def _take_tier(table: DynamicTable) -> None:
    """Give every rank its own files; if one fails, all raise."""
    wrong: Exception | None = None
    try:
        if isinstance(table, TieredCudaTable):
            cuda_tiered.take_part(table)
        else:
            dynamic_tiers.take_part(table)
    except Exception as error:
        wrong = error
    failed = torch.tensor([int(wrong is not None)], device=collectives._device())
    told = gathered(failed).reshape(-1).tolist()
    if wrong is not None:
        raise wrong
    if any(told):
        raise UsageError(
            f"{table.name}: rank {told.index(1)} could not make its disk tier",
            why="all ranks train together; the error of that rank says more",
        )


def _states(weight: Tensor, table: DynamicTable, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """What ``optimizer`` has reserved for the rows of ``weight``, by name."""
    state: dict[str, Any] = {} if optimizer is None else optimizer.state.get(weight, {})
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == table.slab_rows
    }
