"""The GPU as the host code of the kernels sees it: launch, upload, and a few facts.

Host code asks :func:`serving` for the one that runs kernels on a tensor's memory, and gives it
launches in the contract of :mod:`~recast.runtime.cuda_launch`. There are two: the CUDA device, and,
where a test has put one in place by :func:`emulate`, the emulator, whose memory is the CPU's. So
what runs on a GPU is run without one, host code and all.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from recast.runtime import cuda_launch
from recast.runtime.cuda_launch import Argument, Dims, Kernel


class Gpu(Protocol):
    """A device that runs the kernels of ``csrc/cuda``. All its work is in order on one stream."""

    device: torch.device

    @property
    def multiprocessors(self) -> int:
        """How many blocks of full size run at once, for grids that stride."""

    def launch(
        self, kernel: Kernel, grid: Dims, block: Dims, shared: int, arguments: Sequence[Argument]
    ) -> None:
        """As :func:`recast.runtime.cuda_launch.launch`, on the current stream."""

    def upload(self, words: array[int]) -> Tensor:
        """(n,) int64 on the device, of an ``array("q")``; the host does not wait."""

    def counters(self, n: int) -> Tensor:
        """(n,) int64 zeros that kernels add to and the host reads without asking the device."""


class Cuda:
    """One CUDA device."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.multiprocessors = torch.cuda.get_device_properties(index).multi_processor_count

    def launch(
        self, kernel: Kernel, grid: Dims, block: Dims, shared: int, arguments: Sequence[Argument]
    ) -> None:
        with torch.cuda.device(self.device):
            cuda_launch.launch(kernel, grid, block, shared, arguments)

    def upload(self, words: array[int]) -> Tensor:
        # Torch keeps pinned memory back until the copies from it are done.
        pinned = torch.empty(len(words), dtype=torch.int64, pin_memory=True)
        pinned.numpy()[:] = words
        return pinned.to(self.device, non_blocking=True)

    def counters(self, n: int) -> Tensor:
        # Pinned memory has one address on host and device.
        return torch.zeros(n, dtype=torch.int64, pin_memory=True)


_emulated: Gpu | None = None


def serving(tensor: Tensor) -> Gpu | None:
    """What runs kernels on the memory of ``tensor``; None where torch's own calls must do."""
    if tensor.is_cuda:
        return None if cuda_launch.why_not() is not None else _cuda(tensor.get_device())
    return _emulated if tensor.is_cpu else None


@cache
def _cuda(index: int) -> Cuda:
    return Cuda(index)


@contextlib.contextmanager
def emulate(gpu: Gpu) -> Iterator[None]:
    """Let ``gpu`` serve tensors of the CPU. For tests; not thread-safe."""
    global _emulated
    before, _emulated = _emulated, gpu
    try:
        yield
    finally:
        _emulated = before
