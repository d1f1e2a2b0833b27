"""What a training step demands of each table, and what its dense part demands of a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from recast.errors import UsageError

from ..plan import SHARDING_TYPES, Table

POOLINGS = ("sum", "mean", "max", "none")


_MOST = 2**63 - 1  # of torch's sizes


def _whole(least: int, most: int = _MOST) -> Callable[[Any], bool]:
    return lambda n: isinstance(n, int) and not isinstance(n, bool) and least <= n <= most


def _number(least: float, most: float = float(_MOST)) -> Callable[[Any], bool]:
    """Also not NaN, which compares with nothing."""
    return lambda n: isinstance(n, int | float) and not isinstance(n, bool) and least <= n <= most


def _types(given: Any) -> bool:
    listed = isinstance(given, list | tuple) and bool(given)
    return listed and all(t in SHARDING_TYPES for t in given) and len({*given}) == len(given)


# What each value of a table and of its load may be: a test, and the same in words.
DUE: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "name": (lambda v: isinstance(v, str) and v != "", "a text, not empty"),
    "rows": (_whole(0), "a whole number from 0 to 2^63 - 1"),
    "dim": (_whole(1), "a whole number from 1 to 2^63 - 1"),
    "dynamic": (lambda v: isinstance(v, bool), "true or false"),
    "ids": (_number(0), "a number from 0 to 2^63 - 1"),
    "lookups": (_whole(0), "a whole number from 0 to 2^63 - 1"),
    "pooling": (lambda v: isinstance(v, str) and v in POOLINGS, f"one of {', '.join(POOLINGS)}"),
    "weighted": (lambda v: isinstance(v, bool), "true or false"),
    "distinct": (_number(0, 1), "a number from 0 to 1"),
    "id_bytes": (_whole(1, 8), "a whole number from 1 to 8"),
    "state_row": (_number(0), "a number from 0 to 2^63 - 1"),
    "state_element": (_number(0), "a number from 0 to 2^63 - 1"),
    "types": (_types, f"a list of some of {', '.join(SHARDING_TYPES)}, each once"),
    "stored_row": (lambda v: _number(0)(v) and v > 0, "a number of more than 0, to 2^63 - 1"),
}


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
        given = {name: getattr(self, name) for name in DUE if hasattr(self, name)}
        given = {"rows": self.table.rows, "dim": self.table.dim, **given}
        if self.stored_row is None:
            del given["stored_row"]
        wrong = {name: value for name, value in given.items() if not DUE[name][0](value)}
        if wrong:
            shown = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
            raise UsageError(
                f"{self.table.name}: the load of a table cannot have {shown}",
                why="; ".join(f"{name} is {DUE[name][1]}" for name in wrong),
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
