"""Whether the process of another rank, on this machine, is there still.

It is known at once, where a sign of life takes seconds not to come. Whoever starts the ranks may
end them all as soon as one has gone (``torchrun`` does so within a tenth of a second), and what is
to be said of it has to be said before.
"""

from __future__ import annotations

import os
from pathlib import Path

_STATE, _BEGAN = 0, 19  # in /proc/PID/stat, behind the name of the program


def here() -> str:
    """Who this process is, to others of its machine; "" where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbers = os.readlink("/proc/self/ns/pid")  # of a container: its numbers are its own
    except OSError:
        return ""
    found = _stat(os.getpid())
    return "" if found is None else f"{boot} {numbers}|{os.getpid()}|{found[1]}"


def gone(process: str) -> bool:
    """Whether ``process``, of which :func:`here` said who it is, has ended; False of another
    machine.
    """
    where, _, who = process.partition("|")
    if not where or where != here().partition("|")[0]:
        return False
    pid, _, began = who.partition("|")
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    found = _stat(int(pid))
    return found is not None and (found[0] in "ZX" or found[1] != began)  # its number may be reused


def _stat(pid: int) -> tuple[str, str] | None:
    """Its state, a letter, and when it began."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (fields[_STATE], fields[_BEGAN]) if len(fields) > _BEGAN else None
