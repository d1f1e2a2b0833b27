"""Whether the process of another rank on this machine is still alive.

This is known at once, while a missing heartbeat takes seconds to notice. A launcher may end all
ranks as soon as one has gone (``torchrun`` does so within a tenth of a second), and the error has
to be reported before that.
"""

from __future__ import annotations

import os
from pathlib import Path

_STATE, _BEGAN = 0, 19  # fields of /proc/PID/stat after the program's name


def here() -> str:
    """An identifier of this process for others on its machine; "" if the system has none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbers = os.readlink("/proc/self/ns/pid")  # a container has its own process ids
    except OSError:
        return ""
    found = _stat(os.getpid())
    return "" if found is None else f"{boot} {numbers}|{os.getpid()}|{found[1]}"


def gone(process: str) -> bool:
    """Whether ``process``, an identifier from :func:`here`, has ended; False on another machine."""
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
    return found is not None and (found[0] in "ZX" or found[1] != began)  # process ids are reused


def _stat(pid: int) -> tuple[str, str] | None:
    """The state (a letter) and start time of process ``pid``; None if it is not there."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (fields[_STATE], fields[_BEGAN]) if len(fields) > _BEGAN else None
