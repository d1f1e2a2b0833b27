"""A GPU that compiles every kernel that it is asked to launch, for architectures that need not be
here, and launches none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import recast
from gpu.bench.host_time import Idle
from recast.errors import KernelError
from recast.runtime.gpu import gpu, kernel_cache, nvrtc
from recast.runtime.gpu.cuda_launch import Argument, Dims, Kernel


class Compiling(Idle):
    """Results are whatever was in their memory: only which kernels are launched is of interest."""

    def __init__(self, archs: Sequence[str], multiprocessors: int) -> None:
        super().__init__()
        self.multiprocessors = multiprocessors
        self.launched: list[str] = []
        self.refused: dict[str, str] = {}  # what does not compile, and the compiler's words
        self._archs, self._seen = archs, set[nvrtc.Program]()

    def launch(
        self, kernel: Kernel, grid: Dims, block: Dims, shared: int, arguments: Sequence[Argument]
    ) -> None:
        if all(grid):
            self.launched.append(kernel.name)
            self.warm(kernel)

    def warm(self, kernel: Kernel) -> None:
        program = kernel.program
        if program in self._seen:
            return
        self._seen.add(program)
        for arch in self._archs:
            try:
                kernel_cache.binary(program, arch)
            except KernelError as error:
                self.refused[error.what] = error.why or ""

    def lacks(self, kernel: Kernel, shared: int) -> bool:
        return False


@contextmanager
def compiling(archs: Sequence[str], multiprocessors: int) -> Iterator[Compiling]:
    """Let such a device serve tensors of the CPU. Models are rewritten without it, as a rewrite
    whose results differ would be refused.
    """
    optimize = recast.optimize

    def alone(*args: Any, **options: Any) -> Any:
        with gpu.emulate(None):
            return optimize(*args, **options)

    device = Compiling(archs, multiprocessors)
    recast.optimize = alone
    try:
        with gpu.emulate(device):
            yield device
    finally:
        recast.optimize = optimize
