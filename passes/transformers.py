"""Opens torch's transformer encoders into their layers, so that other passes see them.

    x = norm1(x + dropout1(self_attn(x, x, x)))            norm_first: the norms stand before
    x = norm2(x + dropout2(linear2(dropout(activation(linear1(x))))))

The feed-forward part is a chain, usually much wider than the input: 2048 by default. Without
gradients torch evaluates layers by a fast path that reads masks in a way of its own: the attention
gets masks that are made for each call, as `runtime/layers/encoder_masks` tells.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Graph, Node, Spec, annotate
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply
from recast.runtime.layers.encoder_masks import (
    layer_masks,
    with_padding,
    without_padding,
)

from .leaf import argument, device_of, differs, extra, module_of, plural, spec_of

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_FUNCTIONS = {F.relu: torch.relu, F.gelu: F.gelu}


@dataclass(frozen=True, slots=True)
class Found:
    """An encoder, or one layer of it: paths of its layers and of the norm after them."""

    x: Node
    mask: Any
    padding: Any
    causal: bool
    layers: tuple[str, ...]
    norm: str | None
    skips: str | None  # the attribute that lets torch leave out padded places


def _match(node: Node, root: nn.Module) -> Answer:
    module, path = module_of(node, root), str(node.target)
    if isinstance(module, nn.TransformerEncoder):
        why = differs(node, module, nn.TransformerEncoder)
        paths = tuple(f"{path}.layers.{i}" for i in range(len(module.layers)))
        layers, mask_name = list(module.layers), "mask"
        norm = None if module.norm is None else f"{path}.norm"
        skips = f"{path}.use_nested_tensor"
    elif isinstance(module, nn.TransformerEncoderLayer):
        why, paths, layers, norm, skips = None, (path,), [module], None, None
        mask_name = "src_mask"
    else:
        return None
    names = ("src", mask_name, "src_key_padding_mask", "is_causal")
    x, mask, padding, causal = (argument(node, i, name) for i, name in enumerate(names))
    if extra(node, 4, *names) or not isinstance(x, Node) or spec_of(x) is None:
        return None
    for layer in layers:
        why = why or _unlike(node, layer)
    if why is None and (mask is not None or padding is not None or causal):
        why = _unreadable(node, root, x, mask, padding, causal, module)
    if why is not None:
        return why
    return Match([node], [node], Found(x, mask, padding, causal is True, paths, norm, skips))


def _unreadable(
    node: Node, root: nn.Module, x: Node, mask: Any, padding: Any, causal: Any, module: nn.Module
) -> Miss | None:
    """Why the masks of a call cannot be given to the attention of the layers."""
    if isinstance(causal, Node) or (causal and mask is None):
        return Miss(node, "is_causal lets torch read the mask or not", ("give the mask alone",))
    spec = spec_of(x)
    if spec is None or len(spec.shape) != 3:
        return Miss(node, "its input is masked and has no batch dimension")
    if padding is None or not any(_fast(m) for m in module.modules()):
        return None
    if device_of(root) != "cpu":
        return Miss(
            node,
            "without gradients torch evaluates it by a fast path that treats padding in another"
            " way, so it stays whole",
        )
    if not getattr(module, "mask_check", True):
        return Miss(
            node, "mask_check=False lets torch move rows whose padding is not at the end",
            ("nn.TransformerEncoder(.., mask_check=True)",),
        )  # fmt: skip
    return None


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


def _fast(layer: nn.Module) -> bool:
    """Whether torch may evaluate ``layer`` by its fast path."""
    return bool(
        isinstance(layer, nn.TransformerEncoderLayer)
        and layer.activation_relu_or_gelu
        and layer.self_attn.batch_first
        and layer.self_attn.in_proj_bias is not None
        and layer.self_attn.num_heads % 2 == 0
        and layer.norm1.eps == layer.norm2.eps
        and not any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules())
    )


_READ = (
    "self_attn.in_proj_weight", "self_attn.in_proj_bias", "self_attn.out_proj.weight",
    "self_attn.out_proj.bias", "norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias",
    "linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias",
)  # fmt: skip


def _layer(root: nn.Module, path: str) -> nn.TransformerEncoderLayer:
    layer = root.get_submodule(path)
    assert isinstance(layer, nn.TransformerEncoderLayer)
    return layer


Masks: TypeAlias = "tuple[Node | None, Node | None]"  # attn_mask, key_padding_mask


class _Writer:
    """Writes the layers; every value has the shape and dtype of x."""

    def __init__(self, found: Found, build: Build) -> None:
        self.found, self.build = found, build
        self.spec = spec_of(found.x)
        self.x, self.padding = found.x, found.padding
        self.shared: Masks | None = None  # those of all layers that have no fast path

    def module(self, path: str, *args: Any, **kwargs: Any) -> Node:
        made = self.build.graph.create_node("call_module", path, args, kwargs)
        return self.build._add(made)

    def alike(self, node: Node) -> Node:
        annotate(node, spec=self.spec)
        return node

    def attention(self, path: str, x: Node, masks: Masks) -> Node:
        pair = self.module(
            f"{path}.self_attn", x, x, x,
            attn_mask=masks[0], key_padding_mask=masks[1], need_weights=False,
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

    def parameters(self, path: str) -> list[Node]:
        return [self.build.get(f"{path}.{name}") for name in _READ]

    def skip(self) -> tuple[Node, Node]:
        """Leave out what torch does where it computes no padded places; what it made, and whether
        it does not compute them.
        """
        found, build = self.found, self.build
        assert found.skips is not None
        layers = [_layer(build.root, path) for path in found.layers]
        told = [
            (m.self_attn.num_heads, m.activation_relu_or_gelu == 2, m.norm_first) for m in layers
        ]
        made = build.call(
            without_padding, found.x, found.padding, build.get(found.skips),
            build.get(f"{found.layers[0]}.training"), told,
            [node for path in found.layers for node in self.parameters(path)],
            [build.get(f"{path}.norm1.eps") for path in found.layers],
        )  # fmt: skip
        done, self.x, self.padding, skipped = (build.item(made, i) for i in range(4))
        self.alike(self.x)
        annotate(self.padding, spec=spec_of(found.padding))
        return done, skipped

    def masks(self, path: str, layer: nn.TransformerEncoderLayer, x: Node) -> Masks:
        """The masks of the attention of a layer of the input ``x``."""
        found, spec, fast = self.found, self.spec, _fast(layer)
        if found.mask is None and found.padding is None:
            return None, None
        if not fast and self.shared is not None:
            return self.shared
        attention = layer.self_attn
        args = x, found.mask, self.padding, attention.num_heads, found.causal
        decided = (self.build.get(f"{path}.training"), self.parameters(path)) if fast else ()
        pair = self.build.call(
            layer_masks, *args, attention.batch_first, *decided, name="attention_masks"
        )
        made: list[Node | None] = [None, None]
        for i, mask in enumerate((found.mask, found.padding)):
            own = spec_of(mask)
            if mask is not None:
                made[i] = item = self.build.item(pair, i)
                if own is not None and spec is not None and own.dtype == torch.bool:
                    own = Spec(spec.dtype, own.shape)
                annotate(item, spec=own)
        masks = made[0], made[1]
        self.shared = None if fast else masks
        return masks

    def layer(self, path: str, x: Node) -> Node:
        layer = _layer(self.build.root, path)
        masks = self.masks(path, layer, x)
        if layer.norm_first:
            inner = self.attention(path, self.alike(self.module(f"{path}.norm1", x)), masks)
            x = self.sum(x, inner)
            inner = self.feed(path, layer, self.alike(self.module(f"{path}.norm2", x)))
            return self.sum(x, inner)
        x = self.sum(x, self.attention(path, x, masks))
        x = self.alike(self.module(f"{path}.norm1", x))
        x = self.sum(x, self.feed(path, layer, x))
        return self.alike(self.module(f"{path}.norm2", x))

    def sum(self, one: Node, two: Node) -> Node:
        return self.alike(self.build.call(operator.add, one, two))


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    writer = _Writer(found, build)
    skips = writer.skip() if _may_skip(found, build.root) else None
    x = writer.x
    for path in found.layers:
        x = writer.layer(path, x)
    if skips is not None:
        done, skipped = skips
        x = writer.alike(build.call(with_padding, x, writer.padding, done, skipped))
    return [x if found.norm is None else writer.alike(writer.module(found.norm, x))]


def _may_skip(found: Found, root: nn.Module) -> bool:
    """Whether torch may compute only the places that are no padding."""
    unmasked = found.mask is None and found.padding is not None and found.skips is not None
    return unmasked and bool(found.layers) and all(_fast(_layer(root, p)) for p in found.layers)


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
