"""``recast.diff``: two models agree, or the first node where they part is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from recast.rewriter.diff.prove import DiffReport, batches_of
from recast.rewriter.diff.prove import diff as compare
from recast.runtime import checked, tolerances
from recast.runtime.embedding import precision_table

from .diff import rounding


def diff(
    plain: nn.Module, fast: nn.Module, example: Any, *, steps: int = 3, **options: Any
) -> DiffReport:
    """Prove that two models agree, or name the first node where they part.

    Compares outputs, all gradients, parameters and optimizer state after ``steps`` optimizer
    steps, and buffers, with the float64 run of ``plain`` as the judge. Ids outside their tables
    are an error on a GPU too. Where ``fast`` has tables below float32 (``precision=``),
    those of ``plain`` and of the judge are rounded in the same way, eval mode alone is compared,
    and the notes say what the rounding does to the outputs. For the options see
    :func:`recast.rewriter.diff.prove.diff`.
    """
    options.setdefault("limits", tolerances)
    stored = precision_table.stored(fast)
    if stored:
        return _diff_stored(plain, fast, example, stored, options)
    with checked.checked():
        return compare(plain, fast, example, steps=steps, **options)


def _diff_stored(
    plain: nn.Module,
    fast: nn.Module,
    example: Any,
    stored: Mapping[str, precision_table.StoredTable],
    options: dict[str, Any],
) -> DiffReport:
    """The same of tables below float32: those of ``plain`` are rounded like them."""
    same = precision_table.rounded(plain, stored)
    options |= {"steps": 0, "training": False}
    report = compare(same, fast, example, **options)
    names = ", ".join(sorted({t.precision for t in stored.values()}))
    calls: list[rounding.Call] = [(batch, {}) for batch in batches_of(example)]
    report.notes[:0] = [
        f"{len(stored)} tables of the second model are in {names}, for inference: those of the"
        " first were rounded in the same way, and eval mode alone was compared",
        f"of this rounding: {rounding.sentence(plain, fast, calls)}",
    ]
    return report
