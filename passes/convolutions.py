"""Convolutions over one short axis, as matrix products.

conv2d(x, w, b), windows of columns, (k, 1), or of whole rows, (k, W)   =>   window_conv(x, w, b)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Graph, Node, is_call
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply
from recast.runtime.layers.window_conv import pays

from .leaf import Attr, Value, argument, differs, extra, module_of, plural, put, spec_of, unpaid
from .pointwise import LEFT, POINTWISE

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_ONCE = (1, (1,), (1, 1), [1], [1, 1])


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution whose window moves along one axis, by one."""

    x: Node
    weight: Value
    bias: Value
    shape: tuple[int, ...]
    padding: int


def _match(node: Node, root: nn.Module) -> Answer:
    found = _read(node, root)
    if not isinstance(found, Convolution):
        return found
    spec = spec_of(found.x)
    if spec is None or len(spec.shape) != 4 or not all(isinstance(n, int) for n in spec.shape[1:]):
        return None
    sizes: Any = spec.shape
    _, channels, k, v = found.shape
    if v not in (1, sizes[3]):
        return Miss(node, "its windows move along both axes: torch's convolution is kept")
    if not pays(sizes[2], sizes[3], found.shape, found.padding):
        return Miss(
            node,
            f"torch's convolution of {plural(channels, 'channel')} of ({sizes[2]}, {sizes[3]}) by"
            f" windows of ({k}, {v}) is as fast as a product",
        )
    return unpaid("window_conv", node, root) or Match([node], [node], found)


def _read(node: Node, root: nn.Module) -> Convolution | Miss | None:
    module = module_of(node, root)
    weight: Any
    bias: Any
    shape: Any
    if isinstance(module, nn.Conv2d):
        refused = differs(node, module, nn.Conv2d)
        plain = module.padding_mode == "zeros" and module.stride == module.dilation == (1, 1)
        if refused is not None or not plain or module.groups != 1 or extra(node, 1, "input"):
            return refused
        weight, shape = Attr(f"{node.target}.weight"), tuple(module.weight.shape)
        bias = None if module.bias is None else Attr(f"{node.target}.bias")
        padding: Any = module.padding
    elif is_call(node, F.conv2d, torch.conv2d):
        weight, bias = argument(node, 1, "weight"), argument(node, 2, "bias")
        known = spec_of(weight)
        steps = [argument(node, at, name, 1) for at, name in ((3, "stride"), (5, "dilation"))]
        if known is None or any(step not in _ONCE for step in steps):
            return None
        if argument(node, 6, "groups", 1) != 1 or not all(isinstance(n, int) for n in known.shape):
            return None
        shape, padding = known.shape, argument(node, 4, "padding", 0)
    else:
        return None
    x, rows = argument(node, 0, "input"), _rows(padding)
    if not isinstance(x, Node) or rows is None or len(shape) != 4:
        return None
    return Convolution(x, weight, bias, shape, rows)


def _rows(padding: Any) -> int | None:
    """How many rows of zeros pad either end; None when columns are padded too."""
    if padding in (0, "valid"):
        return 0
    given = tuple(padding) if isinstance(padding, (tuple, list)) else ()
    rows = given[0] if len(given) == 2 and given[1] == 0 else None
    return rows if isinstance(rows, int) else None


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Convolution = match.found
    return [
        build.call(
            torch.ops.recast.window_conv.default,
            found.x, put(build, found.weight), put(build, found.bias), found.padding,
            name="window_conv",
        )
    ]  # fmt: skip


WINDOWS = Rule(
    name="multiply-windows",
    equation="conv2d(x, w, b) => window_conv(x, w, b), windows (k, 1) or (k, W)",
    match=_match,
    rewrite=_rewrite,
    describe=lambda match: "a convolution as a product with its matrix",
    worth=lambda match: "half or more of its time on a CPU",
)


@dataclass(frozen=True)
class MultiplyWindows:
    """conv2d(x, w, b) => window_conv(x, w, b)

    Only windows that move along one short axis, as in CCPM, FGCNN and Caser, and only where the
    product was measured to be faster; parameters stay the user's own. On a CPU also conv1d with
    windows of one place, as in SASRec, which becomes a linear layer or a product per sample, and
    products ``w @ x`` from the left, as in AFN, where a copy of the result follows.
    """

    name: ClassVar[str] = "multiply-windows"

    def run(self, graph: Graph, context: Context) -> int:
        """Rewrite the convolutions of ``graph``; returns their number."""
        return apply(graph, [WINDOWS, POINTWISE, LEFT], context)


__all__ = ["WINDOWS", "MultiplyWindows"]
