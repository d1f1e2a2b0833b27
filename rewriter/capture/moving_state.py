"""What a trace took from Python, and forward itself changes: a number that a helper function counts
up, in a list of its own module or of a closure, or in the environment.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from recast.rewriter.compiled.copies import modules_by_path
from recast.rewriter.compiled.external_state import checks

from .trace import Traced


def moved(root: nn.Module, traced: Iterable[Traced]) -> str | None:
    """The name of something that is no longer as the traces took it, to be asked once the plain
    forward has run again; None: all is. A graph is run wherever it is as it was, and does not move
    it on.
    """
    modules = modules_by_path(root)
    for case in traced:
        for question, of, held, label in checks(case.taken, modules):
            if not held.same(question(*of)):
                return label
    return None
