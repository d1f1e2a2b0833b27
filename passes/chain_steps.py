"""Reads one step of a chain: a Linear, BatchNorm1d, activation or dropout, as module or function.

What a module may change later (p, training, momentum, eps, slope) is an :class:`~.leaf.Attr`, read
from it at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Node, is_call, is_method
from recast.rewriter.rule import Miss

from .leaf import (
    BATCH_NORM,
    Attr,
    Value,
    argument,
    arguments,
    differs,
    extra,
    module_of,
    rank,
    tensor_at,
)


@dataclass(frozen=True, slots=True)
class Step:
    """One link of a chain, and the arguments that ``recast::mlp`` takes for it."""

    node: Node
    source: Any  # its input
    kind: str
    params: tuple[Value, ...] = ()
    stats: tuple[Value, ...] = ()
    numbers: tuple[Value, ...] = ()
    training: tuple[Value, ...] = ()
    inplace: bool = False


# ---------------------------------------------------------------- modules


def _linear(node: Node, m: nn.Linear, path: str) -> Step:
    bias = None if m.bias is None else Attr(f"{path}.bias")
    return Step(node, None, "linear", params=(Attr(f"{path}.weight"), bias))


def _batch_norm(node: Node, m: nn.BatchNorm1d, path: str) -> Step | Miss:
    if not m.track_running_stats and m.running_mean is not None:
        return Miss(
            node,
            "track_running_stats was switched off after the statistics were made",
            ("build it with track_running_stats=False",),
        )
    held = {
        name: None if getattr(m, name) is None else Attr(f"{path}.{name}")
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    return Step(
        node, None, "batch_norm",
        params=(held["weight"], held["bias"]),
        stats=(held["running_mean"], held["running_var"], held["num_batches_tracked"]),
        numbers=(Attr(f"{path}.momentum"), Attr(f"{path}.eps")),
        training=(Attr(f"{path}.training"),),
    )  # fmt: skip


def _dropout(node: Node, m: nn.Dropout, path: str) -> Step:
    flags = (Attr(f"{path}.training"),)
    return Step(node, None, "dropout", (), (), (Attr(f"{path}.p"),), flags, m.inplace)


def _plain(kind: str, *attributes: str) -> Callable[[Node, Any, str], Step]:
    """An activation whose numbers are attributes of its module."""

    def read(node: Node, m: Any, path: str) -> Step:
        numbers = tuple(Attr(f"{path}.{name}") for name in attributes)
        return Step(node, None, kind, numbers=numbers, inplace=getattr(m, "inplace", False))

    return read


def _prelu(node: Node, m: nn.PReLU, path: str) -> Step:
    return Step(node, None, "prelu", params=(Attr(f"{path}.weight"),))


def _gelu_module(node: Node, m: nn.GELU, path: str) -> Step | Miss | None:
    return Step(node, None, "gelu") if m.approximate == "none" else None


MODULES: Mapping[type[nn.Module], Callable[[Node, Any, str], Step | Miss | None]] = {
    nn.Linear: _linear,
    nn.BatchNorm1d: _batch_norm,
    nn.Dropout: _dropout,
    nn.ReLU: _plain("relu"),
    nn.Sigmoid: _plain("sigmoid"),
    nn.Tanh: _plain("tanh"),
    nn.SiLU: _plain("silu"),
    nn.LeakyReLU: _plain("leaky_relu", "negative_slope"),
    nn.ELU: _plain("elu", "alpha"),
    nn.PReLU: _prelu,
    nn.GELU: _gelu_module,
}


# ---------------------------------------------------------------- functions


def _scalar(value: Any) -> bool:
    """Whether ``value`` is a number, or an attribute of the model that is one."""
    return isinstance(value, (int, float)) or (isinstance(value, Node) and value.op == "get_attr")


def _f_linear(node: Node, root: nn.Module) -> Step | Miss | None:
    weight, bias = argument(node, 1, "weight"), argument(node, 2, "bias")
    table = tensor_at(weight, root)
    if (table.dim() if table is not None else rank(weight)) != 2:
        return None
    return Step(node, argument(node, 0, "input"), "linear", params=(weight, bias))


def _f_batch_norm(node: Node, root: nn.Module) -> Step | Miss | None:
    source, mean, var, weight, bias, training, momentum, eps = arguments(node, BATCH_NORM)
    if mean is None or var is None or not all(map(_scalar, (training, momentum, eps))):
        return Miss(
            node,
            "batch_norm without running statistics, or with computed flags",
            ("use nn.BatchNorm1d",),
        )
    return Step(
        node, source, "batch_norm", (weight, bias), (mean, var, None), (momentum, eps), (training,)
    )


def _f_dropout(node: Node, root: nn.Module) -> Step | Miss | None:
    p, training = argument(node, 1, "p", 0.5), argument(node, 2, "training", True)
    if not (_scalar(p) and _scalar(training)):
        return None
    inplace = argument(node, 3, "inplace", False)
    return Step(
        node, argument(node, 0, "input"), "dropout", (), (), (p,), (training,), bool(inplace)
    )


def _f_numbers(kind: str, **defaults: float) -> Callable[[Node, nn.Module], Step | None]:
    """A functional activation with numbers; their order is that of torch's signature."""

    def read(node: Node, root: nn.Module) -> Step | None:
        numbers = tuple(
            argument(node, k, name, default)
            for k, (name, default) in enumerate(defaults.items(), start=1)
        )
        if not all(map(_scalar, numbers)):
            return None
        inplace = argument(node, len(defaults) + 1, "inplace", False)
        source = argument(node, 0, "input")
        return Step(node, source, kind, numbers=numbers, inplace=bool(inplace))

    return read


def _f_prelu(node: Node, root: nn.Module) -> Step | None:
    return Step(node, argument(node, 0, "input"), "prelu", params=(argument(node, 1, "weight"),))


def _f_gelu(node: Node, root: nn.Module) -> Step | None:
    if argument(node, 1, "approximate", "none") != "none":
        return None
    return Step(node, argument(node, 0, "input"), "gelu")


FUNCTIONS: Mapping[Callable[..., Any], Callable[[Node, nn.Module], Step | Miss | None]] = {
    F.linear: _f_linear,
    F.batch_norm: _f_batch_norm,
    F.dropout: _f_dropout,
    torch.relu: _f_numbers("relu"),
    F.relu: _f_numbers("relu"),
    torch.sigmoid: _f_numbers("sigmoid"),
    F.sigmoid: _f_numbers("sigmoid"),
    torch.tanh: _f_numbers("tanh"),
    F.tanh: _f_numbers("tanh"),
    F.silu: _f_numbers("silu"),
    F.leaky_relu: _f_numbers("leaky_relu", negative_slope=0.01),
    F.elu: _f_numbers("elu", alpha=1.0),
    F.prelu: _f_prelu,
    torch.prelu: _f_prelu,
    F.gelu: _f_gelu,
}
_INPLACE = {"relu_": "relu", "sigmoid_": "sigmoid", "tanh_": "tanh"}
_INPLACE_FUNCTIONS = {
    torch.relu_: "relu", F.relu_: "relu", torch.sigmoid_: "sigmoid", torch.tanh_: "tanh",
}  # fmt: skip


def read_step(node: Node, root: nn.Module) -> Step | Miss | None:
    """``node`` as a step; a Miss when it nearly is one; None for anything else."""
    module = module_of(node, root)
    if module is not None:
        return _read_module(node, module)
    if is_method(node, *_INPLACE) and not extra(node, 1):
        return Step(node, node.args[0], _INPLACE[str(node.target)], inplace=True)
    if node.op != "call_function":
        return None
    if is_call(node, *_INPLACE_FUNCTIONS):
        return Step(node, node.args[0], _INPLACE_FUNCTIONS[node.target], inplace=True)  # type: ignore[index]
    reader = FUNCTIONS.get(node.target)  # type: ignore[arg-type]
    return reader(node, root) if reader else None


def _read_module(node: Node, module: nn.Module) -> Step | Miss | None:
    kind = next((c for c in type(module).__mro__ if c in MODULES), None)
    if kind is None:
        return None
    found = differs(node, module, kind) or MODULES[kind](node, module, str(node.target))
    if not isinstance(found, Step):
        return found
    source = argument(node, 0, "input")
    return Step(
        node, source, found.kind, found.params, found.stats, found.numbers, found.training,
        found.inplace,
    )  # fmt: skip
