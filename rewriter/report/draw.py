"""The graph as a picture: siblings folded, so that a model of many tables fits one screen.

Two nodes are siblings when they make the same call on siblings and siblings use their values (the
coarsest bisimulation of the graph, by colour refinement); if that leaves too many side by side,
when they make the same call at the same depth. One box then stands for all of them: ``26 ×
EmbeddingBag``. A chain of plain functions, or of modules of one container, is one box too. Colours
tell inputs, modules and functions apart; a fused call has a bold border and names its rule.
Hovering over a box shows its notes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from recast.errors import UsageError
from recast.rewriter.cli.native_stderr import no_native_stderr
from recast.rewriter.ir import Graph, Node, Spec, note

from .dump import about_text, callee, inlined, node_text, type_of
from .short_lists import braces

_FONT = "Helvetica,Arial,sans-serif"
_LOOKS = {  # kind: (shape, style, fill, border)
    "input": ("box", "rounded,filled", "#eef1f5", "#8a94a3"),
    "module": ("box", "filled", "#dcebf9", "#4a7fb5"),
    "function": ("box", "filled", "#ffffff", "#9aa3ad"),
    "respelled": ("box", "filled", "#ffffff", "#2d8a4e"),  # by a rule, in plain torch
    "rewritten": ("box", "filled,bold", "#dff3e2", "#2d8a4e"),
    "output": ("box", "rounded,filled", "#2f3b4b", "#2f3b4b"),
}
_MISSED = "#d0312d"
_WIDE = 8  # boxes side by side; more are not readable
_LONG = 6  # steps of a folded chain of functions
_LETTERS = 34  # of a line of names


@dataclass
class Box:
    """One box of the picture: the steps of a chain (mostly one), each of some siblings."""

    name: str
    kind: str
    steps: list[list[Node]]
    inputs: dict[str, int]  # names of its input boxes, and the number of values from each

    @property
    def nodes(self) -> list[Node]:
        return [n for step in self.steps for n in step]

    @property
    def count(self) -> int:
        """The number of siblings that it stands for."""
        return len(self.steps[0])


def boxes(graph: Graph, root: nn.Module | None = None) -> list[Box]:
    """The graph with siblings and chains of modules folded; attributes and sizes are no boxes."""
    sizes = _sizes(graph)
    shown = [n for n in graph.nodes if not inlined(n) and n not in sizes and n.op != "get_attr"]
    inputs = {n: _inputs(n, sizes) for n in shown}
    colour = _siblings(shown, inputs, root)
    members: dict[int, list[Node]] = {}
    for n in shown:
        members.setdefault(colour[n], []).append(n)
    names = {c: nodes[0].name for c, nodes in members.items()}
    out = []
    for c, nodes in members.items():
        feeding: dict[str, int] = {}
        for n in nodes:
            for source in inputs[n]:
                key = names[colour[source]]
                feeding[key] = feeding.get(key, 0) + 1
        out.append(Box(names[c], _kind(nodes[0]), [nodes], feeding))
    return _chains(out)


def _chains(drawn: list[Box]) -> list[Box]:
    """Fold ``bot.0 -> bot.1 -> bot.2`` of one container into one box."""
    users: dict[str, int] = {}
    for box in drawn:
        for source in box.inputs:
            users[source] = users.get(source, 0) + 1
    placed: dict[str, Box] = {}  # name of a box: itself, or the box it is now part of
    out: list[Box] = []
    for box in drawn:
        before = placed.get(next(iter(box.inputs), ""))
        alone = len(box.inputs) == 1 and users[next(iter(box.inputs))] == 1
        if alone and before is not None and _reads_as_one(before, box):
            before.steps += box.steps
            before.kind = max(before.kind, box.kind)  # "respelled" when any step is
            placed[box.name] = before
            continue
        feeding = {placed[s].name if s in placed else s: k for s, k in box.inputs.items()}
        placed[box.name] = made = Box(box.name, box.kind, box.steps, feeding)
        out.append(made)
    for box in out:  # what was folded after its reader
        box.inputs = {placed[s].name: k for s, k in box.inputs.items()}
    return out


def _reads_as_one(first: Box, second: Box) -> bool:
    """Whether two boxes in a row read better as one: modules of a container, or plain functions."""
    if first.count != second.count:
        return False
    plain = ("function", "respelled")
    if first.kind in plain and second.kind in plain and len(first.steps) < _LONG:
        return True
    if first.kind != "module" or second.kind != "module":
        return False
    return _containers(first) == _containers(second) != {""}


def _containers(box: Box) -> set[str]:
    return {str(n.target).rpartition(".")[0] for n in box.steps[-1]}


def _sizes(graph: Graph) -> set[Node]:
    """Nodes that only compute sizes: ``x.shape``, ``x.size(0)``, and arithmetic on these."""
    found: set[Node] = set()
    for n in graph.nodes:
        asks = n.target is getattr and n.args[1:2] in (
            ("shape",),
            ("ndim",),
            ("device",),
            ("dtype",),
        )
        asks = asks or (n.op == "call_method" and n.target in ("size", "dim", "numel"))
        inner = n.all_input_nodes
        derived = n.op == "call_function" and inner and all(i in found for i in inner)
        if asks or (derived and getattr(n.target, "__module__", "") in ("_operator", "math")):
            found.add(n)
    return found


def _inputs(node: Node, sizes: Collection[Node]) -> dict[Node, int]:
    """The shown nodes that ``node`` reads, each with the place among its arguments."""
    found: dict[Node, int] = {}
    for k, argument in enumerate([*node.args, *node.kwargs.values()]):
        for source in _nodes_in(argument):
            while inlined(source) and source.op != "get_attr":
                source = source.all_input_nodes[0]
            if source.op != "get_attr" and source not in sizes:
                found.setdefault(source, k)
    return dict(sorted(found.items(), key=lambda item: item[0]))


def _nodes_in(argument: Any) -> list[Node]:
    found: list[Node] = []
    fx.node.map_arg(argument, found.append)
    return found


def _siblings(
    shown: list[Node], inputs: Mapping[Node, Mapping[Node, int]], root: nn.Module | None
) -> dict[Node, int]:
    """Refine colours until nodes of one colour read, and are read by, the same colours."""
    users: dict[Node, list[tuple[Node, int]]] = {n: [] for n in shown}
    for n in shown:
        for source, place in inputs[n].items():
            users[source].append((n, place))
    colour = _numbered({n: _seed(n, root) for n in shown})
    while True:
        keys = {}
        for n in shown:
            reads = sorted((place, colour[i]) for i, place in inputs[n].items())
            read_by = sorted({(place, colour[u]) for u, place in users[n]})
            keys[n] = (colour[n], tuple(reads), tuple(read_by))
        refined = _numbered(keys)
        if len(set(refined.values())) == len(set(colour.values())):
            return _narrowed(refined, inputs, root)
        colour = refined


def _narrowed(
    colour: Mapping[Node, int], inputs: Mapping[Node, Mapping[Node, int]], root: nn.Module | None
) -> dict[Node, int]:
    """If a depth has too many boxes, merge those that make the same call. Edges go from a smaller
    depth to a greater one, so folding cannot make cycles.
    """
    depth: dict[Node, int] = {}
    for n in colour:
        depth[n] = 1 + max((depth[i] for i in inputs[n]), default=0)
    across: dict[int, set[int]] = {}
    for n, c in colour.items():
        across.setdefault(depth[n], set()).add(c)
    keys: dict[Node, object] = {}
    for n, c in colour.items():
        wide = len(across[depth[n]]) > _WIDE and n.op != "placeholder"
        keys[n] = (_seed(n, root), depth[n]) if wide else (c, depth[n])
    return _numbered(keys)


def _numbered(keys: Mapping[Node, object]) -> dict[Node, int]:
    numbers: dict[object, int] = {}
    return {n: numbers.setdefault(key, len(numbers)) for n, key in keys.items()}


def _seed(node: Node, root: nn.Module | None) -> object:
    about = note(node)
    target = callee(node, root).partition("[")[0] if node.op.startswith("call") else node.op
    kind = (about.spec.dtype, len(about.spec.shape)) if isinstance(about.spec, Spec) else None
    return node.op, target, about.rule, kind


def _kind(node: Node) -> str:
    if node.op in ("placeholder", "output"):
        return "input" if node.op == "placeholder" else "output"
    if node.op == "call_module":
        return "module"
    if note(node).rule is None:
        return "function"
    return "rewritten" if isinstance(node.target, torch._ops.OpOverload) else "respelled"


# ---------------------------------------------------------------- dot


def dot(
    graph: Graph,
    root: nn.Module | None = None,
    name: str = "",
    *,
    missed: Collection[str] = (),
) -> str:
    """The picture in Graphviz's language; ``missed`` nodes have a red border."""
    title = name or (type(root).__name__ if root is not None else "model")
    lines = [
        f"digraph {_quote(title)} {{",
        "  graph [rankdir=TB, nodesep=0.25, ranksep=0.28, bgcolor=white]",
        f'  node [fontname="{_FONT}", fontsize=12, margin="0.14,0.08", height=0.3]',
        f'  edge [fontname="{_FONT}", fontsize=10, color="#7b8490", fontcolor="#5b6470", '
        "arrowsize=0.6]",
    ]
    drawn = boxes(graph, root)
    lines += [f"  {_quote(box.name)} [{_attributes(box, root, missed)}]" for box in drawn]
    sizes = {box.name: box.count for box in drawn}
    for box in drawn:
        for source, count in box.inputs.items():
            values = max(count, sizes[source])
            label = f' [label=" {values}×"]' if values > 1 else ""
            lines.append(f"  {_quote(source)} -> {_quote(box.name)}{label}")
    return "\n".join([*lines, "}"]) + "\n"


def _attributes(box: Box, root: nn.Module | None, missed: Collection[str]) -> str:
    shape, style, fill, border = _LOOKS[box.kind]
    if any(n.name in missed for n in box.nodes):
        border, style = _MISSED, f"{style},bold"
    ink = "#ffffff" if box.kind == "output" else "#1c232b"
    values = {
        "label": _label(box, root),
        "tooltip": _tooltip(box, root),
        "shape": shape,
        "style": style,
        "fillcolor": fill,
        "color": border,
        "fontcolor": ink,
    }
    return ", ".join(f"{k}={_quote(v)}" for k, v in values.items())


def _label(box: Box, root: nn.Module | None) -> str:
    """In short lines: what it is, where it comes from, the rule that wrote it, its type."""
    first = box.steps[0][0]
    if first.op == "output":
        return "output"
    types = [type_of(n) for n in box.steps[-1]]
    given = types[0] if len(set(types)) == 1 else _widest(types)
    if first.op == "placeholder":
        return "\n".join([_names([n.name for n in box.nodes]), *([given] if given != "?" else [])])
    parts = [callee(step[0], root).partition("[")[0] for step in box.steps]
    head = f"{box.count} × " * (box.count > 1) + " → ".join(parts)
    where = _names([p for n in box.nodes for p in note(n).origin])
    rule = note(first).rule if box.kind == "rewritten" else None
    lines = [*textwrap.wrap(head, 40), where, f"← {rule}" if rule else ""]
    lines.append(given if given != "?" else "")
    return "\n".join(line for line in lines if line)


def _widest(types: list[str]) -> str:
    known = sorted(set(types) - {"?"})
    return " ".join(known) if len(known) <= 2 else f"{known[0]} … {known[-1]}"


def _names(words: list[str]) -> str:
    """A few words, shortened to one short line."""
    out = ", ".join(braces(dict.fromkeys(w for w in words if w)))
    return out if len(out) <= _LETTERS else f"{out[: _LETTERS - 1].rstrip(', ')}…"


def _tooltip(box: Box, root: nn.Module | None) -> str:
    lines = []
    for n in box.nodes[:8]:
        value = "input" if n.op == "placeholder" else node_text(n, root)
        about = about_text(n)
        kind = type_of(n)
        lines.append(f"{n.name} = {value[:160]}" + (f" : {kind}" if kind != "?" else ""))
        if about:
            lines.append(f"    {about}")
    if len(box.nodes) > 8:
        lines.append(f"and {len(box.nodes) - 8} more")
    return "\n".join(lines)


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


# ---------------------------------------------------------------- svg


def svg(
    graph: Graph, root: nn.Module | None = None, name: str = "", *, missed: Collection[str] = ()
) -> str:
    """The picture as SVG. Raises UsageError if no layout program is installed."""
    return layout(dot(graph, root, name, missed=missed))


def layout(text: str) -> str:
    """Lay out dot text: by pygraphviz (which brings Graphviz) or by the system's ``dot``."""
    raw = _by_pygraphviz(text)
    if raw is None:
        raw = _by_program(text)
    if raw is None:
        raise UsageError(
            "svg: nothing here can lay out a graph",
            why="neither the package pygraphviz nor the program dot is installed",
            tries=("pip install 'torch-recast[viz]'", "--format dot"),
        )
    return _tidy(raw)


def can_layout() -> bool:
    """Whether :func:`layout` has a layout program."""
    return _pygraphviz() is not None or shutil.which("dot") is not None


def _pygraphviz() -> object | None:
    try:
        import pygraphviz
    except ImportError:
        return None
    return pygraphviz


def _by_pygraphviz(text: str) -> str | None:
    if _pygraphviz() is None:
        return None
    import pygraphviz

    try:
        with no_native_stderr():  # fontconfig has opinions on the system's fonts
            drawn = pygraphviz.AGraph(string=text).draw(format="svg", prog="dot")
    except (OSError, ValueError):  # an installation without its programs
        return None
    return str(drawn.decode("utf-8")) if drawn else None


def _by_program(text: str) -> str | None:
    program = shutil.which("dot")
    if program is None:
        return None
    done = subprocess.run(
        [program, "-Tsvg"], input=text.encode(), capture_output=True, check=True, timeout=120
    )
    return done.stdout.decode("utf-8")


def _tidy(raw: str) -> str:
    """Only the ``<svg>`` element, with the notes as titles instead of Graphviz's ids."""
    body = raw[raw.index("<svg") :]
    body = re.sub(r'<svg width="(\d+)pt" height="(\d+)pt"', r'<svg width="\1" height="\2"', body)
    body = re.sub(r' id="(?:graph|node|edge|a_node)\d+"', "", body)  # not unique in a page of two
    body = re.sub(r"<!--.*?-->\n?", "", body, flags=re.DOTALL)

    def hover(found: re.Match[str]) -> str:
        told = re.search(r'xlink:title="([^"]*)"', found[0])
        inner = re.sub(r"<title>.*?</title>\n?", "", found[0], count=1, flags=re.DOTALL)
        inner = re.sub(r"<g><a [^>]*>\n?|</a>\n</g>\n?", "", inner)
        title = f"<title>{told[1]}</title>\n" if told else ""
        head, _, rest = inner.partition(">\n")
        return f"{head}>\n{title}{rest}"

    body = re.sub(r'<g class="node">.*?</g>\n(?=<g|</g)', hover, body, flags=re.DOTALL)
    return re.sub(r'(<g class="edge">\n)<title>.*?</title>\n', r"\1", body, flags=re.DOTALL)


__all__ = ["Box", "boxes", "can_layout", "dot", "layout", "svg"]
