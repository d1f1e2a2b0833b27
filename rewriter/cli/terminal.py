"""stdout and stderr of a command: the result on one, progress and warnings on the other."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any, TextIO

from recast.errors import UsageError
from recast.rewriter.report.wrap import wrapped

from .native_stdout import native_stdout_to_stderr

_RAISE = ("strict", "surrogateescape")  # the second is Python's choice where LC_ALL is C


def emit(args: argparse.Namespace, text: str, data: Any) -> None:
    """Write the result: ``text``, or ``data`` with ``--json``. Raises UsageError if stdout cannot
    be written, as on a full disk.
    """
    if args.json:
        codes = not (sys.stdout.encoding or "utf-8").lower().startswith("utf")  # not "?" in data
        text = json.dumps(_finite(data), indent=2, ensure_ascii=codes, default=str, allow_nan=False)
    elif (width := columns()) is not None:
        text = wrapped(text, width)
    try:
        sys.stdout.write(text.rstrip("\n") + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has stopped reading, which is no error
        raise
    except OSError as error:
        lead_nowhere(sys.stdout)
        why = error.strerror or str(error)
        raise UsageError("output: cannot write to stdout", why=why) from error


def columns() -> int | None:
    """The width of the terminal that stdout is; None if it is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def complain(text: str) -> None:
    """Write ``text`` to stderr, in lines that fit if it is a terminal. If nobody reads it any more,
    or its disk is full, it is lost; the answer and its exit code are not.
    """
    if sys.stderr.isatty():
        text = wrapped(text, shutil.get_terminal_size().columns)
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except OSError:
        lead_nowhere(sys.stderr)


def _finite(data: Any) -> Any:
    """``data`` with null for NaN and infinity, which JSON cannot write."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {k: _finite(v) for k, v in data.items()}
    return [_finite(v) for v in data] if isinstance(data, (list, tuple)) else data


def lead_nowhere(stream: TextIO) -> None:
    """Drop what ``stream`` still buffers, which Python would try to write once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def open_streams() -> Iterator[None]:
    """Make stdout and stderr accept whatever is written. One that the caller closed (``>&-``, None
    in Python) discards it, and a character that the locale lacks, such as an arrow in Latin-1, is
    written as a question mark.
    """
    with ExitStack() as stack:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:
                nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                stack.callback(setattr, sys, name, None)
                setattr(sys, name, nowhere)
            elif isinstance(stream, io.TextIOWrapper) and stream.errors in _RAISE:
                stack.callback(stream.reconfigure, errors=stream.errors)
                stream.reconfigure(errors="replace")
        yield


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """Send what the user's code prints to stderr, so that stdout holds only the result."""
    with native_stdout_to_stderr(sys.stdout), redirect_stdout(sys.stderr):
        yield


@contextmanager
def busy(args: argparse.Namespace, what: str) -> Iterator[None]:
    """Show a spinner on stderr during long work; nothing if stderr is not a terminal."""
    if args.quiet or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


@contextmanager
def counting(
    args: argparse.Namespace, total: int, what: str = "timing"
) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, where ``progress(k)`` says that k rounds are done."""
    if args.quiet or not sys.stderr.isatty():
        yield lambda k: None
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    # drawn only between rounds: a drawing thread would be timed too
    with Progress(console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(what, total=total)
        yield lambda k: bar.update(task, completed=k, refresh=True)


@contextmanager
def plain_warnings(args: argparse.Namespace) -> Iterator[None]:
    """Warnings as one line each on stderr; none with ``-q``."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if not args.quiet:
            text = str(message).replace("\n", "\n  ")
            complain(f"warning: {text}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
