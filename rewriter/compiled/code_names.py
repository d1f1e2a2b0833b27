"""What code names, as its instructions tell: attributes, globals, imports, closures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise, takewhile
from types import CodeType, FrameType, FunctionType
from typing import Any

from torch import nn

from .homes import home_of
from .instructions import Step, steps

COPY_OF = "__recast_copy_of__"  # what a function of a trace is a copy of
_WHOLE = frozenset({"asdict", "astuple", "attrgetter"})  # ask for any field of an object
_ASKING = _WHOLE | {"vars", "__dict__", "getattr"}


@lru_cache(maxsize=4096)
def names_in(code: CodeType) -> frozenset[str]:
    """All names and strings in ``code`` and in the functions inside it."""
    texts = (c for c in code.co_consts if isinstance(c, str))
    found = {*code.co_names, *texts}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= names_in(inner)
    return frozenset(found)


@lru_cache(maxsize=4096)
def globals_in(code: CodeType) -> frozenset[str]:
    """The global names that ``code`` reads."""
    found = {i.argval for i in steps(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= globals_in(inner)
    return frozenset(found)


def methods(kind: type) -> Iterator[tuple[CodeType, str]]:
    """The code of the user's methods of a module class, with the Python module of each."""
    for base in kind.__mro__:
        if base is nn.Module or base.__module__.startswith(("torch.", "builtins")):
            continue
        for value in vars(base).values():
            inner = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
            if isinstance(inner, FunctionType):
                yield inner.__code__, home_of(inner.__globals__)


def codes_of(root: nn.Module) -> dict[CodeType, str]:
    """The code of all methods of the user's modules, with the Python module of each."""
    kinds = {type(m): None for m in root.modules()}
    return {code: name for kind in kinds for code, name in methods(kind)}


@lru_cache(maxsize=4096)
def attributes_in(code: CodeType) -> frozenset[tuple[str, str]]:
    """(a, b) for each ``a.b`` in ``code`` and in the functions inside it, where ``a`` may be an
    attribute itself; for ``from . import a as x`` and ``x.b`` too.
    """
    pairs = list(pairwise(steps(code)))
    found = {
        (one.argval, read.argval)
        for one, read in pairs
        if read.opname == "LOAD_ATTR" and one.opname.startswith("LOAD_")
        and isinstance(one.argval, str)
    }  # fmt: skip
    imported = {(to.argval, one.argval) for one, to in pairs if one.opname == "IMPORT_FROM"}
    found |= {(name, read) for to, name in imported for known, read in found if known == to}
    inner = (attributes_in(c) for c in code.co_consts if isinstance(c, CodeType))
    return frozenset(found).union(*inner)


@lru_cache(maxsize=4096)
def any_field(code: CodeType) -> bool:
    """Whether ``code`` asks for fields of an object that is not ``self`` other than by name."""
    if any(isinstance(inner, CodeType) and any_field(inner) for inner in code.co_consts):
        return True
    if not _ASKING.intersection(code.co_names):
        return False
    called = [i for i in steps(code) if i.opname != "PUSH_NULL"]
    for k, i in enumerate(called):
        after = called[k + 1 :]
        if i.argval == "getattr" and i.opname == "LOAD_GLOBAL" and not _by_name(code, after):
            return True
        if i.argval == "vars" and i.opname == "LOAD_GLOBAL" and not _own(code, after):
            return True
        if i.argval == "__dict__" and not _own(code, called[k - 1 : k]):
            return True
        if i.argval in _WHOLE and i.opname != "LOAD_FAST":
            return True
    return False


def _own(code: CodeType, after: list[Step]) -> bool:
    """Whether the first of them reads ``self``: the trace sees what modules read of
    themselves.
    """
    if not after or after[0].opname != "LOAD_FAST" or after[0].argval not in code.co_varnames[:1]:
        return False
    return len(after) == 1 or after[1].opname != "LOAD_ATTR"


def _by_name(code: CodeType, after: list[Step]) -> bool:
    """Whether a ``getattr`` asks for one name, or a module for what is its own: seen elsewhere."""
    if _own(code, after):
        return True
    inside = [*takewhile(lambda i: not i.opname.startswith("CALL"), after)]
    made = {"FORMAT_VALUE", "FORMAT_SIMPLE", "BUILD_STRING", "BINARY_OP"}
    fixed = any(i.opname == "LOAD_CONST" and isinstance(i.argval, str) for i in inside)
    return fixed and not any(i.opname in made for i in inside)


@lru_cache(maxsize=4096)
def imports_in(code: CodeType) -> tuple[tuple[int, str], ...]:
    """The Python modules that ``code`` imports: how many packages up, and the name."""
    inner = (found for c in code.co_consts if isinstance(c, CodeType) for found in imports_in(c))
    taken = steps(code)
    own = (
        (taken[k - 2].argval, i.argval) for k, i in enumerate(taken) if i.opname == "IMPORT_NAME"
    )
    return (*own, *inner)


def closed_over(frame: FrameType) -> dict[tuple[CodeType, str, int], Any]:
    """The variables that the running code reads from its closure; of a function that a trace has
    copied, the original, which is what the closure of the user's code holds.
    """
    code, held = frame.f_code, frame.f_locals
    names = (name for name in code.co_freevars if name != "__class__" and name in held)
    read = {name: _original(held[name]) for name in names}
    return {(code, name, id(value)): value for name, value in read.items()}


def _original(value: Any) -> Any:
    return getattr(value, COPY_OF, value) if type(value) is FunctionType else value


@lru_cache(maxsize=4096)
def rebound(code: CodeType) -> tuple[str, ...]:
    """The variables of its closure that ``code`` rebinds."""
    if not code.co_freevars:
        return ()
    stores = (i.argval for i in steps(code) if i.opname == "STORE_DEREF")
    return tuple(dict.fromkeys(name for name in stores if name in code.co_freevars))


@lru_cache(maxsize=4096)
def catches(code: CodeType) -> bool:
    """Whether ``code`` catches errors: ``except KeyError``, ``except``, ``suppress(KeyError)``; or
    may, as the exit of a context.
    """
    inner = any(isinstance(c, CodeType) and catches(c) for c in code.co_consts)
    caught = any(
        i.opname == "CHECK_EXC_MATCH" or (i.opname, after.opname) == ("PUSH_EXC_INFO", "POP_TOP")
        for i, after in pairwise(steps(code))
    )
    return inner or caught or "suppress" in code.co_names or code.co_name == "__exit__"


@lru_cache(maxsize=4096)
def only_sets_entries(code: CodeType, name: str) -> bool:
    """Whether ``code`` names the attribute ``name`` for ``self.name[key] = value`` and
    ``self.name.update(...)`` alone.
    """
    if any(isinstance(c, CodeType) and not only_sets_entries(c, name) for c in code.co_consts):
        return False
    if any(c == name or (isinstance(c, tuple) and name in c) for c in code.co_consts):
        return False  # getattr(self, "name")
    every = steps(code)
    named = (k for k, i in enumerate(every) if i.argval == name and not i.opname.endswith("_FAST"))
    return all(every[k].opname == "LOAD_ATTR" and _sets(every[k + 1 :]) for k in named)


def _sets(after: tuple[Step, ...]) -> bool:
    """Whether they set an entry of what has just been loaded, or update it."""
    if after and after[0].opname == "LOAD_ATTR":
        return bool(after[0].argval == "update")
    depth = 0  # of what lies above it
    for i in after:
        if i.opname == "STORE_SUBSCR" and depth == 1:
            return True
        if depth < 0 or i.effect is None:
            return False
        depth += i.effect
    return False


def asks_type(codes: Iterable[CodeType]) -> str | None:
    """The first of ``codes`` that compares ``type(x)`` with a class of tensors: under a trace a
    tensor is of another class.
    """
    return next((code.co_name for code in codes if _asks_type(code)), None)


@lru_cache(maxsize=4096)
def _asks_type(code: CodeType) -> bool:
    if any(isinstance(inner, CodeType) and _asks_type(inner) for inner in code.co_consts):
        return True
    if "type" not in code.co_names or not {"Tensor", "Parameter"} & set(code.co_names):
        return False
    every = steps(code)
    for k, i in enumerate(every):
        if i.argval == "type" and i.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            ends = ("IS_OP", "COMPARE_OP", "CONTAINS_OP")
            end = next((n for n in range(k, len(every)) if every[n].opname in ends), k)
            if {"Tensor", "Parameter"} & {step.argval for step in every[k:end] if step.argval}:
                return True
    return False


def lies_within(inner: CodeType, outer: CodeType) -> bool:
    held = [c for c in outer.co_consts if isinstance(c, CodeType)]
    return inner in held or any(lies_within(inner, c) for c in held)


@lru_cache(maxsize=4096)
def looked_for(code: CodeType) -> tuple[str, ...]:
    """The names that ``code`` may give to ``getattr`` or ``hasattr``."""
    inner = (n for c in code.co_consts if isinstance(c, CodeType) for n in looked_for(c))
    if not {"getattr", "hasattr"} & set(code.co_names):
        return tuple(inner)
    texts = (c for c in code.co_consts if isinstance(c, str) and c.isidentifier())
    return (*inner, *texts)
