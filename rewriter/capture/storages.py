"""The memory behind tensors: of a sparse one, that of the dense tensors that hold it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn


def memory(tensor: Any) -> dict[int, torch.UntypedStorage]:
    """The memory of a tensor, by address: of a sparse one, that of its indices and values. Empty if
    it has none of its own.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta" or unborn(tensor):
        return {}
    found: dict[int, torch.UntypedStorage] = {}
    for part in _parts(tensor):
        with suppress(NotImplementedError, RuntimeError):  # a wrapper of other tensors
            storage = part.untyped_storage()
            found[storage.data_ptr()] = storage
    found.pop(0, None)
    return found


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that hold ``tensor``."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def unborn(tensor: torch.Tensor) -> bool:
    """Whether a parameter of a lazy module has no shape yet."""
    return nn.parameter.is_lazy(tensor)
