"""Calls that were examined before: inputs of a form that a graph took, and modules as they were.

Almost every call is one. To examine it nevertheless (the signature, the assumptions) takes 2 us in
a loop, but 10 us between other work, when the processor has to fetch all that code again: half the
time of a small model. The runtime's extension recognizes a known call in one step. Any other call
is examined, so without the extension all are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from .assumptions import Assumptions
from .entries import ABSENT
from .external_state import Check
from .signature import Signature
from .snapshots import Settled
from .value_checks import Function, ProcessLocal, Same

_DECLINED = -1


class Recognizer(Protocol):
    """What the extension does."""

    def inputs(self, args: tuple[Any, ...], modules: Any) -> list[Any] | None: ...
    def examine(self, modules: Any) -> int: ...
    def admit(self, examination: int, args: tuple[Any, ...]) -> None: ...


# (outline, lazy inputs, dicts) -> the extension's, by api_link; None if there is none
recognizer: Callable[[Any, list[int], list[dict[Any, Any]]], Recognizer | None] | None = None


class KnownCalls:
    """Of one module. ``lazy``: the flat inputs that torch may have yet to negate."""

    def __init__(self, signature: Signature, assumptions: Assumptions, lazy: set[int]) -> None:
        self._assumptions = assumptions
        self._sized, self._functions, rest = _sorted(assumptions.checks)
        self._rest = Settled(rest) if rest else None  # what the extension cannot ask
        self._modules = self._list()
        form = signature.form()
        self._recognizer: Recognizer | None = None
        if recognizer is not None and form is not False and signature.binds_as_given:
            self._recognizer = recognizer(form, sorted(lazy), self._modules[0])

    def inputs(self, args: tuple[Any, ...]) -> list[Any] | None:
        """The flat inputs of a known call with ``args``, in order; None if the call has to be
        examined.
        """
        if self._recognizer is None or (self._rest is not None and self._rest.changed()):
            return None
        if self._assumptions.reads_dtypes and self._assumptions.other_dtypes():
            return None
        return self._recognizer.inputs(args, self._modules)

    def examine(self) -> int:
        """Called before a call is examined: the number to admit it by."""
        return _DECLINED if self._recognizer is None else self._recognizer.examine(self._modules)

    def admit(self, examination: int, ordered: tuple[Any, ...]) -> None:
        """The call that was examined runs by its graph: from now on it is known."""
        if self._recognizer is not None and examination != _DECLINED:
            self._modules = self._list()
            self._recognizer.admit(examination, ordered)

    def _list(self) -> tuple[Any, ...]:
        """What the extension reads of the modules, in its order (csrc/known_calls.cpp). It keeps
        none of it: that would hide cycles from the garbage collector.
        """
        empty, entries = self._assumptions.hooks.dicts, self._assumptions.entries
        all_of_them = (*empty, *entries.dicts, *(held for held, _ in self._sized))
        watched = [*{id(one): one for one in all_of_them}.values()]
        objects = [*self._assumptions.classed.values()]
        return (
            watched, empty, entries.dicts, entries.keys, entries.known, ABSENT, self._sized,
            self._functions, objects,
        )  # fmt: skip


def _sorted(checks: tuple[Check, ...]) -> tuple[list[Any], list[Any], list[Check]]:
    """Dicts and their sizes, functions, and the checks of anything else."""
    rest: list[Check] = []
    sized: list[tuple[dict[Any, Any], int]] = []
    functions: list[tuple[Any, ...]] = []
    for one in checks:
        ask, of, held, _ = one
        check = held.check if type(held) is ProcessLocal else held
        if ask is len and type(of[0]) is dict and isinstance(check, Same):
            sized.append((of[0], check.value))
        elif isinstance(check, Function) and check.is_plain:
            functions.append((ask, of, *check.parts))
        else:
            rest.append(one)
    return sized, functions, rest
