"""NVRTC: compiles CUDA sources at run time, to machine code for one architecture.

:func:`compile` turns a file of ``csrc/cuda`` (device code only) and the values that specialise it
into a cubin. It needs the library libnvrtc and its headers, which come with torch for CUDA or the
extra ``torch-recast[cuda]``; it needs neither a GPU nor a driver. This module never calls the
driver (libnvrtc itself opens libcuda.so.1 if there is one). Code is compiled for the exact
architecture (``sm_90``), never to PTX: an older driver refuses PTX from a newer toolkit, but takes
its machine code.

The toolkit is searched for in the installed wheels (``nvidia/cu13``), then in ``CUDA_HOME``,
``CUDA_PATH``, beside ``nvcc`` and in its usual place. Library and headers are taken from one place,
so their versions always match.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from recast.errors import KernelError, UsageError

_RUNTIME = Path(__file__).resolve().parents[1]
_DEFAULT = Path("/usr/local/cuda")  # where the toolkit's own installer puts it
_LANGUAGE = ("--std=c++17",)
_INSTALL = "pip install 'torch-recast[cuda]'"


@dataclass(frozen=True)
class Program:
    """What is compiled: a source file and the values that specialise it.

    ``defines`` are macros, ``("DIM", "64")`` for ``-DDIM=64``; ``kernels`` are name expressions of
    template instances, ``"sum_rows<float, 64>"``; kernels declared ``extern "C"`` need none.
    ``options`` are further NVRTC options. Make them with :func:`program`, which normalises its
    arguments, so that equal programs compare equal.
    """

    source: Path
    defines: tuple[tuple[str, str], ...] = ()
    kernels: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Binary:
    """A compiled program: an ELF image, the symbol of each name expression, the compiler's log."""

    cubin: bytes
    symbols: Mapping[str, str]
    log: str


@dataclass(frozen=True)
class Toolkit:
    """One installation of the CUDA toolkit: its libraries and headers."""

    library: Path
    include: Path


def program(
    source: str | Path,
    *,
    defines: Mapping[str, object] | None = None,
    kernels: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
) -> Program:
    """The program of ``source``, a path or the name of a file in :func:`folder`.

    Values of ``defines`` are converted by ``str()``; True and False become 1 and 0.
    """
    path = Path(source)
    if not path.is_absolute():
        path = folder() / path
    values = sorted((defines or {}).items())
    texts = tuple((name, str(int(v) if isinstance(v, bool) else v)) for name, v in values)
    return Program(path, texts, tuple(kernels), tuple(options))


def folder() -> Path:
    """Where the kernel sources are: beside this file if installed, ``csrc/cuda`` in a checkout."""
    installed = _RUNTIME / "cuda"
    return installed if installed.is_dir() else _RUNTIME.parent / "csrc" / "cuda"


def sources() -> list[Path]:
    """All kernel sources, by name."""
    return sorted(folder().glob("*.cu"))


def why_missing() -> str | None:
    """Why nothing can be compiled here; None when it can."""
    return _load()[1]


def version() -> str:
    """The version of NVRTC, ``"13.0"``. Raises KernelError when it is missing."""
    nvrtc = _nvrtc()
    return ".".join(map(str, _ok(nvrtc.nvrtcVersion())))


def archs() -> tuple[str, ...]:
    """The architectures this NVRTC knows. Raises KernelError when it is missing."""
    return tuple(f"sm_{number}" for number in _ok(_nvrtc().nvrtcGetSupportedArchs()))


def include_folders(program: Program) -> tuple[Path, ...]:
    """Where ``#include`` looks: beside the source, then the toolkit's headers."""
    return program.source.parent, toolkit().include


def flags(program: Program, arch: str) -> tuple[str, ...]:
    """The command line without the include folders, whose names do not affect the result."""
    macros = tuple(f"--define-macro={name}={value}" for name, value in program.defines)
    return (f"--gpu-architecture={arch}", *_LANGUAGE, *macros, *program.options)


def compile(program: Program, arch: str) -> Binary:
    """The machine code of ``program`` for ``arch``, such as ``"sm_90"``; about 0.1 s.

    Raises KernelError if NVRTC is missing, the source has errors (the compiler's whole log is in
    the error's notes), or this NVRTC does not know the architecture; UsageError if ``arch`` is not
    an ``sm_`` name or there is no such source.
    """
    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise UsageError(f"{arch!r} is no architecture", why="machine code is for one: sm_90")
    try:
        text = program.source.read_bytes()
    except OSError as error:
        raise UsageError(f"no kernel source {program.source.name}", why=str(error)) from None
    nvrtc = _nvrtc()
    handle = _ok(nvrtc.nvrtcCreateProgram(text, program.source.name.encode(), 0, None, None))
    try:
        for name in program.kernels:
            _ok(nvrtc.nvrtcAddNameExpression(handle, name.encode()))
        given = [*flags(program, arch), *(f"--include-path={p}" for p in include_folders(program))]
        (code,) = nvrtc.nvrtcCompileProgram(handle, len(given), [o.encode() for o in given])
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, handle)
        said = log.rstrip(b"\0 \n").decode(errors="replace")
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise _failed(program, arch, code.name, said)
        cubin = _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, handle)
        lowered = (_ok(nvrtc.nvrtcGetLoweredName(handle, n.encode())) for n in program.kernels)
        symbols = {n: s.decode() for n, s in zip(program.kernels, lowered, strict=True)}
    finally:
        nvrtc.nvrtcDestroyProgram(handle)
    return Binary(cubin, symbols, said)


def toolkit() -> Toolkit:
    """The toolkit to compile with. Raises KernelError if there is none."""
    found = next(_toolkits(), None)
    if found is None:
        raise KernelError("no CUDA compiler", why=_NO_TOOLKIT, tries=(_INSTALL,))
    return found


# ---------------------------------------------------------------- finding the library

_NO_TOOLKIT = "no libnvrtc with its headers in the installed packages, CUDA_HOME or beside nvcc"


def _toolkits() -> Iterator[Toolkit]:
    for root in _roots():
        for place in ("lib", "lib64"):
            libraries = sorted((root / place).glob("libnvrtc.so.1?"))
            if libraries and (root / "include" / "cuda_fp16.h").exists():
                yield Toolkit(libraries[-1], root / "include")


def _roots() -> Iterator[Path]:
    packages = importlib.util.find_spec("nvidia")
    for place in packages.submodule_search_locations or () if packages else ():
        yield Path(place) / "cu13"
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if named := os.environ.get(variable):
            yield Path(named)
    if nvcc := shutil.which("nvcc"):
        yield Path(nvcc).resolve().parent.parent
    yield _DEFAULT


@cache
def _load() -> tuple[Any, str | None]:
    """The Python binding, or why there is none. The library is opened first, so that the binding
    uses this one.
    """
    found = next(_toolkits(), None)
    if found is None:
        return None, _NO_TOOLKIT
    try:
        for helper in sorted(found.library.parent.glob("libnvrtc-builtins.so.1?.*")):
            ctypes.CDLL(str(helper))
        ctypes.CDLL(str(found.library))
        from cuda.bindings import nvrtc

        _ok(nvrtc.nvrtcVersion())
    except (ImportError, OSError, RuntimeError) as error:
        return None, f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return nvrtc, None


def _nvrtc() -> Any:
    nvrtc, why = _load()
    if why is not None:
        raise KernelError("no CUDA compiler", why=why, tries=(_INSTALL,))
    return nvrtc


# ---------------------------------------------------------------- talking to it


def _ok(answer: Any) -> Any:
    """The values that come with the result code; one alone as it is. Raises KernelError unless the
    code is success.
    """
    # One function of the binding returns a plain 0 instead of a result code.
    code, *values = answer
    if int(code):
        raise KernelError("NVRTC refused a call", why=getattr(code, "name", str(code)))
    return values[0] if len(values) == 1 else tuple(values)


def _read(size: Any, fetch: Any, handle: Any) -> bytes:
    """What ``fetch`` writes. The binding writes into the bytes object that it is given, so nobody
    else may hold that.
    """
    buffer = bytes(bytearray(_ok(size(handle)) + 1))
    _ok(fetch(handle, buffer))
    return buffer[:-1]


def _failed(program: Program, arch: str, code: str, log: str) -> KernelError:
    """The error for a failed compilation: the first message, and the whole log in the notes."""
    first = re.search(r"^(.+?)\((\d+)\): (?:catastrophic )?error:? *(.*)$", log, re.M)
    count = len(re.findall(r"\berror\b *:", log))
    if first:
        # NVRTC reports a wrong name expression as an error in a file of its own.
        where = "kernels" if first[1] == "__nv_name_map" else f"{Path(first[1]).name}:{first[2]}"
        why = first[3].strip()
    else:
        said = (line for line in log.splitlines() if "error" in line)
        where, why = program.source.name, next(said, code).strip()
    if code == "NVRTC_ERROR_INVALID_OPTION" and arch not in archs():
        why = f"NVRTC {version()} knows {archs()[0]} to {archs()[-1]}, not {arch}"
    if count > 1:
        why += f" (the first of {count} errors)"
    given = " ".join(f"-D{name}={value}" for name, value in program.defines)
    error = KernelError(
        f"{program.source.name} does not compile for {arch}" + (f" with {given}" if given else ""),
        where=where,
        why=why,
        tries=("the log below", "`recast env` for the versions"),
    )
    if log:
        error.add_note(log)
    return error
