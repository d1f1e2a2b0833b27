"""What code can name besides its arguments: attributes, globals, closures, flags of torch.

A trace sees which code ran, but not which Python state it read. So everything that this code names
counts as read: constants of a module, fields of ``args``, ``Config.SCALE`` of a class, entries of a
dictionary next to a lambda.
"""

from __future__ import annotations

import dis
import gc
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recast.rewriter.capture.code_watcher import LIBRARIES
from recast.rewriter.capture.missing_attributes import counted, missing, of_layers

from .external_state import BakedValue
from .object_contents import CALLED, Absent, inherited
from .value_checks import (
    Cell,
    Fields,
    Held,
    NotComparable,
    ProcessLocal,
    Same,
    ValueCheck,
    check_of,
    function,
    portable,
)

if TYPE_CHECKING:
    from recast.rewriter.capture.python_reads import PythonReads

_OWN = frozenset(vars(nn.Module()))  # what nn.Module keeps of its own
_DEEP = 4  # classes and modules within others
_AT_ONCE = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_DEVICES = ("cpu", "cuda")
_FLAGS = {  # with the arguments of each question
    "is_grad_enabled": ("",), "is_inference_mode_enabled": ("",), "get_default_dtype": ("",),
    "is_autocast_enabled": _DEVICES, "get_autocast_dtype": _DEVICES, "initial_seed": ("",),
    "are_deterministic_algorithms_enabled": ("",), "get_num_threads": ("",),
    "get_float32_matmul_precision": ("",), "is_anomaly_enabled": ("",),
}  # fmt: skip


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
class VisibleNames:
    """What some code can see: the names in it. ``every``: all fields of objects, because it uses
    ``vars`` or a computed name. ``after``: the names that it reads of what has a name, so ``b`` for
    ``a`` and ``c`` for ``b`` where it says ``a.b.c``.
    """

    names: frozenset[str]
    every: bool
    after: Mapping[str, frozenset[str]]

    def check_of(self, value: Any, label: str) -> ValueCheck:
        """The check for whether ``value`` has changed. Raises NotComparable, with its name."""
        try:
            return check_of(value, self.names, every=self.every)
        except NotComparable as error:
            raise NotComparable(f"{label}, {error}") from None

    def reached(self, value: Any, label: str) -> ValueCheck | None:
        """:meth:`check_of` for what is reached by name; None if there is nothing to compare."""
        if isinstance(value, (FunctionType, MethodType, staticmethod, classmethod, property)):
            try:
                return function(value, self.names)
            except NotComparable as error:
                raise NotComparable(f"{label}, {error}") from None
        if isinstance(value, (type, ModuleType)):
            return self._fields(value, label, self.names)
        if isinstance(value, (torch.Tensor, nn.Module, *CALLED)):
            return ProcessLocal(Same(value))
        if type(value).__module__.partition(".")[0] == "torch":
            return None
        check = self.check_of(value, label)
        if isinstance(check, Fields) and not check.fields:
            return None
        return check if portable(check) else ProcessLocal(check)

    def within(self, value: Any, name: str, label: str, deep: int = 1) -> ValueCheck | None:
        """What the code reads of a class or a Python module that it reaches by ``name``."""
        names = self.after.get(name, frozenset()) if deep < _DEEP else frozenset()
        return self._fields(value, label, names, deep)

    def _fields(
        self, value: Any, label: str, names: frozenset[str], deep: int = 0
    ) -> ValueCheck | None:
        """What the code names in a class or a Python module of the user."""
        home = value.__name__ if isinstance(value, ModuleType) else value.__module__
        if home.partition(".")[0] in LIBRARIES:
            return None
        held = {**inherited(value), **vars(value)} if isinstance(value, type) else vars(value)
        known = {k: held[k] for k in names & held.keys()}
        found = (
            (k, self.within(v, k, f"{label}.{k}", deep + 1))
            if isinstance(v, (type, ModuleType))
            else (k, self.reached(v, f"{label}.{k}"))
            for k, v in known.items()
        )
        fields = tuple((k, check) for k, check in found if check is not None)
        return Fields(type(value), fields) if fields else None


def visible_names(codes: Iterable[CodeType]) -> VisibleNames:
    """What ``codes`` can see together."""
    codes = tuple(codes)
    after: dict[str, frozenset[str]] = {}
    for name, read in (pair for code in codes for pair in _attributes_in(code)):
        after[name] = after.get(name, frozenset()) | {read}
    every = any(map(_any_field, codes))
    return VisibleNames(frozenset().union(*map(names_in, codes)), every, after)


@lru_cache(maxsize=4096)
def _attributes_in(code: CodeType) -> frozenset[tuple[str, str]]:
    """(a, b) for each ``a.b`` in ``code`` and in the functions inside it, where ``a`` may be an
    attribute itself; for ``from . import a as x`` and ``x.b`` too.
    """
    pairs = list(pairwise(dis.get_instructions(code)))
    found = {
        (one.argval, read.argval)
        for one, read in pairs
        if read.opname in ("LOAD_ATTR", "LOAD_METHOD") and one.opname.startswith("LOAD_")
        and isinstance(one.argval, str)
    }  # fmt: skip
    imported = {(to.argval, one.argval) for one, to in pairs if one.opname == "IMPORT_FROM"}
    found |= {(name, read) for to, name in imported for known, read in found if known == to}
    inner = (_attributes_in(c) for c in code.co_consts if isinstance(c, CodeType))
    return frozenset(found).union(*inner)


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


@lru_cache(maxsize=4096)
def imports_in(code: CodeType) -> tuple[tuple[int, str], ...]:
    """The Python modules that ``code`` imports: how many packages up, and the name."""
    inner = (found for c in code.co_consts if isinstance(c, CodeType) for found in imports_in(c))
    steps = list(dis.get_instructions(code))
    own = (
        (steps[k - 2].argval, i.argval) for k, i in enumerate(steps) if i.opname == "IMPORT_NAME"
    )
    return (*own, *inner)


def global_values(
    codes: Mapping[CodeType, str], strict: bool = True
) -> dict[tuple[str, str], ValueCheck]:
    """What ``codes`` read by a global name, by (Python module, name): plain values, containers,
    functions, tensors; of objects, classes and Python modules of the user's, the fields that they
    name. Raises NotComparable if ``strict``.
    """
    seen = visible_names(codes)
    found = {}
    for code, module in codes.items():
        scope = getattr(sys.modules.get(module), "__dict__", {})
        for name in globals_in(code):
            try:
                check = seen.reached(scope.get(name, Absent), name)
            except NotComparable:
                if strict:
                    raise
                continue
            if check is not None:
                found[module, name] = check
    return found


def of_classes(modules: Mapping[str, nn.Module], seen: VisibleNames) -> list[BakedValue]:
    """What the code names of the classes of the user's modules: constants, methods, ``forward``."""
    found: dict[tuple[type, str], BakedValue] = {}
    for path, module in modules.items():
        bases = [b for b in type(module).__mro__ if b.__module__.partition(".")[0] not in LIBRARIES]
        for base in bases:
            for name in (seen.names | {"forward"}) & vars(base).keys():
                first = next(b for b in type(module).__mro__ if name in vars(b))
                if first is not base or (base, name) in found or name.startswith("__"):
                    continue
                check = seen.reached(vars(base)[name], f"{base.__name__}.{name}")
                if check is not None:
                    found[base, name] = BakedValue("class", path, name, check)
    return list(found.values())


def closed_over(frame: FrameType) -> dict[tuple[CodeType, str, int], Any]:
    """The variables that the running code reads from its closure."""
    code, held = frame.f_code, frame.f_locals
    read = (name for name in code.co_freevars if name != "__class__" and name in held)
    return {(code, name, id(held[name])): held[name] for name in read}


def closures(
    found: Mapping[tuple[CodeType, str, int], Any], seen: VisibleNames
) -> list[BakedValue]:
    """The checks for variables of closures; ``found`` is what ``closed_over`` returned."""
    cells = _cells({code for code, _, _ in found})
    taken = []
    for (code, name, place), value in found.items():
        check = seen.reached(value, name)
        if check is None:
            continue
        check = check.check if isinstance(check, ProcessLocal) else check
        held: list[ValueCheck] = [Cell(check, cell) for cell in cells.get((code, name, place), ())]
        if not held and portable(check):  # else it is of the trace itself, which made the function
            held = [Held(check, value)]
        taken += [BakedValue("closure", code.co_qualname, name, one) for one in held]
    return taken


def _no_rebinding(codes: Iterable[CodeType]) -> None:
    """Raise NotComparable if ``codes`` rebind a variable of an enclosing function."""
    codes = tuple(codes)
    for code in codes:
        for name in _rebound(code):
            owners = (c for c in codes if name in c.co_cellvars and _within(code, c))
            if next(owners, None) is None:
                raise NotComparable(
                    f"{name}, a variable around {code.co_name}() that it binds anew"
                )


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


def flags_in(codes: Mapping[CodeType, str]) -> list[BakedValue]:
    """Questions about torch's state that code asks, with the present answers."""
    asked = {name for code in codes for name in names_in(code)}
    return [
        BakedValue("flag", of, name, Same(getattr(torch, name)(*filter(None, (of,)))))
        for name, arguments in _FLAGS.items()
        if name in asked
        for of in arguments
    ]


def taken_globals(codes: Mapping[CodeType, str]) -> list[BakedValue]:
    """The checks for what ``codes`` read by a global name, and of the modules that they import."""
    found = [
        BakedValue("global", m, name, check) for (m, name), check in global_values(codes).items()
    ]
    seen = visible_names(codes)
    for code, home in codes.items():
        package = getattr(sys.modules.get(home), "__package__", None)
        for level, name in imports_in(code):
            try:
                full = importlib.util.resolve_name("." * level + name, package) if level else name
            except ImportError:  # from . in a script: forward catches that, or did not get there
                continue
            held = sys.modules.get(full)
            check = None if held is None else seen.reached(held, full)
            if check is not None:
                found.append(BakedValue("import", "", full, check))
    return found


def taken_by_trace(
    reading: PythonReads, modules: Mapping[str, nn.Module], written: set[tuple[str, str]]
) -> tuple[BakedValue, ...]:
    """The checks for the state of the model and of Python that is baked into a graph, except what
    forward itself writes. Raises NotComparable.
    """
    seen = visible_names(reading.codes)
    found: list[BakedValue] = []
    for path, name in reading.taken:
        value = vars(modules[path]).get(name, Absent)
        known = isinstance(value, (torch.Tensor, nn.Module))  # looked up anew at each call
        if value is not Absent and not known and (path, name) not in written:
            found += _of_attribute(seen, path, name, value)
    for path, name in reading.inherited:
        if name not in vars(modules[path]) and (path, name) not in written:
            found.append(BakedValue("attribute", path, name, Same(Absent)))
    unseen = (*missing(reading.absent, modules), *of_layers(reading.codes, seen, modules))
    found += [one for path, name, one in unseen if (path, name) not in written]
    found += counted(seen.names, modules)
    found += of_classes(modules, seen)
    found += taken_globals(reading.codes)
    _no_rebinding(reading.codes)
    found += closures(reading.closed, seen)
    for (path, name), value in reading.answers.items():
        found.append(BakedValue("answer", path, name, Same(value)))
    for path, records in reading.grads.items():
        owner, _, name = path.rpartition(".")
        found.append(BakedValue("grad", owner, name, Same(records)))
    for name in reading.environment:
        now = Same(os.environ.get(name, Absent))
        found.append(BakedValue("environment", "os.environ", name, now))
    return (*found, *flags_in(reading.codes))


def _of_attribute(seen: VisibleNames, path: str, name: str, value: Any) -> Iterator[BakedValue]:
    """The checks for an attribute of a module; of a class or a Python module that it holds, for
    what is read of that too.
    """
    label = f"self.{name}"
    yield BakedValue("attribute", path, name, seen.check_of(value, label))
    if isinstance(value, (type, ModuleType)):
        check = seen.within(value, name, label)
        if check is not None:
            yield BakedValue("answer", path, name, check)


def taken_by_name(root: nn.Module) -> tuple[BakedValue, ...]:
    """The checks for what the forwards of ``root`` and its modules name, when no trace has seen
    what they read: attributes that the methods called by forward may read, and globals.
    """
    found: list[BakedValue] = []
    for path, module in root.named_modules():
        by_name: dict[str, list[CodeType]] = {}
        for code, _ in methods(type(module)):
            by_name.setdefault(code.co_name, []).append(code)
        names, left, codes = frozenset({"forward"}), ["forward"], list[CodeType]()
        while left:
            for code in by_name.pop(left.pop(), ()):
                codes.append(code)
                left.extend(names_in(code) - names)
                names |= names_in(code)
        seen = VisibleNames(names, every=False, after=visible_names(codes).after)
        for name, value in vars(module).items():
            if name in names and name not in _OWN and not isinstance(value, torch.Tensor):
                found += _of_attribute(seen, path, name, value)
        found += of_classes({path: module}, seen)
    return (*found, *taken_globals(codes_of(root)))
