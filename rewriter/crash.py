"""Reproducers: one folder with what a maintainer needs when the fault is Recast's own."""

from __future__ import annotations

import argparse
import hashlib
import shlex
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from recast.rewriter.capture.capture_model import capture
from recast.rewriter.cli.terminal import quiet_stdout

from . import api
from .cli import spec
from .report import dump


def write(
    error: BaseException,
    args: argparse.Namespace,
    arguments: list[str],
    versions: Callable[[], str],
) -> Path:
    """Write the folder (in the current one, else among temporary files) and return its path."""
    trace = "".join(traceback.format_exception(error))
    told = f"{shlex.join(arguments)}\n{type(error).__name__}: {error}"
    folder = _folder(f"recast-reproducer-{hashlib.sha256(told.encode()).hexdigest()[:8]}")
    (folder / "error.txt").write_text(trace, encoding="utf-8")
    (folder / "command.txt").write_text(f"recast {shlex.join(arguments)}\n", encoding="utf-8")
    for name, make in (("versions.txt", versions), ("pipeline.txt", lambda: _pipeline(args)),
                       ("graph-before.txt", lambda: _graph(args))):  # fmt: skip
        (folder / name).write_text(_told(make), encoding="utf-8")
    return folder


def place(error: BaseException) -> str:
    """The line of Recast at which ``error`` was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    here = Path(__file__).resolve().parent.parent
    ours = [f for f in frames if here in Path(f.filename).resolve().parents] or frames
    last = ours[-1]
    return f"{Path(last.filename).parent.name}/{Path(last.filename).name}:{last.lineno}"


def _folder(name: str) -> Path:
    folder = Path(name)
    try:
        folder.mkdir(exist_ok=True)
    except OSError:  # a folder one may not write to
        folder = Path(tempfile.mkdtemp(prefix="recast-"))
    return folder


def _told(make: Callable[[], str]) -> str:
    """One file of the reproducer; a second fault while writing it must not hide the first."""
    try:
        return make().rstrip("\n") + "\n"
    except Exception as error:
        return f"not available: {type(error).__name__}: {error}\n"


def _pipeline(args: argparse.Namespace) -> str:
    text = getattr(args, "passes", None)
    without = ",".join(getattr(args, "without", []))
    names = ",".join(p.name for p in api.pipeline_of(text))
    return f"passes  {names}\nwithout {without or 'none'}"


def _graph(args: argparse.Namespace) -> str:
    with quiet_stdout():
        subject = spec.load(args.spec, args.arg)
        captured = capture(subject.model, subject.example)
    return "\n".join(
        f"# {mode}\n{dump.text(graph, captured.root, captured.name)}"
        for mode, graph in captured.graphs.items()
    )
