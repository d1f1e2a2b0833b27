"""The plan: where every table lives. On one device there is one answer."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

VERSION = 1


@dataclass(frozen=True, slots=True)
class Table:
    """One embedding matrix."""

    name: str  # its path in ``state_dict()``
    rows: int
    dim: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one table lives."""

    table: str
    sharding_type: str = "data_parallel"  # whole, on every rank: the only choice with one rank
    ranks: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Plan:
    """All placements of a model; immutable."""

    world_size: int
    fingerprint: str  # of (name, rows, dim, dtype) of all tables
    tables: tuple[Table, ...]
    placements: tuple[Placement, ...]
    version: int = VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, sort_keys=True)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(self.to_json() + "\n")

    def __str__(self) -> str:
        total = sum(t.rows * t.dim for t in self.tables)
        return f"plan for 1 rank: {len(self.tables)} tables, {total:,} parameters, all local"


def single(tables: tuple[Table, ...]) -> Plan:
    """The plan of one device: every table whole, where it is."""
    facts = repr([(t.name, t.rows, t.dim, t.dtype) for t in tables]).encode()
    return Plan(
        world_size=1,
        fingerprint="sha256:" + hashlib.sha256(facts).hexdigest(),
        tables=tables,
        placements=tuple(Placement(t.name) for t in tables),
    )
