"""Convolutions over windows of one place: a linear layer for each place.

conv1d(x, w, b), windows (1)   =>   pointwise_conv(x, w, b)        on a CPU
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Node, is_call
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule
from recast.runtime.layers.pointwise_conv import pays, pointwise_conv

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

__all__ = ["POINTWISE"]
