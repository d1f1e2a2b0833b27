"""nn.GRUCell(x, h): read here for the rule that makes one call of a loop over its steps.

A single call is left to torch: as a call of the op for one step it took 1.1 to 1.6 times as long
with gradients, 1.15 to 2.2 times without (64 to 1024 rows, 32 and 64 wide, one thread). Two steps
in one call are faster than torch.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from recast.rewriter.ir import Node
from recast.rewriter.rule import Build, Miss

from .leaf import argument, differs, extra, module_of, spec_of, unpaid

_WHOLE = ("nn.GRU over all steps, where nothing is done between them",)


class Called(NamedTuple):
    """A call of nn.GRUCell for a batch of rows: (B, D), (B, H)."""

    x: Node
    h: Node


def read_module(node: Node, root: nn.Module) -> Called | Miss | None:
    """What ``node`` calls nn.GRUCell with, or why it is no step of a loop that may be merged."""
    module = module_of(node, root)
    if not isinstance(module, nn.GRUCell) or extra(node, 2, "input", "hx"):
        return None
    refused = differs(node, module, nn.GRUCell) or unpaid("gru", node, root)
    if refused is not None:
        return refused
    x, h = argument(node, 0, "input"), argument(node, 1, "hx")
    if not isinstance(h, Node):
        return Miss(node, "it starts from no state, so it is one step", ("pass zeros as hx",))
    if any(spec is None or len(spec.shape) != 2 for spec in (spec_of(x), spec_of(h))):
        return Miss(node, "its input and state are not known to be matrices")
    return Called(x, h)


def left(node: Node) -> Miss:
    """``node`` is in no loop whose steps follow each other directly."""
    return Miss(node, "nn.GRUCell is left to torch, a call for each step", _WHOLE)


def left_loop(node: Node) -> Miss:
    """``node`` begins a loop whose inputs are computed from its states."""
    why = "nn.GRUCell is left to torch: the input of a step is computed from the state before it"
    return Miss(node, why)


def parameters(build: Build, node: Node, root: nn.Module) -> list[Node | None]:
    """The weights and biases of the cell that ``node`` calls, as the op takes them."""
    module = module_of(node, root)
    assert isinstance(module, nn.GRUCell)
    names = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if module.bias else [])]
    found: list[Node | None] = [build.get(f"{node.target}.{name}") for name in names]
    return found + [None] * (4 - len(found))


__all__ = ["Called", "left", "left_loop", "parameters", "read_module"]
