"""Groups embedding lookups of every form into one call per level.

How a table is looked up decides whether its gradient is dense, so a single lookup is taken too.
Lookups whose ids are computed from other lookups form a second level, and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter import order
from recast.rewriter.ir import Graph, Node, is_call, is_method
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply, legal
from recast.runtime.dynamic import table as dynamic_table
from recast.runtime.embedding.sum_of_rows import sum_of_rows

from . import dynamic
from .leaf import (
    Attr,
    Value,
    argument,
    differs,
    human,
    module_of,
    plural,
    put,
    tensor_at,
)

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_MODES = ("sum", "mean", "max", "total")
BAGS = torch.ops.recast.embedding_bags.default
# Elements of a table up to which a dense gradient, if there is one anyway, costs less than rows.
SMALL = 1 << 18


@dataclass(frozen=True, slots=True)
class Lookup:
    """One embedding call, whatever its spelling."""

    node: Node
    weight: Attr | Node
    table: torch.Tensor  # the Parameter itself; lookups of one table share it
    ids: Any
    offsets: Any
    per_sample_weights: Any
    mode: str
    padding_idx: Value
    include_last_offset: bool
    sparse: bool


def is_lookup(node: Node, root: nn.Module) -> bool:
    """Whether ``node`` looks up rows in an embedding table, whether that can be grouped or not."""
    module = module_of(node, root)
    if module is not None:
        return isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    functions = (F.embedding, F.embedding_bag, sum_of_rows, torch.embedding, torch.embedding_bag)
    return is_call(node, *functions)


def read(node: Node, root: nn.Module) -> Lookup | Miss | None:
    """The lookup that ``node`` makes; a Miss when it cannot be grouped; None when it is none."""
    if not is_lookup(node, root):
        return _one_hot(node, root)
    if is_call(node, torch.embedding, torch.embedding_bag):
        name = str(node.target.__name__)  # type: ignore[union-attr]
        return Miss(node, f"torch.{name} is torch's inner spelling", (f"F.{name}",))
    module = module_of(node, root)
    if isinstance(module, nn.Embedding):
        plain = dynamic.kind_of(module, nn.Embedding)
        found = differs(node, module, plain) or _module(node, module)
    elif isinstance(module, nn.EmbeddingBag):
        plain = dynamic.kind_of(module, nn.EmbeddingBag)
        found = differs(node, module, plain) or _bag_module(node, module)
    else:
        found = _function(node, root)
    return _acceptable(found) or found if isinstance(found, Lookup) else found


def _module(node: Node, module: nn.Embedding) -> Lookup | Miss:
    path = str(node.target)
    return _writes(node, module.max_norm, module.scale_grad_by_freq) or Lookup(
        node, Attr(f"{path}.weight"), module.weight, argument(node, 0, "input"), None, None,
        "none", Attr(f"{path}.padding_idx"), False, module.sparse,
    )  # fmt: skip


def _bag_module(node: Node, module: nn.EmbeddingBag) -> Lookup | Miss:
    path = str(node.target)
    return _writes(node, module.max_norm, module.scale_grad_by_freq) or Lookup(
        node, Attr(f"{path}.weight"), module.weight, argument(node, 0, "input"),
        argument(node, 1, "offsets"), argument(node, 2, "per_sample_weights"), module.mode,
        Attr(f"{path}.padding_idx"), module.include_last_offset, module.sparse,
    )  # fmt: skip


def _function(node: Node, root: nn.Module) -> Lookup | Miss:
    weight = argument(node, 1, "weight")
    table = tensor_at(weight, root)
    if table is None or not table.is_leaf:
        return Miss(
            node,
            "its table is computed at each call and is not a Parameter or buffer",
            ("look up in the Parameter itself and compute on the rows it gives",),
        )
    if dynamic_table.of(table) is not None:
        return Miss(node, "it looks up by raw ids in the rows of a dynamic table")
    if node.target is F.embedding:
        by_name = _named(
            node, "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"
        )
        offsets = weights = None
        mode, last = "none", False
    elif node.target is sum_of_rows:
        by_name = dict.fromkeys(("max_norm", "scale_grad_by_freq"))
        by_name |= _named(node, "per_sample_weights", "padding_idx", "sparse")
        offsets, weights = None, by_name["per_sample_weights"]
        mode, last = "total", False
    else:
        by_name = _named(
            node, "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse",
            "per_sample_weights", "include_last_offset", "padding_idx",
        )  # fmt: skip
        offsets, weights = by_name["offsets"], by_name["per_sample_weights"]
        mode, last = by_name["mode"] or "mean", bool(by_name["include_last_offset"])
    return _writes(node, by_name["max_norm"], by_name["scale_grad_by_freq"]) or Lookup(
        node, weight, table, argument(node, 0, "input"), offsets, weights,
        mode, by_name["padding_idx"], last, bool(by_name["sparse"]),
    )  # fmt: skip


def _one_hot(node: Node, root: nn.Module) -> Miss | None:
    """``F.one_hot(ids, n).float() @ self.table``: a lookup, as a product with every row."""
    if not is_call(node, torch.matmul, torch.mm) or len(node.args) != 2:
        return None
    chosen: Any = node.args[0]
    while is_method(chosen, "float", "to", "type_as", "double", "type"):
        chosen = chosen.args[0]
    if not is_call(chosen, F.one_hot) or not isinstance(
        tensor_at(node.args[1], root), nn.Parameter
    ):
        return None
    return Miss(
        node,
        "a one-hot vector times a Parameter is a lookup, computed as a product with every row",
        ("F.embedding(ids, weight)", "nn.Embedding"),
    )


def _named(node: Node, *names: str) -> dict[str, Any]:
    """The arguments after ``(input, weight)``, by name."""
    return {name: argument(node, k + 2, name) for k, name in enumerate(names)}


def _writes(node: Node, max_norm: object, scale_grad_by_freq: object) -> Miss | None:
    if max_norm is not None:
        return Miss(
            node,
            "max_norm rewrites rows of the table while they are read",
            ("drop max_norm and clip the rows after the optimizer step",),
        )
    if scale_grad_by_freq:
        return Miss(
            node,
            "scale_grad_by_freq divides gradients by how often an id occurs in the batch",
            ("drop scale_grad_by_freq",),
        )
    return None


def _acceptable(found: Lookup) -> Miss | None:
    """Why the op cannot do this lookup, or None."""
    table = found.table
    if table.dim() != 2 or table.dtype not in _DTYPES:
        return Miss(
            found.node,
            f"its table has shape {tuple(table.shape)} and dtype {table.dtype}",
            ("a table of rows x columns in float32, float64, float16 or bfloat16",),
        )
    if found.mode not in ("none", *_MODES):
        return Miss(found.node, f"its mode is {found.mode!r}", ("use sum, mean or max",))
    if found.per_sample_weights is not None and found.mode not in ("sum", "total"):
        return Miss(
            found.node,
            f"per_sample_weights with mode {found.mode!r}, which torch refuses",
            ("use mode='sum' with per_sample_weights",),
        )
    if not isinstance(found.ids, Node):
        return Miss(found.node, "its ids are not a tensor of the graph", ("pass ids as a tensor",))
    return None


# ---------------------------------------------------------------- groups


def groups(graph: Graph, root: nn.Module) -> list[list[Lookup]]:
    """Lookups that may run as one call, in the order of the graph.

    Two lookups share a group when neither needs the other's rows (same level), no in-place write
    between them touches them, their tables are on the same device, and the output depends on both
    or on neither: a table whose rows nothing reads gets no gradient.
    """
    level: dict[Node, int] = {}
    live = order.live(graph, root)
    found: dict[tuple[int, torch.device, bool], list[Lookup]] = {}
    for node in graph.nodes:
        level[node] = max((level[n] for n in node.all_input_nodes), default=0)
        lookup = read(node, root)
        if isinstance(lookup, Lookup):
            key = level[node], lookup.table.device, node in live
            found.setdefault(key, []).append(lookup)
            level[node] += 1
    return [part for group in found.values() for part in _legal_parts(graph, group, root)]


def _legal_parts(graph: Graph, group: list[Lookup], root: nn.Module) -> list[list[Lookup]]:
    """``group`` as a whole if the engine allows it, else the longest runs that it allows."""
    if len(group) == 1 or legal(graph, _as_match(group), root) is None:
        return [group]
    parts: list[list[Lookup]] = [[group[0]]]
    for lookup in group[1:]:
        if legal(graph, _as_match([*parts[-1], lookup]), root) is None:
            parts[-1].append(lookup)
        else:
            parts.append([lookup])
    return parts


def _as_match(group: Sequence[Lookup]) -> Match:
    nodes = [lookup.node for lookup in group]
    return Match(nodes, nodes, group)


# ---------------------------------------------------------------- the rule


def _match(node: Node, root: nn.Module) -> Answer:
    found = read(node, root)
    if not isinstance(found, Lookup):
        return found
    for group in groups(node.graph, root):
        if group[0].node is node:
            nodes = [lookup.node for lookup in group]
            part = isinstance(root, (nn.Embedding, nn.EmbeddingBag))
            return Match(nodes, nodes, _Group(group, _whole(group, node.graph, root), part))
    return None


def _tables(group: Iterable[Lookup]) -> list[torch.Tensor]:
    """The distinct tables of a group, in the order of their first lookup."""
    return list({id(lookup.table): lookup.table for lookup in group}.values())


@dataclass(frozen=True, slots=True)
class _Group:
    """The lookups of one call, and the ids of those tables that are also read as a whole."""

    lookups: Sequence[Lookup]
    whole: set[int]
    part: bool  # of a model that is not captured whole: who else reads the tables is unknown


def _whole(group: Sequence[Lookup], graph: Graph, root: nn.Module) -> set[int]:
    """The ids of small tables on the CPU that are also read as a whole, not only by lookups.

    Their gradient is dense whatever the lookups do. Large tables are not among them: what reads one
    may not contribute to the loss, and next to a dense gradient of that size rows cost little.
    """
    tables = {id(t) for t in _tables(group) if t.numel() <= SMALL and t.is_cpu}
    if isinstance(root, (nn.Embedding, nn.EmbeddingBag)):
        return tables  # what else reads them is unknown
    found: set[int] = set()
    for node in graph.nodes:
        if node.op == "get_attr" and any(_reads(user, root) for user in node.users):
            found.add(id(tensor_at(node, root)))
        elif node.op == "call_module" and not is_lookup(node, root):
            found.update(map(id, root.get_submodule(str(node.target)).parameters()))
    return tables & found


def _reads(user: Node, root: nn.Module) -> bool:
    """Whether ``user`` of a table gives it a dense gradient."""
    if is_lookup(user, root) or is_call(user, BAGS, getattr):
        return False
    return not is_method(user, "size", "dim", "numel", "detach")


def _rewrite(match: Match, build: Build) -> list[Node]:
    group: Sequence[Lookup] = match.found.lookups
    whole: set[int] = match.found.whole
    tables = _tables(group)
    first = {id(x.table): x.weight for x in reversed(group)}
    index = {id(t): k for k, t in enumerate(tables)}
    weights = {id(t): put(build, first[id(t)]) for t in tables}
    matrices, rows = dynamic.encode(build, group, weights)
    padding = [
        put(build, x.padding_idx) if k not in rows else dynamic.padding(x, build.root)
        for k, x in enumerate(group)
    ]
    call = build.call(
        BAGS,
        [matrices.get(id(t), weights[id(t)]) for t in tables],
        [rows.get(k, x.ids) for k, x in enumerate(group)],
        [x.offsets for x in group],
        [x.per_sample_weights for x in group],
        [index[id(x.table)] for x in group],
        [x.mode for x in group],
        padding,
        [x.include_last_offset for x in group],
        [x.sparse for x in group],
        *([False, [id(x.table) in whole for x in group]] if whole else []),
        name="embedding_bags",
    )
    return [build.item(call, k) for k in range(len(group))]


def _describe(match: Match) -> str:
    group: _Group = match.found
    tables = plural(len(_tables(group.lookups)), "table")
    told = f"{plural(len(group.lookups), 'lookup')} of {tables} in one call"
    if group.whole:
        why = "which may be read elsewhere too" if group.part else "read as a whole too"
        told += f"; dense gradients of {len(group.whole)}, {why}"
    return told


def _worth(match: Match) -> str | None:
    group: Sequence[Lookup] = match.found.lookups
    kept = {id(x.table) for x in group if x.sparse} | match.found.whole
    dense = sum(
        t.numel() * t.element_size()
        for t in _tables(group)
        if t.requires_grad and id(t) not in kept and dynamic_table.of(t) is None
    )
    saved = [plural(len(group) - 1, "launch")] if len(group) > 1 else []
    saved += [f"{human(dense)} of dense gradient a step"] if dense else []
    return ", ".join(saved) or None


GROUP = Rule(
    name="group-embeddings",
    equation="w1[x1], bag(w2, x2, offsets2) ... => embedding_bags([w1, w2 ...], [x1, x2 ...])",
    match=_match,
    rewrite=_rewrite,
    describe=_describe,
    worth=_worth,
)


@dataclass(frozen=True)
class GroupEmbeddings:
    """w1[x1], bag(w2, x2, offsets2) ... => embedding_bags([w1, w2 ...], [x1, x2 ...])

    nn.Embedding, nn.EmbeddingBag, F.embedding and F.embedding_bag, sum, mean, max or none, with
    offsets and weights per sample or without. Each table is passed once, however often it is looked
    up. padding_idx is read from the user's module at each call.
    """

    name: ClassVar[str] = "group-embeddings"

    def run(self, graph: Graph, context: Context) -> int:
        """Group the lookups of ``graph``; returns the number of groups made."""
        before = sum(is_lookup(n, context.root) for n in graph.nodes)
        fired = apply(graph, [GROUP], context)
        after = sum(is_lookup(n, context.root) for n in graph.nodes)
        context.journal.lookups_found += before
        context.journal.lookups_fused += before - after
        return fired
