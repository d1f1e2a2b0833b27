"""A small model of tables and dense layers, whole or placed by a plan: what the tests here save."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from recast.runtime.plan import Plan, Table, explicit
from recast.runtime.ranks import shards, shards_state
from recast.runtime.ranks.shards import ShardedTable

ROWS, DIM = (11, 7, 4, 1), (4, 6, 3, 8)
NAMES = tuple(f"tables.{k}.weight" for k in range(len(ROWS)))
KINDS = ("row_wise", "column_wise", "table_wise", "data_parallel")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(r, d) for r, d in zip(ROWS, DIM, strict=True))
        self.norm = nn.BatchNorm1d(sum(DIM))
        self.top = nn.Linear(sum(DIM), 1)

    def forward(self, ids: Tensor) -> Tensor:
        rows = [table(ids[:, k] % ROWS[k]) for k, table in enumerate(self.tables)]
        out: Tensor = self.top(self.norm(torch.cat(rows, 1)))
        return out


def model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    made = Model()
    made.norm.running_mean = torch.randn(sum(DIM))
    return made


def filled(value: float) -> Model:
    """One whose parameters are all ``value``."""
    made = model()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(value)
    return made


def trained(
    seed: int, kind: type[torch.optim.Optimizer], **options: float
) -> tuple[Model, torch.optim.Optimizer]:
    """A plain model after two steps."""
    made = model(seed)
    optimizer = kind(made.parameters(), **options)  # type: ignore[call-arg]
    for _ in range(2):
        optimizer.zero_grad()
        made(torch.randint(0, 11, (8, len(ROWS)))).mul(torch.randn(8, 1)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    return made, optimizer


def plan(world: int, kinds: Mapping[str, str] | str | None = None) -> Plan:
    tables = [Table(n, r, d) for n, r, d in zip(NAMES, ROWS, DIM, strict=True)]
    return explicit(tables, world, dict(zip(NAMES, KINDS, strict=True)) if kinds is None else kinds)


def place(
    made: nn.Module, optimizer: torch.optim.Optimizer | None, rank: int, chosen: Plan
) -> None:
    """What ``recast.optimize`` does to tables and state on one rank."""
    held = dict(made.named_parameters())
    for table in chosen.tables:
        own = ShardedTable(table, chosen.placement(table.name), rank, chosen.world_size)
        shards.place(held[table.name], own)
    shards_state.hook(made)
    if optimizer is not None:
        shards.place_state(optimizer)
        shards_state.hook_optimizer(optimizer)
