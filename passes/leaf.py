"""Helpers with which passes read a node: arguments by name, modules, dtypes, shapes, sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from recast.rewriter import alias
from recast.rewriter.ir import Node, Spec, is_call, is_method, note
from recast.rewriter.order import writes
from recast.rewriter.rule import Build, Miss, resolve
from recast.runtime import OPS

BATCH_NORM = (
    ("input", None), ("running_mean", None), ("running_var", None), ("weight", None),
    ("bias", None), ("training", False), ("momentum", 0.1), ("eps", 1e-5),
)  # fmt: skip

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True)
class Attr:
    """An attribute of the user's module, read anew at each call: ``"top.2.p"``."""

    path: str


Value: TypeAlias = "Attr | Node | int | float | bool | str | None"


def put(build: Build, value: Value) -> Any:
    """The argument that stands for ``value`` in a call: a node, or the constant itself."""
    return build.get(value.path) if isinstance(value, Attr) else value


def argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    """The argument ``name`` of a call, given by position or by keyword."""
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(name, default)


def arguments(node: Node, signature: Sequence[tuple[str, Any]]) -> list[Any]:
    """The arguments of a call in the order of ``signature``: names and defaults."""
    return [argument(node, k, name, default) for k, (name, default) in enumerate(signature)]


def extra(node: Node, positional: int, *names: str) -> bool:
    """Whether a call has more arguments than these: ``positional`` of them, or by these names."""
    return len(node.args) > positional or bool(set(node.kwargs) - set(names))


def module_of(node: Node, root: nn.Module) -> nn.Module | None:
    """The module that ``node`` calls; None when it calls none."""
    return root.get_submodule(str(node.target)) if node.op == "call_module" else None


class Einsum(NamedTuple):
    """``einsum("ab,bc->ac", x, y)``; ``output`` is None where the equation does not say it."""

    terms: list[str]
    output: str | None
    operands: list[Any]


def einsum_of(node: Any) -> Einsum | None:
    """``(["ab", "bc"], "ac", [x, y])`` of an einsum, its operands given one by one or as a list.

    None too where a letter is 1 in one operand and more in another, over which that is spread.
    """
    if not is_call(node, torch.einsum):
        return None
    operands: list[Any]
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str):
        return None
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != len(operands):
        return None
    sizes: dict[str, Any] = {}
    for term, operand in zip(terms, operands, strict=True):
        spec = spec_of(operand)
        named = zip(term, spec.shape, strict=True) if spec and len(spec.shape) == len(term) else ()
        if any(sizes.setdefault(letter, size) != size for letter, size in named):
            return None
    return Einsum(terms, output if arrow else None, operands)


class Reduction(NamedTuple):
    """``x.sum(dim, keepdim)`` or another of that form; ``dim`` as it is given."""

    name: str
    source: Any
    dim: int
    keepdim: Any


def reduction_of(node: Any, *names: str) -> Reduction | None:
    """A function or method of one of ``names`` over one dimension."""
    name = next((n for n in names if is_call(node, getattr(torch, n)) or is_method(node, n)), None)
    if name is None or extra(node, 3, "input", "dim", "axis", "keepdim"):
        return None
    dim = argument(node, 1, "dim", node.kwargs.get("axis"))
    if isinstance(dim, (list, tuple)) and len(dim) == 1:
        (dim,) = dim
    if not isinstance(dim, int):
        return None
    return Reduction(name, argument(node, 0, "input"), dim, argument(node, 2, "keepdim", False))


def spec_of(node: Any) -> Spec | None:
    """Dtype and shape of ``node`` when it is one tensor; None when unknown."""
    spec = note(node).spec if isinstance(node, Node) else None
    return spec if isinstance(spec, Spec) else None


def bytes_of(node: Any) -> int | None:
    """Bytes of the value of ``node`` per sample; None when unknown."""
    spec = spec_of(node)
    size = None if spec is None else spec.at(1)
    return None if spec is None or size is None else math.prod(size) * spec.dtype.itemsize


def rank(node: Any) -> int | None:
    """Number of dimensions of ``node``, where known."""
    spec = spec_of(node)
    return None if spec is None else len(spec.shape)


def is_fixed(node: Node, dims: int) -> bool:
    """Whether ``node`` has ``dims`` known sizes, none of which is the batch."""
    spec = spec_of(node)
    return spec is not None and len(spec.shape) == dims and all(type(d) is int for d in spec.shape)


def tensor_at(node: Any, root: nn.Module) -> torch.Tensor | None:
    """The tensor behind a ``get_attr`` node; None for anything else."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    value = resolve(root, str(node.target))
    return value if isinstance(value, torch.Tensor) else None


def differs(node: Node, module: nn.Module, kind: type[nn.Module]) -> Miss | None:
    """Why ``module`` may not be treated as a plain ``kind``, or None when it may."""
    if any(getattr(module, name, None) for name in _HOOKS):
        return Miss(
            node,
            "it has hooks, which a fused call would not run",
            ("remove the hooks before optimize()", "hook the module around it instead"),
        )
    if parametrize.is_parametrized(module):
        return Miss(
            node,
            "it has a parametrization, so its weight is computed at each call",
            ("torch.nn.utils.parametrize.remove_parametrizations() once training is done",),
        )
    own = type(module)
    if own.forward is not kind.forward or "forward" in vars(module):
        return Miss(
            node,
            f"{own.__name__} overrides the forward of nn.{kind.__name__}",
            (f"use a plain nn.{kind.__name__} and do the rest around it",),
        )
    if own.__call__ is not nn.Module.__call__:
        return Miss(node, f"{own.__name__} overrides __call__", ("override forward of a parent",))
    for name in ("weight", "bias"):
        if isinstance(getattr(module, name, None), torch.Tensor) and name not in module._parameters:
            return Miss(
                node, f"its {name} is computed and no Parameter", (f"make {name} a Parameter",)
            )
    return None


class Linear(NamedTuple):
    """``F.linear(input, weight, bias)``, or a module that does the same; ``miss``: why that module
    may not be treated as a plain ``nn.Linear``.
    """

    input: Any
    weight: Any
    bias: Any
    miss: Miss | None


def linear_of(node: Node, root: nn.Module) -> Linear | None:
    """A Linear layer in either spelling; the parameters of a module are Attrs."""
    module = module_of(node, root)
    if isinstance(module, nn.Linear):
        path, miss = str(node.target), differs(node, module, nn.Linear)
        bias = None if module.bias is None else Attr(f"{path}.bias")
        return Linear(argument(node, 0, "input"), Attr(f"{path}.weight"), bias, miss)
    if not is_call(node, F.linear) or extra(node, 3, "input", "weight", "bias"):
        return None
    weight, bias = argument(node, 1, "weight"), argument(node, 2, "bias")
    return Linear(argument(node, 0, "input"), weight, bias, None)


def memory_written(nodes: Sequence[Node], root: nn.Module) -> bool:
    """Whether the graph writes in place to memory that a value of ``nodes`` may share."""
    graph = nodes[0].graph
    writing = [n for n in graph.nodes if writes(n, root)]
    known = alias.roots(graph, root) if writing else {}
    return any(alias.touched(n, root, known) & known[node] for n in writing for node in nodes)


def device_of(root: nn.Module) -> str:
    """The kind of device that the model lives on."""
    first = next(root.parameters(), None)
    return "cpu" if first is None else first.device.type


def on_gpu(lookups: Node, root: nn.Module) -> bool:
    """Whether all tables of a call of lookups are on a GPU."""
    tables = [tensor_at(table, root) for table in lookups.args[0]]  # type: ignore[union-attr]
    return all(t is not None and t.is_cuda for t in tables)


def unpaid(op: str, node: Node, root: nn.Module) -> Miss | None:
    """Why the op gains nothing on this model's device, or None when it pays."""
    device = device_of(root)
    if OPS[op].pays(device):
        return None
    return Miss(node, f"{op} does not pay on {device}: {OPS[op].not_worth[device]}")


def human(count: float, unit: str = "B") -> str:
    """``1_500_000 -> "1.5 MB"``."""
    for prefix in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.3g} {prefix}{unit}"
        count /= 1000
    return f"{count:.3g} T{unit}"


def plural(count: int, noun: str) -> str:
    """``2, "launch" -> "2 launches"``."""
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "sh", "s", "x")) else "s"
    return f"{count} {noun}{ending}"
