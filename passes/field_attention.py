"""Self-attention of fields: softmax(c Q K^t) V, written by hand or with torch's own functions.

scores      Q @ K.transpose(-2, -1), bmm, einsum("bhid,bhjd->bhij"), times a constant or not
weights     softmax over the last dimension, with or without dropout; may have other readers
values      weights @ V, bmm, einsum("bhij,bhjd->bhid")
torch's     scaled_dot_product_attention(Q, K, V) without a mask; nn.MultiheadAttention of one input
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter import order
from recast.rewriter.ir import Graph, Node, is_call, is_method, items
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply

from .chain_steps import Step, read_step
from .leaf import (
    Attr,
    Value,
    argument,
    bytes_of,
    differs,
    extra,
    human,
    module_of,
    plural,
    put,
    rank,
    spec_of,
    unpaid,
)

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_MOST = 128  # fields, and elements of a head: for more, torch's own products are as fast
_PRODUCTS = (torch.bmm, torch.matmul, operator.matmul)


# ---------------------------------------------------------------- by hand


@dataclass(frozen=True, slots=True)
class Found:
    """softmax(scale · q kᵀ), dropout, v; each of q, k and v of 3 or 4 dimensions."""

    q: Node
    k: Node
    turned: bool  # k is given transposed
    v: Node
    scale: float
    p: Value
    training: Value
    weights: bool


def _softmax(node: Node, root: nn.Module) -> Node | None:
    """X when ``node`` is its softmax over the last dimension."""
    module = module_of(node, root)
    if type(module) is nn.Softmax and differs(node, module, nn.Softmax) is None:
        source, dim = argument(node, 0, "input"), module.dim
    elif is_call(node, F.softmax, torch.softmax) or is_method(node, "softmax"):
        if extra(node, 2, "input", "dim", "_stacklevel", "dtype") or node.kwargs.get("dtype"):
            return None
        source, dim = argument(node, 0, "input"), argument(node, 1, "dim")
    else:
        return None
    spec = spec_of(source)
    last = spec is not None and dim in (-1, len(spec.shape) - 1)
    return source if last and isinstance(source, Node) else None


def _unscaled(node: Node) -> tuple[Node, float, list[Node]]:
    """``(x, factor, nodes)`` of a product with constants, or of a quotient."""
    factor, nodes = 1.0, []
    while is_call(node, operator.mul, operator.imul, operator.truediv, operator.itruediv):
        first: Any = node.args[0]
        second: Any = node.args[1]
        if isinstance(second, Node) and node.target is operator.mul:
            first, second = second, first
        if not isinstance(first, Node) or type(second) not in (int, float) or not second:
            break
        product = node.target in (operator.mul, operator.imul)
        factor = factor * second if product else factor / second
        nodes.append(node)
        node = first
    return node, factor, nodes


def _einsum(node: Any, *forms: str) -> tuple[Node, Node] | None:
    """The operands of an einsum whose equation is one of ``forms``, whatever its letters."""
    if not is_call(node, torch.einsum) or not isinstance(node.args[0], str):
        return None
    equation: Any = node.args[0]
    given: list[Any] = list(node.args[1:])
    if len(given) == 1 and isinstance(given[0], (list, tuple)):
        given = list(given[0])
    letters: dict[str, str] = {}
    plain = "".join(
        letters.setdefault(c, chr(97 + len(letters))) if c.isalpha() else c
        for c in equation.replace(" ", "")
    )
    both = len(given) == 2 and all(isinstance(g, Node) for g in given)
    return (given[0], given[1]) if both and plain in forms else None


def _scores(node: Node) -> tuple[Node, Node, bool, list[Node]] | None:
    """``(q, k, turned, nodes)`` when ``node`` is q kᵀ."""
    if (found := _einsum(node, "abcd,abed->abce", "abc,adc->abd")) is not None:
        return (*found, False, [node])
    if not is_call(node, *_PRODUCTS):
        return None
    q, k = node.args[:2]
    if not isinstance(q, Node) or not isinstance(k, Node):
        return None
    spec = spec_of(k)
    if spec is not None and is_call(k, torch.transpose):
        dims = {d % len(spec.shape) for d in k.args[1:] if isinstance(d, int)}
        if dims == {len(spec.shape) - 1, len(spec.shape) - 2} and set(k.users) == {node}:
            return q, k.all_input_nodes[0], False, [k, node]
    return q, k, True, [node]


def _values(node: Node, weights: Node) -> Node | None:
    """V when ``node`` is weights V."""
    found = _einsum(node, "abcd,abde->abce", "abc,acd->abd")
    if found is None and is_call(node, *_PRODUCTS):
        first, second = node.args[:2]
        both = isinstance(first, Node) and isinstance(second, Node)
        found = (first, second) if both else None  # type: ignore[assignment]
    if found is None or found[0] is not weights or found[1] is weights:
        return None
    return found[1]


def _match(node: Node, root: nn.Module) -> Answer:
    source = _softmax(node, root)
    if source is None:
        return None
    product, scale, scaling = _unscaled(source)
    scores = _scores(product)
    if scores is None:
        return None
    q, k, turned, nodes = scores
    dropping, p, training = node, 0.0, False
    drop = next((s for u in node.users if isinstance(s := read_step(u, root), Step)), None)
    if drop is not None and drop.kind == "dropout" and drop.source is node:
        dropping, (p,), (training,) = drop.node, drop.numbers, drop.training  # type: ignore[assignment]
    found = [(user, v) for user in dropping.users if (v := _values(user, dropping)) is not None]
    if len(found) != 1:
        return None
    (last, v), weights = found[0], bool(set(node.users) - {dropping, found[0][0]})
    sizes = _sizes(q, k, v, turned)
    if sizes is None:
        return None
    if max(sizes) > _MOST:
        return Miss(
            node,
            f"{sizes[0]} fields look at {sizes[1]}, in heads of {max(sizes[2:])} elements",
            (f"nothing: above {_MOST} torch's own products are as fast",),
        )
    inner = [*nodes, *scaling[::-1], node, *([dropping] if dropping is not node else []), last]
    outputs = [last, node] if weights else [last]
    match = Match(inner, outputs, Found(q, k, turned, v, scale, p, training, weights))
    return unpaid("field_attention", node, root) or match


def _sizes(q: Node, k: Node, v: Node, turned: bool) -> tuple[int, ...] | None:
    """The numbers of queries and keys, and the lengths of their vectors and of the values; None if
    unfit.
    """
    specs = [spec_of(t) for t in (q, k, v)]
    if any(s is None or len(s.shape) not in (3, 4) for s in specs):
        return None
    a, b, c = (s for s in specs if s is not None)
    if not len(a.shape) == len(b.shape) == len(c.shape) or not a.dtype == b.dtype == c.dtype:
        return None
    if not a.shape[:-2] == b.shape[:-2] == c.shape[:-2] or "n" in a.shape[:-2]:
        return None
    keys, length = (b.shape[-1], b.shape[-2]) if turned else b.shape[-2:]
    sizes = (a.shape[-2], keys, length, c.shape[-1])
    fit = keys == c.shape[-2] and length == a.shape[-1] and a.dtype.is_floating_point
    return tuple(s for s in sizes if isinstance(s, int)) if fit and all(
        isinstance(s, int) and s for s in sizes
    ) else None  # fmt: skip


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    k = build.call(torch.transpose, found.k, -2, -1) if found.turned else found.k
    spec = spec_of(found.q)
    flat = spec is not None and len(spec.shape) == 3
    q, k, v = (build.call(torch.unsqueeze, t, 1) if flat else t for t in (found.q, k, found.v))
    call = _attention(q, k, v, found.scale, found.p, found.training, found.weights, build)
    made = [build.item(call, i) for i in range(1 + found.weights)]
    return [build.call(torch.squeeze, t, 1) if flat else t for t in made]


def _attention(
    q: Node, k: Node, v: Node, scale: float, p: Value, training: Value, weights: bool, build: Build
) -> Node:
    return build.call(
        torch.ops.recast.field_attention.default,
        q, k, v, scale, put(build, p), put(build, training), weights,
        name="field_attention",
    )  # fmt: skip


def _worth(match: Match) -> str:
    launches = plural(max(len(match.nodes) - 1, 1), "launch")
    size = bytes_of(next((n for n in match.nodes if (rank(n) or 0) > 2), None))
    return launches if size is None else f"{launches}, {human(4 * size)} of traffic a sample"


BY_HAND = Rule(
    name="fuse-field-attention",
    equation="dropout(softmax(c Q K^t)) V => field_attention(Q, K, V, c)",
    match=_match,
    rewrite=_rewrite,
    describe=lambda match: "attention of fields in one call",
    worth=_worth,
)


# ---------------------------------------------------------------- scaled_dot_product_attention

_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")


def _match_sdpa(node: Node, root: nn.Module) -> Answer:
    if not is_call(node, F.scaled_dot_product_attention) or extra(node, 7, *_SDPA):
        return None
    q, k, v, mask, p, causal, scale = (argument(node, i, name) for i, name in enumerate(_SDPA))
    if not all(isinstance(t, Node) for t in (q, k, v)):
        return None
    sizes = _sizes(q, k, v, False)
    if sizes is None or max(sizes) > _MOST:
        return None  # it is made for long sequences
    if mask is not None or causal not in (None, False):
        return Miss(node, "its attention is masked", ("field attention without a mask is fused",))
    if p not in (None, 0, 0.0):
        return Miss(
            node,
            "its dropout draws in an order of its own",
            ("dropout_p=0.0", "softmax, F.dropout and a product, by hand or nn.MultiheadAttention"),
        )
    if scale is not None and type(scale) not in (int, float):
        return None
    factor = sizes[2] ** -0.5 if scale is None else float(scale)
    found = Found(q, k, False, v, factor, 0.0, False, False)
    return unpaid("field_attention", node, root) or Match([node], [node], found)


SDPA = Rule(
    name="fuse-field-attention",
    equation="scaled_dot_product_attention(Q, K, V) => field_attention(Q, K, V, c)",
    match=_match_sdpa,
    rewrite=_rewrite,
    describe=lambda match: "attention of fields in one call",
    worth=lambda match: "a call made for long sequences",
)


# ---------------------------------------------------------------- nn.MultiheadAttention


@dataclass(frozen=True, slots=True)
class Module:
    """An ``nn.MultiheadAttention`` of one input."""

    x: Node
    path: str
    module: nn.MultiheadAttention
    drawn: bool  # a reader draws random numbers in the memory order of the result


def _match_module(node: Node, root: nn.Module) -> Answer:
    module = module_of(node, root)
    if not isinstance(module, nn.MultiheadAttention):
        return None
    why = differs(node, module, nn.MultiheadAttention)
    if why is not None:
        return why
    names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
    given = [argument(node, i, name) for i, name in enumerate(names)]
    spec = spec_of(given[0])
    same = given[0] is given[1] is given[2] and isinstance(given[0], Node)
    if not same or module.in_proj_weight is None or spec is None or len(spec.shape) != 3:
        return None
    if given[3] is not None or given[5] is not None or node.kwargs.get("is_causal"):
        return Miss(node, "its attention is masked", ("field attention without a mask is fused",))
    if module.bias_k is not None or module.add_zero_attn:
        return Miss(node, "it adds a key of its own (bias_k or add_zero_attn)")
    outer = [(key, user) for key, user in items(node)]
    if not outer or len(outer) != len(node.users) or any(key != 0 for key, _ in outer):
        return Miss(node, "its attention weights are used", ("call it with need_weights=False",))
    fields = spec.shape[1 if module.batch_first else 0]
    if not isinstance(fields, int) or max(fields, module.head_dim) > _MOST:
        return Miss(node, f"attention over {fields} places, whose number is large or varies")
    users = [user for _, user in outer]
    drawn = any(order.draws(reader, root) for user in users for reader in user.users)
    match = Match([node, *users], users, Module(given[0], str(node.target), module, drawn))
    return unpaid("field_attention", node, root) or match


def _rewrite_module(match: Match, build: Build) -> list[Node]:
    found: Module = match.found
    path, module = found.path, found.module
    # Keep a sample's fields together: with fields first, they would be a whole batch apart.
    x = found.x if module.batch_first else build.call(torch.transpose, found.x, 0, 1)
    bias = None if module.in_proj_bias is None else build.get(f"{path}.in_proj_bias")
    whole = build.call(F.linear, x, build.get(f"{path}.in_proj_weight"), bias)
    parts = build.call(torch.chunk, whole, 3, -1)
    heads = []
    for i in range(3):
        split = (module.num_heads, module.head_dim)
        part = build.call(torch.unflatten, build.item(parts, i), -1, split)
        heads.append(build.call(torch.transpose, part, 1, 2))
    scale = module.head_dim**-0.5
    p, training = Attr(f"{path}.dropout"), Attr(f"{path}.training")
    call = _attention(heads[0], heads[1], heads[2], scale, p, training, False, build)
    # Torch's own result has the fields first in memory, and a dropout after it draws in that order.
    places = (2, 0, 1, 3) if found.drawn else (0, 2, 1, 3)
    joined = build.call(torch.permute, build.item(call, 0), places)
    joined = build.call(torch.flatten, joined, 2)
    last = None if module.out_proj.bias is None else build.get(f"{path}.out_proj.bias")
    out = build.call(F.linear, joined, build.get(f"{path}.out_proj.weight"), last)
    if module.batch_first == found.drawn:
        out = build.call(torch.transpose, out, 0, 1)
    return [out] * len(match.outputs)


MODULE = Rule(
    name="fuse-field-attention",
    equation="MultiheadAttention(x, x, x)[0] => linear(field_attention(linear(x)))",
    match=_match_module,
    rewrite=_rewrite_module,
    describe=lambda match: "multi-head self-attention in one call between its two linears",
    worth=_worth,
)


@dataclass(frozen=True)
class FuseFieldAttention:
    """dropout(softmax(c Q K^t)) V => field_attention(Q, K, V, c)

    Attention written by hand in three or four dimensions, scaled_dot_product_attention, and
    nn.MultiheadAttention of one input without masks, if its weights are not read. Dropout draws
    torch's own masks.
    """

    name: ClassVar[str] = "fuse-field-attention"

    def run(self, graph: Graph, context: Context) -> int:
        """Fuse the attentions of ``graph``; returns their number."""
        return apply(graph, [BY_HAND, SDPA, MODULE], context)


__all__: Sequence[str] = ["BY_HAND", "MODULE", "SDPA", "FuseFieldAttention"]
