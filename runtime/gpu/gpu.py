"""The GPU as the host code of the kernels sees it: launch, upload, and a few facts.

Host code asks :func:`serving` for the one that runs kernels on a tensor's memory, and gives it
launches in the contract of :mod:`.cuda_launch`. There are two: the CUDA device, and, where a test
has put one in place by :func:`emulate`, the emulator, whose memory is the CPU's. So what runs on a
GPU is run without one, host code and all.
"""

from __future__ import annotations

import contextlib
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from recast.runtime.gpu import cuda_launch
from recast.runtime.gpu.cuda_launch import Argument, Dims, Kernel
from recast.runtime.gpu.uploads import Uploads
from recast.runtime.recorded import recording


class Gpu(Protocol):
    """A device that runs the kernels of ``csrc/cuda``. Its work is in order on torch's current
    stream, but for that given to it :meth:`beside`.
    """

    device: torch.device

    @property
    def multiprocessors(self) -> int:
        """How many blocks of full size run at once, for grids that stride."""

    def launch(
        self, kernel: Kernel, grid: Dims, block: Dims, shared: int, arguments: Sequence[Argument]
    ) -> None:
        """As :func:`.cuda_launch.launch`, on the current stream."""

    def upload(self, words: array[int]) -> Tensor:
        """(n,) int64 on the device, of an ``array("q")``; the host does not wait.

        Equal words may be given the same memory again: nobody writes to it.
        """

    def counters(self, n: int) -> Tensor:
        """(n,) int64 zeros that kernels add to and the host reads without asking the device."""

    def beside(self, inputs: Iterable[Tensor]) -> contextlib.AbstractContextManager[None]:
        """Work of this context runs beside what follows it, until :meth:`join`.

        It starts after what came before it. The memory of its ``inputs`` is left alone until it is
        done, also where they are freed earlier.
        """

    def join(self, outputs: Iterable[Tensor]) -> None:
        """What follows runs after all work :meth:`beside`, whose ``outputs`` it may use."""

    def first(self) -> contextlib.AbstractContextManager[None]:
        """Work of this context needs nothing but what the recording was given: in its replays it
        runs from the begin on, beside all that the host has called before; what follows waits.

        The memory it uses must be taken inside, and kept for as long as the recording.
        """


class Cuda:
    """One CUDA device."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.multiprocessors = torch.cuda.get_device_properties(index).multi_processor_count
        self._beside = torch.cuda.Stream(self.device)  # for what a recording must not contain
        self._second = torch.cuda.Stream(self.device)
        self._third = torch.cuda.Stream(self.device)
        self._fork, self._joined, self._done = (torch.cuda.Event() for _ in range(3))
        self._order = threading.Lock()  # of recording an event and waiting for it: others do too
        self._uploads = Uploads(self.device)
        self._captured: list[Tensor] = []

    def launch(
        self, kernel: Kernel, grid: Dims, block: Dims, shared: int, arguments: Sequence[Argument]
    ) -> None:
        with cuda_launch.on_device(self.device.index):
            cuda_launch.launch(kernel, grid, block, shared, arguments)

    def upload(self, words: array[int]) -> Tensor:
        recorded = recording.current()
        if recorded is not None:
            # Addresses do not change from replay to replay: copied once, now, beside the capture.
            with torch.cuda.stream(self._beside):
                made = torch.tensor(words, dtype=torch.int64).to(self.device)
            recorded.keep(made)
            return made
        if torch.cuda.is_current_stream_capturing():
            # Somebody's own capture: each replay copies again, from memory that must stay.
            pinned = torch.tensor(words, dtype=torch.int64).pin_memory()
            self._captured.append(pinned)
            return pinned.to(self.device, non_blocking=True)
        return self._uploads.of(words)

    def counters(self, n: int) -> Tensor:
        # Pinned memory has one address on host and device.
        return torch.zeros(n, dtype=torch.int64, pin_memory=True)

    @contextlib.contextmanager
    def beside(self, inputs: Iterable[Tensor]) -> Iterator[None]:
        with self._order:
            self._fork.record(torch.cuda.current_stream(self.device))
            self._second.wait_event(self._fork)
        for t in inputs:
            if t.is_cuda:
                t.record_stream(self._second)
        with torch.cuda.stream(self._second):
            yield

    def join(self, outputs: Iterable[Tensor]) -> None:
        current = torch.cuda.current_stream(self.device)
        with self._order:
            self._joined.record(self._second)
            current.wait_event(self._joined)
        # Several outputs may be cut from one allocation.
        for t in {t.untyped_storage().data_ptr(): t for t in outputs}.values():
            t.record_stream(current)

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        recorded = recording.current()
        if recorded is None or recorded.start is None:
            yield
            return
        # Within a capture an event is a place in the graph, however much has been called since.
        self._third.wait_event(recorded.start)
        try:
            with torch.cuda.stream(self._third):
                yield
        finally:  # whoever catches an error goes on: no capture ends with a stream left out
            self._done.record(self._third)
            torch.cuda.current_stream(self.device).wait_event(self._done)


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
def emulate(gpu: Gpu | None) -> Iterator[None]:
    """Let ``gpu`` serve tensors of the CPU; None: nobody. For tests; not thread-safe."""
    global _emulated
    before, _emulated = _emulated, gpu
    try:
        yield
    finally:
        _emulated = before
