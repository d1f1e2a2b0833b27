"""Lookups whose ids have been checked, but whose rows have not been read yet.

Without gradients, rows that go into one interaction and nowhere else need not be written: if each
bag is one id, the interaction can read them from the tables. :class:`UnreadRows` stands for them on
the way; it never leaves generated code (see :mod:`recast.rewriter.compiled.codegen`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class UnreadRows:
    """The rows (bags, lookups, dim) of one call of lookups, each bag being one row of a table.

    step: the call in the form that the C++ kernels read; bags: rows per lookup; finish: reads the
    rows and returns them as one tensor, in a list; keeps: keeps alive what the step points to.
    """

    __slots__ = ("bags", "finish", "keeps", "step")

    def __init__(
        self, step: Any, bags: int, finish: Callable[[], list[Tensor]], keeps: Any
    ) -> None:
        self.step, self.bags, self.finish, self.keeps = step, bags, finish, keeps


def are_in(rows: Any) -> bool:
    """Whether an argument is a list with UnreadRows in it."""
    return type(rows) is list and UnreadRows in map(type, rows)


def read(rows: Sequence[Any]) -> list[Tensor]:
    """``rows`` with tensors in the place of UnreadRows."""
    return [t for r in rows for t in (r.finish() if type(r) is UnreadRows else (r,))]
