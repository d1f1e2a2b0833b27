"""What a trace finds that ``forward`` reads from Python, as a list of checks.

A trace sees which code ran, but not which Python state it read. So everything that this code names
counts as read: constants of a module, fields of ``args``, ``Config.SCALE`` of a class, entries of a
dictionary next to a lambda.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recast.rewriter.capture.frames import LIBRARIES
from recast.rewriter.capture.layers import torch_layer
from recast.rewriter.capture.missing_attributes import counted, missing, of_layers

from .code_names import codes_of, globals_in, imports_in, lies_within, methods, names_in, rebound
from .external_state import BakedValue, answer
from .homes import scope_of
from .object_contents import PLAIN, Absent, hidden
from .value_checks import (
    Cell,
    Held,
    NotComparable,
    ProcessLocal,
    Same,
    ValueCheck,
    contents,
    inner_function,
    portable,
)
from .visible_names import VisibleNames, visible_names

if TYPE_CHECKING:
    from recast.rewriter.capture.python_reads import PythonReads

_OWN = frozenset(vars(nn.Module()))  # what nn.Module keeps of its own
_AT_ONCE = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_DEVICES = ("cpu", "cuda")
_FLAGS = {  # functions of torch, with the arguments of each question
    "is_grad_enabled": ("",), "is_inference_mode_enabled": ("",), "get_default_dtype": ("",),
    "is_autocast_enabled": _DEVICES, "get_autocast_dtype": _DEVICES, "initial_seed": ("",),
    "are_deterministic_algorithms_enabled": ("",), "get_num_threads": ("",),
    "is_deterministic_algorithms_warn_only_enabled": ("",), "get_default_device": ("",),
    "get_float32_matmul_precision": ("",), "is_anomaly_enabled": ("",),
    "distributed.is_initialized": ("",), "distributed.get_world_size": ("",),
    "distributed.get_rank": ("",),
}  # fmt: skip


def global_values(
    codes: Mapping[CodeType, str], seen: VisibleNames, strict: bool = True
) -> dict[tuple[str, str], ValueCheck]:
    """What ``codes`` read by a global name, by (Python module, name): plain values, containers,
    functions, tensors; of objects, classes and Python modules of the user's, the fields that they
    name. Raises NotComparable if ``strict``.
    """
    found = {}
    for code, module in codes.items():
        scope = scope_of(module) or {}
        if strict and "globals" in globals_in(code):
            raise NotComparable("globals(), in which any name can be looked up")
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
    """What the code names of the classes of the user's modules: constants, methods, ``forward``;
    methods of bases that ran because ``super()`` found them, too.
    """
    found: dict[tuple[type, str], BakedValue] = {}
    for path, module in modules.items():
        mro = type(module).__mro__
        for base in (b for b in mro if b.__module__.partition(".")[0] not in LIBRARIES):
            for name in (seen.names | {"forward"}) & vars(base).keys():
                value = vars(base)[name]
                first = next(b for b in mro if name in vars(b)) is base
                above = not first and getattr(inner_function(value), "__code__", 0) in seen.codes
                if (base, name) in found or hidden(name, value) or not (first or above):
                    continue
                check = seen.reached(value, f"{base.__name__}.{name}")
                if check is not None:
                    kind, label = ("base", f"{base.__name__}.{name}") if above else ("class", name)
                    found[base, name] = BakedValue(kind, path, label, check)
    return list(found.values())


_Variable = tuple[CodeType, str, int]  # of a closure: its code, its name, the id of its value


def closures(
    found: Mapping[_Variable, Any], seen: VisibleNames, modules: Collection[nn.Module]
) -> list[BakedValue]:
    """The checks for variables of closures; ``found`` is what ``closed_over`` returned."""
    cells = _cells(_methods(modules)) if found else {}
    if elsewhere := {one[0] for one in found if one not in cells}:
        cells |= _cells(_living(elsewhere))
    made = {code for code, _, _ in found if any(lies_within(code, c) for c in seen.codes)}
    hidden = [one for one in found if one not in cells and one[0] not in made]
    frozen = bool(hidden) and gc.get_freeze_count() > 0  # which counts them one by one
    if frozen:
        cells = {**_cells(_reached(modules)), **cells}
    taken = []
    for (code, name, place), value in found.items():
        check = seen.reached(value, name)
        if check is None:
            continue
        check = check.check if isinstance(check, ProcessLocal) else check
        held: list[ValueCheck] = [Cell(check, cell) for cell in cells.get((code, name, place), ())]
        if not held and code not in made and frozen:
            raise NotComparable(
                f"{name}, a variable around {code.co_qualname}, which gc.freeze() hides"
            )
        if not held and portable(check):  # else it is of the trace itself, which made the function
            held = [Held(check, value)]
        taken += [BakedValue("closure", code.co_qualname, name, one) for one in held]
    return taken


def _no_rebinding(codes: Iterable[CodeType]) -> None:
    """Raise NotComparable if ``codes`` rebind a variable of an enclosing function."""
    codes = tuple(codes)
    for code in codes:
        for name in rebound(code):
            owners = (c for c in codes if name in c.co_cellvars and lies_within(code, c))
            if next(owners, None) is None:
                raise NotComparable(
                    f"{name}, a variable around {code.co_name}() that it binds anew"
                )


def _methods(modules: Iterable[nn.Module]) -> Iterator[FunctionType]:
    """The methods that the classes of ``modules`` define."""
    for base in dict.fromkeys(base for m in modules for base in type(m).__mro__):
        for held in vars(base).values():
            function = held.__func__ if isinstance(held, (staticmethod, classmethod)) else held
            if type(function) is FunctionType:
                yield function


def _living(codes: set[CodeType]) -> Iterator[FunctionType]:
    """The functions of these codes that live on, wherever they are kept."""
    # The function of a comprehension is gone once called, and to ask takes a look at all objects.
    lasting = [code for code in codes if code.co_name not in _AT_ONCE]
    referring = gc.get_referrers(*lasting) if lasting else []
    return (f for f in referring if type(f) is FunctionType)


def _reached(modules: Collection[nn.Module]) -> Iterator[FunctionType]:
    """The functions that ``modules`` keep, that their methods can name, and that those hold: all
    that can be found of what ``gc.freeze()`` has hidden from the garbage collector.
    """
    left: list[Any] = [*_methods(modules), *(vars(module) for module in modules)]
    known = {id(one) for one in left}
    scopes: set[int] = set()
    while left and len(known) < _MOST_REACHED:
        one = left.pop()
        inside: Iterable[Any] = ()
        if isinstance(one, FunctionType):
            yield one
            cells = (cell.cell_contents for cell in one.__closure__ or () if is_filled(cell))
            inside = [*cells, *(one.__defaults__ or ())]
            if id(one.__globals__) not in scopes:
                scopes.add(id(one.__globals__))
                inside += one.__globals__.values()
        elif isinstance(one, MethodType):
            inside = (one.__func__, one.__self__)
        elif isinstance(one, partial):
            inside = (one.func, one.args, one.keywords)
        elif isinstance(one, dict):
            inside = one.values()
        elif isinstance(one, (list, tuple)):
            inside = one
        for value in inside:
            # not isinstance: a global may be a stand-in that warns when it is asked for its class
            if issubclass(type(value), _HOLDING) and id(value) not in known:
                known.add(id(value))
                left.append(value)


_HOLDING = (FunctionType, MethodType, partial, dict, list, tuple)
_MOST_REACHED = 1 << 16


def is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _cells(functions: Iterable[FunctionType]) -> dict[_Variable, list[CellType]]:
    """Where ``functions`` have their variables, by what is in them."""
    found: dict[_Variable, list[CellType]] = {}
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
        BakedValue("flag", of, name, Same(answer(name, *filter(None, (of,)))))
        for name, arguments in _FLAGS.items()
        if name.rpartition(".")[2] in asked
        for of in arguments
    ]


def of_libraries(
    codes: Mapping[CodeType, str], modules: Mapping[str, nn.Module]
) -> list[BakedValue]:
    """What ``codes``, and torch's layers, name in Python modules of libraries, as ``F.relu`` and
    ``torch.backends.mkldnn.enabled``: functions, which tools replace, and settings.
    """
    scopes = [
        (code, scope) for code, home in codes.items() if (scope := scope_of(home)) is not None
    ]
    for kind in {type(m) for m in modules.values() if torch_layer(type(m))}:
        forward = kind.forward
        if isinstance(forward, FunctionType):
            scopes.append((forward.__code__, forward.__globals__))
    found: dict[tuple[str, str], BakedValue] = {}
    for code, scope in scopes:
        after = visible_names((code,)).after
        for name in globals_in(code) & after.keys():
            if isinstance(scope.get(name), ModuleType):
                _of_library(scope[name], name, after, found)
    return list(found.values())


def _of_library(
    module: ModuleType, name: str, after: Mapping[str, frozenset[str]],
    found: dict[tuple[str, str], BakedValue], deep: int = 0,
) -> None:  # fmt: skip
    home = module.__name__
    if home.partition(".")[0] not in LIBRARIES or sys.modules.get(home) is not module or deep > 4:
        return
    for attribute in after.get(name, ()):
        if attribute not in vars(module) and not hasattr(type(module), attribute):
            continue  # which torch may have yet to import
        value = getattr(module, attribute)
        if isinstance(value, ModuleType):
            _of_library(value, attribute, after, found, deep + 1)
        elif type(value) in PLAIN:
            found[home, attribute] = BakedValue("setting", home, attribute, Same(value))
        elif attribute in vars(module) and callable(value):
            check = ProcessLocal(Same(value))
            found[home, attribute] = BakedValue("global", home, attribute, check)


def taken_globals(codes: Mapping[CodeType, str], seen: VisibleNames) -> list[BakedValue]:
    """The checks for what ``codes`` read by a global name, and of the modules that they import."""
    held = global_values(codes, seen)
    found = [BakedValue("global", m, name, check) for (m, name), check in held.items()]
    for code, home in codes.items():
        package = (scope_of(home) or {}).get("__package__")
        for level, name in imports_in(code):
            try:
                full = importlib.util.resolve_name("." * level + name, package) if level else name
            except ImportError:  # from . in a script: forward catches that, or did not get there
                continue
            there = sys.modules.get(full)
            check = None if there is None else seen.reached(there, full)
            if check is not None:
                found.append(BakedValue("import", "", full, check))
    return found


def taken_by_trace(
    reading: PythonReads, modules: Mapping[str, nn.Module], written: set[tuple[str, str]],
    default_dtype: bool,
) -> tuple[BakedValue, ...]:  # fmt: skip
    """The checks for the state of the model and of Python that is baked into a graph, except what
    forward itself writes. ``default_dtype``: so is torch's. Raises NotComparable.
    """
    seen = visible_names(reading.codes, modules)
    found: list[BakedValue] = []
    for path, name in reading.taken:
        value = vars(modules[path]).get(name, Absent)
        known = isinstance(value, (torch.Tensor, nn.Module))  # looked up anew at each call
        if value is not Absent and not known and (path, name) not in written:
            found.append(_of_attribute(seen, path, name, value))
    for path, name in reading.inherited:
        if name not in vars(modules[path]) and (path, name) not in written:
            found.append(BakedValue("attribute", path, name, Same(Absent)))
    unseen = (*missing(reading.absent, modules), *of_layers(seen, modules))
    found += [one for path, name, one in unseen if (path, name) not in written]
    found += counted(seen.names, modules)
    found += of_classes(modules, seen)
    found += taken_globals(reading.codes, seen)
    found += of_libraries(reading.codes, modules)
    _no_rebinding(reading.codes)
    found += closures(reading.closed, seen, modules.values())
    for (path, name), value in reading.answers.items():
        found.append(BakedValue("answer", path, name, Same(value)))
    for path, records in reading.grads.items():
        owner, _, name = path.rpartition(".")
        found.append(BakedValue("grad", owner, name, Same(records)))
    for (path, fact), known in reading.facts.items():
        owner, _, name = path.rpartition(".")
        if (owner, name) not in written:
            found.append(BakedValue(fact, owner, name, Same(known)))
    for name in reading.environment:
        now = Same(os.environ.get(name, Absent)) if name else contents(one := (*os.environ,), one)
        found.append(BakedValue("environment", "os.environ", name, now))
    for device in reading.autocast_dtypes:
        now = Same(torch.get_autocast_dtype(device))
        found.append(BakedValue("flag", device, "get_autocast_dtype", now))
    if reading.enables_grad:
        found.append(BakedValue("flag", "", "is_grad_enabled", Same(True)))
    if default_dtype:
        found.append(BakedValue("flag", "", "get_default_dtype", Same(torch.get_default_dtype())))
    return (*found, *flags_in(reading.codes))


def _of_attribute(seen: VisibleNames, path: str, name: str, value: Any) -> BakedValue:
    """The check for an attribute of a module."""
    return BakedValue("attribute", path, name, seen.check_of(value, f"self.{name}"))


def taken_by_name(root: nn.Module) -> tuple[BakedValue, ...]:
    """The checks for what the forwards of ``root`` and its modules name, when no trace has seen
    what they read: attributes that the methods called by forward may read, and globals.
    """
    found: list[BakedValue] = []
    modules = dict(root.named_modules())
    for path, module in modules.items():
        by_name: dict[str, list[CodeType]] = {}
        for code, _ in methods(type(module)):
            by_name.setdefault(code.co_name, []).append(code)
        names, left, codes = frozenset({"forward"}), ["forward"], list[CodeType]()
        while left:
            for code in by_name.pop(left.pop(), ()):
                codes.append(code)
                left.extend(names_in(code) - names)
                names |= names_in(code)
        seen = replace(visible_names(codes, modules), names=names, every=False)
        for name, value in vars(module).items():
            if name in names and name not in _OWN and not isinstance(value, torch.Tensor):
                found.append(_of_attribute(seen, path, name, value))
        found += of_classes({path: module}, seen)
    every = codes_of(root)
    return (*found, *taken_globals(every, visible_names(every, modules)))
