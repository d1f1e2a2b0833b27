"""Nothing is printed or logged by a forward that is traced: its values are none to show.

The streams and the loggers are the whole process's, so what other threads say passes through.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import frames

_HEARD = frozenset({"logging", "recast", "rewriter", "torch", "traceback", "warnings"})


@contextmanager
def muted() -> Iterator[None]:
    """Drop what this thread prints and logs, but for warnings and what torch says."""
    silent = _Silent()
    known = [*logging.root.manager.loggerDict.values()]
    loggers = [logging.root, *(one for one in known if isinstance(one, logging.Logger))]
    found = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    streams = {name: _Stream(held) for name, held in found.items() if held is not None}
    for logger in loggers:
        logger.filters.insert(0, silent)  # before those of the user, which may read the record
    for name, stream in streams.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(silent)
        for name, stream in streams.items():
            stream.thread = None
            if getattr(sys, name) is stream:  # else another trace, or forward, has put its own
                setattr(sys, name, stream.beneath())


class _Silent(logging.Filter):
    """Drops what the user's code logs in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return threading.get_ident() != self.thread or not frames.is_users(record.pathname)


class _Stream:
    """Drops what the user's code prints in this thread."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.thread: int | None = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> Any:
        if threading.get_ident() == self.thread:
            home = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
            if home not in _HEARD:
                return len(text)
        return self.stream.write(text)

    def beneath(self) -> Any:
        """The stream, without those of other traces that have ended."""
        stream = self.stream
        while isinstance(stream, _Stream) and stream.thread is None:
            stream = stream.stream
        return stream
