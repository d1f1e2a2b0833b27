"""The memory of a table: reserved as a whole, but copied and pickled as the stored rows only.

``copy`` and ``pickle`` ask the tensor object how it is copied before they ask its class. So a slab
and its optimizer state, which stay plain tensors and the user's own Parameter, can answer
themselves.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recast.runtime.dynamic import generation
from recast.runtime.dynamic.table import _TABLES, DynamicTable

_LINE = 64  # bytes
_HERE = torch.device("cpu")
_HOW = "__reduce_ex__", "__deepcopy__"


def reserve(shape: tuple[int, ...], dtype: torch.dtype, where: torch.device = _HERE) -> Tensor:
    """Zeros, aligned to a cache line; on the host, pages take memory only when written to."""
    if where.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=where)
    count = int(np.prod(shape))
    size = count * dtype.itemsize
    raw = torch.from_numpy(np.zeros(size + _LINE, dtype=np.uint8))
    first = -raw.data_ptr() % _LINE
    return raw[first : first + size].view(dtype).view(shape)


def hold(table: DynamicTable, whole: Tensor, columns: Sequence[Tensor]) -> None:
    """Let ``copy`` and ``pickle`` take only those rows of ``columns`` that ``table`` stores.

    Args:
        whole: (slab_rows, ...), the reserved memory.
        columns: its parts along dimension 1, as ``split`` returns them, or a Parameter of such a
            part; or ``whole`` itself, alone.
    """
    record = _Record(table, whole.detach())  # detached: no reference cycle with `whole`
    first = 0
    for column in columns:
        _tell(column, record, first)
        first += column.shape[1] if column.dim() > 1 else 1


class _Record:
    """The memory of one table, whose columns belong to several tensors."""

    def __init__(self, table: DynamicTable, whole: Tensor) -> None:
        self.table, self.whole = table, whole

    def __getstate__(self) -> dict[str, Any]:
        self.table.check_copies()
        rows = self.table.stored()[1]
        last = torch.arange(len(self.whole) - generation.ROWS, len(self.whole))
        rows = torch.cat([rows.new_zeros(1), rows, last.to(rows)])  # row 0 is for padding
        kept = self.whole.detach()[rows]
        return {"table": self.table, "rows": rows, "kept": kept, "shape": tuple(self.whole.shape)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = state["kept"]
        self.table = state["table"]
        self.whole = reserve(state["shape"], kept.dtype, kept.device)
        self.whole[state["rows"]] = kept


class _Column:
    """How one tensor is copied."""

    def __init__(self, tensor: Tensor, record: _Record, first: int) -> None:
        self.tensor, self.record, self.first = weakref.ref(tensor), record, first

    def _here(self) -> Tensor:
        tensor = self.tensor()
        assert tensor is not None  # these are attributes of the tensor itself
        return tensor

    def _form(self) -> tuple[Any, ...] | None:
        """What a copy needs besides the record; None: the tensor has got other memory since."""
        tensor = self._here()
        shape = tuple(tensor.shape)
        there = _part(self.record, self.first, shape)
        same = there.data_ptr() == tensor.data_ptr() and there.stride() == tensor.stride()
        if same and (there.shape, there.dtype) == (tensor.shape, tensor.dtype):
            return self.first, shape, isinstance(tensor, nn.Parameter), tensor.requires_grad
        for name in _HOW:
            vars(tensor).pop(name, None)
        return None

    def reduce(self, protocol: Any) -> Any:
        form = self._form()
        return (
            self._here().__reduce_ex__(protocol) if form is None else (_made, (self.record, *form))
        )

    def deepcopy(self, memo: dict[int, Any]) -> Tensor:
        form = self._form()
        if form is None:
            return copy.deepcopy(self._here(), memo)
        return _made(copy.deepcopy(self.record, memo), *form)


def _part(record: _Record, first: int, shape: tuple[int, ...]) -> Tensor:
    whole = record.whole
    return whole if whole.dim() == 1 else whole[:, first : first + shape[1]]


def _made(
    record: _Record, first: int, shape: tuple[int, ...], is_parameter: bool, requires_grad: bool
) -> Tensor:
    tensor = _part(record, first, shape)
    if is_parameter:
        tensor = nn.Parameter(tensor, requires_grad)
        _TABLES[tensor] = record.table  # at once: an optimizer's copy may be saved before a lookup
    _tell(tensor, record, first)
    return tensor


def _tell(tensor: Tensor, record: _Record, first: int) -> None:
    own = _Column(tensor, record, first)
    vars(tensor).update(zip(_HOW, (own.reduce, own.deepcopy), strict=True))
