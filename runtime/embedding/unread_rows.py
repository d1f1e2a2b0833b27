"""Lookups whose ids are checked and whose rows nobody has read yet.

Without gradients, rows that go into one interaction and nowhere else need not be written: where
each bag is one id, the interaction reads them in the tables. What stands for them on the way is
:class:`UnreadRows`; it never leaves generated code (see :mod:`recast.rewriter.compiled.codegen`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class UnreadRows:
    """The rows (bags, lookups, dim) of one call of lookups, a row of a table each.

    step: the call as the C++ kernels read it; bags: how many rows a lookup has; finish: gives the
    rows as one tensor; keeps: what the step points into.
    """

    __slots__ = ("bags", "finish", "keeps", "step")

    def __init__(
        self, step: Any, bags: int, finish: Callable[[], list[Tensor]], keeps: Any
    ) -> None:
        self.step, self.bags, self.finish, self.keeps = step, bags, finish, keeps


def are_in(rows: Any) -> bool:
    """Whether there are such among the parts of an argument."""
    return type(rows) is list and UnreadRows in map(type, rows)


def read(rows: Sequence[Any]) -> list[Tensor]:
    """``rows`` with tensors in the place of what is unread."""
    return [t for r in rows for t in (r.finish() if type(r) is UnreadRows else (r,))]
