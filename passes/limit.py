"""What bounds the speed of a step: matrix products, or calls that no rule takes.

    least time of a call = max(flops / 10, bytes)      in bytes that could be moved meanwhile

Flops and bytes are those of a forward: an op's own cost, 2 m n k for a matrix product of torch, and
what anything else reads and writes. In fp32, ten flops per byte is about right for a processor core
(100 Gflop/s to 10 GB/s) as well as for a GPU (20 Tflop/s to 2 TB/s).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from recast.errors import RecastError
from recast.rewriter.ir import Graph, Node, Spec, is_call, is_method, note
from recast.rewriter.report.dump import callee
from recast.rewriter.report.report import origin_text
from recast.rewriter.rule import resolve
from recast.runtime import OPS
from recast.runtime.cost import Cost

from .leaf import argument, human, module_of, plural, spec_of

ROWS = 2048  # a batch so large that the weights hardly count
BALANCE = 10.0  # flops that a machine does in the time it takes to move a byte
SHARE = 2 / 3  # share of the least time from which products count as the bound
LEFT = 1 / 2  # the same for calls that no rule takes
MOST_UNKNOWN = 0.1  # share of the nodes whose sizes may be unknown

_BY_SIZES = (F.linear, torch.matmul, operator.matmul, torch.bmm, torch.mm)
_LAYERS = (
    nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention,
)  # fmt: skip
_OPS = ("linears", "cross_matrix", "cross_mixture", "contraction")
# the call stays torch's
_SPELL = (
    None, "normalize", "look-up-rows", "share-values", "open-transformers", "split-columns",
)  # fmt: skip
_VIEWS = (
    torch.unsqueeze, torch.squeeze, torch.transpose, torch.reshape, torch.flatten, torch.permute,
    torch.unbind,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Call:
    """What one node costs, and whether it is a matrix product."""

    node: Node
    cost: Cost
    product: bool
    ours: bool = False

    @property
    def least(self) -> float:
        return max(self.cost.flops / BALANCE, self.cost.bytes)


def bound(graphs: Mapping[str, Graph], root: nn.Module) -> str | None:
    """The sentence for the report; None when matrix products do not bound the model, or when too
    many sizes are known only for a given batch, such as lengths that the examples differ in.
    """
    graph = graphs.get("both") or graphs.get("train") or graphs.get("eval")
    if graph is None or sum(map(_is_unknown, graph.nodes)) > MOST_UNKNOWN * len(graph.nodes):
        return None
    calls = [c for n in graph.nodes if (c := _call(n, root)) is not None]
    products = [c for c in calls if c.product]
    flops, least = (sum(of(c) for c in calls) for of in (_flops, _least))
    share = sum(map(_least, products)) / least if least else 0.0
    if share < SHARE:
        return _left([c for c in calls if not c.ours], least, root)
    within = sum(map(_flops, products))
    take = "takes" if len(products) == 1 else "take"
    return (
        f"bound by matrix products: {plural(len(products), 'call')} of them {take} {share:.0%} of a"
        f" step, as estimated from flops and bytes ({human(within / ROWS, 'flop')} a sample,"
        f" forward, {within / max(flops, 1):.0%} of all), most in"
        f" {_places(products, _flops, root)}; torch's own libraries do them before and after, so a"
        " rewrite has little to gain there"
    )


def _left(calls: list[_Call], least: float, root: nn.Module) -> str | None:
    """If calls that no rule takes make up most of a step: a sentence that names them."""
    share = sum(map(_least, calls)) / least if least else 0.0
    if share < LEFT:
        return None
    products = [c for c in calls if c.product]
    part = sum(map(_least, products)) / least
    among = f" ({part:.0%} in {plural(len(products), 'matrix product')})" if part > 0.005 else ""
    hold = "holds" if len(calls) == 1 else "hold"
    return (
        f"left to torch: {plural(len(calls), 'call')} of torch that no rule takes {hold}"
        f" {share:.0%} of a step, as estimated from flops and bytes{among}, most in"
        f" {_places(calls, _least, root)}; their speed is unchanged"
    )


def _places(calls: list[_Call], of: Callable[[_Call], float], root: nn.Module) -> str:
    """The user's three lines with the most of ``calls``, and what they call."""
    lines: dict[str, list[_Call]] = {}
    for call in calls:
        lines.setdefault(note(call.node).where or "", []).append(call)
    largest = sorted(lines.items(), key=lambda item: -sum(map(of, item[1])))[:3]
    told = []
    for line, found in largest:
        names = dict.fromkeys(_name(c.node, root) for c in sorted(found, key=of, reverse=True))
        known = ", ".join(list(names)[:2]) + (" ..." if len(names) > 2 else "")
        where = origin_text(note(c.node).origin for c in found if any(note(c.node).origin))
        told.append(" ".join(filter(None, (where, line, f"({known})"))))
    return ", ".join(told)


def _name(node: Node, root: nn.Module) -> str:
    """``bmm``, ``Conv2d``: what is called, without the path of a module."""
    return callee(node, root).partition("[")[0].lstrip(".")


def _flops(call: _Call) -> float:
    return call.cost.flops


def _least(call: _Call) -> float:
    return call.least


def _call(node: Node, root: nn.Module) -> _Call | None:
    """The cost of ``node``; None if it has none or a size is unknown."""
    if node.op in ("placeholder", "get_attr", "output") or _views(node):
        return None
    out = _sizes(note(node).spec)
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "recast":
        name = node.target._schema.name.partition("::")[2]
        cost = _own(name, node, root)
        product = name in _OPS or (name == "mlp" and "linear" in node.args[3])  # type: ignore[operator]
        return None if cost is None else _Call(node, cost, product, ours=True)
    if not out:
        return None
    inputs = [s for n in node.all_input_nodes for s in _sizes(note(n).spec)]
    bytes_ = sum(n * size for n, size in [*out, *inputs])
    flops, ours = _product(node, root, out[0][0]), note(node).rule not in _SPELL
    if flops is None:
        return _Call(node, Cost(sum(n for n, _ in out), bytes_), False, ours)
    return _Call(node, Cost(flops, bytes_), True, ours)


def _is_unknown(node: Node) -> bool:
    """Whether ``node`` computes a tensor of a size that is not known."""
    spec = note(node).spec
    computes = node.op.startswith("call_") and not _views(node)
    return computes and isinstance(spec, Spec) and spec.at(ROWS) is None


def _views(node: Node) -> bool:
    if is_call(node, operator.getitem):
        return len(node.all_input_nodes) == 1  # by tensors it copies
    return is_call(node, getattr, *_VIEWS) or is_method(
        node, "view", "expand", "size", "reshape", "detach"
    )


def _sizes(spec: Any) -> list[tuple[int, int]]:
    """The number of elements and bytes of each tensor in ``spec``, if known."""
    if isinstance(spec, (tuple, list)):
        return [found for part in spec for found in _sizes(part)]
    shape = spec.at(ROWS) if isinstance(spec, Spec) else None
    return [] if shape is None else [(math.prod(shape), spec.dtype.itemsize)]


def _own(name: str, node: Node, root: nn.Module) -> Cost | None:
    """The cost that an op of ours states; None where a size is unknown."""
    op = OPS.get(name)
    if op is None or op.cost is None:
        return None
    try:
        args = fx.map_arg(node.args, lambda n: _value(n, root))
        kwargs = fx.map_arg(node.kwargs, lambda n: _value(n, root))
        cost: Cost = op.cost(*args, **kwargs)
    except (_UnknownError, RecastError):
        return None
    return cost


class _UnknownError(Exception):
    """A shape that is known only for a given batch."""


def _value(node: Node, root: nn.Module) -> Any:
    """``node`` as an argument of a cost function: a tensor without memory, or the model's own
    value.
    """
    if node.op == "get_attr":
        return resolve(root, str(node.target))
    spec = note(node).spec
    shape = spec.at(ROWS) if isinstance(spec, Spec) else None
    if shape is None:
        raise _UnknownError(node.name)
    return torch.empty(shape, dtype=spec.dtype, device="meta")


def _product(node: Node, root: nn.Module, out: int) -> int | None:
    """The flops of ``node`` if it is a matrix product of torch with ``out`` results; else None."""
    module = module_of(node, root)
    if isinstance(module, _LAYERS):
        return _of_layer(node, module, out)
    if is_call(node, torch.einsum):
        return _of_einsum(node)
    if is_call(node, *_BY_SIZES) or is_method(node, "matmul", "bmm", "mm"):
        spec = spec_of(argument(node, 0, "input"))
        inner = None if spec is None else spec.shape[-1]
        return 2 * out * inner if isinstance(inner, int) else None
    if is_call(node, F.conv1d, F.conv2d):
        spec = spec_of(argument(node, 1, "weight"))
        shape = None if spec is None else spec.at(ROWS)
        return None if shape is None else 2 * out * math.prod(shape[1:])
    return None


def _of_layer(node: Node, module: nn.Module, out: int) -> int | None:
    if isinstance(module, nn.Linear):
        return 2 * out * module.in_features
    if isinstance(module, nn.modules.conv._ConvNd):
        return 2 * out * module.weight[0].numel()
    first = "query" if isinstance(module, nn.MultiheadAttention) else "input"
    spec = spec_of(argument(node, 0, first))
    shape = None if spec is None else spec.at(ROWS)
    if shape is None or not shape[-1]:
        return None
    return 2 * math.prod(shape[:-1]) * sum(_weights(module.parameters()))


def _weights(parameters: Iterable[nn.Parameter]) -> Iterable[int]:
    return (p.numel() for p in parameters if p.dim() == 2)


def _of_einsum(node: Node) -> int | None:
    """Two flops for each combination of the letters."""
    equation, *operands = node.args
    if not isinstance(equation, str) or "." in equation or len(operands) != 2:
        return None
    sizes: dict[str, int] = {}
    letters = equation.replace(" ", "").partition("->")[0].split(",")
    for names, operand in zip(letters, operands, strict=True):
        spec = spec_of(operand)
        shape = None if spec is None else spec.at(ROWS)
        if shape is None or len(shape) != len(names):
            return None
        sizes.update(zip(names, shape, strict=True))
    return 2 * math.prod(sizes.values())


__all__ = ["BALANCE", "LEFT", "ROWS", "SHARE", "bound"]
