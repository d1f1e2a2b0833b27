"""stdout and stderr of a command: the result on one, progress and warnings on the other."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any


def emit(args: argparse.Namespace, text: str, data: Any) -> None:
    """Write the result: ``text``, or ``data`` with ``--json``."""
    if args.json:
        json.dump(data, sys.stdout, indent=2, ensure_ascii=False, default=str)
        sys.stdout.write("\n")
    else:
        sys.stdout.write(text.rstrip("\n") + "\n")


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """What the user's code prints goes to stderr, so that stdout stays the result."""
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def busy(args: argparse.Namespace, what: str) -> Iterator[None]:
    """A spinner on stderr while something takes long; nothing when stderr is no terminal."""
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
    # drawn between rounds only: a thread that draws would be timed too
    with Progress(console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(what, total=total)
        yield lambda k: bar.update(task, completed=k, refresh=True)


@contextmanager
def plain_warnings(args: argparse.Namespace) -> Iterator[None]:
    """Warnings as one line each on stderr; none with ``-q``."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if not args.quiet:
            text = str(message).replace("\n", "\n  ")
            sys.stderr.write(f"warning: {text}\n")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
