"""What a training step demands of each table, and what its dense part demands of a rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from recast.errors import UsageError

from ..plan import SHARDING_TYPES, Table

POOLINGS = ("sum", "mean", "max", "none")


@dataclass(frozen=True, slots=True)
class TableLoad:
    """One table in a training step.

    ``ids``: per sample, over all lookups of the table; ``lookups``: bags per sample that read it (1
    for one feature, more if features share the table). ``distinct``: the fraction of ids in a
    global batch that are distinct, from an example or a sample of batches; 1: none repeats.
    """

    table: Table
    ids: float = 1.0
    lookups: int = 1
    pooling: str = "sum"
    weighted: bool = False
    distinct: float = 1.0
    id_bytes: int = 8
    state_row: float = 0.0  # bytes of optimizer state for a row, whatever its columns
    state_element: float = 0.0  # bytes of optimizer state for an element
    types: tuple[str, ...] = SHARDING_TYPES
    only: str = ""  # why no other type is open to it, if there is one
    stored_row: float | None = None  # bytes of a row that is stored in fewer bits than its dtype

    def __post_init__(self) -> None:
        sizes = "ids", "lookups", "state_row", "state_element"
        wrong = [f"{name}={n}" for name in sizes if (n := getattr(self, name)) < 0]
        wrong += [f"distinct={self.distinct}"] if not 0 <= self.distinct <= 1 else []
        wrong += [f"pooling={self.pooling!r}"] if self.pooling not in POOLINGS else []
        known = self.types and all(kind in SHARDING_TYPES for kind in self.types)
        wrong += [] if known else [f"types={self.types}"]
        wrong += [f"rows={self.table.rows}"] if self.table.rows < 0 else []
        wrong += [f"dim={self.table.dim}"] if self.table.dim < 1 else []
        if wrong:
            raise UsageError(
                f"{self.table.name}: the load of a table cannot have {', '.join(wrong)}",
                why="counts are not negative, 0 <= distinct <= 1, rows are cut or whole",
                tries=(f"pooling: {', '.join(POOLINGS)}", f"types: {', '.join(SHARDING_TYPES)}"),
            )

    @property
    def element(self) -> float:
        """Bytes of a weight."""
        if self.stored_row is not None:
            return self.stored_row / self.table.dim
        found = getattr(torch, self.table.dtype, None)
        if not isinstance(found, torch.dtype):
            raise UsageError(f"{self.table.name}: no dtype {self.table.dtype!r}")
        return found.itemsize

    @property
    def vectors(self) -> float:
        """Vectors of ``dim`` values per sample: one per bag, or one per id without pooling."""
        return self.ids if self.pooling == "none" else float(self.lookups)

    @property
    def state_bytes(self) -> float:
        """Bytes of optimizer state of a whole row."""
        return self.state_row + self.state_element * self.table.dim

    @property
    def bytes(self) -> float:
        """Weights and optimizer state of the whole table."""
        return self.table.rows * (self.table.dim * self.element + self.state_bytes)


@dataclass(frozen=True, slots=True)
class Dense:
    """The dense part of a step; per sample, except ``parameters``."""

    flops: float = 0.0  # forward and backward
    traffic: float = 0.0  # bytes of activations and their gradients to and from memory
    parameters: float = 0.0  # bytes, reduced over all ranks in every step
    hideable_flops: float = 0.0  # forward of what runs while rows are sent: the bottom MLP
    optimizer_states: float = 1.0  # state tensors per parameter
