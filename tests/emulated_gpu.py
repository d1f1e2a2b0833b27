"""A GPU for host code, on the CPU: launches go to the emulator, tensors are the CPU's.

    with emulated_gpu.serve():
        fast(*batch)  # every op that has CUDA kernels runs them, host code and all

Types, number and range of the arguments are checked against each kernel's own parameters, which the
driver would not do.
"""

from __future__ import annotations

import contextlib
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence

import simt_build
import torch
from torch import Tensor

from recast.runtime.gpu import gpu
from recast.runtime.gpu.cuda_launch import Argument, Dims, Kernel

PLAIN_SHARED = 48 << 10  # bytes of shared memory that need no opt-in


class Emulated:
    """Serves tensors of the CPU; keeps the names of what it launched.

    loaded: the shared memory allowed to each kernel that was launched or warmed; None unless it
    ``loads`` kernels as a GPU does: otherwise all are there.
    """

    device = torch.device("cpu")
    multiprocessors = 2

    def __init__(self, workers: int = 1, seed: int = 0, loads: bool = False) -> None:
        self.launched: list[str] = []
        self.loaded: dict[Kernel, int] | None = {} if loads else None
        self._workers, self._seed = workers, seed
        self._turn = threading.Lock()  # ranks may be threads: one kernel at a time

    def launch(
        self, kernel: Kernel, grid: Dims, block: Dims, shared: int, arguments: Sequence[Argument]
    ) -> None:
        if not all(grid):
            return
        self.launched.append(kernel.name)
        self.warm(kernel, shared)
        source = kernel.program.source
        with self._turn:
            kernels = simt_build.kernels(source, defines=dict(kernel.program.defines))
            kernels.launch_packed(
                kernel.name, grid, block, shared, arguments, workers=self._workers, seed=self._seed
            )

    def warm(self, kernel: Kernel, shared: int = 0) -> None:
        if self.loaded is not None:
            self.loaded[kernel] = max(self.loaded.get(kernel, PLAIN_SHARED), shared)

    def lacks(self, kernel: Kernel, shared: int) -> bool:
        """Whether a capture would refuse this launch."""
        return self.loaded is not None and shared > self.loaded.get(kernel, -1)

    def upload(self, words: array[int]) -> Tensor:
        return torch.tensor(words, dtype=torch.int64)

    def counters(self, n: int) -> Tensor:
        return torch.zeros(n, dtype=torch.int64)

    def in_parallel(self, inputs: Iterable[Tensor]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def join(self, outputs: Iterable[Tensor]) -> None:
        pass

    def from_start(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@contextlib.contextmanager
def serve(workers: int = 1, seed: int = 0, loads: bool = False) -> Iterator[Emulated]:
    """Inside, CUDA kernels run on tensors of the CPU."""
    emulated = Emulated(workers, seed, loads)
    with gpu.emulate(emulated):
        yield emulated


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Inside, tensors of the CPU are the CPU's, even within :func:`serve`."""
    with gpu.emulate(None):
        yield
