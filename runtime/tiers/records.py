"""A row on disk is one record: facts about it, its weights, and its optimizer state.

record = score, stamp, age : int64 | weights | each state of the row
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HEADER = 24


@dataclass(frozen=True, slots=True)
class Field:
    """The part of a record that is one row of one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of one row
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a record of ``size`` bytes."""

    fields: tuple[Field, ...]
    start: NDArray[np.uint8]  # (size,): a row with its initial optimizer state

    @property
    def size(self) -> int:
        return len(self.start)

    def of(self, name: str) -> Field | None:
        return next((f for f in self.fields if f.name == name), None)


def layout(rows: Mapping[str, Tensor]) -> Layout:
    """The layout for ``rows``: for each field name, its initial row (1, ...)."""
    at, fields, parts = HEADER, [], [np.zeros(HEADER, np.uint8)]
    for name, row in rows.items():
        size = row.numel() * row.element_size()
        fields.append(Field(name, row.dtype, tuple(row.shape[1:]), at, at + size))
        parts.append(_raw(row)[0])
        at += size
    return Layout(tuple(fields), np.concatenate(parts))


def gather(kind: Layout, slabs: Mapping[str, Tensor], rows: Tensor) -> NDArray[np.uint8]:
    """Records of ``rows`` (n,) of the slabs, with headers still unset.

    By numpy, in this thread: while others read and write files, torch's threads wait for a core.
    """
    n, out = len(rows), np.empty((len(rows), kind.size), np.uint8)
    for field in kind.fields:
        taken = _bytes(slabs[field.name], field)[rows.numpy(), 0]
        out[:, field.first : field.last] = taken.view(np.uint8).reshape(n, field.last - field.first)
    return out


def scatter(
    kind: Layout, slabs: Mapping[str, Tensor], rows: Tensor, records: NDArray[np.uint8]
) -> None:
    """Write records to ``rows`` of the slabs."""
    for field in kind.fields:
        part = np.ascontiguousarray(records[:, field.first : field.last])
        if len(part):
            whole = _bytes(slabs[field.name], field)
            whole[rows.numpy(), 0] = part.view(whole.dtype)[:, 0]


def _bytes(slab: Tensor, field: Field) -> NDArray[np.void]:
    """(rows, 1): a view of a slab's memory, with each row as one opaque element."""
    flat = slab.detach().view(len(slab), -1).view(torch.uint8).numpy()
    return flat.view(f"V{field.last - field.first}")


def column(field: Field, records: NDArray[np.uint8]) -> Tensor:
    """(n, ...): one field of all records."""
    if not len(records):
        return torch.empty((0, *field.shape), dtype=field.dtype)
    part = np.ascontiguousarray(records[:, field.first : field.last])
    return torch.from_numpy(part).view(field.dtype).view(len(records), *field.shape)


def write_column(field: Field, records: NDArray[np.uint8], values: Tensor) -> None:
    records[:, field.first : field.last] = _raw(values.detach().to(field.dtype))


def known(records: NDArray[np.uint8]) -> NDArray[np.int64]:
    """(3, n): score, stamp and age of each record; a copy."""
    part = records[:, :HEADER].copy()  # numpy calls one record contiguous, whatever its strides
    return part.view(np.int64).T.copy()


def write_known(records: NDArray[np.uint8], facts: NDArray[np.int64]) -> None:
    records[:, :HEADER] = np.ascontiguousarray(facts.T).view(np.uint8)


def _raw(rows: Tensor) -> NDArray[np.uint8]:
    """(n, bytes) uint8: the bytes of each row."""
    columns = int(np.prod(rows.shape[1:])) * rows.element_size()
    if not len(rows):
        return np.empty((0, columns), np.uint8)
    flat = rows.detach().cpu().contiguous().view(len(rows), -1)
    return flat.view(torch.uint8).numpy()
