"""What code can name besides its arguments: attributes, globals, closures, flags of torch.

A trace sees which code ran, not what of Python's own state it read. So all that this code names is
taken to be read: constants of a module, fields of ``args``, ``Config.SCALE`` of a class, entries
of a dictionary beside a lambda.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from .surroundings import (
    CALLED,
    CONTAINERS,
    MOST,
    PLAIN,
    Absent,
    Contents,
    Fields,
    Held,
    Kept,
    Same,
    Taken,
    keep,
)  # fmt: skip

_OWN = frozenset(vars(nn.Module()))  # what nn.Module keeps of its own
_FLAGS = ("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled")
_LIBRARIES = sys.stdlib_module_names | {"numpy", "recast", "torch"}


@lru_cache(maxsize=4096)
def names_in(code: CodeType) -> frozenset[str]:
    """All names and texts of ``code`` and of the functions inside it."""
    texts = (c for c in code.co_consts if isinstance(c, str))
    found = {*code.co_names, *texts}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= names_in(inner)
    return frozenset(found)


@lru_cache(maxsize=4096)
def globals_in(code: CodeType) -> frozenset[str]:
    """The global names that ``code`` reads."""
    read = (
        i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )
    found = set(read)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= globals_in(inner)
    return frozenset(found)


def methods(kind: type) -> Iterator[tuple[CodeType, str]]:
    """The code of the user's methods of a class of modules, with the Python module of each."""
    for base in kind.__mro__:
        if base is nn.Module or base.__module__.startswith(("torch.", "builtins")):
            continue
        for value in vars(base).values():
            inner = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
            if isinstance(inner, FunctionType):
                yield inner.__code__, inner.__module__


def codes_of(root: nn.Module) -> dict[CodeType, str]:
    """The code of all methods of the user's modules, with the Python module of each."""
    kinds = {type(m): None for m in root.modules()}
    return {code: name for kind in kinds for code, name in methods(kind)}


def global_values(codes: Mapping[CodeType, str]) -> dict[tuple[str, str], Kept]:
    """What ``codes`` read by a global name, by (Python module, name): plain values and containers
    of such; of objects, classes and Python modules of the user's, the fields that they name.
    """
    names: frozenset[str] = frozenset().union(*map(names_in, codes))
    found = {}
    for code, module in codes.items():
        scope = getattr(sys.modules.get(module), "__dict__", {})
        for name in globals_in(code):
            kept = _kept(scope.get(name, Absent), names)
            if kept is not None:
                found[module, name] = kept
    return found


def _kept(value: Any, names: frozenset[str]) -> Kept | None:
    """What to compare of a value that code reaches by a name; None if nothing."""
    if _literal(value):
        return keep(value, names)
    if isinstance(value, (type, ModuleType)):
        home = value.__name__ if isinstance(value, ModuleType) else value.__module__
        if home.partition(".")[0] in _LIBRARIES:
            return None
        known = {k: v for k in names & vars(value).keys() if _literal(v := vars(value)[k])}
        fields = tuple((k, keep(v, names)) for k, v in known.items())
        return Fields(type(value), fields) if fields else None
    if isinstance(value, (torch.Tensor, nn.Module, *CALLED, *CONTAINERS)):
        return None
    if type(value).__module__.partition(".")[0] == "torch" or not hasattr(value, "__dict__"):
        return None
    kept = keep(value, names)
    return (
        kept if isinstance(kept, Contents) or (isinstance(kept, Fields) and kept.fields) else None
    )


def _literal(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) <= MOST and all(_literal(v) for v in value.values())
    if isinstance(value, CONTAINERS):
        return len(value) <= MOST and all(_literal(v) for v in value)
    return type(value) in PLAIN


def closed_over(frame: FrameType) -> dict[tuple[CodeType, str, int], Any]:
    """The objects that the running code reads as variables of its closure. Plain values are not
    among them: where they are bound cannot be seen from a frame.
    """
    code = frame.f_code
    if not code.co_freevars or code.co_freevars == ("__class__",):
        return {}
    held = frame.f_locals
    found = {(code, name, id(held[name])): held[name] for name in code.co_freevars if name in held}
    return {key: value for key, value in found.items() if type(value) not in PLAIN}


def closures(found: Mapping[tuple[CodeType, str, int], Any], names: frozenset[str]) -> list[Taken]:
    """What to ask again of variables of closures; ``found`` as by ``closed_over``."""
    kept = {key: _kept(value, names) for key, value in found.items()}
    return [
        Taken("closure", code.co_qualname, name, Held(found[code, name, k], was))
        for (code, name, k), was in kept.items()
        if was is not None and not isinstance(was, Held)
    ]


def flags_in(codes: Mapping[CodeType, str]) -> list[Taken]:
    """Questions about the state of torch that code asks, with the answer now."""
    asked = {name for code in codes for name in names_in(code)}
    return [
        Taken("flag", "torch", name, Same(getattr(torch, name)()))
        for name in _FLAGS
        if name in asked
    ]


def taken_globals(codes: Mapping[CodeType, str]) -> list[Taken]:
    """What ``codes`` read by a global name, to be asked again."""
    return [Taken("global", m, name, kept) for (m, name), kept in global_values(codes).items()]


def taken_by_name(root: nn.Module) -> tuple[Taken, ...]:
    """What the forwards of ``root`` and of its modules name, where no trace has seen them read it:
    attributes that the methods which forward leads to may read, and globals.
    """
    found = []
    for path, module in root.named_modules():
        by_name: dict[str, list[CodeType]] = {}
        for code, _ in methods(type(module)):
            by_name.setdefault(code.co_name, []).append(code)
        names, left = frozenset({"forward"}), ["forward"]
        while left:
            for code in by_name.pop(left.pop(), ()):
                left.extend(names_in(code) - names)
                names |= names_in(code)
        for name, value in vars(module).items():
            if name in names and name not in _OWN and not isinstance(value, torch.Tensor):
                found.append(Taken("attribute", path, name, keep(value, names)))
    return (*found, *taken_globals(codes_of(root)))
