"""Silences libraries that log to file descriptor 2, since our stderr is for people."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_native_stderr() -> Iterator[None]:
    """Drop what native code writes to stderr, but not Python's exceptions and warnings."""
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
