"""Find the first rewrite that breaks the numbers, by limiting how many rewrites are made (fuel)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from recast.errors import UsageError
from recast.rewriter.report.journal import Fired

from .equivalence import DiffReport, diff


@dataclass(frozen=True)
class Culprit:
    """The first rewrite with which the two models differ."""

    fuel: int  # the number of rewrites up to and including this one
    rewrites: int  # the number that the whole pipeline makes
    fired: Fired
    report: DiffReport  # the diff with this rewrite as the last

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "fuel": self.fuel,
            "rewrites": self.rewrites,
            "rewrite": asdict(self.fired),
            "diff": self.report.to_dict(),
        }

    def __str__(self) -> str:
        f = self.fired
        at = f" at {f.where}" if f.where else ""
        of = f" ({' '.join(f.origin[:3])}{' ...' if len(f.origin) > 3 else ''})" if f.origin else ""
        return (
            f"rewrite {self.fuel} of {self.rewrites} breaks the numbers: {f.rule} wrote "
            f"{f.node}{of}{at}: {f.what}\n{self.report.first or ''}".rstrip()
        )


def bisect(
    plain: nn.Module,
    build: Callable[[int | None], Any],
    example: Any,
    *,
    progress: Callable[[int, int], None] = lambda low, high: None,
    **options: Any,
) -> Culprit | None:
    """The first rewrite after which ``plain`` and its optimised twin part; None when they agree.

    Args:
        build: ``build(fuel)`` is the ``Compiled`` with that many rewrites; None is all of them.
        example, options: as for :func:`.equivalence.diff`.
        progress: called with the bounds before every probe.

    A rewrite whose error a later one undoes is not found: the search bisects, and assumes that the
    numbers stay wrong once they are.

    Raises:
        UsageError: no rewrite at all, and the two part: the capture is wrong, not a rewrite.
    """
    whole = build(None)
    rewrites = len(whole.report.journal.fired)
    if diff(plain, whole, example, **options).ok:
        return None
    if not (found := diff(plain, build(0), example, **options)).ok:
        raise UsageError(
            "bisect: the models part before any rewrite",
            where=found.first.place if found.first else None,
            why=str(found.first) if found.first else "the captured graph itself is not the model",
            tries=("recast diff SPEC --passes ''",),
        )
    low, high = 0, rewrites  # right with low rewrites, wrong with high
    while high - low > 1:
        progress(low, high)
        middle = (low + high) // 2
        if diff(plain, build(middle), example, **options).ok:
            low = middle
        else:
            high = middle
    guilty = build(high)
    report = diff(plain, guilty, example, **options)
    return Culprit(high, rewrites, guilty.report.journal.fired[high - 1], report)
