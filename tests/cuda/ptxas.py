"""What kernels are compiled for, and what ptxas tells of one: registers, local memory, spills."""

from __future__ import annotations

import re
from dataclasses import dataclass

ARCHS = ("sm_80", "sm_90", "sm_100")  # every kernel source must compile to each
VERBOSE = "--ptxas-options=-v"


@dataclass(frozen=True)
class Usage:
    """Of one thread: registers; bytes of stack, of spill stores and of spill loads."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


def usage(log: str) -> dict[str, Usage]:
    """By kernel symbol, from a log of NVRTC (or nvcc) under :data:`VERBOSE`."""
    found = {}
    for part in log.split("Compiling entry function ")[1:]:
        name = re.match(r"'([^']+)'", part)
        sizes = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part
        )
        used = re.search(r"Used (\d+) registers", part)
        assert name and sizes and used, part
        found[name[1]] = Usage(int(used[1]), *map(int, sizes.groups()))
    return found
