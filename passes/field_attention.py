"""Attention of fields or of a sequence: softmax(c Q K^t) V, by hand or with torch's own functions.

scores      Q @ K.transpose(-2, -1), bmm, einsum("bhid,bhjd->bhij"), times a constant or not
masks       on a CPU, of scores: see `attention_masks`
weights     softmax over the last dimension, with or without dropout; may have other readers
values      weights @ V, bmm, einsum("bhij,bhjd->bhid")
torch's     scaled_dot_product_attention(Q, K, V); nn.MultiheadAttention: see `attention_module`
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Graph, Node, is_call, is_method
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply
from recast.runtime.layers.attention_masks import causal_bias

from .attention_call import MOST, attention, masked_elsewhere, too_large, worth
from .attention_masks import Masks, filled_in_place, read_masks, write_masks
from .attention_module import MODULE
from .chain_steps import Step, read_step
from .leaf import (
    Value,
    argument,
    differs,
    extra,
    module_of,
    spec_of,
    unpaid,
)

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_PRODUCTS = (torch.bmm, torch.matmul, operator.matmul)


# ---------------------------------------------------------------- by hand


@dataclass(frozen=True, slots=True)
class Found:
    """softmax(masks of scale · q kᵀ), dropout, v; each of q, k and v of 3 or 4 dimensions."""

    q: Node
    k: Node
    turned: bool  # k is given transposed
    v: Node
    scale: float
    p: Value
    training: Value
    weights: bool
    masks: Masks | None = None


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


def unscaled(node: Node) -> tuple[Node, float, list[Node]]:
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


def einsum_operands(node: Any, *forms: str) -> tuple[Node, Node] | None:
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


def scores_of(node: Node) -> tuple[Node, Node, bool, list[Node]] | None:
    """``(q, k, turned, nodes)`` when ``node`` is q kᵀ."""
    if (found := einsum_operands(node, "abcd,abed->abce", "abc,adc->abd")) is not None:
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


def values_of(node: Node, weights: Node) -> Node | None:
    """V when ``node`` is weights V."""
    found = einsum_operands(node, "abcd,abde->abce", "abc,acd->abd")
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
    if filled_in_place(source):
        return Miss(node, "its mask is filled in place", ("scores.masked_fill(mask, value)",))
    masks = read_masks(source)
    product, scale, scaling = unscaled(masks.scores)
    scores = scores_of(product)
    if scores is None:
        return None
    q, k, turned, nodes = scores
    dropping, p, training = node, 0.0, False
    drop = next((s for u in node.users if isinstance(s := read_step(u, root), Step)), None)
    if drop is not None and drop.kind == "dropout" and drop.source is node:
        dropping, (p,), (training,) = drop.node, drop.numbers, drop.training  # type: ignore[assignment]
    found = [(user, v) for user in dropping.users if (v := values_of(user, dropping)) is not None]
    if len(found) != 1:
        return None
    (last, v), weights = found[0], bool(set(node.users) - {dropping, found[0][0]})
    sizes = sizes_of(q, k, v, turned)
    if sizes is None:
        return _of_any_length(node)
    if too_large(max(sizes[:2]), max(sizes[2:]), p, root):
        return Miss(
            node,
            f"{sizes[0]} fields look at {sizes[1]}, in heads of {max(sizes[2:])} elements",
            (f"nothing: above {MOST}, or 64 of both, torch's own products are as fast",),
        )
    if masks.nodes and (miss := masked_elsewhere(node, root)) is not None:
        return miss
    dropped = [dropping] if dropping is not node else []
    inner = [*nodes, *scaling[::-1], *masks.nodes, node, *dropped, last]
    outputs = [last, node] if weights else [last]
    match = Match(inner, outputs, Found(q, k, turned, v, scale, p, training, weights, masks))
    return unpaid("field_attention", node, root) or match


def _of_any_length(node: Node) -> Miss | None:
    spec = spec_of(node)
    if spec is None or "n" not in spec.shape[-2:]:
        return None
    return Miss(
        node, "its number of places is not known, and attention over few is fused",
        ("one example, if all calls have its length",),
    )  # fmt: skip


def sizes_of(q: Node, k: Node, v: Node, turned: bool) -> tuple[int, ...] | None:
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
    given: tuple[Any, ...] = ()
    if found.masks is not None and found.masks.nodes:
        given = (*write_masks(found.masks, flat, build), found.masks.fill)
    call = attention(q, k, v, found.scale, found.p, found.training, found.weights, build, given)
    made = [build.item(call, i) for i in range(1 + found.weights)]
    return [build.call(torch.squeeze, t, 1) if flat else t for t in made]


BY_HAND = Rule(
    name="fuse-field-attention",
    equation="dropout(softmax(c Q K^t)) V => field_attention(Q, K, V, c)",
    match=_match,
    rewrite=_rewrite,
    describe=lambda match: "attention of fields in one call",
    worth=worth,
)


# ---------------------------------------------------------------- scaled_dot_product_attention

_LONGEST = 32  # elements of vectors, beyond which torch's masked call is as fast
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")


def _match_sdpa(node: Node, root: nn.Module) -> Answer:
    if not is_call(node, F.scaled_dot_product_attention) or extra(node, 7, *_SDPA):
        return None
    q, k, v, mask, p, causal, scale = (argument(node, i, name) for i, name in enumerate(_SDPA))
    if not all(isinstance(t, Node) for t in (q, k, v)):
        return None
    sizes = sizes_of(q, k, v, False)
    if sizes is None or too_large(max(sizes[:2]), max(sizes[2:]), 0.0, root):
        return None  # it is made for long sequences
    masked = mask is not None or causal not in (None, False)
    if masked and (miss := masked_elsewhere(node, root)) is not None:
        return miss
    if masked and max(sizes[2:]) > _LONGEST:
        return Miss(
            node,
            f"its attention is masked, and for vectors of {max(sizes[2:])} elements"
            " torch's own call is as fast",
        )
    if masked and ((mask is None) is not (causal is True) or not _fits_scores(mask, q)):
        return Miss(node, "its attention is masked in a way that is not known when it is optimised")
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
    match = Match([node], [node], (found, mask, causal is True, sizes[1]))
    return unpaid("field_attention", node, root) or match


def _fits_scores(mask: Any, q: Node) -> bool:
    """Whether ``mask`` is None, or of a dtype that torch takes and no wider than the scores."""
    own, spec = spec_of(mask), spec_of(q)
    if mask is None:
        return True
    if own is None or spec is None or own.dtype not in (torch.bool, spec.dtype):
        return False
    samples = zip(reversed(own.shape[:-2]), reversed(spec.shape[:-2]), strict=False)
    return len(own.shape) <= len(spec.shape) and all(a in (1, b) for a, b in samples)


def _rewrite_sdpa(match: Match, build: Build) -> list[Node]:
    found, mask, causal, keys = match.found
    spec = spec_of(found.q)
    flat = spec is not None and len(spec.shape) == 3
    q, k, v = (
        build.call(torch.unsqueeze, t, 1) if flat else t for t in (found.q, found.k, found.v)
    )
    given: tuple[Any, ...] = ()
    if causal:
        given = (build.call(causal_bias, q, keys, name="causal"),)
    elif mask is not None:
        boolean = (known := spec_of(mask)) is not None and known.dtype == torch.bool
        masks = Masks(q, filled=mask, kept=True) if boolean else Masks(q, bias=mask)
        given = (*write_masks(masks, flat, build), -math.inf, True)
    call = attention(q, k, v, found.scale, 0.0, False, False, build, given)
    out = build.item(call, 0)
    return [build.call(torch.squeeze, out, 1) if flat else out]


SDPA = Rule(
    name="fuse-field-attention",
    equation="scaled_dot_product_attention(Q, K, V) => field_attention(Q, K, V, c)",
    match=_match_sdpa,
    rewrite=_rewrite_sdpa,
    describe=lambda match: "attention of fields in one call",
    worth=lambda match: "a call made for long sequences",
)


# ---------------------------------------------------------------- the pass


@dataclass(frozen=True)
class FuseFieldAttention:
    """dropout(softmax(c Q K^t)) V => field_attention(Q, K, V, c)

    Attention written by hand in three or four dimensions, scaled_dot_product_attention, and
    nn.MultiheadAttention, if its weights are not read. On a CPU also with masks: filled or added
    scores, attn_mask, key_padding_mask, is_causal. Dropout draws torch's own masks.
    """

    name: ClassVar[str] = "fuse-field-attention"

    def run(self, graph: Graph, context: Context) -> int:
        """Fuse the attentions of ``graph``; returns their number."""
        return apply(graph, [BY_HAND, SDPA, MODULE], context)


__all__: Sequence[str] = ["BY_HAND", "MODULE", "SDPA", "FuseFieldAttention"]
