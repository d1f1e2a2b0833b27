"""Leads what native code and child processes write to file descriptor 1 to stderr, since our stdout
holds the result.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def native_stdout_to_stderr(stdout: TextIO) -> Iterator[None]:
    """Write to stderr what is written past Python, or by ``stdout``, which is ours, inside it."""
    stdout.flush()
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # the caller has closed one of them
        yield
        return
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what printf of C still holds
        stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
