"""The instructions of code, as they are in every version of Python.

Python 3.13 joins two that handle local variables, 3.14 has another kind of them; 3.11 tells methods
from other attributes.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

_SAME = {
    "LOAD_METHOD": "LOAD_ATTR", "LOAD_FAST_CHECK": "LOAD_FAST", "LOAD_FAST_BORROW": "LOAD_FAST",
}  # fmt: skip
_TWO = {
    "LOAD_FAST_LOAD_FAST": ("LOAD_FAST", "LOAD_FAST"),
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": ("LOAD_FAST", "LOAD_FAST"),
    "STORE_FAST_LOAD_FAST": ("STORE_FAST", "LOAD_FAST"),
    "STORE_FAST_STORE_FAST": ("STORE_FAST", "STORE_FAST"),
}
_UNMOVING = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "RESUME"})


@dataclass(frozen=True, slots=True)
class Step:
    """``effect``: what it adds to the stack; None where it may jump."""

    opname: str
    argval: Any
    effect: int | None


@lru_cache(maxsize=1024)
def steps(code: CodeType) -> tuple[Step, ...]:
    """What ``code`` does, in its order, without what does nothing."""
    return tuple(_steps(code))


def _steps(code: CodeType) -> Iterator[Step]:
    for i in dis.get_instructions(code):
        if i.opname in _TWO:
            for name, local in zip(_TWO[i.opname], i.argval, strict=True):
                yield Step(name, local, 1 if name == "LOAD_FAST" else -1)
        elif i.opname not in _UNMOVING:
            jumps = i.opcode in dis.hasjrel or i.opcode in dis.hasjabs
            effect = None if jumps else dis.stack_effect(i.opcode, i.arg)
            yield Step(_SAME.get(i.opname, i.opname), i.argval, effect)
