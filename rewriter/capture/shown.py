"""Text that ``forward`` only shows: it prints it, logs it, warns or raises with it.

No graph repeats that, so a number of the batch may be in such a text: that of the first example.
Where else the text goes (a key, a comparison) it would become a constant, and is refused. Which of
the two it is, the source says: what encloses the expression that is being evaluated.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import linecache
import logging
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch

from recast.rewriter.compiled import code_names

from . import frames

_LEVELS = frozenset({
    "debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log",
})  # fmt: skip
_FUNCTIONS = (
    print, warnings.warn, torch._assert,
    *(getattr(logging, name) for name in _LEVELS if hasattr(logging, name)),
)  # fmt: skip
_NAMES = _LEVELS | {"print", "_assert"}
_PURE = frozenset({
    "str", "repr", "ascii", "format", "round", "int", "float", "len", "abs", "min", "max", "sum",
    "list", "tuple", "sorted",
})  # fmt: skip
_OF_TEXT = frozenset({"format", "join"})
_TEXTS = frozenset({"__repr__", "__str__"})
_HANDED_ON = (
    ast.FormattedValue, ast.JoinedStr, ast.BinOp, ast.UnaryOp, ast.Tuple, ast.List, ast.Dict,
    ast.Starred, ast.keyword,
)  # fmt: skip
_STARTS = (ast.FormattedValue, ast.JoinedStr, ast.BinOp, ast.Call)
_FORMATS = frozenset({
    "FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "CONVERT_VALUE",
})  # fmt: skip
_LOOKS = frozenset({"locals", "vars", "eval", "exec"})
_Span = tuple[int | None, ...]


def shows(pure: bool = False) -> bool:
    """Whether the user's expression that asks for a text or a number is only shown. ``pure``: if it
    is a call, what is asked for goes nowhere but into its result.
    """
    frame = _asking()
    return frame is not None and _shown(frame, pure)


def may_show() -> bool:
    """Whether :func:`shows` is worth asking: a function that runs names what shows something."""
    return any(not _NAMES.isdisjoint(one.f_code.co_names) for one in _running(_asking()))


def _running(frame: FrameType | None) -> Iterator[FrameType]:
    """``frame`` and the user's functions that called it."""
    while frame is not None and not (frames.ours(frame) and frame.f_code.co_name == "trace"):
        if frames.users(frame):
            yield frame
        frame = frame.f_back


def asked_by_model() -> bool:
    """Whether the model's own code asks, or a library of models: no debugger, nor torch."""
    frame = _asking()
    return frame is not None and frames.of_model(frame)


def _asking() -> FrameType | None:
    return _users(sys._getframe(1))


def _users(frame: FrameType | None) -> FrameType | None:
    """``frame``, or what called it if it is ours; None beyond the trace."""
    while frame is not None and frames.ours(frame):
        if frame.f_code.co_name == "trace":
            return None
        frame = frame.f_back
    return frame


def _shown(frame: FrameType, pure: bool) -> bool:
    """Whether what ``frame`` is about to evaluate is only shown."""
    if not frames.users(frame):
        return False
    code = frame.f_code
    source = _source(code.co_filename, "".join(linecache.getlines(code.co_filename)))
    if source is None or not source.has(code):
        made = code.co_name in _TEXTS and code.co_filename == "<string>"  # of a dataclass
        return made and _given_back(frame)
    spans = [*code.co_positions()]
    nodes = source.at(spans[frame.f_lasti // 2])
    if dis.opname[code.co_code[frame.f_lasti]] in _FORMATS:  # of "%s" % (n,) it has the place of n
        pure = True
    else:
        nodes = [n for n in nodes if isinstance(n, _STARTS)]
    return bool(nodes) and all(_starts(source, n, frame, pure) for n in nodes)


def _starts(source: _Source, node: ast.expr, frame: FrameType, pure: bool) -> bool:
    if isinstance(node, ast.Call) and _sink(node, frame):
        return True
    if isinstance(node, ast.Call) and not pure and not _pure(node, frame):
        return False
    return _goes_on(source, node, frame, set())


def _goes_on(source: _Source, node: ast.AST, frame: FrameType, seen: set[str]) -> bool:
    """Whether the value of ``node`` is only shown."""
    while True:
        inner, node = node, source.parents[node]
        if isinstance(node, _HANDED_ON):
            continue
        if isinstance(node, ast.IfExp) and inner is not node.test:
            continue
        if isinstance(node, (ast.ListComp, ast.GeneratorExp)) and inner is node.elt:
            continue
        if isinstance(node, ast.Call) and inner is not node.func:
            if _sink(node, frame):
                return True
            if _pure(node, frame):
                continue
            return False
        if isinstance(node, ast.Raise):
            return not any(code_names.catches(one.f_code) for one in _running(frame))
        if isinstance(node, ast.Expr):
            return True
        if isinstance(node, ast.Assert):
            return inner is node.msg
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            (target, *more) = targets
            named = isinstance(target, ast.Name) and not more
            if named and isinstance(node, ast.AugAssign):  # a list, it would change in place
                name = target.id  # type: ignore[attr-defined]
                named = type(frame.f_locals.get(name)) in (str, int, float)
            return named and _name_is(source, node, target.id, frame, seen)  # type: ignore[attr-defined]
        if isinstance(node, ast.Return) or (isinstance(node, ast.Lambda) and inner is node.body):
            return _given_back(frame)
        return False


def _given_back(frame: FrameType) -> bool:
    """Whether what the function of ``frame`` returns is only shown."""
    generator = frame.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE)
    caller = _users(frame.f_back)
    return not generator and caller is not None and _shown(caller, pure=True)


def _name_is(source: _Source, node: ast.AST, name: str, frame: FrameType, seen: set[str]) -> bool:
    """Whether the local variable ``name``, to which ``node`` assigns, is only shown."""
    if name in seen:
        return True
    function: ast.AST | None = node
    while function is not None and not isinstance(function, (ast.FunctionDef, ast.Lambda)):
        function = source.parents.get(function)
    code = frame.f_code
    if function is None or name not in code.co_varnames or _LOOKS & {*code.co_names}:
        return False
    if name in code.co_cellvars:
        return False
    seen = seen | {name}
    return all(
        _goes_on(source, one, frame, seen)
        for one in ast.walk(function)
        if isinstance(one, ast.Name) and one.id == name and isinstance(one.ctx, ast.Load)
    )


# ---------------------------------------------------------------- what is called


def _sink(call: ast.Call, frame: FrameType) -> bool:
    """Whether ``call`` shows its arguments, and does no more."""
    function = call.func
    if isinstance(function, ast.Attribute) and function.attr in _LEVELS:
        owner = _value(function.value, frame)
        if isinstance(owner, (logging.Logger, logging.LoggerAdapter)):
            return True
    if isinstance(function, ast.Attribute) and function.attr == "write":
        owner = _value(function.value, frame)
        return owner is not None and owner in (sys.stdout, sys.stderr)
    found = _value(function, frame)
    return found is not None and any(found is one for one in _FUNCTIONS)


def _pure(call: ast.Call, frame: FrameType) -> bool:
    """Whether the arguments of ``call`` go nowhere but into its result."""
    function = call.func
    if isinstance(function, ast.Attribute):
        text = isinstance(function.value, (ast.Constant, ast.JoinedStr))
        return text and function.attr in _OF_TEXT
    if not isinstance(function, ast.Name):
        return False
    if function.id not in _PURE:
        found = _value(function, frame)
        return isinstance(found, type) and issubclass(found, BaseException)
    return function.id not in frame.f_locals and function.id not in frame.f_globals


def _value(node: ast.expr, frame: FrameType) -> Any:
    """What a dotted name stands for, without running code of the user's; None if that is not known.
    Of ``logging.getLogger(name)`` any logger.
    """
    if isinstance(node, ast.Name):
        for names in (frame.f_locals, frame.f_globals, vars(builtins)):
            if node.id in names:
                return names[node.id]
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, frame)
        if owner is not None:
            return inspect.getattr_static(owner, node.attr, None)
    if isinstance(node, ast.Call) and _value(node.func, frame) is logging.getLogger:
        return logging.root
    return None


# ---------------------------------------------------------------- sources


@dataclass(frozen=True)
class _Source:
    """A file: its codes, and its expressions by their places."""

    codes: dict[str, list[CodeType]]
    spans: dict[_Span, list[ast.expr]]
    parents: dict[ast.AST, ast.AST]

    def has(self, code: CodeType) -> bool:
        """Whether the file still is what ``code`` was made of."""
        return any(_same(code, one) for one in self.codes.get(code.co_qualname, ()))

    def at(self, span: _Span) -> list[ast.expr]:
        """The expressions there: of texts with values in them, Python 3.11 knows one place."""
        return self.spans.get(span, [])


def _same(a: CodeType, b: CodeType) -> bool:
    here = a.co_firstlineno, a.co_code, a.co_linetable, a.co_names
    return here == (b.co_firstlineno, b.co_code, b.co_linetable, b.co_names)


@lru_cache(maxsize=16)
def _source(file: str, text: str) -> _Source | None:
    try:
        tree = ast.parse(text, file)
        whole = compile(text, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    codes: dict[str, list[CodeType]] = {}
    for code in _inside(whole):
        codes.setdefault(code.co_qualname, []).append(code)
    spans: dict[_Span, list[ast.expr]] = {}
    parents: dict[ast.AST, ast.AST] = {}
    for node in ast.walk(tree):
        parents |= dict.fromkeys(ast.iter_child_nodes(node), node)
        if isinstance(node, ast.expr):
            span = node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
            spans.setdefault(span, []).append(node)
    return _Source(codes, spans, parents) if text else None


def _inside(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _inside(one)
