"""Mutants of a model: the same, but for one change in a function that its forward consists of."""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import linecache
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from types import CodeType, FunctionType

import changes
from torch import nn

_count = itertools.count()


@dataclass(frozen=True)
class Mutant:
    """``source``: of the function that was changed."""

    model: nn.Module
    what: str
    source: str


def mutant(model: nn.Module, rng: Random) -> Mutant | None:
    """A copy of ``model`` with one change; None where this try found nothing to change."""
    made = copy.deepcopy(model)
    places = list(_places(made))
    if not places:
        return None
    module, name, function, of_class = rng.choice(places)
    changed = _changed(function, rng)
    if changed is None:
        return None
    new, what, source = changed
    if of_class:
        old = type(module)
        kind = type(old.__name__, (old,), {name: new, "__module__": old.__module__})
        for one in made.modules():
            if type(one) is old:
                one.__class__ = kind
    else:
        setattr(module, name, new)
    return Mutant(made, what, source)


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, FunctionType, bool]]:
    """The functions that hang on modules of the user's, or are methods of their class: ``(module,
    name, function, whether it is a method)``.
    """
    for module in model.modules():
        if type(module).__module__.partition(".")[0] in ("torch", "recast"):
            continue
        for of_class, held in ((False, vars(module)), (True, vars(type(module)))):
            for name, value in held.items():
                if isinstance(value, FunctionType) and not name.startswith("__"):
                    yield module, name, value, of_class


def _changed(function: FunctionType, rng: Random) -> tuple[FunctionType, str, str] | None:
    """``function`` with a change, what it is, and the new source."""
    node = _parsed(function)
    what = None if node is None else changes.change(node, rng)
    free = function.__code__.co_freevars
    if node is None or what is None or "__class__" in free:
        return None
    node.decorator_list = []
    # Its variables of closures are arguments of a function around it.
    around = ast.parse(f"def around({', '.join(free)}):\n    pass")
    around.body[0].body = [node]  # type: ignore[attr-defined]
    source = "from __future__ import annotations\n" + ast.unparse(around) + "\n"
    file = f"<mutant {next(_count)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    code = _inner(_inner(compile(source, file, "exec", dont_inherit=True), "around"), node.name)
    cells = dict(zip(free, function.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in code.co_freevars)
    new = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, closure
    )
    new.__kwdefaults__ = function.__kwdefaults__
    return new, what, ast.unparse(node)


def _inner(code: CodeType, name: str) -> CodeType:
    return next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)


def _parsed(function: FunctionType) -> ast.FunctionDef | None:
    """The definition of ``function``; of a lambda too, where its line has no other like it."""
    try:
        source = textwrap.dedent(inspect.getsource(function)).strip()
    except OSError:
        return None
    part = source.rstrip(",")  # of a dict, a list or a call
    for text in (source, f"({part})", f"f({part})", f"{{{part}}}", f"{part}\n    pass"):
        with suppress(SyntaxError):
            tree = ast.parse(text)
            break
    else:
        return None
    if function.__name__ != "<lambda>":
        defined = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
        return next((n for n in defined if n.name == function.__name__), None)
    code = function.__code__
    names = list(code.co_varnames[: code.co_argcount])
    lambdas = [n for n in ast.walk(tree) if isinstance(n, ast.Lambda)]
    lambdas = [n for n in lambdas if [a.arg for a in n.args.args] == names]
    if len(lambdas) != 1:
        return None
    made = ast.parse("def function():\n    return 0").body[0]
    assert isinstance(made, ast.FunctionDef)
    made.args, made.body = lambdas[0].args, [ast.Return(lambdas[0].body)]
    return made
