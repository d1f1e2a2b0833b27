"""Recognises activations written by hand, and calls torch's instead.

silu     x * sigmoid(x)
gelu     0.5 * x * (1 + erf(x / sqrt(2)))
         0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))

in any order of factors and terms. By hand, each operation is a pass over memory, and its gradient
another: as one call, 2048 rows of 256 train in 1/3, 1/8 and 1/9 of the time.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Node, is_call, is_method, sole_user
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule

from .leaf import argument, bytes_of, device_of, human, plural, spec_of

_EXACT = 1e-15  # relative, of the numbers: a graph outlives .double()
_ROUNDED = 2e-9  # what float32 does not tell from it: 0.79788456 is sqrt(2 / pi), 0.7979 is not


@dataclass(frozen=True, slots=True)
class Found:
    """Which activation of ``x``."""

    name: str
    x: Node


@dataclass(frozen=True, slots=True)
class _Product:
    """A product of values and one number, with the nodes that multiply them."""

    values: tuple[Node, ...]
    number: float
    nodes: tuple[Node, ...]


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _factors(node: Any, *, outer: bool = True) -> _Product:
    """The factors of ``node``; a product with other readers counts as one value."""
    alone = isinstance(node, Node) and (outer or sole_user(node) is not None)
    if alone and is_call(node, operator.mul, operator.truediv) and len(node.args) == 2:
        one, two = node.args
        if node.target is operator.truediv and not (_number(two) and two):
            return _Product((node,), 1.0, ())
        values: tuple[Node, ...] = ()
        nodes: tuple[Node, ...] = (node,)
        number = 1.0
        for factor, inverse in ((one, False), (two, node.target is operator.truediv)):
            if _number(factor):
                number = number / factor if inverse else number * factor
                continue
            inner = _factors(factor, outer=False)
            values += inner.values
            number *= inner.number
            nodes += inner.nodes
        return _Product(values, number, nodes)
    return _Product((node,), 1.0, ()) if isinstance(node, Node) else _Product((), math.nan, ())


def _plus_one(node: Any) -> Node | None:
    """X when ``node`` is 1 + X."""
    if not is_call(node, operator.add) or len(node.args) != 2 or sole_user(node) is None:
        return None
    for one, other in (node.args, node.args[::-1]):
        if _number(one) and one == 1 and isinstance(other, Node):
            return other
    return None


# ---------------------------------------------------------------- silu


def _match_silu(node: Node, root: nn.Module) -> Answer:
    if not is_call(node, operator.mul) or len(node.args) != 2:
        return None
    for x, gate in (node.args, node.args[::-1]):
        if is_call(gate, torch.sigmoid) and isinstance(x, Node) and gate.args == (x,):
            alone = sole_user(gate) is node and _floating(x) and not gate.kwargs
            return Match([gate, node], [node], Found("silu", x)) if alone else None
    return None


def _floating(node: Node) -> bool:
    spec = spec_of(node)
    return spec is not None and spec.dtype.is_floating_point


# ---------------------------------------------------------------- gelu


def _match_gelu(node: Node, root: nn.Module) -> Answer:
    if not is_call(node, operator.mul, operator.truediv):
        return None
    found = _gelu(node, root, _EXACT)
    if found is None and isinstance(_gelu(node, root, _ROUNDED), Match):
        return Miss(
            node,
            "its constants are rounded: to float32 they are a gelu's, but not after .double()",
            ("math.sqrt(2 / math.pi)", "math.sqrt(2)", "torch.nn.GELU"),
        )
    return found


def _gelu(node: Node, root: nn.Module, within: float) -> Match | Miss | None:
    """The gelu at ``node``, its constants right within this relative error."""
    product = _factors(node)
    if len(product.values) != 2 or not math.isclose(product.number, 0.5, rel_tol=within):
        return None
    for x, gate in (product.values, product.values[::-1]):
        inner = _plus_one(gate)
        if inner is None or not _floating(x) or sole_user(inner) is None:
            continue
        found = _erf(inner, x, within) or _tanh(inner, x, within)
        if found is None:
            continue
        name, nodes, power = found
        if power is not None and device_of(root) != "cpu":
            return Miss(
                power,
                "a power is computed in fp32 under autocast on a GPU, where a gelu is not",
                ("x * x * x", "torch.nn.GELU('tanh')"),
            )
        inside = {*product.nodes, gate, inner, *nodes}
        ordered = [n for n in node.graph.nodes if n in inside]
        return Match(ordered, [node], Found(name, x))
    return None


_Inner = tuple[str, tuple[Node, ...], "Node | None"]


def _erf(node: Node, x: Node, within: float) -> _Inner | None:
    if not is_call(node, torch.erf, torch.special.erf) and not is_method(node, "erf"):
        return None
    product = _factors(argument(node, 0, "input"), outer=False)
    fits = product.values == (x,) and math.isclose(product.number, math.sqrt(0.5), rel_tol=within)
    return ("gelu", product.nodes, None) if fits else None


def _tanh(node: Node, x: Node, within: float) -> _Inner | None:
    """``tanh(c (x + k x³))``, or ``tanh(c x (1 + k x²))``."""
    if not is_call(node, torch.tanh):
        return None
    product = _factors(argument(node, 0, "input"), outer=False)
    if not math.isclose(product.number, math.sqrt(2 / math.pi), rel_tol=within):
        return None
    values = list(product.values)
    power = 3
    if len(values) == 2 and x in values:
        values.remove(x)
        power = 2
    (bent, *rest) = values
    if rest or not is_call(bent, operator.add) or len(bent.args) != 2 or sole_user(bent) is None:
        return None
    for first, other in (bent.args, bent.args[::-1]):
        starts = first is x if power == 3 else _number(first) and first == 1
        cube = _cube(other, x, power, within) if starts else None
        if cube is not None:
            return "gelu_tanh", (*product.nodes, bent, *cube[0]), cube[1]
    return None


def _cube(
    node: Any, x: Node, power: int, within: float
) -> tuple[tuple[Node, ...], Node | None] | None:
    """The nodes of ``0.044715 * x ** power``, and the call of ``pow`` among them."""
    product = _factors(node, outer=False)
    if not math.isclose(product.number, 0.044715, rel_tol=within):
        return None
    raised, count = None, 0
    nodes = product.nodes
    for value in product.values:
        if value is x:
            count += 1
            continue
        exponent = _power(value, x)
        if exponent is None or sole_user(value) is None:
            return None
        raised = raised if _squares(value) else value
        nodes += (value,)
        count += exponent
    return (nodes, raised) if count == power else None


def _squares(node: Node) -> bool:
    return is_call(node, torch.square) or is_method(node, "square")


def _power(node: Node, x: Node) -> int | None:
    if _squares(node):
        return 2 if argument(node, 0, "input") is x else None
    if not is_call(node, torch.pow, operator.pow) and not is_method(node, "pow"):
        return None
    exponent = argument(node, 1, "exponent")
    plain = argument(node, 0, "input") is x and exponent in (2, 3) and _number(exponent)
    return int(exponent) if plain else None


# ---------------------------------------------------------------- the rewrite


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    if found.name == "silu":
        return [build.call(F.silu, found.x)]
    approximate = "tanh" if found.name == "gelu_tanh" else "none"
    return [build.call(F.gelu, found.x, approximate=approximate)]


def _worth(match: Match) -> str:
    launches = plural(len(match.nodes) - 1, "launch")
    size = bytes_of(match.nodes[-1])
    if size is None:
        return launches
    return f"{launches}, {human(4 * (len(match.nodes) - 1) * size)} of traffic a sample"


def _rule(match: Any, equation: str) -> Rule:
    return Rule(
        name="name-activations",
        equation=equation,
        match=match,
        rewrite=_rewrite,
        describe=lambda m: f"{m.found.name.replace('_', ' by ')} by hand as torch's own",
        worth=_worth,
    )


SILU = _rule(_match_silu, "x * sigmoid(x) => silu(x)")
GELU = _rule(_match_gelu, "0.5 x (1 + erf(x / sqrt(2))) => gelu(x)")
