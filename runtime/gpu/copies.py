"""Copies of many tensors to fixed places on a GPU, in one launch, however many dtypes they have.

Where they go is described once; where they come from is uploaded, which costs nothing where the
addresses come again. Torch's own copy of a list takes the host several times as long.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_void_p
from functools import cache

import torch
from torch import Tensor

from recast.runtime import device
from recast.runtime.gpu import gpu as gpus
from recast.runtime.gpu import nvrtc
from recast.runtime.gpu.cuda_launch import Kernel
from recast.runtime.gpu.gpu import Gpu

_BLOCK = 256
CHUNK = _BLOCK * 16 * 4  # bytes of a block


class Copies:
    """Copies to ``targets``, which are contiguous memory of one device."""

    def __init__(self, gpu: Gpu, targets: Sequence[Tensor]) -> None:
        self._gpu, self._targets = gpu, list(targets)
        self._where = [t.device for t in targets]
        # What reads a tensor otherwise than its memory is: conjugates, and negatives.
        self._lazy = [k for k, t in enumerate(targets) if t.is_floating_point() or t.is_complex()]
        words = array("q")
        for k, t in enumerate(targets):
            at, size = t.data_ptr(), t.numel() * t.element_size()
            for first in range(0, size, CHUNK):
                words.extend((at + first, k, first, min(CHUNK, size - first)))
        self._blocks = len(words) // 4
        self._chunks = gpu.upload(words) if words else None

    def takes(self, tensors: Sequence[Tensor]) -> bool:
        """Whether ``tensors``, of the dtypes and shapes of the targets, are memory as theirs."""
        if not set(map(type, tensors)) <= _PLAIN or [t.device for t in tensors] != self._where:
            return False
        if not all([t.layout is torch.strided for t in tensors]):
            return False
        if any([tensors[k].is_neg() or tensors[k].is_conj() for k in self._lazy]):
            return False
        return all(map(_is_contiguous, tensors))

    def run(self, tensors: Sequence[Tensor]) -> None:
        """Copy ``tensors``, which it takes, each to its place, on the current stream."""
        if self._chunks is None:
            return
        sources = self._gpu.upload(array("q", map(_data_ptr, tensors)))
        self._gpu.launch(
            _kernel(), (self._blocks, 1, 1), (_BLOCK, 1, 1), 0,
            (c_void_p(sources.data_ptr()), c_void_p(self._chunks.data_ptr())),
        )  # fmt: skip
        torch.autograd.graph.increment_version(self._targets)


_PLAIN = {Tensor, torch.nn.Parameter}
_is_contiguous, _data_ptr = Tensor.is_contiguous, Tensor.data_ptr


def to(targets: Sequence[Tensor]) -> Copies | None:
    """Copies to ``targets``; None where torch's own have to do."""
    if not targets or device.held() == "torch":
        return None
    served = gpus.serving(targets[0])
    where = targets[0].device
    if served is None or not all([t.device == where and t.is_contiguous() for t in targets]):
        return None
    return Copies(served, targets)


@cache
def _kernel() -> Kernel:
    return Kernel(
        nvrtc.program("copy_tensors.cu", defines={"RECAST_BLOCK": _BLOCK}), "copy_tensors"
    )
