"""A profiler of the user's, which makes way for ours while forward is traced.

A thread has one profile function. What forward reads of Python is seen by ours alone, and is not
asked again at later calls if it is not seen.
"""

from __future__ import annotations

import sys
from _lsprof import Profiler  # of cProfile, which is another module under python -m cProfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType


@contextmanager
def aside(refuse: Callable[[str], None]) -> Iterator[None]:
    """While it runs, no profile function is set: or ``refuse`` is called, with the reason.

    For cProfile the functions that are running end here: it knows no pause.
    """
    theirs: object = sys.getprofile()
    if isinstance(theirs, Profiler):
        theirs.disable()
    elif theirs is not None and not isinstance(theirs, (FunctionType, MethodType)):
        name = f"{type(theirs).__module__}.{type(theirs).__qualname__}"
        refuse(f"a profiler that cannot be paused runs, {name}: what forward reads is not seen")
    sys.setprofile(None)
    try:
        yield
    finally:
        if isinstance(theirs, Profiler):
            theirs.enable()
        else:
            sys.setprofile(theirs)  # type: ignore[arg-type]
