"""The stand-in for cublasLt, built; see fake_cublaslt.cpp.

with cublaslt_stand_in.serve() as library, emulated_gpu.serve():
    out = fast(*batch)
assert "RELU_AUX_BIAS" in library.epilogues()
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path

import simt_build

from recast.runtime.gpu import cublaslt
from recast.runtime.gpu.cublaslt import Epilogue

SOURCE = Path(__file__).with_name("fake_cublaslt.cpp")
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")


@functools.cache
def built() -> Path:
    """The library, compiled once and kept in ``$RECAST_CACHE``."""
    include = ("-Icsrc", "-isystem", str(simt_build.cuda_headers()))
    command = [*_FLAGS, *include, str(SOURCE.relative_to(simt_build.CSRC.parent))]
    contents = [SOURCE.read_bytes(), (simt_build.CSRC / "cublaslt_abi.h").read_bytes()]
    return simt_build._cached(
        "fake_cublaslt.so",
        simt_build._key(command, contents),
        lambda out: [*command, "-o", str(out)],
    )


class Library:
    """What a test asks of the stand-in."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.fake_log.restype = ctypes.c_char_p
        self._library.fake_set.argtypes = [ctypes.c_char_p, ctypes.c_long]

    def epilogues(self) -> list[str]:
        """The epilogues of the products since the last call, in order."""
        return [Epilogue(int(word)).name for word in self._library.fake_log().decode().split()]

    @contextlib.contextmanager
    def set(self, name: str, value: int) -> Iterator[None]:
        """A setting of the stand-in, for the time of the context."""
        self._library.fake_set(name.encode(), value)
        try:
            yield
        finally:
            self._library.fake_set(name.encode(), 0)


@contextlib.contextmanager
def serve() -> Iterator[Library]:
    """Let the stand-in multiply tensors of the CPU, for the time of the context."""
    library = Library(built())
    with cublaslt.stand_in(built()):
        library.epilogues()
        yield library
