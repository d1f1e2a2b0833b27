"""Rewrites the many spellings of a call to one, so that later passes need to look for one only.

Every entry of :mod:`.spellings` keeps values and aliasing exactly. Forms that write in place are
left alone, and so are modules with parameters or with flags that are read at run time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from recast.rewriter.ir import Graph, Node, annotate, note
from recast.rewriter.report.journal import Fired

from .form import Form
from .leaf import argument, differs, module_of, plural
from .spellings import FUNCTIONS, METHODS, MODULES

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context


@dataclass(frozen=True)
class Normalize:
    """x.relu(), F.relu(x), nn.ReLU()(x) ... => relu(x)

    Also cat, stack, matrix products, transposes, reshapes, casts, arithmetic and dropout. Values
    and aliases stay exactly as they are. One entry of the journal stands for all nodes of one
    spelling.
    """

    name: ClassVar[str] = "normalize"

    def run(self, graph: Graph, context: Context) -> int:
        """Rewrite the spellings of ``graph``; returns how many of them it met."""
        met: dict[str, list[Node]] = {}
        for node in list(graph.nodes):
            form = canonical(node, context.root)
            if form is None:
                continue
            name = getattr(form.function, "__name__", str(form.function))
            spelling = f"{_spelling(node, context.root)} => {name}"
            if spelling not in met and context.fuel_left() == 0:
                continue
            if spelling not in met:
                context.burn()
            met.setdefault(spelling, []).append(node)
            _become(node, form)
        for spelling, nodes in met.items():
            self._tell(context, nodes, spelling)
        return len(met) + self._identities(graph, context)

    def _identities(self, graph: Graph, context: Context) -> int:
        """Remove nn.Identity, which returns the very object it is given."""
        gone = [n for n in graph.nodes if _identity(n, context.root)]
        if not gone or context.fuel_left() == 0:
            return 0
        context.burn()
        self._tell(context, gone, "nn.Identity => nothing")
        for node in gone:
            node.replace_all_uses_with(argument(node, 0, "input"))
            graph.erase_node(node)
        return 1

    def _tell(self, context: Context, nodes: list[Node], what: str) -> None:
        """Write one journal entry for all ``nodes``."""
        first = note(nodes[0])
        told = f"{what}, {plural(len(nodes), 'node')}"
        context.journal.fired.append(
            Fired(self.name, nodes[0].name, first.origin, first.where, told)
        )


def _become(node: Node, form: Form) -> None:
    """Turn ``node`` into ``form`` where it stands, keeping its name, origin and line."""
    node.op = "call_method" if isinstance(form.function, str) else "call_function"
    node.target = form.function
    node.args = form.args
    node.kwargs = dict(form.kwargs)
    annotate(node, rule=Normalize.name)


def canonical(node: Node, root: nn.Module) -> Form | None:
    """The canonical form of ``node``; None when it has none, or is in that form already."""
    if node.op == "call_function":
        reader = FUNCTIONS.get(node.target)  # type: ignore[arg-type]
        form = reader(node) if reader else None
    elif node.op == "call_method":
        reader = METHODS.get(str(node.target))
        form = reader(node) if reader else None
    elif node.op == "call_module":
        form = _module(node, root)
    else:
        return None
    return None if form is None or _is(node, form) else form


def _module(node: Node, root: nn.Module) -> Form | None:
    module = module_of(node, root)
    if module is None or type(module) not in MODULES:
        return None
    kind = type(module)
    if differs(node, module, kind) is not None:
        return None
    source = argument(node, 0, "input")
    return MODULES[kind](source, module) if isinstance(source, Node) else None


def _identity(node: Node, root: nn.Module) -> bool:
    module = module_of(node, root)
    if type(module) is not nn.Identity or differs(node, module, nn.Identity) is not None:
        return False
    return isinstance(argument(node, 0, "input"), Node)


def _is(node: Node, form: Form) -> bool:
    """Whether ``node`` is in this form already, with arguments by position or by keyword."""
    return node.target is form.function and _values(node) == _values(form)


def _values(call: Node | Form) -> list[Any]:
    return [*call.args, *(value for name, value in call.kwargs.items() if name != "axis")]


def _spelling(node: Node, root: nn.Module) -> str:
    if node.op == "call_module":
        return f"nn.{type(root.get_submodule(str(node.target))).__name__}"
    if node.op == "call_method":
        return f"Tensor.{node.target}"
    return str(getattr(node.target, "__name__", node.target))
