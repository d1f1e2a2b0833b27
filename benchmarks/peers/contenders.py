"""Which variants may be the fastest in a cell. When time is short, the others are left out, and the
record says why.

The reason is what a variant consists of, or what was measured in the cell with the same tables, ids
and threads and batch 2048: a larger batch does the same work for more rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from peers.cells import BATCHES, Cell, table_rows
from peers.variants import OURS, RECIPES

What = Literal["step", "forward"]
Left = dict[str, dict[str, str]]  # variant -> what -> why it is left out

# A variant, a similar but faster one, and what the former does on top.
_LIKE = {
    "TorchRec fused": ("FBGEMM exact", "its lookup and more Python"),
    "eager dense": ("eager fused", "its gradients and a slower optimizer"),
}
# Variants with the same forward.
_FORWARD_OF = {
    "recast row-wise": "recast",
    "FBGEMM row-wise": "FBGEMM exact",
    "FBGEMM row-wise + compile": "FBGEMM + compile",
    "eager fused": "eager sparse",
    "compile fused": "compile sparse",
}
_DENSE = ("eager fused", "compile fused")  # every row has a gradient and is updated
_TOUCHED = 0.25  # share of the rows from which that may be as fast as sorting the ids
# Pairs with the same lookup: when steps are long, the one that was slower before is left out.
_PAIRS = (
    ("FBGEMM exact", "FBGEMM + compile"),
    ("FBGEMM row-wise", "FBGEMM row-wise + compile"),
    ("eager sparse", "compile sparse"),
    ("eager fused", "compile fused"),
)
_FAR = 1.3  # times the fastest in the cell before: it will not be the fastest


def neighbour(cell: Cell) -> Cell | None:
    """The cell with batch 2048 that shows, for larger batches, which variants are far behind."""
    return replace(cell, batch=BATCHES[2]) if cell.batch > BATCHES[2] else None


def left_out(cell: Cell, known: Mapping[str, Any] | None, gib: float) -> Left:
    """Which variants are left out of ``cell``; ``known``: the result of its neighbour."""
    found: Left = {}
    for name, what, why in (*_by_make(cell, gib), *_by_measure(known)):
        if name in RECIPES and what not in found.get(name, {}):
            found.setdefault(name, {})[what] = why
    return found


def _by_make(cell: Cell, gib: float) -> Iterator[tuple[str, What, str]]:
    for name, (like, by) in _LIKE.items():
        yield name, "step", f"{like} with {by}"
        yield name, "forward", f"{like} with {by}"
    for name, like in _FORWARD_OF.items():
        yield name, "forward", f"the forward of {like}"
    rows = table_rows(cell.data, cell.dim, gib)
    drawn = cell.batch * cell.ids
    # For uniform ids, which touch the most rows.
    share = sum(r - r * (1 - 1 / r) ** drawn for r in rows) / sum(rows)
    if share < _TOUCHED:
        for name in _DENSE:
            yield name, "step", "it updates all rows, of which less than a quarter are touched"


def _by_measure(known: Mapping[str, Any] | None) -> Iterator[tuple[str, What, str]]:
    if known is None:
        return
    for what in ("step", "forward"):
        times = {
            name: times[what][0]
            for name, times in known["variants"].items()
            if what in times and name not in OURS.values()
        }
        for pair in _PAIRS:
            there = sorted((name for name in pair if name in times), key=times.__getitem__)
            for slower in there[1:]:
                by = times[slower] / times[there[0]]
                yield slower, what, f"{by:.2f} times {there[0]} at batch {BATCHES[2]}"
        for semantics in OURS:
            alike = [n for n in times if what == "forward" or RECIPES[n].semantics == semantics]
            least = min((times[n] for n in alike), default=0.0)
            for name in alike:
                if times[name] > _FAR * least and name not in _DENSE:
                    by = times[name] / least
                    yield name, what, f"{by:.1f} times the fastest at batch {BATCHES[2]}"
