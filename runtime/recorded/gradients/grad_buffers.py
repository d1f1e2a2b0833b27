"""Fixed memory for the gradients of dense parameters, outside the recording.

Each replay copies the gradients there. If a gradient from the last replay is no longer in use, the
next replay hands out the same tensor again, so that a recorded optimizer step finds it at the same
address. As with any in-place write, the loop must wait for other streams that were given that
memory.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recast.runtime.recorded.state.same import (
    ReferenceCounts,
    TensorLayouts,
    held_in_torch,
    same_attributes,
)


class _GradBuffer(NamedTuple):
    """A gradient tensor that is handed out, and its storage.

    ``alias`` has the same memory, for recordings to keep.
    """

    tensor: Tensor
    alias: Tensor
    storage: torch.UntypedStorage
    key: int  # of the storage


class GradBuffers:
    """Fixed memory for the gradients of ``weights``, by their index."""

    def __init__(self, weights: dict[int, Tensor]) -> None:
        self._buffers = {k: self._made(w) for k, w in weights.items()}
        self._all = list(self._buffers.values())
        self.tensors = [buffer.tensor for buffer in self._all]  # in the order of the weights
        self._in_torch = held_in_torch(self.tensors)
        self._where = [TensorLayouts([buffer.tensor]) for buffer in self._all]
        self._everywhere = TensorLayouts(self.tensors)
        self._keys = [buffer.key for buffer in self._all]
        self._objects: list[Any] = [x for buffer in self._all for x in (buffer[0], buffer[2])]
        self._plain = [False, None] * len(self._all)
        self._references = ReferenceCounts(self._objects)
        self._uses = self._counted_in_torch()
        self._alone = [_holders(buffer) for buffer in self._all]

    @staticmethod
    def _made(weight: Tensor) -> _GradBuffer:
        alias = torch.empty_like(weight, requires_grad=False)
        tensor = alias.detach()
        storage = tensor.untyped_storage()
        return _GradBuffer(tensor, alias, storage, storage._cdata)

    def unused(self) -> list[bool]:
        """For each, whether it is not in use elsewhere, and still as it was made."""
        if self._all_unused():
            return [True] * len(self._all)
        return [
            _holders(buffer) == alone and where.unchanged()
            for buffer, alone, where in zip(self._all, self._alone, self._where, strict=True)
        ]

    def _all_unused(self) -> bool:
        return (
            self._references.unchanged()
            and self._counted_in_torch() == self._uses
            and same_attributes(self.tensors, _CHANGEABLE, self._plain)
            and not any(map(vars, self.tensors))
            and self._everywhere.unchanged()
        )

    def _counted_in_torch(self) -> list[int]:
        return [*map(_uses, self.tensors), *map(_storage_uses, self._keys)]

    def in_place(self) -> bool:
        """Whether each tensor still has the memory that it was made with."""
        return self._everywhere.unchanged()

    def aliases(self) -> dict[int, Tensor]:
        """Tensors in the same memory, for a recording to keep."""
        return {k: buffer.alias for k, buffer in self._buffers.items()}


_uses: Any = Tensor._use_count  # type: ignore[attr-defined]
_storage_uses = torch._C._storage_Use_Count
_CHANGEABLE = ("requires_grad", "_backward_hooks")  # by a holder


def _holders(buffer: _GradBuffer) -> tuple[object, ...]:
    """The reference counts of its parts, and what only a holder of it can have changed."""
    tensor, count = buffer.tensor, sys.getrefcount
    return (
        count(tensor), _uses(tensor), count(buffer.storage), _storage_uses(buffer.key),
        len(tensor.__dict__), tensor.requires_grad, tensor._backward_hooks is None,
    )  # fmt: skip
