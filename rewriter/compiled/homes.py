"""Whose global names code sees: those of the Python module that it is of, by its name.

A script that another program runs has globals of its own under the name ``__main__``, which that
program has already: ``python -m cProfile train.py``, ``runpy.run_path``, ``exec``. Its home has
a number behind the name. The copy of a module's globals that a trace makes has the module's home.
"""

from __future__ import annotations

import sys
from typing import Any

_SCRIPTS: dict[str, dict[str, Any]] = {}
_HOME = "__home_of_the_original__"  # in a copy


def home_of(scope: dict[str, Any]) -> str:
    """The name by which :func:`scope_of` finds these globals."""
    if _HOME in scope:
        return str(scope[_HOME])
    name = str(scope.get("__name__"))
    module = sys.modules.get(name)
    own = "__file__" in scope if module is None else vars(module) is not scope
    if not own:  # or of what a library makes as it runs, as the methods of a namedtuple
        return name
    for home, known in _SCRIPTS.items():
        if known is scope:
            return home
    home = f"{name}#{len(_SCRIPTS)}"
    _SCRIPTS[home] = scope
    return home


def copied(scope: dict[str, Any]) -> dict[str, Any]:
    """A copy of these globals; what code reads in it is still looked for in the original."""
    return {**scope, _HOME: home_of(scope)}


def scope_of(home: str) -> dict[str, Any] | None:
    """The globals of ``home``; None where no such module is loaded. In another process than that of
    a script, those of the module of its name.
    """
    if home in _SCRIPTS:
        return _SCRIPTS[home]
    module = sys.modules.get(named(home))
    return None if module is None else vars(module)


def named(home: str) -> str:
    """The name of the module ``home``, for people."""
    return home.partition("#")[0]
