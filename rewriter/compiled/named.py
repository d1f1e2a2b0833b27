"""What code can name besides its arguments: attributes, globals, closures, flags of torch.

A trace sees which code ran, but not which Python state it read. So everything that this code names
counts as read: constants of a module, fields of ``args``, ``Config.SCALE`` of a class, entries of a
dictionary next to a lambda.
"""

from __future__ import annotations

import dis
import gc
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recast.rewriter.capture.absent import counted, missing, of_layers
from recast.rewriter.capture.running import LIBRARIES

from .kept import (
    CALLED,
    Absent,
    Beyond,
    Cell,
    Fields,
    Held,
    Here,
    Kept,
    Same,
    function,
    keep,
    portable,
)  # fmt: skip
from .surroundings import Taken

if TYPE_CHECKING:
    from recast.rewriter.capture.reading import Reading

_OWN = frozenset(vars(nn.Module()))  # what nn.Module keeps of its own
_AT_ONCE = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_FLAGS = (
    "is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "get_default_dtype",
)  # fmt: skip


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
    read = (
        i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )
    found = set(read)
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
                yield inner.__code__, inner.__module__


def codes_of(root: nn.Module) -> dict[CodeType, str]:
    """The code of all methods of the user's modules, with the Python module of each."""
    kinds = {type(m): None for m in root.modules()}
    return {code: name for kind in kinds for code, name in methods(kind)}


@dataclass(frozen=True)
class Sight:
    """What some code can see: the names in it. ``every``: all fields of objects, because it uses
    ``vars`` or a computed name.
    """

    names: frozenset[str]
    every: bool

    def keep(self, value: Any, label: str) -> Kept:
        """The check for whether ``value`` has changed. Raises Beyond, with its name."""
        try:
            return keep(value, self.names, every=self.every)
        except Beyond as error:
            raise Beyond(f"{label}, {error}") from None

    def reached(self, value: Any, label: str) -> Kept | None:
        """:meth:`keep` for what is reached by name; None if there is nothing to compare."""
        if isinstance(value, (FunctionType, MethodType, staticmethod, classmethod, property)):
            return function(value, self.names)
        if isinstance(value, (type, ModuleType)):
            return self._fields(value, label)
        if isinstance(value, (torch.Tensor, nn.Module, *CALLED)):
            return Here(Same(value))
        if type(value).__module__.partition(".")[0] == "torch":
            return None
        kept = self.keep(value, label)
        if isinstance(kept, Fields) and not kept.fields:
            return None
        return kept if portable(kept) else Here(kept)

    def _fields(self, value: Any, label: str) -> Kept | None:
        """What the code names in a class or a Python module of the user."""
        home = value.__name__ if isinstance(value, ModuleType) else value.__module__
        if home.partition(".")[0] in LIBRARIES:
            return None
        known = {k: vars(value)[k] for k in self.names & vars(value).keys()}
        known = {k: v for k, v in known.items() if not isinstance(v, (type, ModuleType))}
        found = ((k, self.reached(v, f"{label}.{k}")) for k, v in known.items())
        fields = tuple((k, kept) for k, kept in found if kept is not None)
        return Fields(type(value), fields) if fields else None


def sight(codes: Iterable[CodeType]) -> Sight:
    """What ``codes`` can see together."""
    codes = tuple(codes)
    return Sight(frozenset().union(*map(names_in, codes)), any(map(_any_field, codes)))


@lru_cache(maxsize=4096)
def _any_field(code: CodeType) -> bool:
    """Whether ``code`` asks for fields of an object that is not ``self`` other than by name."""
    if any(isinstance(inner, CodeType) and _any_field(inner) for inner in code.co_consts):
        return True
    if not {"vars", "__dict__", "asdict", "getattr"} & set(code.co_names):
        return False
    steps = [i for i in dis.get_instructions(code) if i.opname not in ("PUSH_NULL", "CACHE")]
    for k, i in enumerate(steps):
        after = steps[k + 1 :]
        if i.argval == "getattr" and i.opname == "LOAD_GLOBAL" and not _by_name(code, after):
            return True
        if i.argval == "vars" and i.opname == "LOAD_GLOBAL" and not _own(code, after):
            return True
        if i.argval == "__dict__" and not _own(code, steps[k - 1 : k]):
            return True
        if i.argval == "asdict" and i.opname != "LOAD_FAST":
            return True
    return False


def _own(code: CodeType, steps: list[dis.Instruction]) -> bool:
    """Whether the first of ``steps`` reads ``self``: the trace sees what modules read of
    themselves.
    """
    if not steps or steps[0].opname != "LOAD_FAST" or steps[0].argval not in code.co_varnames[:1]:
        return False
    return len(steps) == 1 or steps[1].opname not in ("LOAD_ATTR", "LOAD_METHOD")


def _by_name(code: CodeType, steps: list[dis.Instruction]) -> bool:
    """Whether a ``getattr`` asks for one name, or a module for what is its own: seen elsewhere."""
    if _own(code, steps):
        return True
    end = next((k for k, i in enumerate(steps) if i.opname.startswith("CALL")), len(steps))
    inside = steps[:end]
    made = {"FORMAT_VALUE", "FORMAT_SIMPLE", "BUILD_STRING", "BINARY_OP"}
    fixed = any(i.opname == "LOAD_CONST" and isinstance(i.argval, str) for i in inside)
    return fixed and not any(i.opname in made for i in inside)


def global_values(
    codes: Mapping[CodeType, str], strict: bool = True
) -> dict[tuple[str, str], Kept]:
    """What ``codes`` read by a global name, by (Python module, name): plain values, containers,
    functions, tensors; of objects, classes and Python modules of the user's, the fields that they
    name. Raises Beyond if ``strict``.
    """
    seen = sight(codes)
    found = {}
    for code, module in codes.items():
        scope = getattr(sys.modules.get(module), "__dict__", {})
        for name in globals_in(code):
            try:
                kept = seen.reached(scope.get(name, Absent), name)
            except Beyond:
                if strict:
                    raise
                continue
            if kept is not None:
                found[module, name] = kept
    return found


def of_classes(modules: Mapping[str, nn.Module], seen: Sight) -> list[Taken]:
    """What the code names of the classes of the user's modules: constants, methods, ``forward``."""
    found: dict[tuple[type, str], Taken] = {}
    for path, module in modules.items():
        bases = [b for b in type(module).__mro__ if b.__module__.partition(".")[0] not in LIBRARIES]
        for base in bases:
            for name in (seen.names | {"forward"}) & vars(base).keys():
                first = next(b for b in type(module).__mro__ if name in vars(b))
                if first is not base or (base, name) in found or name.startswith("__"):
                    continue
                kept = seen.reached(vars(base)[name], f"{base.__name__}.{name}")
                if kept is not None:
                    found[base, name] = Taken("class", path, name, kept)
    return list(found.values())


def closed_over(frame: FrameType) -> dict[tuple[CodeType, str, int], Any]:
    """The variables that the running code reads from its closure."""
    code, held = frame.f_code, frame.f_locals
    read = (name for name in code.co_freevars if name != "__class__" and name in held)
    return {(code, name, id(held[name])): held[name] for name in read}


def closures(found: Mapping[tuple[CodeType, str, int], Any], seen: Sight) -> list[Taken]:
    """The checks for variables of closures; ``found`` is what ``closed_over`` returned."""
    cells = _cells({code for code, _, _ in found})
    taken = []
    for (code, name, place), value in found.items():
        kept = seen.reached(value, name)
        if kept is None:
            continue
        kept = kept.kept if isinstance(kept, Here) else kept
        held: list[Kept] = [Cell(kept, cell) for cell in cells.get((code, name, place), ())]
        if not held and portable(kept):  # else it is of the trace itself, which made the function
            held = [Held(kept, value)]
        taken += [Taken("closure", code.co_qualname, name, one) for one in held]
    return taken


def _no_rebinding(codes: Iterable[CodeType]) -> None:
    """Raise Beyond if ``codes`` rebind a variable of an enclosing function."""
    codes = tuple(codes)
    for code in codes:
        for name in _rebound(code):
            owners = (c for c in codes if name in c.co_cellvars and _within(code, c))
            if next(owners, None) is None:
                raise Beyond(f"{name}, a variable around {code.co_name}() that it binds anew")


@lru_cache(maxsize=4096)
def _rebound(code: CodeType) -> tuple[str, ...]:
    """The variables of its closure that ``code`` rebinds."""
    if not code.co_freevars:
        return ()
    stores = (i.argval for i in dis.get_instructions(code) if i.opname == "STORE_DEREF")
    return tuple(dict.fromkeys(name for name in stores if name in code.co_freevars))


@lru_cache(maxsize=4096)
def catches(code: CodeType) -> bool:
    """Whether ``code`` catches errors: ``except KeyError``, ``suppress(KeyError)``."""
    inner = any(isinstance(c, CodeType) and catches(c) for c in code.co_consts)
    caught = (i.opname == "CHECK_EXC_MATCH" for i in dis.get_instructions(code))
    return inner or "suppress" in code.co_names or any(caught)


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
    steps = list(dis.get_instructions(code))
    for k, i in enumerate(steps):
        if i.argval == "type" and i.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            ends = ("IS_OP", "COMPARE_OP", "CONTAINS_OP")
            end = next((n for n in range(k, len(steps)) if steps[n].opname in ends), k)
            if {"Tensor", "Parameter"} & {step.argval for step in steps[k:end] if step.argval}:
                return True
    return False


def _within(inner: CodeType, outer: CodeType) -> bool:
    held = [c for c in outer.co_consts if isinstance(c, CodeType)]
    return inner in held or any(_within(inner, c) for c in held)


def _cells(codes: set[CodeType]) -> dict[tuple[CodeType, str, int], list[CellType]]:
    """Where the functions of these codes that live on have their variables, by what is in them."""
    # The function of a comprehension is gone once called, and to ask takes a look at all objects.
    lasting = [code for code in codes if code.co_name not in _AT_ONCE]
    referring = gc.get_referrers(*lasting) if lasting else []
    functions = [f for f in referring if type(f) is FunctionType]
    found: dict[tuple[CodeType, str, int], list[CellType]] = {}
    for living in functions:
        code = living.__code__
        for name, cell in zip(code.co_freevars, living.__closure__ or (), strict=True):
            try:
                key = code, name, id(cell.cell_contents)
            except ValueError:  # empty
                continue
            known = found.setdefault(key, [])
            if all(cell is not other for other in known):
                known.append(cell)
    return found


def flags_in(codes: Mapping[CodeType, str]) -> list[Taken]:
    """Questions about torch's state that code asks, with the present answers."""
    asked = {name for code in codes for name in names_in(code)}
    return [
        Taken("flag", "torch", name, Same(getattr(torch, name)()))
        for name in _FLAGS
        if name in asked
    ]


def taken_globals(codes: Mapping[CodeType, str]) -> list[Taken]:
    """The checks for what ``codes`` read by a global name."""
    return [Taken("global", m, name, kept) for (m, name), kept in global_values(codes).items()]


def taken_by_trace(
    reading: Reading, modules: Mapping[str, nn.Module], written: set[tuple[str, str]]
) -> tuple[Taken, ...]:
    """The checks for the state of the model and of Python that is baked into a graph, except what
    forward itself writes. Raises Beyond.
    """
    seen = sight(reading.codes)
    found = []
    for path, name in reading.taken:
        value = vars(modules[path]).get(name, Absent)
        known = isinstance(value, (torch.Tensor, nn.Module))  # looked up anew at each call
        if value is not Absent and not known and (path, name) not in written:
            found.append(Taken("attribute", path, name, seen.keep(value, f"self.{name}")))
    for path, name in reading.inherited:
        if name not in vars(modules[path]) and (path, name) not in written:
            found.append(Taken("attribute", path, name, Same(Absent)))
    unseen = (*missing(reading.absent, modules), *of_layers(reading.codes, seen, modules))
    found += [one for path, name, one in unseen if (path, name) not in written]
    found += counted(seen.names, modules)
    found += of_classes(modules, seen)
    found += taken_globals(reading.codes)
    _no_rebinding(reading.codes)
    found += closures(reading.closed, seen)
    for (path, name), value in reading.answers.items():
        found.append(Taken("answer", path, name, Same(value)))
    for path, records in reading.grads.items():
        owner, _, name = path.rpartition(".")
        found.append(Taken("grad", owner, name, Same(records)))
    for name in reading.environment:
        now = Same(os.environ.get(name, Absent))
        found.append(Taken("environment", "os.environ", name, now))
    return (*found, *flags_in(reading.codes))


def taken_by_name(root: nn.Module) -> tuple[Taken, ...]:
    """The checks for what the forwards of ``root`` and its modules name, when no trace has seen
    what they read: attributes that the methods called by forward may read, and globals.
    """
    found: list[Taken] = []
    for path, module in root.named_modules():
        by_name: dict[str, list[CodeType]] = {}
        for code, _ in methods(type(module)):
            by_name.setdefault(code.co_name, []).append(code)
        names, left = frozenset({"forward"}), ["forward"]
        while left:
            for code in by_name.pop(left.pop(), ()):
                left.extend(names_in(code) - names)
                names |= names_in(code)
        seen = Sight(names, every=False)
        for name, value in vars(module).items():
            if name in names and name not in _OWN and not isinstance(value, torch.Tensor):
                found.append(Taken("attribute", path, name, seen.keep(value, f"self.{name}")))
        found += of_classes({path: module}, seen)
    return (*found, *taken_globals(codes_of(root)))
