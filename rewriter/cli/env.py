"""``recast env``: versions, machine, and which kernels are usable here and why others are not."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch

_ISA = ("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl",
        "avx512_bf16", "amx_bf16")  # fmt: skip
_LIBRARIES = ("torch", "numpy", "rich", "jinja2", "pygraphviz", "cuda-bindings")
_SETTINGS = ("RECAST_KERNELS", "RECAST_CHECKED")  # RECAST_CACHE is shown in the cache's own line


class HasKernels(Protocol):
    """What this page needs to know of an op."""

    def usable(self) -> list[tuple[str, bool, str]]: ...


def collect(
    ops: Mapping[str, HasKernels],
    cuda: Mapping[str, Any] | None = None,
    builds: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything a bug report needs; no names of users, hosts or folders.

    ``cuda`` is what the runtime says about its CUDA compiler, driver and kernel cache, ``builds``
    about the folder of compiled C++.
    """
    return {
        "recast": _version("torch-recast"),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.machine()}",
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "set": {name: os.environ[name] for name in _SETTINGS if os.environ.get(name)},
        "cpu": {
            "name": _cpu_name(),
            "cores": len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count(),
            "threads": torch.get_num_threads(),
            "isa": _isa(),
        },
        "gpu": gpu(),
        "cuda": dict(cuda) if cuda is not None else None,
        "builds": dict(builds) if builds is not None else None,
        "kernels": {
            name: [{"kernel": k, "usable": ok, "why": why} for k, ok, why in op.usable()]
            for name, op in sorted(ops.items())
        },
    }


def gpu() -> str:
    """What torch says about CUDA; the driver is only asked if its library exists."""
    if torch.version.cuda is None:
        return "none: this torch is built without CUDA"
    if not _has_driver():
        return f"none: torch is built for CUDA {torch.version.cuda}, but there is no libcuda.so.1"
    if not torch.cuda.is_available():
        return f"none: torch is built for CUDA {torch.version.cuda} and sees no device"
    names = sorted({torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())})
    return f"{torch.cuda.device_count()} × {', '.join(names)} (CUDA {torch.version.cuda})"


def machine() -> str:
    """One line for benchmarks: CPU, threads, torch, Python."""
    return (
        f"{_cpu_name()}, {_threads(torch.get_num_threads())}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, recast {_version('torch-recast')}"
    )


def _threads(number: int) -> str:
    return f"{number} thread" + ("" if number == 1 else "s")


def text(found: Mapping[str, Any]) -> str:
    """The page as text."""
    cpu = found["cpu"]
    lines = [
        f"recast {found['recast']}, {found['python']}, {found['system']}",
        "  " + ", ".join(f"{k} {v}" for k, v in found["libraries"].items()),
        f"  cpu   {cpu['name']}, {cpu['cores']} cores, {_threads(cpu['threads'])}",
        f"  isa   {' '.join(cpu['isa'])}",
        *[f"  set   {name}={value}" for name, value in found["set"].items()],
        f"  gpu   {found['gpu']}",
        *_cuda_lines(found["cuda"]),
        *_build_lines(found["builds"]),
        "kernels: usable here or not, and for what",
    ]
    without_gpu = found["gpu"].startswith("none") and found["cuda"] is not None
    for op, kernels in found["kernels"].items():
        rows = kernels or [{"kernel": "reference", "usable": True, "why": "plain torch"}]
        lines.append(f"  {op}")
        for names, usable, why in _alike(rows):
            if without_gpu and names.startswith("cuda/"):
                continue  # why is told once, in the lines of gpu and cuda
            lines.append(f"    {'yes' if usable else 'no':<3}  {names:<24}  {why}".rstrip())
    return "\n".join(lines)


def _alike(kernels: Iterable[Mapping[str, Any]]) -> list[tuple[str, bool, str]]:
    """Kernels of one device that are usable in the same cases share a row, as those of all
    instruction sets do: ``cpu/avx512,avx2,portable``.
    """
    rows: list[tuple[str, bool, str]] = []
    for k in kernels:
        device, _, name = k["kernel"].partition("/")
        names, *same = rows[-1] if rows else ("", False, "")
        if names.startswith(f"{device}/") and same == [k["usable"], k["why"]]:
            rows[-1] = (f"{names},{name}", k["usable"], k["why"])
        else:
            rows.append((k["kernel"], k["usable"], k["why"]))
    return rows


def _cuda_lines(cuda: Mapping[str, Any] | None) -> list[str]:
    if cuda is None:
        return []
    kept = cuda["cache"]
    compiler = f"NVRTC {cuda['nvrtc']}" if cuda["nvrtc"] else f"no NVRTC: {cuda['nvrtc_why']}"
    if cuda["usable"]:
        state = f"usable, driver {cuda['driver']}, {' '.join(cuda['archs'])}"
    else:
        state = f"not usable: {cuda['why']}"
    return [
        f"  cuda  {state}; {compiler}",
        f"  cache {kept['folder']}, {kept['entries']} compiled kernels, {_size(kept)}",
    ]


def _build_lines(kept: Mapping[str, Any] | None) -> list[str]:
    return [] if kept is None else [f"  cache {kept['folder']}, compiled C++, {_size(kept)}"]


def _size(kept: Mapping[str, Any]) -> str:
    return f"{kept['bytes'] / 1e6:.1f} of {kept['limit'] / 1e6:.0f} MB"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        loaded = sys.modules.get("recast") if name == "torch-recast" else None
        return str(getattr(loaded, "__version__", "not installed"))


def _cpu_name() -> str:
    for line in _cpuinfo():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model Name", "CPU part"):
            return " ".join(value.split())
    return platform.processor() or platform.machine()


def _isa() -> list[str]:
    for line in _cpuinfo():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags = set(value.split())
            return [f for f in (*_ISA, "asimd", "sve", "bf16") if f in flags]
    return [torch.backends.cpu.get_cpu_capability().lower()]


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def _has_driver() -> bool:
    """Whether the dynamic linker finds libcuda.so.1: looked up by name, never loaded."""
    folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), "/usr/lib/x86_64-linux-gnu",
               "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/cuda/compat",
               "/usr/lib/wsl/lib"]  # fmt: skip
    if any(folder and Path(folder, "libcuda.so.1").exists() for folder in folders):
        return True
    try:
        return b"libcuda.so.1" in Path("/etc/ld.so.cache").read_bytes()
    except OSError:
        return False
