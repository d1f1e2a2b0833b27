"""Loads or builds the C++ kernels, or says why there are none. Importing it never fails.

An installed package contains the extension. In a checkout the sources are compiled on first use
into a cache folder, keyed by sources, compiler and interpreter; a file lock keeps processes from
doing it twice, and a rename makes the result appear all at once. Objects are kept too: after a
change of one source only that one is compiled again. Environment:

=================  ================================================================
RECAST_KERNELS     ``torch`` to do without the extension; ``portable``, ``avx2`` or
                  ``avx512`` to restrict it to one instruction set
RECAST_CACHE       where to build; default ``$XDG_CACHE_HOME/recast`` or ``~/.cache/recast``
RECAST_SANITIZER   ``address`` or ``thread``: a build of the checkout with that sanitizer, whose
                  library must be loaded before Python (``make sanitize`` does it)
CXX                the compiler; default ``g++``, then ``c++``
=================  ================================================================
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from recast.runtime import build_cache
from recast.runtime.units import digest, text, units

ISAS = ("avx512", "avx2", "portable")
WAYS = ("cublaslt", "plain")  # of products on a GPU
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden")
# Without the checks for null, which cost half of the build and find what the first also finds.
_SANITIZERS = {
    "": (),
    "address": ("-O1", "-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all",
                "-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize=null,vptr"),
    "thread": ("-O1", "-g1", "-fsanitize=thread"),
}  # fmt: skip
_TRIES = 3  # builds of sources that change meanwhile
_SOURCES = Path(__file__).resolve().parent.parent / "csrc"
_log = logging.getLogger("recast")

_loaded: ModuleType | None = None
_why: str | None = None
_tried = False
_torch_only = False
_held: str | None = None
_forced = False
_lock = threading.Lock()


def extension() -> Any:
    """The extension module, built on first use if necessary; None when it is not usable."""
    if not _tried:
        _load()
    return None if _torch_only else _loaded


def why_missing() -> str | None:
    """Why :func:`extension` returns None; None when it does not."""
    if extension() is not None:
        return None
    return "switched off" if _torch_only else _why


def why_not(isa: str) -> Callable[[], str | None]:
    """For :class:`~recast.runtime.op.Kernel`: a function that says why kernels of ``isa`` cannot
    run here.
    """

    def ask() -> str | None:
        module = extension()
        if module is None:
            return why_missing()
        return None if module.has_isa(isa) else f"this processor has no {isa}"

    return ask


@contextlib.contextmanager
def use(kernel: str) -> Iterator[None]:
    """Force all ops to use one kernel: of :data:`ISAS` or :data:`WAYS`, "fused", or "torch".
    "fused" is the kernel of ops that consist of torch calls; other ops are not affected. Raises
    ValueError for one that this machine does not have. Not thread-safe.
    """
    global _torch_only, _held, _forced
    module = extension()
    before = _torch_only, None if module is None else module.isa()
    held, forced = _held, _forced
    try:
        _choose(kernel)
        _forced = True
        yield
    finally:
        _torch_only, _held, _forced = before[0], held, forced
        if before[1] is not None and _loaded is not None:
            _loaded.set_isa(before[1])


def held() -> str | None:
    """What :func:`use` forces, if that is "fused", "torch" or of :data:`WAYS`; None: each op
    chooses.
    """
    return _held


def forced() -> bool:
    """Whether :func:`use` is in force: no op may then leave a small call to torch."""
    return _forced


def _choose(kernel: str) -> None:
    global _torch_only, _held
    if kernel in ("fused", "torch", *WAYS):
        _held, _torch_only = kernel, kernel == "torch"
        return
    if kernel not in ISAS:
        raise ValueError(
            f"unknown kernel {kernel!r}: one of {', '.join((*ISAS, *WAYS, 'fused', 'torch'))}"
        )
    _torch_only = False
    if _loaded is None:
        raise ValueError(f"no {kernel} kernels: {_why}")
    _loaded.set_isa(kernel)


def threads() -> int:
    """How many threads a kernel may use: torch's own number."""
    return torch.get_num_threads()


# ---------------------------------------------------------------- loading and building


def _load() -> None:
    """Fill ``_loaded`` or ``_why``, once: a second thread waits."""
    global _tried
    with _lock:
        if not _tried:
            _find()
            _tried = True


def _find() -> None:
    """Find the extension; whatever goes wrong becomes the reason why there is none."""
    global _loaded, _why
    wanted = os.environ.get("RECAST_KERNELS")
    if wanted and wanted not in ISAS:
        names = ", ".join((*ISAS, "torch"))
        known = wanted == "torch"
        _why = f"RECAST_KERNELS={wanted}" + ("" if known else f": unknown, one of {names}")
        return
    try:
        _loaded = (None if os.environ.get("RECAST_SANITIZER") else _installed()) or _built()
    except Exception as error:
        _why = f"{type(error).__name__}: {error}" if not isinstance(error, _Missing) else str(error)
        return
    if wanted:
        try:
            _choose(wanted)
        except ValueError as error:
            _loaded, _why = None, f"RECAST_KERNELS: {error}"


class _Missing(Exception):
    """The extension cannot be had, for the reason in the message."""


def _installed() -> ModuleType | None:
    name = "recast.runtime._C"
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def _built() -> ModuleType:
    ahead = made_ahead()
    if ahead.exists():
        try:
            return _opened(ahead)
        except ImportError as error:  # such as of a newer C++ library than there is here
            _log.warning("the CPU kernels that were compiled ahead cannot be loaded: %s", error)
    return _opened(library())


def _opened(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("recast.runtime._C", path)
    if spec is None or spec.loader is None:
        raise _Missing(f"{path} is no Python module")
    build_cache.used(path.parent)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["recast.runtime._C"] = module
    return module


def made_ahead(suffix: str | None = None) -> Path:
    """Where an extension of these sources lies if another machine has compiled it for this one, or
    for Pythons whose extensions end in ``suffix``. No compiler is needed to find it.
    """
    suffix = suffix or str(sysconfig.get_config_var("EXT_SUFFIX"))
    key = digest("\0".join((suffix, *_flags(), *units(_SOURCES).values())))
    return build_cache.folder() / f"ahead-{key}" / f"_C{suffix}"


def compile_ahead(library: Path, include: Path) -> None:
    """Compile the extension for a Python with headers in ``include``, at :func:`made_ahead`."""
    with build_cache.alone(library.parent):
        if not library.exists():
            _build(_compiler(), library, include)


def library() -> Path:
    """The extension of these sources, compiled on first use."""
    if not any(_SOURCES.glob("*.cpp")):
        raise _Missing("the package was installed without it (no C++ compiler at that time)")
    compiler = _compiler()
    for _ in range(_TRIES):
        folder = build_cache.folder() / _key(compiler)
        path = folder / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
        try:
            if path.exists():
                return path
            if _build_once(compiler, path):
                build_cache.prune()
                return path
        except OSError as error:
            why = f"they cannot be built in {folder}: {error.strerror or error}"
            raise _Missing(f"{why}; RECAST_CACHE names another folder") from error
    raise _Missing(f"their sources changed while they were compiled, {_TRIES} times")


def _build_once(compiler: str, library: Path) -> bool:
    """Build, or wait for the process that does; returns whether it is there now.

    It is not if the sources changed while they were compiled: the result would not match the key of
    the folder.
    """
    with build_cache.alone(library.parent):
        if not library.exists():
            _build(compiler, library)
        return library.exists()


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in (named,) if named else ("g++", "c++"):
        found = shutil.which(name)
        if found:
            return found
    raise _Missing(f"no C++ compiler ({named or 'g++, c++'}) on PATH to build it with")


def _key(compiler: str) -> str:
    """A digest of all that the result depends on."""
    return digest("\0".join((_options_key(compiler), *units(_SOURCES).values())))


def _options_key(compiler: str) -> str:
    """A digest of what all objects depend on besides their sources."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60)
    return digest("\0".join((version.stdout, sys.version, *_flags(), _headers())))


def _flags() -> tuple[str, ...]:
    named = os.environ.get("RECAST_SANITIZER", "")
    if named not in _SANITIZERS:
        raise _Missing(f"RECAST_SANITIZER={named}: it is address or thread")
    return (*_FLAGS, *_SANITIZERS[named])


def _headers() -> str:
    """Where pybind11's headers are: torch brings them."""
    folder = Path(torch.__file__).parent / "include"
    if not (folder / "pybind11" / "pybind11.h").exists():
        raise _Missing("torch was installed without pybind11's headers")
    return str(folder)


def _build(compiler: str, library: Path, python: Path | None = None) -> None:
    """``python``: the folder of the headers of another Python than this."""
    # A warning, since for minutes nothing seems to happen; an installed package never comes here.
    _log.warning("recast compiles its CPU kernels: once, for minutes, into %s", library.parent)
    includes = [f"-I{_headers()}", f"-I{python or sysconfig.get_paths()['include']}"]
    # Threads come from the OpenMP runtime that torch has loaded; linking one would add a second.
    gnu = b"clang" not in subprocess.run([compiler, "--version"], capture_output=True).stdout
    flags = [*_flags(), *(["-fopenmp"] if gnu else ["-Wno-unknown-pragmas"]), *includes]
    key = _options_key(compiler)
    key = key if python is None else digest(f"{key}\0{python}")
    objects = build_cache.folder() / f"objects-{key}"
    with build_cache.alone(objects), tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        command = [compiler, *flags, "-c"]
        wanted = units(_SOURCES)
        with ThreadPoolExecutor(max(1, min(len(wanted), os.cpu_count() or 1))) as pool:
            made = list(
                pool.map(
                    lambda unit: _object(command, unit, wanted[unit], objects, Path(scratch)),
                    wanted,
                )
            )
        whole = Path(scratch) / library.name
        _compile([compiler, "-shared", *map(str, made), "-o", str(whole)])
        ahead = made_ahead(library.name.removeprefix("_C"))
        if _key(compiler) == library.parent.name or library == ahead:
            whole.replace(library)
            for old in {*objects.glob("*.o")} - {*made}:
                old.unlink()


def _object(command: list[str], unit: Path, of: str, kept: Path, scratch: Path) -> Path:
    """The object of a source whose text has the digest `of`: the kept one, or compiled anew."""
    name = f"{unit.stem}-{of}.o"
    if (kept / name).exists():
        return kept / name
    made = scratch / name
    _compile([*command, str(unit), "-o", str(made)])
    # Not kept if the source changed meanwhile.
    return made.replace(kept / name) if digest(text(unit)) == of else made


def _compile(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.splitlines()
        silent = f"exit code {done.returncode}, and no message"
        first = next((line for line in lines if "error" in line), lines[0] if lines else silent)
        raise _Missing(f"{Path(command[0]).name} failed: {first.strip()}")
