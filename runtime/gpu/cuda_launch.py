"""Launching compiled kernels on a GPU: one contract, ``cuLaunchKernel``'s own.

A launch is (kernel, grid, block, shared bytes, ``void**`` parameters, stream). Modules are loaded
once per device; dynamic shared memory is requested before the first use; a launch goes to torch's
current stream, so it is ordered among torch's own kernels and recorded by ``torch.cuda.graph``.
:func:`warm` does all that a capture must not do: compile, load, look up.

The gate: nothing here calls the driver unless :func:`why_not` returns None. For that, torch must be
built for CUDA, ``libcuda.so.1`` must open, torch must see a device, and NVRTC must be found. A
driver call without that library can make the next one hang.

Tested: the calls and their order, against a stand-in for the driver; on an H200, training steps,
launched one by one and in graphs.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

from recast.errors import KernelError
from recast.runtime.gpu import kernel_cache, nvrtc

Dims = tuple[int, int, int]
Argument = ctypes.c_void_p | ctypes.c_int32 | ctypes.c_int64 | ctypes.c_float | ctypes.c_double
_LEAST = (8, 0)  # compute capability: asynchronous copies, products of bf16 and TF32
_PLAIN_SHARED = 48 << 10  # bytes of shared memory that need no opt-in


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """The address of a tensor, as a kernel takes it; null for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


@dataclass(frozen=True)
class Kernel:
    """A kernel: its program, and its name there, a name expression or an ``extern "C"`` name.

    ``loaded``: by device, what :func:`warm` has loaded. Kept here so that a launch need not hash
    the program, which means its path and all its macros.
    """

    program: nvrtc.Program
    name: str
    loaded: dict[int, _Loaded] = field(default_factory=dict, compare=False, repr=False)


@dataclass
class _Loaded:
    """A kernel on one device."""

    function: Any
    shared: int  # bytes of dynamic shared memory that a launch may use


_modules: dict[tuple[nvrtc.Program, int], tuple[Any, Mapping[str, str]]] = {}  # and symbols
_kernels: dict[tuple[Kernel, int], _Loaded] = {}
_refused: list[Callable[[], object]] = []  # what loads kernels that captures asked for
_lock = threading.RLock()
_thread = threading.local()


@cache
def why_not() -> str | None:
    """Why kernels cannot be launched in this process; None when they can."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not _has_driver():
        return "there is no libcuda.so.1"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return nvrtc.why_missing()


def why_not_on(device: int) -> str | None:
    """Why kernels cannot be launched on CUDA device ``device``; None when they can. Initialises
    CUDA, unlike :func:`why_not`.
    """
    why = why_not()
    if why is None and torch.cuda.get_device_capability(device) < _LEAST:
        why = f"cuda:{device} is {arch(device)}, and the kernels need sm_80 or later"
    return why


def why_not_on_any() -> str | None:
    """Why kernels can be launched on none of the CUDA devices here; None when they can on one.
    Initialises CUDA if :func:`why_not` returns None.
    """
    why = why_not()
    if why is not None:
        return why
    reasons = [why_not_on(device) for device in range(torch.cuda.device_count())]
    return reasons[0] if all(reasons) else None


def arch(device: int) -> str:
    """The architecture of CUDA device ``device``: ``"sm_90"``. Raises KernelError without one."""
    _require()
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def warm(kernel: Kernel, *, shared: int = 0) -> None:
    """Compile, load and look up ``kernel`` for the current device, with room for ``shared`` bytes.

    Needed before a capture, harmless at any other time. Raises KernelError when the kernel does not
    compile or load, has no such name, or the device has less shared memory.
    """
    _require()
    device = torch.cuda.current_device()
    with _lock:
        loaded = _kernels.get((kernel, device))
        if loaded is None or shared > loaded.shared:
            if torch.cuda.is_current_stream_capturing():
                raise refusal(kernel.name, partial(_warm_on, device, kernel, shared))
            with context(device):
                loaded = _load(kernel, device) if loaded is None else loaded
                _make_room(kernel, loaded, shared)
            _kernels[kernel, device] = loaded
        kernel.loaded[device] = loaded


def _warm_on(device: int, kernel: Kernel, shared: int) -> None:
    with on_device(device):
        warm(kernel, shared=shared)


def refusal(name: str, load: Callable[[], object]) -> KernelError:
    """The error to raise when a capture needs a kernel that ``load()`` must load outside of it."""
    _refused.append(load)
    return KernelError(
        f"the kernel {name} is first used inside a graph capture",
        why="compiling and loading cannot be captured",
        tries=("run the step once before the capture",),
    )


def load_refused() -> bool:
    """Load the kernels that captures needed and did not have. Returns whether there were any and
    all could be loaded. No capture may be running.

    A capture may need kernels that the same step has not used outside of it, as its operands may be
    laid out differently: a copy of a slice is read 16 bytes at a time, the slice itself is not.
    """
    loads = [*_refused]
    _refused.clear()
    try:
        for load in loads:
            load()
    except KernelError:  # an unrecorded step does not need it
        return False
    return bool(loads)


def launch(
    kernel: Kernel,
    grid: Dims,
    block: Dims,
    shared: int,
    arguments: Sequence[Argument],
    stream: int | None = None,
) -> None:
    """Run ``kernel`` on the current device, on ``stream``; None: torch's current one.

    ``arguments`` are ctypes values of exactly the parameters' types, pointers as ``c_void_p`` of
    ``tensor.data_ptr()``; the caller keeps the tensors alive and on the current device. An empty
    grid launches nothing. Raises KernelError if the driver refuses; faults inside the kernel show
    up at the next synchronisation, as with torch's own kernels.
    """
    if not kernel.loaded:
        _require()
    if not all(grid):
        return
    device = torch.cuda.current_device()
    loaded = kernel.loaded.get(device)
    if loaded is None or shared > loaded.shared:
        warm(kernel, shared=shared)
        loaded = kernel.loaded[device]
    if stream is None:
        stream = raw_stream(device)
    if not getattr(_thread, "bound", False):
        bind(device)
    # The driver copies the parameters before it returns.
    pointers = _pointers(len(arguments))(*map(ctypes.addressof, arguments))
    where = ctypes.addressof(pointers)
    answer = _driver().cuLaunchKernel(loaded.function, *grid, *block, shared, stream, where, 0)
    if answer[0]:
        _ok(
            answer,
            f"launching {kernel.name} with grid {grid}, block {block}, {shared} bytes shared",
        )


def on_device(device: int) -> contextlib.AbstractContextManager[object]:
    """Makes ``device`` the current one; libraries, events and stream 0 refer to it."""
    return _AS_IT_IS if torch.cuda.current_device() == device else torch.cuda.device(device)


_AS_IT_IS = contextlib.nullcontext()


def raw_stream(device: int) -> int:
    """The address of torch's current stream on ``device``."""
    found: int = _raw(device) if _raw is not None else torch.cuda.current_stream(device).cuda_stream
    return found


# Inductor gets the stream from here: it takes a tenth of the time of making a Stream.
_raw: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


@cache
def _pointers(count: int) -> Any:
    """The type of an array of pointers; cached, as ctypes is slow to find it."""
    return ctypes.c_void_p * count


def facts() -> dict[str, Any]:
    """For ``recast env``: toolkit, driver, architectures, cache, and why it cannot be used."""
    missing, why = nvrtc.why_missing(), why_not()
    number, archs = 0, set()
    if why is None:
        try:
            number = _ok(_driver().cuDriverGetVersion(), "asking for the version")
            archs = {arch(device) for device in range(torch.cuda.device_count())}
            why = why_not_on_any()
        except KernelError as error:
            why = f"{error.what}: {error.why}"
    return {
        "usable": why is None,
        "why": why,
        "nvrtc": nvrtc.version() if missing is None else None,
        "nvrtc_why": missing,
        "driver": f"{number // 1000}.{number % 1000 // 10}" if number else None,
        "archs": sorted(archs),
        "cache": kernel_cache.facts(),
    }


# ---------------------------------------------------------------- the driver


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _require() -> None:
    why = why_not()
    if why is not None:
        raise KernelError("no CUDA kernels here", why=why, tries=("`recast env`",))


@cache
def _driver() -> Any:
    """The Python binding of the driver. Raises KernelError if the gate is closed."""
    _require()
    from cuda.bindings import driver

    return driver


def call(name: str, doing: str, *arguments: Any) -> Any:
    """The result of the driver's function ``name``. Raises KernelError, which names the error."""
    return _ok(getattr(_driver(), name)(*arguments), doing)


def _ok(answer: tuple[Any, ...], doing: str) -> Any:
    """The value of a driver call. Raises KernelError with the driver's name for the error."""
    code, *values = answer
    if int(code):
        raise KernelError(
            f"the CUDA driver failed {doing}",
            why=getattr(code, "name", str(code)),
            tries=("`recast env` for the versions",),
        )
    return values[0] if values else None


@cache
def _primary(device: int) -> Any:
    """The context that torch uses on ``device``; kept for the life of the process."""
    torch.cuda.init()
    handle = _ok(_driver().cuDeviceGet(device), f"finding device {device}")
    return _ok(_driver().cuDevicePrimaryCtxRetain(handle), f"taking the context of {device}")


@contextlib.contextmanager
def context(device: int) -> Iterator[None]:
    """Makes the context that torch uses on ``device`` the current one, in whatever thread."""
    _ok(_driver().cuCtxPushCurrent(_primary(device)), "entering the context")
    try:
        yield
    finally:
        _ok(_driver().cuCtxPopCurrent(), "leaving the context")


def bind(device: int) -> None:
    """Give a thread without a context, such as autograd's, the one that torch uses on ``device``,
    the current device. Without one, the driver refuses events and streams too.
    """
    if not getattr(_thread, "bound", False):
        if not int(_ok(_driver().cuCtxGetCurrent(), "asking for the context")):
            _ok(_driver().cuCtxSetCurrent(_primary(device)), "entering the context")
        _thread.bound = True


def _load(kernel: Kernel, device: int) -> _Loaded:
    """Load the kernel's module (from this process, the disk or the compiler), then the function."""
    program = kernel.program
    if (program, device) not in _modules:
        made = kernel_cache.binary(program, arch(device))
        doing = f"loading {program.source.name} for {arch(device)}"
        module = _ok(_driver().cuModuleLoadData(made.cubin), doing)
        _modules[program, device] = module, made.symbols
    module, symbols = _modules[program, device]
    symbol = symbols.get(kernel.name, kernel.name)
    doing = f"looking up {kernel.name} in {program.source.name}"
    function = _ok(_driver().cuModuleGetFunction(module, symbol.encode()), doing)
    _ok(_driver().cuFuncLoad(function), f"loading {kernel.name}")
    # A kernel's static shared memory counts towards what needs no opt-in.
    what = _driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    own = _ok(_driver().cuFuncGetAttribute(what, function), f"measuring {kernel.name}")
    return _Loaded(function, _PLAIN_SHARED - own)


def _make_room(kernel: Kernel, loaded: _Loaded, shared: int) -> None:
    if shared > loaded.shared:
        what = _driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        doing = f"asking for {shared} bytes of shared memory for {kernel.name}"
        _ok(_driver().cuFuncSetAttribute(loaded.function, what, shared), doing)
        loaded.shared = shared
