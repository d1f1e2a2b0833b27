"""Turns a graph into Python source, and that into a function.

``get_attr`` nodes are fetched anew at the start of each call, straight from the ``_parameters`` and
``_buffers`` dicts of their owners (which modules never replace); values are released after their
last use. Every line remembers its node, so that an error can name the user's line.

An operation with an attribute ``direct``, the same call without torch's dispatcher, is called
through that; compilers get code that calls the operation itself. Results that go side by side into
other operations may be one tensor on the way (``stacks``); if nothing in between could write to
what is read, the other operation may even read it itself (``unread``).
"""

from __future__ import annotations

import linecache
import math
import operator
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from operator import getitem
from typing import Any

import torch
from torch import nn

from recast.rewriter.autocast import Region, same_in_any
from recast.rewriter.capture.opaque_calls import OpaqueCall
from recast.rewriter.ir import Graph, Node, note

from . import stacks

_COUNTER = count()
_INFIX = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/",
    operator.floordiv: "//", operator.mod: "%", operator.matmul: "@", operator.pow: "**",
    operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==",
    operator.ne: "!=",
}  # fmt: skip


@dataclass
class Program:
    """Compiled code of one graph: ``fetch()`` reads what the model holds, ``run(inputs, held)``.

    ``trace`` is ``run`` for compilers: it calls every operation by its own name.
    """

    source: str
    fetch: Callable[[], tuple[Any, ...]]
    run: Callable[..., Any]
    trace: Callable[..., Any]
    nodes: dict[int, Node]  # line of ``source`` -> node
    file: str


class _Writer:
    def __init__(self, graph: Graph, root: nn.Module) -> None:
        self.graph = graph
        self.root = root
        self.taken = {n.name for n in graph.nodes}
        self.names: dict[str, Any] = {}
        self.known: dict[int, str] = {}
        self.lines: list[str] = []
        self.nodes: dict[int, Node] = {}
        self.listed: dict[str, str] = {}  # stacks that the present call has named
        self.stacked = stacks.plan(graph, root, self.taken)

    def bind(self, value: Any, hint: str) -> str:
        """A global name for an object that has no literal."""
        if id(value) in self.known:
            return self.known[id(value)]
        name = f"{hint}_{len(self.names)}"
        while name in self.taken:
            name = f"{name}_"
        self.names[name] = value
        self.known[id(value)] = name
        return name

    def text(self, value: Any) -> str:
        """An argument as source."""
        if isinstance(value, Node):
            return value.name
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            inner = ", ".join(filter(None, map(self.item, value)))
            if isinstance(value, list):
                return f"[{inner}]"
            return f"({inner},)" if inner else "()"
        if isinstance(value, tuple):
            kind = self.bind(type(value), type(value).__name__)
            return f"{kind}({', '.join(self.text(v) for v in value)})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self.text(v)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            return (
                f"slice({', '.join(self.text(v) for v in (value.start, value.stop, value.step))})"
            )
        if value is None or type(value) in (bool, int, str, bytes):
            return repr(value)
        if type(value) is float and math.isfinite(value):
            return repr(value)
        return self.bind(value, "const")

    def item(self, value: Any) -> str:
        """An argument inside a list; of a stack, only the first part is written."""
        name = self.stacked.names.get(value) if isinstance(value, Node) else None
        if name is None:
            return self.text(value)
        return "" if name in self.listed else self.listed.setdefault(name, f"*{name}")

    def call(self, node: Node) -> str:
        self.listed.clear()
        if node in self.stacked.joins:
            join = self.bind(self.stacked.joins[node], "joined")
            return f"{join}({self.text(node.args[0])})"
        args = [self.text(a) for a in node.args]
        words = [f"{k}={self.text(v)}" for k, v in node.kwargs.items()]
        if node.op == "call_method":
            return f"{args[0]}.{node.target}({', '.join(args[1:] + words)})"
        if node.op == "call_module":
            module = self.bind(self.root.get_submodule(str(node.target)), "module")
            return f"{module}({', '.join(args + words)})"
        if node.target is getitem:
            return f"{args[0]}[{args[1]}]"
        if node.target is getattr and len(args) == 2 and isinstance(node.args[1], str):
            return f"{args[0]}.{node.args[1]}"
        if node.target in _INFIX and not words:
            return f"{args[0]} {_INFIX[node.target]} {args[1]}"
        name = getattr(node.target, "__name__", "function").replace(".", "_")
        if isinstance(node.target, OpaqueCall):
            return f"{self.bind(node.target.over(self.root), name)}({', '.join(args + words)})"
        target = self.stacked.calls.get(node, node.target)
        return f"{self.bind(target, name)}({', '.join(args + words)})"

    def held(self, target: str) -> str:
        """The source that reads the ``get_attr`` of a path."""
        path, _, name = target.rpartition(".")
        owner: Any = self.root
        for part in path.split(".") if path else ():
            owner = getattr(owner, part)
        if isinstance(owner, torch.Tensor):  # a part of a Parameter, which may be exchanged whole
            return f"{self.held(path)}.{name}"
        if isinstance(owner, nn.Module):
            for slots in (owner._parameters, owner._buffers):
                if name in slots:
                    return f"{self.bind(slots, 'held')}[{name!r}]"
        if name in getattr(owner, "__dict__", {}):
            return f"{self.bind(vars(owner), 'held')}[{name!r}]"
        return f"{self.bind(owner, 'owner')}.{name}"

    def blocks(self, region: Region, no_grad: bool) -> str:
        """The contexts of a region of autocast, and of no gradients, as source."""
        call = self.bind(torch.autocast, "autocast") if region else ""
        made = [f"{call}({kind!r}, {self.text(dtype)}, {on})" for kind, dtype, on in region]
        return ", ".join(made + [f"{self.bind(torch.no_grad, 'no_grad')}()"] * no_grad)

    def write(self) -> str:
        inputs = [n for n in self.graph.nodes if n.op == "placeholder"]
        held = [n for n in self.graph.nodes if n.op == "get_attr"]
        reads = ", ".join(self.held(str(n.target)) for n in held)
        self.lines = ["def fetch():", f"    return ({reads}{',' if held else ''})", ""]
        self.lines.append(
            f"def run({', '.join(n.name for n in inputs)}{', ' if inputs else ''}held_):"
        )
        if held:
            self.lines.append(f"    {', '.join(n.name for n in held)}, = held_")
        self.lines.append("    del held_")
        ends = _last_uses(self.graph, self.stacked.names)
        region: Region = ()
        frozen = False
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr") or node in self.stacked.names:
                continue
            if node.op == "output":
                self.lines.append(f"    return {self.text(node.args[0])}")
                continue
            now = note(node).autocast
            if now is None:  # a block that ended at each view would only begin again
                now = region if same_in_any(node, None) else ()
            no_grad = note(node).no_grad
            if (now, no_grad) != (region, frozen) and (now or no_grad):
                self.lines.append(f"    with {self.blocks(now, no_grad)}:")
            region, frozen = now, no_grad
            name = ", ".join((*self.stacked.made.get(node, ()), node.name))
            line = f"{'    ' if region or frozen else ''}    {name} = {self.call(node)}"
            spent = dict.fromkeys(self.stacked.names.get(n, n.name) for n in ends.get(node, []))
            if spent:
                line += f"; {' = '.join(spent)} = None"
            self.nodes[len(self.lines) + 1] = node
            where = note(node).where
            self.lines.append(f"{line}  # {where}" if where else line)
        return "\n".join(self.lines) + "\n"


def _last_uses(graph: Graph, unwritten: Mapping[Node, str]) -> dict[Node, list[Node]]:
    """For each node but ``unwritten`` ones, the values that are not needed after it."""
    ends: dict[Node, list[Node]] = {}
    seen: set[Node] = set()
    for node in reversed(graph.nodes):
        for value in [*node.all_input_nodes, node] if node not in unwritten else ():
            if value not in seen:
                seen.add(value)
                if node.op != "output":
                    ends.setdefault(node, []).append(value)
    return ends


def compile_graph(graph: Graph, root: nn.Module, name: str) -> Program:
    """Compile ``graph``, which reads attributes of ``root``."""
    writer = _Writer(graph, root)
    text = writer.write()
    file = f"<recast {name} {next(_COUNTER)}>"
    code = compile(text, file, "exec")
    direct = {name: _direct(value) for name, value in writer.names.items()}
    own = {
        n: v.called(direct=False) if isinstance(v, stacks.Stacked) else v
        for n, v in writer.names.items()
    }
    exec(code, own)
    exec(code, direct)
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    # As long as the code, which tracebacks hold too: every call of `optimize` comes here.
    forget = weakref.finalize(direct["run"].__code__, linecache.cache.pop, file, None)
    forget.atexit = False
    return Program(text, direct["fetch"], direct["run"], own["run"], writer.nodes, file)


def _direct(value: Any) -> Any:
    if isinstance(value, stacks.Stacked):
        return value.called(direct=True)
    return getattr(value, "direct", value) if isinstance(value, torch._ops.OpOverload) else value
