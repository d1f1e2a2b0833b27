"""The graph as text, json and Python.

The text is a small language, stable under unrelated edits: nodes in order of execution, names as
in the graph, fixed columns. Its grammar (``[x]`` optional, ``x*`` any number, ``x,..`` separated by
commas)::

    dump     = header node* return
    header   = "graph " path "(" [input,..] ")"     on one line, or one input a line when long
    input    = word ": " type
    node     = "  " word " = " value [" : " type] ["  # " note]
    return   = "  return " value

    value    = word | literal | list | index | call
    call     = callee "(" [argument,..] ")"
    callee   = FUNCTION | "." METHOD | CLASS "[" path "]"      a function, tensor method, module
    argument = [NAME "="] item
    index    = value "[" item,.. "]"
    list     = "[" [item,..] "]" | "(" [item,..] ")" | "{" [value ": " value,..] "}"
    item     = [COUNT "×"] value | INT ".." INT | slice         3×x is x, x, x; 0..3 is 0, 1, 2, 3
    slice    = [value] ":" [value] [":" value]
    literal  = number | "string" | None | True | False | ... | <other>
    word     = NAME | path                                     NAME: the value of a node
    path     = NAME ("." PART)+                                an attribute; self.x is the root's
    type     = [COUNT "×"] (DTYPE "[" [dim,..] "]" | "(" type,.. ")" | "?")
    note     = [RULE " ←"] word* ["@" PLACE] [REGION] ["no_grad"] [FILE:LINE]   separated by blanks

The note says which rule wrote a node, which modules of the user's model it stands for, in which
region of ``torch.autocast`` inside forward it computes (``autocast(cpu:bfloat16)``, or ``:off``),
whether code of the user runs under ``torch.no_grad``, and the user's line. In words, braces expand
as in the shell: ``bot.{0,2}.{weight,bias}`` is ``bot.0.weight, bot.0.bias, bot.2.weight,
bot.2.bias`` and ``ids_{0..25}`` twenty-six names. On the left of ``=`` they make one line of a
family of nodes that differ in running numbers: then all braces of that line, including those that
stand for a number, count up together.

Parameters and other attributes are written where they are used; so are the parts of a node with
several outputs (``bags[3]``). Arguments of operators are named as in their schema, and those
without content (None, False, empty, or lists of only these) are left out. A PART of a path is the
name of a module: anything without blanks, commas and brackets (else the path is written
``<other>``).
"""

from __future__ import annotations

import json as _json
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import fx, nn

from recast.rewriter.capture.opaque_calls import OpaqueCall
from recast.rewriter.ir import Graph, Node, Spec, autocast_regions, note

from .short_lists import braces, fold, runs

WIDTH = 100  # a longer header is split into lines
_NAME_COLUMN, _VALUE_COLUMN = 18, 62  # fixed, so that one long name does not move every line


def text(graph: Graph, root: nn.Module | None = None, name: str = "", *, fold: bool = True) -> str:
    """The graph in the language above; ``root`` names the classes of called modules.

    ``fold=False`` writes one line for every node, families too.
    """
    title = name or (type(root).__name__ if root is not None else "model")
    shown = [n for n in graph.nodes if not inlined(n)]
    inputs = [_Line(n.name, "", type_of(n), "", n) for n in shown if _is_input(n)]
    lines = [_line(n, root) for n in shown if not _is_input(n) and n.op != "output"]
    if fold:
        inputs, lines = _families(inputs), _families(lines)
    out = [_header(title, inputs), *map(_render, lines)]
    out += [f"  return {value_text(n.args[0])}" for n in shown if n.op == "output"]
    return "\n".join(out) + "\n"


def json(graph: Graph, root: nn.Module | None = None, name: str = "", *, indent: int = 1) -> str:
    """The graph as JSON: every node, nothing folded; ids are the names of the text."""
    return _json.dumps(to_dict(graph, root, name), indent=indent, ensure_ascii=False) + "\n"


def to_dict(graph: Graph, root: nn.Module | None = None, name: str = "") -> dict[str, Any]:
    """What :func:`json` writes: ``{"version", "name", "inputs", "outputs", "nodes"}``."""
    nodes = [_node_dict(n, root) for n in graph.nodes if n.op != "output"]
    outputs = [i.name for n in graph.nodes if n.op == "output" for i in n.all_input_nodes]
    return {
        "version": 1,
        "name": name or (type(root).__name__ if root is not None else "model"),
        "inputs": [n.name for n in graph.nodes if n.op == "placeholder"],
        "outputs": outputs,
        "nodes": nodes,
    }


def _node_dict(node: Node, root: nn.Module | None) -> dict[str, Any]:
    about = note(node)
    return {
        "id": node.name,
        "op": node.op,
        "target": callee(node, root) if node.op.startswith("call") else str(node.target),
        "inputs": [n.name for n in node.all_input_nodes],
        "value": "" if node.op == "placeholder" else node_text(node, root),
        "type": type_of(node),
        "origin": list(about.origin),
        "rule": about.rule,
        "where": about.where,
        "place": about.place,
    }


def python(graph: Graph, root: nn.Module | None = None, name: str = "") -> str:
    """The graph as Python: FX's own code, with the imports it needs. Its ``self`` is what
    ``optimize`` returned.
    """
    code = graph.python_code("self")
    imports = ["import torch"]
    if any(getattr(node.target, "namespace", "") == "recast" for node in graph.nodes):
        imports.append("import recast  # for its operations")
    for key, value in sorted(code.globals.items()):
        if isinstance(value, float):  # repr of these is a name
            imports.append(f"from math import {key}")
        elif isinstance(value, ModuleType) and key != "torch":
            imports.append(f"import {value.__name__} as {key}")
        elif getattr(value, "__module__", None) not in (None, "builtins"):
            named = getattr(value, "__name__", None)
            imports += [f"from {value.__module__} import {named} as {key}"] if named else []
    if autocast_regions(graph.nodes) - {()}:
        imports.append("# here without the regions of torch.autocast that are inside forward")
    title = name or (type(root).__name__ if root is not None else "model")
    return "\n".join([f"# {title}", *imports]) + "\n\n" + code.src.strip("\n") + "\n"


def inlined(node: Node) -> bool:
    """Whether a node has no line of its own: a used attribute, or one output of several."""
    return bool(node.users) and (node.op == "get_attr" or is_part(node))


def is_part(node: Node) -> bool:
    """Whether ``node`` is ``source[k]`` of a source with several outputs."""
    if node.target is not operator.getitem or not isinstance(node.args[1], int):
        return False
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return False
    if isinstance(note(source).spec, tuple):
        return True
    if isinstance(source.target, torch._ops.OpOverload):
        returns = source.target._schema.returns
        return len(returns) > 1 or isinstance(returns[0].type, torch.ListType)
    return False


# ---------------------------------------------------------------- one line


@dataclass
class _Line:
    """One line to be written, and the node (the first of a family) that it stands for."""

    name: str
    value: str
    type: str
    about: str
    node: Node


def _is_input(node: Node) -> bool:
    return node.op == "placeholder"


def _line(node: Node, root: nn.Module | None) -> _Line:
    return _Line(node.name, node_text(node, root), type_of(node), about_text(node), node)


def _render(line: _Line) -> str:
    left = f"  {line.name:<{_NAME_COLUMN}} = {line.value}"
    if line.type != "?":
        left = f"{left:<{_VALUE_COLUMN}} : {line.type}"
    return f"{left}  # {line.about}" if line.about else left


def _header(title: str, inputs: Sequence[_Line]) -> str:
    items = [f"{i.name}: {i.type}" for i in inputs]
    line = f"graph {title}({', '.join(items)})"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"graph {title}(", *(f"    {i}," for i in items), ")"])


def about_text(node: Node) -> str:
    """``rule ← origins file:line`` of a node, without what its own text already says."""
    about = note(node)
    origin = list(about.origin)
    if node.op == "call_module" and origin == [str(node.target)] and about.rule is None:
        origin = []
    words = " ".join(braces([o or "self" for o in origin]))
    rule = f"{about.rule} ←" if about.rule else ""
    place = f"@{about.place}" if about.place else ""
    region = ",".join(
        f"{kind}:{str(dtype).removeprefix('torch.') if on else 'off'}"
        for kind, dtype, on in about.autocast or ()
    )
    region = f"autocast({region})" if region else ""
    frozen = "no_grad" if about.no_grad else ""
    parts = (rule, words, place, region, frozen, about.where or "")
    return " ".join(part for part in parts if part)


def type_of(node: Node) -> str:
    """The type of a node; with several outputs, only the types of its parts may be known."""
    spec = note(node).spec
    parts: dict[Any, Any] = {n.args[1]: note(n).spec for n in node.users if is_part(n)}
    if spec is None and parts and set(parts) == set(range(len(parts))):
        spec = tuple(parts[k] for k in range(len(parts)))
    return type_text(spec)


def type_text(spec: Any) -> str:
    """``f32[B,64]``, ``26×f32[B,64]``, ``(f32[B], i64[B])`` or ``?``."""
    if spec is None:
        return "?"
    if isinstance(spec, Spec):
        return str(spec)
    parts = [type_text(s) for s in spec]
    if len(parts) > 1 and len(set(parts)) == 1 and isinstance(spec[0], Spec):
        return f"{len(parts)}×{parts[0]}"
    return f"({', '.join(runs(parts))})"


def node_text(node: Node, root: nn.Module | None = None) -> str:
    """The right-hand side of a node."""
    if node.op == "get_attr":
        return path_text(str(node.target))
    if node.op == "output":
        return value_text(node.args[0])
    if node.target is operator.getitem and len(node.args) == 2:
        return f"{value_text(node.args[0])}[{_key(node.args[1])}]"
    return f"{callee(node, root)}({', '.join(_arguments(node))})"


def callee(node: Node, root: nn.Module | None = None) -> str:
    """What a node calls: ``cat``, ``recast.mlp``, ``.view``, ``Linear[top.0]``."""
    if node.op == "call_method":
        return f".{node.target}"
    if node.op == "call_module":
        return f"{_class(node, root)}[{node.target}]"
    return function_name(node.target)


def _class(node: Node, root: nn.Module | None) -> str:
    if root is None:
        return "module"
    return type(root.get_submodule(str(node.target))).__name__


def function_name(target: Any) -> str:
    """A short name for a function: torch's and operator's bare, others with their module."""
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, op = target._schema.name.partition("::")
        overload = "" if target._overloadname == "default" else f".{target._overloadname}"
        return f"{namespace}.{op}{overload}"
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target)
    if isinstance(target, str):
        return target
    target = target.custom or target.function if isinstance(target, OpaqueCall) else target
    name = getattr(target, "__name__", type(target).__name__).strip("<>")
    module = getattr(target, "__module__", None) or ""
    if module.partition(".")[0] in ("torch", "_operator", "operator", "builtins", ""):
        return name
    if module.startswith("recast."):  # ours: the file would not help the reader
        return f"recast.{name}"
    return f"{module}.{name}"


def _arguments(node: Node) -> list[str]:
    if isinstance(node.target, torch._ops.OpOverload):
        return _schema_arguments(node, node.target._schema)
    items = fold([value_text(a) for a in node.args])
    return items + [f"{k}={value_text(v)}" for k, v in node.kwargs.items()]


def _schema_arguments(node: Node, schema: Any) -> list[str]:
    """Arguments named as in the schema, the first one without its name, without empty ones."""
    out = []
    names = [a.name for a in schema.arguments]
    for k, value in [*zip(names, node.args, strict=False), *node.kwargs.items()]:
        if k == names[0]:
            out.append(value_text(value))
        elif not _says_nothing(value):
            out.append(f"{k}={value_text(value)}")
    return out


def _says_nothing(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_says_nothing(v) for v in value)
    return value is None or value is False


# ---------------------------------------------------------------- values


def value_text(value: Any) -> str:
    """An argument: a node by name or path, or a literal; never an address."""
    if isinstance(value, fx.Node):
        return _reference(value)
    if isinstance(value, (list, torch.Size)) or type(value) is tuple:
        inner = ", ".join(fold([_key(v) if isinstance(v, slice) else value_text(v) for v in value]))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{value_text(k)}: {value_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (bool, int, float)) or value is None:
        return str(value)
    if isinstance(value, str):
        return _json.dumps(value, ensure_ascii=False)
    if value is Ellipsis:
        return "..."
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return f"<{value}>".replace("torch.", "")
    if isinstance(value, slice):
        return f"<slice {_key(value)}>"
    return f"<{getattr(value, '__name__', type(value).__name__)}>"


def _reference(node: Node) -> str:
    if node.op == "get_attr":
        return path_text(str(node.target))
    if inlined(node):
        return f"{value_text(node.args[0])}[{node.args[1]}]"
    return node.name


def path_text(path: str) -> str:
    """A path always has a dot, so that it cannot be taken for the name of a node."""
    if re.search(r"[\s,()\[\]{}<>=:×\"]|\.\.", path):
        return f"<{path}>"
    return path if "." in path and not path[0].isdecimal() else f"self.{path}"


def _key(key: Any) -> str:
    if isinstance(key, tuple):
        return ", ".join(_key(k) for k in key)
    if isinstance(key, slice):
        start, stop, step = (
            "" if v is None else value_text(v) for v in (key.start, key.stop, key.step)
        )
        return f"{start}:{stop}" + (f":{step}" if step else "")
    return value_text(key)


# ---------------------------------------------------------------- families of lines


def _families(lines: list[_Line]) -> list[_Line]:
    """One line for three or more (or for blocks of up to four) that differ in a running number."""
    out: list[_Line] = []
    k = 0
    while k < len(lines):
        for size in (1, 2, 3, 4):
            count = _repeats(lines, k, size)
            if count >= 3:
                out += [_family(lines[k + j : k + count * size : size]) for j in range(size)]
                k += count * size
                break
        else:
            out.append(lines[k])
            k += 1
    return out


def _repeats(lines: list[_Line], start: int, size: int) -> int:
    """How often the block of ``size`` lines at ``start`` repeats, with numbers in equal steps."""
    count, steps = 1, None
    while start + (count + 1) * size <= len(lines):
        here = start + count * size
        moved = [_moved(lines[j - size], lines[j]) for j in range(here, here + size)]
        if any(m is None for m in moved) or steps not in (None, moved):
            break
        block = {line.node for line in lines[start:here]}
        if any(n in block for j in range(here, here + size) for n in _sources(lines[j].node)):
            break  # a chain is not a family
        count, steps = count + 1, moved
    return count


def _sources(node: Node) -> list[Node]:
    found: list[Node] = []
    for n in node.all_input_nodes:
        found += [n, *_sources(n)] if inlined(n) else [n]
    return found


def _moved(first: _Line, second: _Line) -> tuple[int, ...] | None:
    """By how much each number of a line moved; None when the lines differ in more than numbers."""
    if first.type != second.type or first.node.op != second.node.op:
        return None
    moved: tuple[int, ...] = ()
    if first.name == second.name:
        return None
    for a, b in zip(_texts(first), _texts(second), strict=True):
        one, two = re.split(r"(\d+)", a), re.split(r"(\d+)", b)
        if a != b and (one[0::2] != two[0::2] or re.search(r"[{×]|\.\.", a)):
            return None
        moved += tuple(int(y) - int(x) for x, y in zip(one[1::2], two[1::2], strict=True))
    return moved


def _texts(line: _Line) -> tuple[str, str, str]:
    return line.name, line.value, line.about


def _family(lines: Sequence[_Line]) -> _Line:
    first = lines[0]
    bare = first.type == "?" or _is_input(first.node)
    one = f"({first.type})" if "×" in first.type else first.type
    kind = first.type if bare else f"{len(lines)}×{one}"
    name, value, about = (_together([t[k] for t in map(_texts, lines)]) for k in range(3))
    return _Line(name, value, kind, about, first.node)


def _together(texts: Sequence[str]) -> str:
    """The texts as one; a number that moves becomes ``{first..last}``, with a step if not one."""
    first, second, last = (re.split(r"(\d+)", texts[k]) for k in (0, 1, -1))
    out = []
    for a, b, z in zip(first, second, last, strict=True):
        if a == z:
            out.append(a)
        else:
            step = int(b) - int(a)
            out.append(f"{{{a}..{z}}}" if step == 1 else f"{{{a}..{z}..{step}}}")
    return "".join(out)
