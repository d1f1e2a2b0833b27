"""A linear layer for each place of (N, C, L): a convolution, or a product from the left.

conv1d(x, w, b), windows (1)   =>   pointwise_conv(x, w, b)        on a CPU
f(w @ x).contiguous()          =>   f(left_product(w, x)).contiguous()
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Node, is_call, is_method, sole_user
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule
from recast.runtime.layers.pointwise_conv import left_pays, left_product, pays, pointwise_conv

from .elementwise import read_function
from .leaf import Attr, argument, device_of, differs, extra, module_of, plural, put, spec_of

_ONCE = (1, (1,), [1])
_NONE = (0, (0,), [0], "valid", "same")


def _match(node: Node, root: nn.Module) -> Answer:
    module = module_of(node, root)
    weight: Any
    bias: Any
    shape: tuple[Any, ...]
    if isinstance(module, nn.Conv1d):
        if module.kernel_size != (1,) or module.stride != (1,) or module.groups != 1:
            return None
        if module.padding not in _NONE or extra(node, 1, "input"):
            return None
        why = differs(node, module, nn.Conv1d)
        if why is not None:
            return why
        path, shape = str(node.target), tuple(module.weight.shape)
        weight, bias = Attr(f"{path}.weight"), None
        if module.bias is not None:
            bias = Attr(f"{path}.bias")
    elif is_call(node, F.conv1d, torch.conv1d):
        weight, bias = argument(node, 1, "weight"), argument(node, 2, "bias")
        known = spec_of(weight)
        if known is None or argument(node, 3, "stride", 1) not in _ONCE:
            return None
        if argument(node, 4, "padding", 0) not in _NONE or argument(node, 6, "groups", 1) != 1:
            return None
        shape = known.shape
    else:
        return None
    x = argument(node, 0, "input")
    spec = spec_of(x)
    if spec is None or len(spec.shape) != 3 or len(shape) != 3 or shape[2] != 1:
        return None
    if not isinstance(x, Node) or shape[1] != spec.shape[1] or device_of(root) != "cpu":
        return None
    length = spec.shape[2]
    turned = is_call(x, torch.transpose, torch.permute)
    if not turned and isinstance(length, int) and not pays(length, int(shape[1]), int(shape[0])):
        return Miss(
            node,
            f"torch's convolution of {plural(length, 'place')} is as fast as products for"
            f" {plural(int(shape[1]), 'channel')}",
            ("nn.Linear, of rows (N, L, C)",),
        )
    return Match([node], [node], (x, weight, bias))


def _rewrite(match: Match, build: Build) -> list[Node]:
    x, weight, bias = match.found
    given = (put(build, weight), put(build, bias))
    return [build.call(pointwise_conv, x, *given, name="pointwise_conv")]


POINTWISE = Rule(
    name="multiply-windows",
    equation="conv1d(x, w, b) => pointwise_conv(x, w, b), windows (1)",
    match=_match,
    rewrite=_rewrite,
    describe=lambda match: "a convolution of single places as a product",
    worth=lambda match: "a third of its time on a CPU",
)


def _match_left(node: Node, root: nn.Module) -> Answer:
    """A product whose result lies transposed until it is copied, with nothing between that could
    see how it lies: a dropout would draw another mask.
    """
    if not is_call(node, torch.matmul) or len(node.args) != 2 or device_of(root) != "cpu":
        return None
    weight, x = (spec_of(a) for a in node.args)
    if weight is None or x is None or len(weight.shape) != 2 or len(x.shape) != 3:
        return None
    if not (weight.dtype.is_floating_point and weight.dtype is x.dtype):
        return None
    channels, length = x.shape[1:]
    if not isinstance(channels, int) or not isinstance(length, int):
        return None
    after: Node | None = sole_user(node)
    while after is not None and read_function(after) is not None:
        after = sole_user(after)
    if not is_method(after, "contiguous") or extra(after, 1):
        return None
    if not left_pays(length, channels):
        return None
    return Match([node], [node], node.args)


LEFT = Rule(
    name="multiply-windows",
    equation="f(w @ x).contiguous() => f(left_product(w, x)).contiguous(), x (N, C, L)",
    match=_match_left,
    rewrite=lambda match, build: [build.call(left_product, *match.found, name="left_product")],
    describe=lambda match: "a product from the left for each sample",
    worth=lambda match: "four transposed copies",
)

__all__ = ["LEFT", "POINTWISE"]
