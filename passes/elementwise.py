"""Chains of functions of single numbers: one call on a CPU.

log(clamp(abs(x), 1e-7))   =>   elementwise(x, ["abs", "clamp", "log"], [1e-7, inf])
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Node, is_call, is_method, sole_user
from recast.rewriter.rule import Answer, Build, Match, Rule
from recast.runtime.layers.elementwise import BY_INPUT, anew, from_output

from .leaf import argument, device_of, plural, spec_of

# Numbers per sample: with less, a batch of some thousand is too small for the op to pay.
LEAST = 128
_NAMES = ("abs", "log", "log1p", "exp", "expm1", "relu", "sigmoid", "tanh")
_CHEAP = ("abs", "relu", "add", "mul", "clamp")  # to be computed once more
_FUNCTIONS: dict[Any, str] = {getattr(torch, name): name for name in _NAMES} | {
    F.relu: "relu", F.sigmoid: "sigmoid", F.tanh: "tanh", torch.special.expm1: "expm1",
    torch.special.log1p: "log1p",
}  # fmt: skip
_TURNS = (torch.transpose, torch.permute)


class Function(NamedTuple):
    """One function of single numbers, of the value at ``source``."""

    node: Node
    source: Node
    name: str
    numbers: tuple[float, ...] = ()


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def read_function(node: Any) -> Function | None:
    """``node`` as a function of single numbers; None for anything else."""
    if not isinstance(node, Node):
        return None
    if is_call(node, operator.add, torch.add, operator.mul, torch.mul, operator.sub):
        return None if node.kwargs or len(node.args) != 2 else _linear(node)
    if is_call(node, torch.clamp, torch.clip) or is_method(node, "clamp", "clip"):
        return _clamp(node)
    plain = is_method(node, *_NAMES) or (node.op == "call_function" and node.target in _FUNCTIONS)
    if not plain or len(node.args) + len(node.kwargs) != 1:
        return None
    name = str(node.target) if node.op == "call_method" else _FUNCTIONS[node.target]
    source = argument(node, 0, "input")
    return Function(node, source, name) if isinstance(source, Node) else None


def _linear(node: Node) -> Function | None:
    a, b = node.args
    if not isinstance(a, Node) and not is_call(node, operator.sub):
        a, b = b, a
    if not isinstance(a, Node) or not isinstance(b, (int, float)) or not _number(b):
        return None
    if is_call(node, operator.sub):
        return Function(node, a, "add", (-float(b),))
    name = "mul" if is_call(node, operator.mul, torch.mul) else "add"
    return Function(node, a, name, (float(b),))


def _clamp(node: Node) -> Function | None:
    source, bounds = argument(node, 0, "input"), []
    for k, (name, without) in enumerate((("min", -math.inf), ("max", math.inf)), start=1):
        given = argument(node, k, name)
        if given is not None and (not _number(given) or math.isnan(given)):
            return None
        bounds.append(without if given is None else float(given))
    known = len(node.args) + len(node.kwargs) <= 3 and "out" not in node.kwargs
    return Function(node, source, "clamp", tuple(bounds)) if known else None


def _chain(first: Function) -> tuple[list[Function], list[Node]]:
    """The functions from ``first`` on, along values with one user; and the transpositions among
    them, which may as well come after.
    """
    steps, turns, waiting = [first], [], []
    node = first.node
    while (user := sole_user(node)) is not None:
        if is_call(user, *_TURNS) and user.args and user.args[0] is node:
            waiting.append(user)
        elif (step := read_function(user)) is not None and step.source is node:
            steps.append(step)
            turns += waiting
            waiting = []
        else:
            break
        node = user
    return steps, turns


def _match(node: Node, root: nn.Module) -> Answer:
    first = read_function(node)
    if first is None or device_of(root) != "cpu":
        return None
    before = first.source
    while is_call(before, *_TURNS) and before.args and sole_user(before) is not None:
        before = before.args[0]  # type: ignore[assignment]
    if read_function(before) is not None and sole_user(before) is not None:
        return None  # in the midst of one
    spec = spec_of(first.source)
    steps, turns = _chain(first)
    if spec is None or not spec.dtype.is_floating_point or len(steps) < 2:
        return None
    each = spec.at(1)
    if each is None or math.prod(each) < LEAST or all(step.name in _CHEAP for step in steps):
        return None
    if any(step.name not in _CHEAP for step in steps[: anew(steps)]):
        return None  # torch keeps what would take long to compute once more
    if steps[0].name not in BY_INPUT and not from_output(steps):
        return None  # backward would read what torch's does not, and what may be written to before
    return Match([s.node for s in steps] + turns, [steps[-1].node], (steps, turns))


def _rewrite(match: Match, build: Build) -> list[Node]:
    steps, turns = match.found
    names = [step.name for step in steps]
    numbers = [number for step in steps for number in step.numbers]
    target = torch.ops.recast.elementwise.default
    made = build.call(target, steps[0].source, names, numbers, name="elementwise")
    for turn in turns:
        made = build.call(turn.target, made, *turn.args[1:], **turn.kwargs)
    return [made]


ELEMENTWISE = Rule(
    name="fuse-mlp",
    equation="f(g(x)) => elementwise(x, [g, f])",
    match=_match,
    rewrite=_rewrite,
    describe=lambda match: ", ".join(step.name for step in match.found[0]) + " in one call",
    worth=lambda match: f"{plural(len(match.found[0]) - 1, 'pass')} over memory in training",
)

__all__ = ["ELEMENTWISE", "read_function"]
