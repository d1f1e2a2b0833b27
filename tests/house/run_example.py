"""Runs an example as ``__main__`` of a process forked from one that has imported torch already.

A new interpreter needs seconds to import torch and its compiler, more than most examples take.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import warnings
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

_MODULES = ["torch", "torch._dynamo", "torch.fx", "recast.rewriter.api", __name__]


def run_forked(
    script: Path, arguments: Sequence[str], cwd: Path, ignored: str, timeout: float
) -> tuple[int | None, str]:
    """The exit code, None after ``timeout`` seconds, and what was printed.

    Warnings are errors, but for those whose message begins with ``ignored``.
    """
    context = multiprocessing.get_context("forkserver")
    assert isinstance(context, ForkServerContext)
    context.set_forkserver_preload(_MODULES)
    printed = cwd / "printed.txt"
    process = context.Process(target=_main, args=(script, [*arguments], cwd, printed, ignored))
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        return None, printed.read_text()
    return process.exitcode, printed.read_text()


def _main(script: Path, arguments: list[str], cwd: Path, printed: Path, ignored: str) -> None:
    out = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.chdir(cwd)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ignored)
    runpy.run_path(str(script), run_name="__main__")
