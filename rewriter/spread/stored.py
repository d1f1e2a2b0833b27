"""Tables in fewer bits on several ranks, for serving: each rank packs its parts of them.

This is done once the tables are in their places, so that no rank packs what it does not keep. All
ranks store the same tables, and their reports are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from recast import passes as library
from recast.passes.precision import QuantiseParts, read_whole, sentence
from recast.rewriter import pipeline
from recast.rewriter.capture.capture_model import Captured
from recast.rewriter.compiled.module import Compiled
from recast.rewriter.diff import rounding
from recast.rewriter.pipeline import Context
from recast.rewriter.report.journal import Journal, Stored
from recast.runtime.embedding import precision as formats
from recast.runtime.plan import SHARDING_TYPES, Plan, Table
from recast.runtime.ranks import collectives, materialise, shards

_BY_COLUMN = tuple(kind for kind in SHARDING_TYPES if "column" in kind)


def excluded(precision: str | None, table: Table) -> tuple[str, tuple[str, ...]] | None:
    """Why a table that is to be stored in ``precision`` may not be of some sharding types, and of
    which; None if it may be of any.
    """
    if precision not in ("int8", "int4") or table.dtype != "float32":
        return None
    return f"in {precision} all columns of a row have one scale", _BY_COLUMN


def row_bytes(precision: str | None, table: Table) -> float | None:
    """Bytes of a row that is to be stored in ``precision``; None if it stays in its dtype."""
    if precision is None or table.dynamic or table.dtype != "float32":
        return None
    return float(formats.row_bytes(precision, table.dim))


def recounted(plan: Plan, precision: str | None, tables: Iterable[Table]) -> Plan:
    """``plan``, which may be of another precision, with the bytes that rows take in this one."""
    rows = {table.name: row_bytes(precision, table) for table in tables}
    placements = [replace(p, stored_row=rows.get(p.table)) for p in plan.placements]
    return replace(plan, placements=tuple(placements))


def store(
    forms: Sequence[tuple[Compiled, Captured]], tables: Iterable[str], precision: str, present: bool
) -> None:
    """Store this rank's parts of ``tables`` in ``precision``; of whole ones if the ranks are not
    ``present``. A collective if they are. ``forms``: that of the example first.
    """
    compiled, _ = forms[0]
    if not present and materialise.on_meta(compiled._root):
        return  # whole tables are to have no memory, in whatever form
    held = dict(compiled._root.named_parameters())
    why = {name: formats.unfit(held[name], precision) for name in tables}
    for theirs in collectives.of_all(why, "what tables can be stored") if present else []:
        why |= {name: text for name, text in theirs.items() if text is not None}
    left = {held[name]: text for name, text in why.items() if text is not None}
    several = [one._graphs.values() for one, _ in forms] if len(forms) > 1 else []
    whole = read_whole(several, compiled._root)
    passes = (QuantiseParts(precision, whole, left), library.CleanUp())
    for one, of in forms:
        journal = one.report.journal
        _rewrite(one, of, passes, journal)
        if present:
            parts = collectives.of_all(journal.stored, "what was stored")
            journal.stored[:] = _joined(parts, dict(compiled._root.named_parameters()))
        if journal.stored:
            journal.notes.append(sentence(journal.stored))


def _rewrite(
    compiled: Compiled, captured: Captured, passes: Sequence[pipeline.Pass], journal: Journal
) -> None:
    for graph in compiled._graphs.values():
        context = Context(captured.root, journal, captured.batches, captured.sizes)
        pipeline.run(graph, passes, context)
    compiled.spread()
    for path, part in compiled._parts.items():
        _rewrite(part, captured.parts[path], passes, journal)


def _joined(
    found: Sequence[Sequence[Stored]], held: Mapping[str, nn.Parameter]
) -> Iterable[Stored]:
    """What the ranks have ``found`` of their parts of each table, as if it were whole."""
    for parts in zip(*found, strict=True):
        first: Stored = parts[0]
        own = parts if shards.of(held[first.table]) is not None else parts[:1]
        before = sum(part.bytes_before for part in own)
        yield Stored(
            first.table, first.precision, sum(part.bytes for part in own), before,
            max(part.most for part in own),
            sum(part.mean * part.bytes_before for part in own) / max(before, 1),
        )  # fmt: skip


class Effect:
    """Measures how much storing tables of ``model`` changes its outputs on the example. It is made
    before its tables are put in their places, and told after, on every rank.
    """

    def __init__(self, model: nn.Module, captured: Captured, *, runs: bool) -> None:
        self.calls: list[rounding.Call] = []
        self.outputs: list[rounding.Floats] = []
        if runs and captured.batches is not None and captured.signature is not None:
            self.calls = rounding.calls_of(captured)
            self.outputs = list(rounding.outputs(model, self.calls))

    def told(self, compiled: Compiled) -> str | None:
        """A sentence, the same on every rank; None if it was not measured. The parameters are those
        of rank 0, so its outputs are compared.
        """
        if not all(collectives.of_all(bool(self.calls), "whether there is an example")):
            return None
        mine = rounding.Effect.between(self.outputs, rounding.outputs(compiled, self.calls))
        first: rounding.Effect = collectives.of_all(mine, "the effect of rounding")[0]
        return first.told()
