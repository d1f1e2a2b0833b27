"""Stores tables in fewer bits, for serving: lookups read packed rows, and float32 tables are
dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from recast.rewriter.ir import Graph, Node, annotate, is_call, items, note, sole_user
from recast.rewriter.report.journal import Missed, Stored
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply
from recast.runtime.embedding import precision as formats
from recast.runtime.embedding.precision_table import StoredTable, parameter, save_whole
from recast.runtime.ranks import shards
from recast.runtime.ranks.exchange_ids import send_ids
from recast.runtime.ranks.exchange_rows import send_rows

from .dynamic import weight_behind
from .leaf import human, plural, tensor_at

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

BAGS = torch.ops.recast.embedding_bags.default
STORED = torch.ops.recast.quantised_embedding_bags.default


_OTHERS = {  # by what is wrong with a table
    formats.APART: ("leave it out: optimize() without precision",),
    **{
        formats.BEYOND.format(name): ("precision='bf16'", "precision='int8'")
        for name in formats.OF_FLOAT16
    },
}

_APART = ("leave that form out", "optimize(), with precision, once for each form")


def _refusal(node: Any, root: nn.Module, asked: QuantiseTables) -> Miss | None:
    """Why the table behind ``node`` stays as it is, or None."""
    table = tensor_at(node, root)
    if isinstance(table, StoredTable):
        return None
    if weight_behind(node) is not node:
        return Miss(
            node, "its table is dynamic: rows come and go, each in the dtype of the table",
            ("recast.dynamic.export, and precision for the plain table that it gives",),
        )  # fmt: skip
    if not isinstance(table, nn.Parameter):
        return Miss(node, "its table is not a Parameter", ("keep the table in an nn.Embedding",))
    if table.dtype != torch.float32:
        return Miss(node, f"its table is {str(table.dtype).removeprefix('torch.')}, not float32")
    if not table.is_cpu:
        return Miss(
            node, f"its table is on {table.device}; stored tables are read on the CPU",
            ("optimize(model.cpu().eval(), precision=...)",),
        )  # fmt: skip
    for user in _readers(node, table, root):
        if not is_call(user, BAGS, send_ids):  # the latter looks at its dtype only
            return Miss(
                user, "it reads a whole table, which would be unpacked at each call",
                ("leave tied weights out: optimize() without precision",),
            )  # fmt: skip
    elsewhere = asked.read_whole_by(table)
    if elsewhere is not None:
        return Miss(node, f"{elsewhere}, which would be unpacked at each such call", _APART)
    why = asked.unfit(table)
    return None if why is None else Miss(node, f"its table has numbers {why}", _OTHERS.get(why, ()))


def _readers(node: Node, table: torch.Tensor, root: nn.Module) -> list[Node]:
    """All nodes that read ``table``, under any of its names."""
    same = [n for n in node.graph.nodes if n.op == "get_attr" and tensor_at(n, root) is table]
    layers = [
        n for n in node.graph.nodes
        if n.op == "call_module"
        and any(p is table for p in root.get_submodule(str(n.target)).parameters())
    ]  # fmt: skip
    return [user for n in same for user in n.users] + layers


def read_whole(forms: Iterable[Iterable[Graph]], root: nn.Module) -> dict[nn.Parameter, str]:
    """The tables that are read by more than lookups, and by which of the ``forms``: the graphs of
    the example, and of each further form, after the passes before this one.
    """
    found: dict[nn.Parameter, str] = {}
    for k, graphs in enumerate(forms):
        by = f"forms[{k - 1}] reads the whole table" if k else "the example reads the whole table"
        for graph in graphs:
            for node in graph.nodes:
                table = tensor_at(node, root) if node.op == "get_attr" else None
                if isinstance(table, nn.Parameter) and table.dim() == 2:
                    readers = _readers(node, table, root)
                    if not all(is_call(user, BAGS, send_ids) for user in readers):
                        found.setdefault(table, by)
    return found


@dataclass
class _Found:
    """A call, and the positions of its tables that are stored in fewer bits, and of the others.

    sent: the ``send_rows`` that takes all its rows as one list, where ids come from all ranks.
    """

    call: Node
    items: list[tuple[int, Node]]
    low: list[int]
    rest: list[int]
    sent: Node | None = None


@dataclass(frozen=True)
class _Quantiser:
    """The rule for one precision; what it stores and leaves out goes to the journal."""

    asked: QuantiseTables
    context: Context

    def match(self, node: Node, root: nn.Module) -> Answer:
        if not is_call(node, BAGS):
            return None
        tables: Sequence[Any] = node.args[0]  # type: ignore[assignment]
        refused = [_refusal(t, root, self.asked) for t in tables]
        for miss in refused:
            if miss is not None:
                self.context.journal.miss(_missed(miss, node))
        low = [t for t, miss in enumerate(refused) if miss is None]
        if not low:
            return None
        rest = [t for t, miss in enumerate(refused) if miss is not None]
        sent = sole_user(node)
        if is_call(sent, send_rows):
            return Match([node, sent], [sent], _Found(node, [], low, rest, sent))
        outs = [(int(k), n) for k, n in items(node)]
        if len(outs) != len(node.users):
            return Miss(node, "its rows are used as one list")
        found = _Found(node, outs, low, rest)
        return Match([node, *(n for _, n in outs)], [n for _, n in outs], found)

    def rewrite(self, match: Match, build: Build) -> list[Node]:
        found: _Found = match.found
        if found.sent is not None:
            return [self._sent(found, found.sent, build)]
        made: dict[int, Node] = {}
        for tables, written in ((found.low, self._stored), (found.rest, _left)):
            lookups = _lookups(found.call, tables)
            if lookups:
                call = written(found, build)
                made.update((k, build.item(call, place)) for place, k in enumerate(lookups))
        return [made[k] for k, _ in found.items]

    def _sent(self, found: _Found, sent: Node, build: Build) -> Node:
        """The ``send_rows`` of the rows of stored tables, and of the others."""
        calls = [(found.low, self._stored(found, build))]
        rows: Any = calls[0][1]
        if found.rest:
            calls.append((found.rest, _left(found, build)))
            made = {
                k: build.item(call, place)
                for tables, call in calls
                for place, k in enumerate(_lookups(found.call, tables))
            }
            rows = [made[k] for k in sorted(made)]
        new = build.call(send_rows, rows, *sent.args[1:], name="send_rows")
        for node in (*(call for _, call in calls), new):
            annotate(node, place=note(sent).place)
        return new

    def _stored(self, found: _Found, build: Build) -> Node:
        """The call that reads the stored tables, which takes the place of their Parameters."""
        tables: Sequence[Any] = found.call.args[0]  # type: ignore[assignment]
        journal = self.context.journal.stored
        precision = self.asked.precision
        stored = [_store(tables[t], build.root, precision, journal) for t in found.low]
        packed = [build.get(f"{tables[t].target}.packed") for t in found.low]
        return build.call(
            STORED, packed, *_operands(found, found.low, build),
            [s.precision for s in stored], [s.shape[1] for s in stored], build.get("training"),
            name="quantised_embedding_bags",
        )  # fmt: skip

    def describe(self, match: Match) -> str:
        found: _Found = match.found
        count = plural(len(_lookups(found.call, found.low)), "lookup")
        return f"{count} of {plural(len(found.low), 'table')} in {self.asked.precision}"

    def worth(self, match: Match) -> str:
        found: _Found = match.found
        tables = [tensor_at(found.call.args[0][t], self.context.root) for t in found.low]  # type: ignore[index]
        saved = 0
        for t in tables:
            if t is not None:
                part = shards.of(t)
                rows, dim = t.shape if part is None else part.shape
                saved += rows * (dim * 4 - formats.row_bytes(self.asked.precision, dim))
        return f"{human(saved)} of tables"

    def rule(self) -> Rule:
        return Rule(
            name="quantise-tables",
            equation="embedding_bags([w1 ...], ...) => quantised_embedding_bags([pack(w1) ...])",
            match=self.match,
            rewrite=self.rewrite,
            describe=self.describe,
            worth=self.worth,
        )


def _left(found: _Found, build: Build) -> Node:
    """The call for the tables that stay as they are."""
    tables: Sequence[Any] = found.call.args[0]  # type: ignore[assignment]
    sparse: Sequence[Any] = found.call.args[8]  # type: ignore[assignment]
    lookups = _lookups(found.call, found.rest)
    return build.call(
        BAGS, [tables[t] for t in found.rest],
        *_operands(found, found.rest, build), [sparse[k] for k in lookups],
        *found.call.args[9:10], name="embedding_bags",
    )  # fmt: skip


def _missed(miss: Miss, node: Node) -> Missed:
    where = note(miss.node).where or note(node).where
    return Missed("quantise-tables", miss.node.name, miss.why, where, miss.tries)


def _lookups(call: Node, tables: Sequence[int]) -> list[int]:
    """The lookups of ``call`` in these tables."""
    table: Sequence[int] = call.args[4]  # type: ignore[assignment]
    return [k for k, t in enumerate(table) if t in tables]


def _operands(found: _Found, tables: Sequence[int], build: Build) -> list[Any]:
    """Ids, offsets, weights, table, mode, padding_idx and include_last_offset of the lookups in
    some tables.
    """
    call, lookups = found.call, _lookups(found.call, tables)

    def some(values: Any) -> Any:
        if not isinstance(values, Node):
            return [values[k] for k in lookups]
        # What has come from other ranks is one list at run time.
        return [build.item(values, k) for k in lookups] if found.rest else values

    parts = [some(call.args[at]) for at in range(1, 8)]
    parts[3] = [list(tables).index(t) for t in parts[3]]
    return parts


def _store(node: Node, root: nn.Module, precision: str, made: list[Stored]) -> StoredTable:
    """Replace the Parameter that ``node`` reads by a stored table, under all its names."""
    table = tensor_at(node, root)
    assert table is not None
    if isinstance(table, StoredTable):
        return table
    packed = formats.pack(table, precision)
    stored = StoredTable(packed, precision, table.shape[1])
    new = parameter(stored)
    made.append(
        Stored(
            str(node.target), precision, packed.numel() * packed.element_size(),
            table.numel() * table.element_size(), *formats.loss(table, packed, precision),
        )
    )  # fmt: skip
    part = shards.of(table)
    if part is not None:
        shards.register(new, part)
    for module in root.modules():
        owned = [name for name, held in module._parameters.items() if held is table]
        for name in owned:
            module._parameters[name] = new
        if owned:
            module.register_state_dict_post_hook(save_whole)
    return stored


@dataclass(frozen=True)
class QuantiseTables:
    """embedding_bags([w1, w2 ...], ...) => quantised_embedding_bags([pack(w1), pack(w2) ...], ...)

    float32 Parameters on the CPU that nothing but lookups reads, in ``precision`` (fp16, bf16, int8
    or int4). For inference: the Parameters of the compiled model become stored tables, without
    gradient; those of the user's model stay.
    """

    name: ClassVar[str] = "quantise-tables"
    precision: str = "int8"

    def run(self, graph: Graph, context: Context) -> int:
        """Store the tables of ``graph``; returns how many calls were rewritten."""
        stored = context.journal.stored
        before = len(stored)
        fired = apply(graph, [_Quantiser(self, context).rule()], context)
        if stored[before:]:
            context.journal.notes.append(sentence(stored[before:]))
        return fired

    def unfit(self, table: nn.Parameter) -> str | None:
        """Which numbers of ``table`` cannot be stored in ``precision``; None if it has none."""
        return formats.unfit(table, self.precision)

    def read_whole_by(self, table: nn.Parameter) -> str | None:
        """Which other form of call reads the whole ``table``, in words; None if none does."""
        return None


@dataclass(frozen=True)
class QuantiseForms(QuantiseTables):
    """The same for a model of several forms of call, whose graphs share the tables: one that some
    form reads as a whole stays for all. ``whole``: those, and what reads them.
    """

    whole: Mapping[nn.Parameter, str] = field(default_factory=dict)

    def read_whole_by(self, table: nn.Parameter) -> str | None:
        return self.whole.get(table)


@dataclass(frozen=True)
class QuantiseParts(QuantiseForms):
    """The same for tables that are spread over ranks, after ``communicate``: each rank stores its
    parts. ``unfit_tables``: which numbers the whole table has that cannot be stored, for each that
    has some, so that all ranks store the same tables.
    """

    unfit_tables: Mapping[nn.Parameter, str] = field(default_factory=dict)

    def run(self, graph: Graph, context: Context) -> int:
        """As :class:`QuantiseTables`; what was stored is told once it is known of all ranks."""
        return apply(graph, [_Quantiser(self, context).rule()], context)

    def unfit(self, table: nn.Parameter) -> str | None:
        return self.unfit_tables.get(table)


def sentence(stored: list[Stored]) -> str:
    """How many bytes the tables take, and how far their numbers are from what they were."""
    worst = max(stored, key=lambda s: s.most)
    names = sorted({s.precision for s in stored})
    before, now = sum(s.bytes_before for s in stored), sum(s.bytes for s in stored)
    mean = sum(s.mean * s.bytes_before for s in stored) / max(before, 1)
    return (
        f"{plural(len(stored), 'table')} in {', '.join(names)}: {human(now)}"
        f" instead of {human(before)}; numbers differ by at most {worst.most:.2g} ({worst.table}),"
        f" {mean:.2g} on average"
    )
