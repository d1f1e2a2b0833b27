"""Opens torch's transformer encoders into their layers, so that other passes see them.

    x = norm1(x + dropout1(self_attn(x, x, x)))            norm_first: the norms stand before
    x = norm2(x + dropout2(linear2(dropout(activation(linear1(x))))))

The feed-forward part is a chain, usually much wider than the input: 2048 by default. A layer with a
padding mask is left alone where torch would evaluate it without gradients by its fast path, which
computes other numbers for padded places, and for rows that are all padding, than the layers do.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Graph, Node, annotate
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply

from .leaf import argument, differs, extra, module_of, plural, spec_of

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_FUNCTIONS = {F.relu: torch.relu, F.gelu: F.gelu}


@dataclass(frozen=True, slots=True)
class Found:
    """An encoder, or one layer of it: paths of its layers and of the norm after them."""

    x: Node
    mask: Any
    padding: Any
    layers: tuple[str, ...]
    norm: str | None


def _match(node: Node, root: nn.Module) -> Answer:
    module, path = module_of(node, root), str(node.target)
    if isinstance(module, nn.TransformerEncoder):
        why = differs(node, module, nn.TransformerEncoder)
        paths = tuple(f"{path}.layers.{i}" for i in range(len(module.layers)))
        layers, mask_name = list(module.layers), "mask"
        norm = None if module.norm is None else f"{path}.norm"
    elif isinstance(module, nn.TransformerEncoderLayer):
        why, paths, layers, norm = None, (path,), [module], None
        mask_name = "src_mask"
    else:
        return None
    names = ("src", mask_name, "src_key_padding_mask", "is_causal")
    x, mask, padding, causal = (argument(node, i, name) for i, name in enumerate(names))
    if extra(node, 4, *names) or not isinstance(x, Node) or spec_of(x) is None:
        return None
    if causal:
        return Miss(node, "it is called with is_causal", ("give the mask alone",))
    for layer in layers:
        why = why or _unlike(node, layer)
    if why is not None:
        return why
    if padding is not None and any(_fast(layer) for layer in layers):
        return Miss(
            node,
            "without gradients torch evaluates it by a fast path that treats padding in another"
            " way, so it stays whole",
        )
    return Match([node], [node], Found(x, mask, padding, paths, norm))


def _unlike(node: Node, layer: nn.Module) -> Miss | None:
    """Why ``layer`` may not be taken apart."""
    if not isinstance(layer, nn.TransformerEncoderLayer):
        return Miss(node, f"its layers are {type(layer).__name__}")
    why = differs(node, layer, nn.TransformerEncoderLayer)
    if why is not None:
        return why
    blocks = nn.TransformerEncoderLayer
    if (
        type(layer)._sa_block is not blocks._sa_block
        or type(layer)._ff_block is not blocks._ff_block
    ):
        return Miss(node, f"{type(layer).__name__} overrides a block of its layer")
    if not isinstance(layer.activation, nn.Module) and layer.activation not in _FUNCTIONS:
        return Miss(
            node, "its activation is a function of yours", ("give the activation as a module",)
        )
    return None


def _fast(layer: nn.TransformerEncoderLayer) -> bool:
    """Whether torch would evaluate ``layer`` by its fast path."""
    return bool(
        layer.activation_relu_or_gelu
        and layer.self_attn.batch_first
        and layer.self_attn.in_proj_bias is not None
        and layer.self_attn.num_heads % 2 == 0
        and layer.norm1.eps == layer.norm2.eps
    )


class _Writer:
    """Writes the layers; every value has the shape and dtype of x."""

    def __init__(self, found: Found, build: Build) -> None:
        self.found, self.build = found, build
        self.spec = spec_of(found.x)

    def module(self, path: str, *args: Any, **kwargs: Any) -> Node:
        made = self.build.graph.create_node("call_module", path, args, kwargs)
        return self.build._add(made)

    def alike(self, node: Node) -> Node:
        annotate(node, spec=self.spec)
        return node

    def attention(self, path: str, x: Node) -> Node:
        found = self.found
        pair = self.module(
            f"{path}.self_attn", x, x, x,
            attn_mask=found.mask, key_padding_mask=found.padding, need_weights=False,
        )  # fmt: skip
        mixed = self.alike(self.build.item(pair, 0))
        return self.alike(self.module(f"{path}.dropout1", mixed))

    def feed(self, path: str, layer: nn.TransformerEncoderLayer, x: Node) -> Node:
        spec = self.spec
        assert spec is not None
        wide = type(spec)(spec.dtype, (*spec.shape[:-1], layer.linear1.out_features))
        inner = self.module(f"{path}.linear1", x)
        annotate(inner, spec=wide)
        if isinstance(layer.activation, nn.Module):
            inner = self.module(f"{path}.activation", inner)
        else:
            inner = self.build.call(_FUNCTIONS[layer.activation], inner)
        annotate(inner, spec=wide)
        inner = self.module(f"{path}.dropout", inner)
        annotate(inner, spec=wide)
        out = self.alike(self.module(f"{path}.linear2", inner))
        return self.alike(self.module(f"{path}.dropout2", out))

    def layer(self, path: str, x: Node) -> Node:
        layer = self.build.root.get_submodule(path)
        assert isinstance(layer, nn.TransformerEncoderLayer)
        if layer.norm_first:
            inner = self.attention(path, self.alike(self.module(f"{path}.norm1", x)))
            x = self.sum(x, inner)
            inner = self.feed(path, layer, self.alike(self.module(f"{path}.norm2", x)))
            return self.sum(x, inner)
        x = self.sum(x, self.attention(path, x))
        x = self.alike(self.module(f"{path}.norm1", x))
        x = self.sum(x, self.feed(path, layer, x))
        return self.alike(self.module(f"{path}.norm2", x))

    def sum(self, one: Node, two: Node) -> Node:
        return self.alike(self.build.call(operator.add, one, two))


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    writer = _Writer(found, build)
    x = found.x
    for path in found.layers:
        x = writer.layer(path, x)
    return [x if found.norm is None else writer.alike(writer.module(found.norm, x))]


ENCODER = Rule(
    name="open-transformers",
    equation="TransformerEncoderLayer(x) => norm2(h + mlp(h)), h = norm1(x + self_attn(x))",
    match=_match,
    rewrite=_rewrite,
    describe=lambda match: (
        f"{plural(len(match.found.layers), 'transformer layer')}, opened for the other passes"
    ),
)


@dataclass(frozen=True)
class OpenTransformers:
    """TransformerEncoderLayer(x) => norm2(h + mlp(h)), h = norm1(x + self_attn(x))

    nn.TransformerEncoder and its layers become calls of their parts, which stay the user's modules.
    """

    name: ClassVar[str] = "open-transformers"

    def run(self, graph: Graph, context: Context) -> int:
        """Open the encoders of ``graph``; returns their number."""
        return apply(graph, [ENCODER], context)
