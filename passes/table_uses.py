"""How a model uses its tables: which lookups read them, and how many ids a sample has.

The planner needs this; it is read from the graphs and from one batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from recast.rewriter.ir import Graph, Node, is_call, note
from recast.runtime.plan import Table
from recast.runtime.planner import TableLoad

from .dynamic import ids_behind, reads_rows_of, weight_behind
from .leaf import tensor_at
from .shard import BAGS

ONCE = 128  # bytes per id: 60 ns of sorting (measured, one core) at 2 GB/s between ranks


@dataclass
class Use:
    """How the graphs of a model use one table.

    whole: why every rank needs all of it, or None. lookups: ids, mode and whether it has weights,
    of each that counts as load. modes: those of all lookups. sparse: every lookup asks for a sparse
    gradient.
    """

    whole: str | None = "no graph looks it up"
    lookups: list[tuple[Any, str, bool]] = field(default_factory=list)
    modes: set[str] = field(default_factory=set)
    sparse: bool = True


def uses(graphs: Iterable[Graph], root: nn.Module) -> dict[str, Use]:
    """Every parameter that is looked up, or belongs to an embedding, by name."""
    names = {id(p): name for name, p in root.named_parameters()}
    # Only what modules hold: what a parametrization makes is not a table, and reading it would
    # compute it, which may write to buffers.
    held = (
        id(m._parameters.get("weight"))
        for m in root.modules()
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag))
    )
    found = {names[weight]: Use() for weight in held if weight in names}
    refused: dict[str, str] = {}
    for graph in graphs:
        for node in graph.nodes:
            if is_call(node, BAGS):
                _add(node, root, names, found)
            elif node.op == "get_attr":
                others = [u for u in node.users if not (is_call(u, BAGS) or reads_rows_of(u))]
                name = names.get(id(tensor_at(node, root)))
                if name is not None and others:
                    refused[name] = f"{others[0].name} reads it as a whole"
            elif node.op == "call_module":
                for p in root.get_submodule(str(node.target)).parameters():
                    refused[names[id(p)]] = f"{node.name} looks it up by itself"
    for name, why in refused.items():
        if name in found:
            found[name].whole = why
    return found


def _add(call: Node, root: nn.Module, names: dict[int, str], found: dict[str, Use]) -> None:
    args: tuple[Any, ...] = call.args
    weights, ids, _, factors, table, mode, _, _, sparse = args[:9]
    for k, t in enumerate(table):
        name = names.get(id(tensor_at(weight_behind(weights[t]), root)))
        if name is None:
            continue  # a buffer
        use = found.setdefault(name, Use())
        use.whole = None
        use.lookups.append((ids_behind(ids[k]), mode[k], factors[k] is not None))
        use.modes.add(mode[k])
        use.sparse = use.sparse and sparse[k]


def ids_of(ids: Any, values: Mapping[str, Any], batch: int) -> float:
    """Ids per sample in a lookup, for a batch of ``batch`` samples with the inputs ``values``."""
    value = values.get(ids.name) if isinstance(ids, Node) else None
    if isinstance(value, Tensor):
        return value.numel() / max(batch, 1)
    spec = note(ids).spec if isinstance(ids, Node) else None
    size = spec.at(1) if spec is not None and not isinstance(spec, tuple) else None
    return 1.0 if size is None else float(torch.Size(size).numel())


def distinct(use: Use, values: Mapping[str, Any]) -> float:
    """Distinct ids divided by ids, over the inputs by which the table is looked up; 1 if there are
    none.
    """
    found = [values.get(getattr(ids, "name", "")) for ids, _, _ in use.lookups]
    ids = [v.reshape(-1).long() for v in found if isinstance(v, Tensor) and v.numel()]
    if not ids:
        return 1.0
    whole = torch.cat(ids)
    return len(whole.unique()) / len(whole)


def repeats(table: Table, use: Use, values: Mapping[str, Any]) -> bool:
    """Whether it pays to send each id once: finding repeats costs as much as ``ONCE`` bytes of
    rows.
    """
    width = table.dim * getattr(torch, table.dtype).itemsize
    return (1 - distinct(use, values)) * 2 * width >= ONCE  # rows, and their gradients


def load(
    table: Table,
    use: Use,
    values: Mapping[str, Any],
    batch: int,
    state: tuple[float, float],
    types: Sequence[str],
) -> TableLoad:
    """The load of ``table`` in a step, for the planner.

    ``values``: inputs of the graph by name, of a batch of ``batch`` samples; ids that are computed
    count as their sizes say. ``state``: bytes of the optimizer, for a row and for an element.
    """
    modes = {mode for _, mode, _ in use.lookups}
    return TableLoad(
        table,
        ids=sum(ids_of(node, values, batch) for node, _, _ in use.lookups),
        lookups=len(use.lookups),
        pooling=next((m for m in ("max", "none", "mean") if m in modes), "sum"),
        weighted=any(weighted for _, _, weighted in use.lookups),
        distinct=distinct(use, values),
        state_row=state[0],
        state_element=state[1],
        types=tuple(types),
    )
