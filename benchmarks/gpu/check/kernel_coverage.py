"""Which kernels ``csrc/cuda`` has, and which a process has used: a check that never launches a
kernel says nothing about it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from recast.runtime.gpu import cuda_launch, gpu, nvrtc

# A kernel says its name to the emulator by this macro, or by one that ends in it.
_NAMED = re.compile(r"^\s*(RECAST_[A-Z]+)\((\w+)[,)]", re.M)
_OF_MACROS = re.compile(
    r"#define (RECAST_[A-Z]+)\(name\b(?:[^\n]*\\\n)*[^\n]*RECAST_KERNEL\(name\)"
)


def all_kernels() -> dict[str, str]:
    """The file of every kernel, by its name."""
    found: dict[str, str] = {}
    for path in nvrtc.sources():
        text = path.read_text()
        makers = {"RECAST_KERNEL", *_OF_MACROS.findall(text)}
        named = (name for maker, name in _NAMED.findall(text) if maker in makers)
        found |= {name: path.name for name in named if name != "name"}
    return found


def launched() -> set[str]:
    """Names of the kernels that this process has launched so far."""
    emulated = getattr(gpu._emulated, "launched", ())
    return {kernel.name for kernel, _ in cuda_launch._kernels} | set(emulated)


def never_launched(seen: Iterable[str]) -> list[str]:
    """``file: kernels`` of those that are not in ``seen``."""
    files: dict[str, list[str]] = {}
    known = set(seen)
    for name, file in all_kernels().items():
        if name not in known:
            files.setdefault(file, []).append(name)
    return [f"{file}: {', '.join(sorted(names))}" for file, names in sorted(files.items())]
