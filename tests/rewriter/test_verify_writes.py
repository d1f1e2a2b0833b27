"""A write in place may go with the new tensor that it writes to, and in no other way."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from recast.errors import VerifyError
from recast.rewriter import verify
from recast.rewriter.ir import KEY, Note

ROOT = nn.Module()


def graph() -> tuple[fx.Graph, dict[str, fx.Node]]:
    """``out = zeros(4, 3); out[0:4] = x; return out * 2``"""
    made = fx.Graph()
    x = made.placeholder("x")
    out = made.call_function(torch.zeros, (4, 3))
    write = made.call_function(operator.setitem, (out, slice(0, 4), x))
    double = made.call_function(operator.mul, (out, 2))
    made.output((double, x))
    for node in made.nodes:
        node.meta[KEY] = Note()
    return made, {"x": x, "out": out, "write": write, "double": double}


def test_it_goes_with_its_tensor() -> None:
    made, named = graph()
    before = verify.facts(made, ROOT)
    named["double"].args = (named["x"], 2)
    made.erase_node(named["write"])
    made.erase_node(named["out"])
    verify.check(before, verify.facts(made, ROOT), made, ROOT, "test")


def test_it_may_not_go_alone() -> None:
    made, named = graph()
    before = verify.facts(made, ROOT)
    made.erase_node(named["write"])
    with pytest.raises(VerifyError, match="write in place was moved, added or dropped"):
        verify.check(before, verify.facts(made, ROOT), made, ROOT, "test")


def _by_out(made: fx.Graph, x: fx.Node, y: fx.Node) -> fx.Node:
    return made.call_function(torch.sub, (y, 1), {"out": x})


def _asserted(made: fx.Graph, x: fx.Node, y: fx.Node) -> fx.Node:
    return made.call_function(torch._assert, (y, "y"))


@pytest.mark.parametrize("write", [_by_out, _asserted])
def test_what_is_read_is_not_what_is_written_to(
    write: Callable[[fx.Graph, fx.Node, fx.Node], fx.Node],
) -> None:
    """The call may not go with its first argument, though that is new and for it alone."""
    made = fx.Graph()
    x = made.placeholder("x")
    y = made.call_function(torch.mul, (x, 2))
    node = write(made, x, y)
    made.output(x)
    for each in made.nodes:
        each.meta[KEY] = Note()
    before = verify.facts(made, ROOT)
    made.erase_node(node)
    made.erase_node(y)
    with pytest.raises(VerifyError, match="write in place was moved, added or dropped"):
        verify.check(before, verify.facts(made, ROOT), made, ROOT, "test")
