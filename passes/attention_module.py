"""nn.MultiheadAttention as field attention between its linears.

MultiheadAttention(x, x, x)[0] => linear(field_attention(linear(x)))

On a CPU also of a query of its own, (q, x, x), and with attn_mask, key_padding_mask and is_causal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter import order
from recast.rewriter.ir import Node, items
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule
from recast.runtime.layers.attention_masks import dead_rows_are_zero, module_bias

from .attention_call import attention, masked_elsewhere, too_large, worth
from .leaf import Attr, argument, device_of, differs, module_of, spec_of, unpaid


@dataclass(frozen=True, slots=True)
class Module:
    """An ``nn.MultiheadAttention`` of a query, and one input for keys and values."""

    q: Node
    x: Node  # may be the query
    path: str
    module: nn.MultiheadAttention
    seen: bool  # the memory order of the result is, by a reader that draws in it, or the caller
    masks: tuple[Any, Any]  # attn_mask, key_padding_mask
    causal: bool  # except by the fast path, attn_mask is not read but taken to be causal
    safe: bool  # without keys, the result is zero
    fast: bool  # except by the fast path


_NAMES = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")


def _match_module(node: Node, root: nn.Module) -> Answer:
    module = module_of(node, root)
    if not isinstance(module, nn.MultiheadAttention):
        return None
    why = differs(node, module, nn.MultiheadAttention)
    if why is not None:
        return why
    query, key, value, padding, needed, mask = (
        argument(node, i, name) for i, name in enumerate(_NAMES)
    )
    one = query is key and isinstance(query, Node)
    if not one and not (
        device_of(root) == "cpu" and all(isinstance(t, Node) for t in (query, key))
    ):
        return None
    if key is not value or module.in_proj_weight is None or not _alike(query, key, module):
        return None
    causal = argument(node, 7, "is_causal", False)
    masked = mask is not None or padding is not None or causal is not False
    unread = masked_elsewhere(node, root) or _unmasked(node, mask, padding, causal, needed)
    if masked and unread is not None:
        return unread
    if module.bias_k is not None or module.add_zero_attn:
        return Miss(node, "it adds a key of its own (bias_k or add_zero_attn)")
    outer = [(key, user) for key, user in items(node)]
    if not outer or len(outer) != len(node.users) or any(key != 0 for key, _ in outer):
        return Miss(node, "its attention weights are used", ("call it with need_weights=False",))
    axis = 1 if module.batch_first else 0
    fields = [spec.shape[axis] for t in (query, key) if (spec := spec_of(t)) is not None]
    sizes = [n for n in fields if isinstance(n, int)]
    known = len(sizes) == len(fields)
    if not known or too_large(max(sizes), module.head_dim, module.dropout, root):
        return Miss(node, f"attention over {fields[-1]} places, whose number is large or varies")
    users = [user for _, user in outer]
    readers = [reader for user in users for reader in user.users]
    seen = any(reader.op == "output" or order.draws(reader, root) for reader in readers)
    safe = needed is False
    fast = safe and one and module.batch_first and module.num_heads % 2 == 0
    fast = fast and module.in_proj_bias is not None and not any(map(_floating, (mask, padding)))
    causal = causal is True and safe and padding is None
    path = str(node.target)
    found = Module(query, key, path, module, seen, (mask, padding), causal, safe, fast)
    return unpaid("field_attention", node, root) or Match([node, *users], users, found)


def _alike(query: Any, key: Any, module: nn.MultiheadAttention) -> bool:
    """Whether both are (N, L, E), or (L, N, E), for one N."""
    a, b = spec_of(query), spec_of(key)
    if a is None or b is None or not len(a.shape) == len(b.shape) == 3 or a.dtype != b.dtype:
        return False
    axis = 0 if module.batch_first else 1
    return a.shape[axis] == b.shape[axis] and (query is key or a.shape[axis] != "n")


def _unmasked(node: Node, mask: Any, padding: Any, causal: Any, needed: Any) -> Miss | None:
    """Why the masks of the call cannot be given to the op."""
    hinted = causal is True and mask is not None and isinstance(needed, bool | None)
    if causal is not False and not hinted:
        return Miss(node, "is_causal lets torch read the mask or not", ("give the mask alone",))
    specs = [spec_of(t) for t in (mask, padding) if t is not None]
    if any(s is None or not (s.dtype == torch.bool or s.dtype.is_floating_point) for s in specs):
        return Miss(node, "the dtypes of its masks are not known to be bool or floating")
    return None


def _floating(mask: Any) -> bool:
    spec = spec_of(mask)
    return spec is not None and spec.dtype.is_floating_point


def _rewrite_module(match: Match, build: Build) -> list[Node]:
    found: Module = match.found
    path, module = found.path, found.module
    q, k, v = _projections(found, build)
    p, training = Attr(f"{path}.dropout"), Attr(f"{path}.training")
    masks = _masks(found, q, k, build)
    call = attention(q, k, v, module.head_dim**-0.5, p, training, False, build, masks)
    # Torch's own result has the fields first in memory: a dropout after it draws in that order,
    # and a caller may ask for a view of it.
    places = (2, 0, 1, 3) if found.seen else (0, 2, 1, 3)
    joined = build.call(torch.permute, build.item(call, 0), places)
    joined = build.call(torch.flatten, joined, 2)
    last = None if module.out_proj.bias is None else build.get(f"{path}.out_proj.bias")
    out = build.call(F.linear, joined, build.get(f"{path}.out_proj.weight"), last)
    if module.batch_first == found.seen:
        out = build.call(torch.transpose, out, 0, 1)
    return [out] * len(match.outputs)


def _projections(found: Module, build: Build) -> list[Node]:
    """Queries, keys and values as (N, H, L, d)."""
    path, module = found.path, found.module
    weight = build.get(f"{path}.in_proj_weight")
    bias = None if module.in_proj_bias is None else build.get(f"{path}.in_proj_bias")

    def parts(x: Node, w: Node, b: Node | None, count: int) -> list[Node]:
        # Keep a sample's fields together: with fields first, they would be a whole batch apart.
        x = x if module.batch_first else build.call(torch.transpose, x, 0, 1)
        whole = build.call(F.linear, x, w, b)
        chunks = build.call(torch.chunk, whole, count, -1) if count > 1 else None
        made = []
        for i in range(count):
            split = (module.num_heads, module.head_dim)
            part = whole if chunks is None else build.item(chunks, i)
            part = build.call(torch.unflatten, part, -1, split)
            made.append(build.call(torch.transpose, part, 1, 2))
        return made

    if found.q is found.x:
        return parts(found.x, weight, bias, 3)
    sizes = [module.embed_dim, 2 * module.embed_dim]
    weights = build.call(torch.split, weight, sizes)
    biases = None if bias is None else build.call(torch.split, bias, sizes)
    own = [None if biases is None else build.item(biases, i) for i in range(2)]
    return [
        *parts(found.q, build.item(weights, 0), own[0], 1),
        *parts(found.x, build.item(weights, 1), own[1], 2),
    ]


def _masks(found: Module, q: Node, k: Node, build: Build) -> tuple[Any, ...]:
    """The arguments of the op for the masks."""
    mask, padding = found.masks
    if mask is None and padding is None:
        return ()
    path = found.path
    safe: Any = found.safe
    if found.fast:
        names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
        held = [found.x, *(build.get(f"{path}.{name}") for name in names)]
        safe = build.call(dead_rows_are_zero, build.get(f"{path}.training"), held)
    causal = (safe,) if found.causal else ()
    bias = build.call(module_bias, q, k, mask, padding, *causal, name="attention_bias")
    return (bias, None, 0.0, safe)


MODULE = Rule(
    name="fuse-field-attention",
    equation="MultiheadAttention(x, x, x)[0] => linear(field_attention(linear(x)))",
    match=_match_module,
    rewrite=_rewrite_module,
    describe=lambda match: "multi-head self-attention in one call between its two linears",
    worth=worth,
)

__all__ = ["MODULE"]
