"""CUDA kernels on the CPU: ``kernels(source)`` compiles a ``.cu`` file with g++ for the emulator.

    bags = kernels(CUDA / "embedding_bags.cu")
    bags.launch("bags_forward", grid, block, shared_bytes, weight, ids, out, rows)

The emulator (``csrc/simt``) runs each CUDA thread as a fiber. Three builds, chosen by ``sanitizer``
or, for a whole process, by ``RECAST_SIMT``: plain; "address" (overruns of shared memory and of
tensors, undefined behaviour such as overflow of an int index); "thread" (races: only what orders
memory on the device does here). A sanitizer must be loaded before Python starts, so
:func:`rerun` runs tests again in a process of their own. Builds are kept in ``$RECAST_CACHE``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from recast.runtime import build_cache

CSRC = Path(__file__).resolve().parent.parent / "csrc"
CUDA = CSRC / "cuda"
SIMT = CSRC / "simt"

SANITIZERS = ("address", "thread")
SANITIZER = os.environ.get("RECAST_SIMT", "")  # of this process
_FLAGS = (
    # -Og: for kernels of a few threads, compiling is most of the time, and -O1 takes half as much
    # again for it.
    *("-std=c++17", "-Og", "-fPIC", "-fvisibility=hidden", "-pthread"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
    # What is legal or usual in CUDA: 16-byte views of a float array, no contraction assumed.
    *("-fno-strict-aliasing", "-ffp-contract=off"),
)
_SANITIZE = {
    "": ("-ftrivial-auto-var-init=pattern",),  # a variable never set is -1.7e38 as a float
    "address": ("-g1", "-fsanitize=address,undefined", "-fsanitize-recover=address,undefined"),
    "thread": ("-g1", "-fsanitize=thread", "-Wno-tsan"),
}
# Sanitizers do not watch the scheduler, whose memory is no kernel's: it tells them what matters.
_TELL = {"": (), "address": ("-DSIMT_ASAN",), "thread": ("-DSIMT_TSAN",)}
_LIBRARY = {"address": "libasan.so", "thread": "libtsan.so"}

Argument = Tensor | int | float | None
Size = int | tuple[int, ...]

_DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "bool": torch.bool,
    **{f"{kind}{bits}": getattr(torch, f"{name}{bits}")
       for kind, name in (("i", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)},
}  # fmt: skip
_NUMBERS = {
    "bool": ctypes.c_bool,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
    **{f"{kind}{bits}": getattr(ctypes, f"c_{name}{bits}")
       for kind, name in (("i", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)},
}  # fmt: skip


class LaunchError(RuntimeError):
    """The emulator refused a launch, or a kernel did what CUDA does not allow."""


class Kernels:
    """The kernels of one source, ready to be launched."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.simt_signature.restype = ctypes.c_char_p
        self._library.simt_launch.restype = ctypes.c_char_p
        self._library.simt_launch.argtypes = [
            *(ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
            *(ctypes.c_void_p, ctypes.c_int, ctypes.c_uint),
        ]

    def signature(self, name: str) -> tuple[str, ...]:
        """The types of a kernel's parameters, such as ``("f32*", "i64*", "i32")``."""
        found: bytes | None = self._library.simt_signature(name.encode())
        if found is None:
            raise LaunchError(f"no kernel is named {name}")
        return tuple(found.decode().split())

    def launch(
        self,
        name: str,
        grid: Size,
        block: Size,
        shared: int,
        *arguments: Argument,
        workers: int = 1,
        seed: int = 0,
    ) -> None:
        """Run a kernel to its end.

        Arguments are tensors (for pointers of the tensor's dtype), None (a null pointer) and
        numbers. Blocks are spread over ``workers`` OS threads. A ``seed`` that is not 0 shuffles
        the order of blocks and threads. Raises :class:`LaunchError` when the launch is refused or
        the kernel misuses a collective, TypeError for arguments that do not fit.
        """
        types = self._types(name, arguments)
        pairs = enumerate(zip(types, arguments, strict=True))
        values = [_pack(name, place, type_, value) for place, (type_, value) in pairs]
        self._launch(name, grid, block, shared, values, workers, seed)

    def launch_packed(
        self,
        name: str,
        grid: Size,
        block: Size,
        shared: int,
        arguments: Sequence[ctypes._SimpleCData],
        workers: int = 1,
        seed: int = 0,
    ) -> None:
        """As :meth:`launch`, with exactly the values that a driver would be given.

        Raises TypeError if one is not of its parameter's kind and width.
        """
        for place, (type_, value) in enumerate(
            zip(self._types(name, arguments), arguments, strict=True)
        ):
            wanted = ctypes.c_void_p if type_.endswith("*") else _NUMBERS[type_]
            same = isinstance(value, ctypes.c_void_p) == (wanted is ctypes.c_void_p)
            floats = (ctypes.c_float, ctypes.c_double)
            same = same and isinstance(value, floats) == (wanted in floats)
            if not same or ctypes.sizeof(value) != ctypes.sizeof(wanted):
                raise TypeError(f"{name}, argument {place}: {type(value).__name__} for {type_}")
        self._launch(name, grid, block, shared, arguments, workers, seed)

    def _types(self, name: str, arguments: Sequence[object]) -> tuple[str, ...]:
        types = self.signature(name)
        if len(types) != len(arguments):
            raise TypeError(f"{name} takes {len(types)} arguments, not {len(arguments)}: {types}")
        return types

    def _launch(
        self, name: str, grid: Size, block: Size, shared: int,
        values: Sequence[ctypes._SimpleCData], workers: int, seed: int,
    ) -> None:  # fmt: skip
        params = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        error: bytes | None = self._library.simt_launch(
            *(name.encode(), _three(grid), _three(block), shared, params, workers, seed)
        )
        if error is not None:
            raise LaunchError(error.decode())


def _three(size: Size) -> ctypes.Array[ctypes.c_uint]:
    sizes = (size,) if isinstance(size, int) else size
    return (ctypes.c_uint * 3)(*sizes, *[1] * (3 - len(sizes)))


def _pack(name: str, place: int, type_: str, value: Argument) -> ctypes._SimpleCData:
    if type_.endswith("*"):
        if isinstance(value, Tensor):
            expected = _DTYPES.get(type_[:-1])
            if expected is not None and value.dtype != expected:
                raise TypeError(f"{name}, argument {place}: {value.dtype} for {type_}")
            return ctypes.c_void_p(value.data_ptr())
        if value is None:
            return ctypes.c_void_p(None)
    elif isinstance(value, int | float) and not (type_[0] != "f" and isinstance(value, float)):
        packed = _NUMBERS[type_](value)
        if type_[0] != "f" and packed.value != value:
            raise TypeError(f"{name}, argument {place}: {value} does not fit into {type_}")
        return packed
    raise TypeError(f"{name}, argument {place}: {type(value).__name__} for {type_}")


def kernels(
    source: Path, sanitizer: str | None = None, defines: Mapping[str, object] | None = None
) -> Kernels:
    """Compile ``source`` (``-Dkey=value`` for each of ``defines``), or take it from the cache.

    Raises RuntimeError with the compiler's words when it does not compile.
    """
    sanitizer = SANITIZER if sanitizer is None else sanitizer
    given = tuple(f"-D{key}={value}" for key, value in (defines or {}).items())
    return _kernels(Path(source).resolve(), sanitizer, given)


@functools.cache
def _kernels(source: Path, sanitizer: str, defines: tuple[str, ...]) -> Kernels:
    headers = (*SIMT.glob("*.h"), *CUDA.glob("*.cuh"), *source.parent.glob("*.cuh"))
    include = ("-Icsrc", "-Icsrc/cuda", "-isystem", str(cuda_headers()))
    told = (*_FLAGS, *include)
    # Compiled once, and run at every step of every thread.
    parts = _scheduler((*told, "-O2", *_TELL[sanitizer]), headers)
    flags = (*told, *_SANITIZE[sanitizer])
    # Kernels of tests may define what these headers ask for.
    begun = ("-include", str(_prelude(flags, headers))) if source.parent == CUDA else ()
    link = ("-shared", *_linker(sanitizer), "-x", "none", *map(str, parts))
    return Kernels(_compile(source, (*flags, *defines, *begun), headers, link))


@functools.cache
def _scheduler(flags: tuple[str, ...], headers: tuple[Path, ...]) -> tuple[Path, ...]:
    """What runs the kernels, in parts."""
    return tuple(_compile(unit, flags, headers) for unit in sorted(SIMT.glob("*.cpp")))


def _linker(sanitizer: str) -> tuple[str, ...]:
    """The fast linker, if it is installed: it takes half the time."""
    return () if sanitizer or not shutil.which("ld.gold") else ("-fuse-ld=gold",)


def _compile(
    source: Path, flags: Sequence[str], headers: Sequence[Path], link: Sequence[str] = ()
) -> Path:
    """The object file of ``source``, or what ``link`` makes of it in the same call of g++."""
    sources = re.findall(r'^#include "(\w+\.cu)"', source.read_text(), re.M)
    read = {source, *(source.parent / name for name in sources), *headers}
    contents = [file.read_bytes() for file in sorted(read)]
    # Relative, so that messages name the file as a reader of the project knows it.
    inside = source.is_relative_to(CSRC.parent)
    named = source.relative_to(CSRC.parent) if inside else source
    command = [*flags, "-x", "c++", *(() if link else ("-c",)), str(named), *link]
    return _cached(
        source.stem + (".so" if link else ".o"), _key(command, contents),
        lambda out: [*command, "-o", str(out)],
    )  # fmt: skip


@functools.cache
def _prelude(flags: tuple[str, ...], headers: tuple[Path, ...]) -> Path:
    """A header whose precompiled form lies beside it, where g++ looks for one."""
    source = SIMT / "prelude.h"
    command = [*flags, "-x", "c++-header", str(source.relative_to(CSRC.parent))]
    contents = [file.read_bytes() for file in sorted({source, *headers})]
    made = _cached("prelude.h.gch", _key(command, contents), lambda out: [*command, "-o", str(out)])
    header = made.with_suffix("")
    if not header.exists():  # read only if g++ should refuse the other
        header.write_text('#include "simt/prelude.h"\n')
    build_cache.used(header)
    return header


def _key(command: Sequence[str], contents: Sequence[bytes]) -> str:
    digest = hashlib.sha256("\0".join([_compiler(), _version(), *command]).encode())
    for content in contents:
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()[:20]


def _cached(name: str, key: str, command: Callable[[Path], list[str]]) -> Path:
    folder = build_cache.folder() / "simt"
    result = folder / f"{key}-{name}"
    with build_cache.alone(folder, f"{key}.lock"):
        build_cache.used(result)
        found = result.exists()
        if not found:
            made = folder / f"{key}-half-{name}"  # under the lock: of a process that died, or ours
            run = subprocess.run(
                [_compiler(), *command(made)],
                capture_output=True, text=True, cwd=CSRC.parent, env=_unwatched(), check=False,
            )  # fmt: skip
            if run.returncode != 0:
                raise RuntimeError(f"{name} does not compile:\n{run.stderr}")
            made.replace(result)
    if not found:
        _prune()
    return result


@functools.cache
def _prune() -> None:
    """Once, as there are thousands of files to look at."""
    build_cache.prune()


@functools.cache
def _compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("g++")
    if not found:
        raise RuntimeError("the emulator needs g++")
    return found


@functools.cache
def _version() -> str:
    return subprocess.run(
        [_compiler(), "--version"], capture_output=True, text=True, env=_unwatched(), check=True
    ).stdout


def _unwatched() -> dict[str, str]:
    """The environment without the sanitizer, under which a compiler or a shell may fall over."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


@functools.cache
def cuda_headers() -> Path:
    """The folder of ``cuda_fp16.h``: of the packages nvidia-cuda-runtime, -crt, -cccl or a toolkit.

    Raises RuntimeError when there is none.
    """
    folders = []
    package = importlib.util.find_spec("nvidia")
    for place in (package and package.submodule_search_locations) or ():
        folders += sorted(Path(place).glob("cu*/include"), reverse=True)
    nvcc = shutil.which("nvcc")
    if nvcc:  # it may be a script that calls the real one: ask
        asked = [nvcc, "--dryrun", "-x", "cu", os.devnull]
        said = subprocess.run(
            asked, capture_output=True, text=True, env=_unwatched(), check=False
        ).stderr
        folders += [Path(at).parent / "include" for at in re.findall(r"_HERE_=(.+)", said)]
    if os.environ.get("CUDA_HOME"):
        folders.append(Path(os.environ["CUDA_HOME"]) / "include")
    for folder in folders:
        needed = ("cuda_fp16.h", "crt/host_defines.h", "nv/target")
        if all((folder / name).is_file() for name in needed):
            return folder
    raise RuntimeError("no CUDA headers; try: pip install -c constraints.txt -e '.[dev]'")


def rerun(sanitizer: str, *arguments: str, timeout: float = 240) -> subprocess.CompletedProcess:
    """Run pytest with these arguments again, in a process that the sanitizer watches.

    The caller looks at ``returncode`` (0: all passed and nothing was reported) and ``stdout``.
    """
    if SANITIZER:
        pytest.skip("this process is a sanitized one")
    options = ("-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist")
    return sanitized(sanitizer, "-m", "pytest", *options, *arguments, timeout=timeout)


def sanitized(
    sanitizer: str, *command: str, goes_on: bool = False, timeout: float = 240
) -> subprocess.CompletedProcess:
    """Run Python with these arguments in a process that the sanitizer watches.

    An overrun ends it, unless it ``goes_on``; a race never does, but the return code is 66 then.
    """
    end = f"halt_on_error={int(not goes_on)}"
    library = subprocess.run(
        [_compiler(), f"-print-file-name={_LIBRARY[sanitizer]}"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    path = os.pathsep.join([str(CSRC.parent), str(Path(__file__).parent), *sys.path])
    environment = {
        **os.environ,
        "RECAST_SIMT": sanitizer,
        "LD_PRELOAD": library,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "ASAN_OPTIONS": f"detect_leaks=0 {end}",  # the leaks are Python's
        "UBSAN_OPTIONS": f"print_stacktrace=1 {end}",
        # Python, torch and OpenMP were not built for it and would be reported.
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1 suppress_equal_addresses=0 exitcode=66",
    }
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=CSRC.parent, timeout=timeout,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
