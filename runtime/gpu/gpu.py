"""The GPU as the host code of the kernels sees it: launch, upload, and a few facts.

Host code asks :func:`serving` for the Gpu that runs kernels on a tensor's memory, and launches by
the contract of :mod:`.cuda_launch`. There are two kinds: a CUDA device, and the emulator, which
works on CPU memory and which a test puts in place by :func:`emulate`. So tests can run all GPU
code, kernels and host code alike, without a GPU.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from recast.errors import RecastWarning
from recast.runtime.gpu import cuda_launch
from recast.runtime.gpu.cuda_launch import Argument, Dims, Kernel
from recast.runtime.gpu.uploads import Uploads
from recast.runtime.recorded import recording

_COUNTERS = 1024  # kept after their last reader is gone, by when no kernel writes to them


class Gpu(Protocol):
    """A device that runs the kernels of ``csrc/cuda``, in order on torch's current stream, except
    for work :meth:`in_parallel`.
    """

    device: torch.device

    @property
    def multiprocessors(self) -> int:
        """How many multiprocessors the device has, to size grids by."""

    def launch(
        self, kernel: Kernel, grid: Dims, block: Dims, shared: int, arguments: Sequence[Argument]
    ) -> None:
        """As :func:`.cuda_launch.launch`, on the current stream."""

    def warm(self, kernel: Kernel) -> None:
        """As :func:`.cuda_launch.warm`: for a kernel that only a recording launches."""

    def upload(self, words: array[int]) -> Tensor:
        """(n,) int64 on the device, from an ``array("q")``; the host does not wait.

        Equal words may share memory, so nobody may write to it.
        """

    def counters(self, n: int) -> Tensor:
        """(n,) int64 zeros that kernels add to and the host reads without synchronising."""

    def in_parallel(self, inputs: Iterable[Tensor]) -> contextlib.AbstractContextManager[None]:
        """Work inside this context runs in parallel with the work after it, until :meth:`join`.

        It starts after the work before it. The memory of its ``inputs`` is not reused until it is
        done, even if they are freed earlier.
        """

    def join(self, outputs: Iterable[Tensor]) -> None:
        """Make what follows wait for all work :meth:`in_parallel`, whose ``outputs`` it may use."""

    def from_start(self) -> contextlib.AbstractContextManager[None]:
        """Work inside this context depends only on the recording's inputs. So in a replay it starts
        at once, beside the work recorded before it; the work after it waits for it.

        The memory it uses must be allocated inside, and kept for as long as the recording.
        """


class Cuda:
    """One CUDA device."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.multiprocessors = torch.cuda.get_device_properties(index).multi_processor_count
        self._beside = torch.cuda.Stream(self.device)  # for work that must not be captured
        self._second = torch.cuda.Stream(self.device)
        self._third = torch.cuda.Stream(self.device)
        self._fork, self._joined, self._done = (torch.cuda.Event() for _ in range(3))
        self._order = threading.Lock()  # keeps recording an event and waiting for it together
        self._uploads = Uploads(self.device)
        self._captured: list[Tensor] = []
        self._counters: deque[Tensor] = deque(maxlen=_COUNTERS)

    def launch(
        self, kernel: Kernel, grid: Dims, block: Dims, shared: int, arguments: Sequence[Argument]
    ) -> None:
        with cuda_launch.on_device(self.device.index):
            cuda_launch.launch(kernel, grid, block, shared, arguments)

    def warm(self, kernel: Kernel) -> None:
        with cuda_launch.on_device(self.device.index):
            cuda_launch.warm(kernel)

    def upload(self, words: array[int]) -> Tensor:
        recorded = recording.current()
        if recorded is not None:
            # Addresses are the same in all replays: copy them once, now, outside the capture.
            with torch.cuda.stream(self._beside):
                made = torch.tensor(words, dtype=torch.int64).to(self.device)
            recorded.keep(made)
            return made
        if torch.cuda.is_current_stream_capturing():
            # The user's own capture: each replay copies again, from memory that must stay.
            pinned = torch.tensor(words, dtype=torch.int64).pin_memory()
            self._captured.append(pinned)
            return pinned.to(self.device, non_blocking=True)
        return self._uploads.of(words)

    def counters(self, n: int) -> Tensor:
        # Pinned memory has one address on host and device. The allocator does not know that kernels
        # write there: freed with its last reader, it could be another's while they still run.
        made = torch.zeros(n, dtype=torch.int64, pin_memory=True)
        self._counters.append(made)
        return made

    @contextlib.contextmanager
    def in_parallel(self, inputs: Iterable[Tensor]) -> Iterator[None]:
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
        # Several outputs may share one allocation.
        for t in {t.untyped_storage().data_ptr(): t for t in outputs}.values():
            t.record_stream(current)

    @contextlib.contextmanager
    def from_start(self) -> Iterator[None]:
        recorded = recording.current()
        if recorded is None or recorded.start is None:
            yield
            return
        # In a capture, an event is a point in the graph, whatever has been captured since.
        self._third.wait_event(recorded.start)
        try:
            with torch.cuda.stream(self._third):
                yield
        finally:  # also after an error that is caught: a capture cannot end with an unjoined stream
            self._done.record(self._third)
            torch.cuda.current_stream(self.device).wait_event(self._done)


_emulated: Gpu | None = None


def serving(tensor: Tensor) -> Gpu | None:
    """The Gpu that runs kernels on the memory of ``tensor``; None if torch must do it."""
    if tensor.is_cuda:
        return None if cuda_launch.why_not() is not None else _cuda(tensor.get_device())
    return _emulated if tensor.is_cpu else None


@cache
def _cuda(index: int) -> Cuda | None:
    why = cuda_launch.why_not_on(index)
    if why is None:
        return Cuda(index)
    warnings.warn(
        f"{why}: torch's own operations run instead. The numbers are the same, the speed is not",
        RecastWarning,
        stacklevel=3,
    )
    return None


@contextlib.contextmanager
def emulate(gpu: Gpu | None) -> Iterator[None]:
    """Let ``gpu`` serve CPU tensors; None: nobody. For tests; not thread-safe."""
    global _emulated
    before, _emulated = _emulated, gpu
    try:
        yield
    finally:
        _emulated = before
