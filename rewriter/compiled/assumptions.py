"""What the graphs of a module take for granted about its modules, compared at each call
that is not a known one.

No module whose call was fused may be hooked, replaced or set otherwise, and what ``forward`` read
from Python must be what it was. The lists are long: loops over plain tuples take a tenth of the
time of anything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _module
from torch.nn.modules.batchnorm import _NormBase

from recast.rewriter.capture.layers import torch_layer
from recast.rewriter.capture.trace import Traced
from recast.rewriter.ir import Graph, note

from . import external_state
from .entries import EmptyDicts, Entries
from .object_contents import PLAIN, Absent
from .signature import Signature
from .snapshots import Settled
from .value_checks import Anything, ProcessLocal, Same, alike

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(
    vars(_module)[name]
    for name in (
        "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
    if name in vars(_module)
)  # fmt: skip
_AUTOCAST = ("cpu", "cuda")
_OTHER_DTYPES = "the dtypes are not those of the example, and forward reads dtypes"
_TABLES = (nn.Embedding, nn.EmbeddingBag)  # many, and of one class for good


class Assumptions:
    """What must not change in ``modules`` as long as ``graphs`` run in their place."""

    def __init__(
        self, modules: Mapping[str, nn.Module], graphs: Mapping[str, Graph],
        traced: Iterable[Traced], signature: Signature | None,
    ) -> None:  # fmt: skip
        traced = tuple(traced)
        called = _called(graphs.values())
        free = {
            path: module
            for path, module in modules.items()
            if not _is_inside(path, called, or_is_one=True)
            and not isinstance(module, torch.jit.ScriptModule)
        }
        self.hooked = (*((held, "") for held in _GLOBAL_HOOKS), *_hooks(modules, called))
        self.hooks = EmptyDicts([held for held, _ in self.hooked])
        self.links = tuple(_links(modules, called))
        self.forwards = tuple((vars(m), vars(m).get("forward"), p) for p, m in free.items() if p)
        read = {  # at run time
            str(n.target) for g in graphs.values() for n in g.nodes if n.op == "get_attr"
        }
        baked = [
            s for path, module in free.items() for s in external_state.settings(path, module, read)
        ]
        self.settings = tuple(
            (_values(names, held), names, held, path) for names, held, path in baked
        )
        self.present = (*_present(modules, graphs, traced), *_statistics(free))
        reads = {(p, n): v for t in traced for p, n, v in t.reads}
        everything = {t.key: t for one in traced for t in one.taken}
        of_modules = [c for p, m in free.items() for c in external_state.of_module(p, m)]
        asked: tuple[external_state.Check, ...] = (
            *((vars(modules[p]).get, (n, Absent), Same(v), ".".join(filter(None, (p, n))))
              for (p, n), v in reads.items()),
            *external_state.checks(everything.values(), modules), *of_modules,
        )  # fmt: skip
        asked = tuple(c for c in asked if not isinstance(c[2], Anything))
        # What the very object under a key settles is left to one call for all such keys.
        self.settled = tuple(c for c in asked if _is_settled_by_identity(c))
        self.checks = tuple(c for c in asked if not _is_settled_by_identity(c))
        self.state = Settled(self.checks)
        self.entries = Entries(
            (
                *((slots, path.rpartition(".")[2]) for slots, path, _ in self.links),
                *((held, "forward") for held, _, _ in self.forwards),
                *((held, name) for names, held, _ in baked for name in names),
                *((slots, name) for slots, name, _ in self.present),
                *((ask.__self__, of[0]) for ask, of, _, _ in self.settled),  # type: ignore[attr-defined]
            )
        )
        self.classed = {p: m for p, m in free.items() if p and not isinstance(m, _TABLES)}
        self.classes = [*map(type, self.classed.values())]
        self.probe = _probe(modules, signature)
        self.computed_dtypes = signature is not None and signature.computed_dtypes
        self.reads_dtypes = bool(self.probe or self.computed_dtypes)
        self.outline = dict(self._outline(of_modules))

    def _outline(self, of_modules: Iterable[external_state.Check]) -> Iterator[tuple[str, Any]]:
        """What is taken from modules, by names and as plain values that copies and files keep."""
        for values, names, _, path in self.settings:
            yield from (
                (f"{path}.{name}", _plain(v)) for name, v in zip(names, values, strict=True)
            )
        for ask, of, _, label in of_modules:
            yield label, _plain(ask(*of))
        for held, forward, path in self.forwards:
            own = forward is not None and not external_state.ours(held)
            yield f"{path}.forward", "its own" if own else None
        for _, _, path in self.present:
            yield path, True

    def changed_since(self, outline: Mapping[str, Any]) -> str | None:
        """What is no longer as in ``outline``, which was made with the graphs, in words, or None:
        a copy may have been changed before it was first called, or what it is a copy of.
        """
        for name, was in outline.items():
            now = self.outline.get(name)
            if not alike(now, was):
                known = was is not None and now is not None
                return f"{name} was {was} and is now {now}" if known else f"{name} was changed"
        return None

    def broken(self) -> str | None:
        """The first that no longer holds, in words, or None."""
        if not self.hooks.are_empty():
            path = next(path for held, path in self.hooked if held)
            return f"a hook was added to {f'the module {path!r}' if path else 'all modules'}"
        if self.classed and [*map(type, self.classed.values())] != self.classes:
            now = zip(self.classed.items(), self.classes, strict=True)
            path = next(path for (path, module), then in now if type(module) is not then)
            return f"the module {path!r} was given another class"
        if not self.entries.stand():
            why = self._changed()
            if why is not None:
                return why
            self.entries.renew()
        return self.other_dtypes() or self.state.changed()

    def other_dtypes(self) -> str | None:
        """Whether dtypes that forward reads are not those of the example, in words, or None."""
        if self.probe is not None:
            slots, key, dtype = self.probe
            parameter = slots.get(key)
            if parameter is not None and parameter.dtype != dtype:
                return _OTHER_DTYPES
        if self.computed_dtypes and any(map(torch.is_autocast_enabled, _AUTOCAST)):
            return _OTHER_DTYPES
        return None

    def _changed(self) -> str | None:
        """The first entry that has changed to another object that is not equivalent."""
        for slots, path, module in self.links:
            if slots.get(path.rpartition(".")[2]) is not module:
                return f"the module {path!r} was replaced"
        for held, forward, path in self.forwards:
            if held.get("forward") is not forward and not external_state.ours(held):
                return f"{path}.forward was changed"
        for before, names, held, path in self.settings:
            now = _values(names, held)
            if not alike(now, before):
                was, now = next(p for p in zip(before, now, strict=True) if not alike(*p))
                return f"a setting of {path} was {was} and is now {now}"
        for slots, name, path in self.present:
            if name in slots and slots[name] is None:
                return f"{path} is None"
        return external_state.changed(self.settled)


def _values(names: tuple[str, ...], held: dict[str, Any]) -> tuple[Any, ...]:
    """What a layer has under these names; a setting that becomes a module is no longer there."""
    return tuple(held.get(name, Absent) for name in names)


def _plain(value: Any) -> Any:
    """A value as copies and files keep it; of a function, its name."""
    if isinstance(value, (*PLAIN, type(None))):
        return value
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return getattr(value, "__qualname__", type(value).__qualname__)


def _present(
    modules: Mapping[str, nn.Module], graphs: Mapping[str, Graph], traced: Iterable[Traced]
) -> Iterator[tuple[dict[str, Any], str, str]]:
    """The parameters and buffers that forward itself reads, for it may ask whether they are there:
    dict, name, path. A dict that each call writes to is left out.
    """
    stored = {path.rpartition(".")[0] for t in traced for path in t.stores}
    nodes = (n for graph in graphs.values() for n in graph.nodes if note(n).rule is None)
    for path in dict.fromkeys(str(n.target) for n in nodes if n.op == "get_attr"):
        owner, _, name = path.rpartition(".")
        module = modules.get(owner)
        held: list[Any] = [] if module is None else [module._parameters]
        held += [] if module is None or owner in stored else [module._buffers]
        for slots in held:  # TorchScript's are no dicts
            if isinstance(slots, dict) and slots.get(name) is not None:
                yield slots, name, path


def _statistics(modules: Mapping[str, nn.Module]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """The statistics of normalizations, without which they count and normalize in another way."""
    for path, module in modules.items():
        if isinstance(module, _NormBase) and torch_layer(type(module)):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield module._buffers, name, f"{path}.{name}"


def _is_settled_by_identity(check: external_state.Check) -> bool:
    """Whether a check looks into a dict, and finds nothing changed if the same object is there."""
    ask, of, held, _ = check
    held = held.check if type(held) is ProcessLocal else held
    places = getattr(ask, "__self__", None)
    if type(held) is not Same or type(places) is not dict or ask != places.get:
        return False
    return held.same(ask(*of))  # else it is to be told that it has changed


def _called(graphs: Iterable[Graph]) -> set[str]:
    """The paths of modules that a graph calls as they are. A call that a rule made replaces others:
    its module counts as rewritten all the same.
    """
    nodes = (n for graph in graphs for n in graph.nodes)
    return {str(n.target) for n in nodes if n.op == "call_module" and note(n).rule is None}


def _is_inside(path: str, called: set[str], *, or_is_one: bool) -> bool:
    """Whether ``path`` is that of a module inside one that is ``called``."""
    if path in called:
        return or_is_one
    return any(path.startswith(f"{one}.") for one in called)


def _hooks(
    modules: Mapping[str, nn.Module], called: set[str]
) -> Iterator[tuple[dict[Any, Any], str]]:
    """The dicts of hooks of all modules that are rewritten, and whose they are."""
    for path, module in modules.items():
        if (
            path
            and not _is_inside(path, called, or_is_one=True)
            and not _is_of_layer(path, modules)
        ):
            held = (vars(module).get(name) for name in _HOOKS)
            yield from ((hooks, path) for hooks in held if hooks is not None)


def _links(
    modules: Mapping[str, nn.Module], called: set[str]
) -> Iterator[tuple[dict[str, Any], str, nn.Module]]:
    """Where each module hangs that a graph calls or replaces: dict, path, module."""
    seen: set[tuple[int, str]] = set()
    for path, module in modules.items():
        inside = _is_inside(path, called, or_is_one=False)
        if not path or inside:
            continue
        parent, _, key = path.rpartition(".")
        slots = modules[parent]._modules if parent in modules else None
        # TorchScript's is no dict
        if isinstance(slots, dict) and slots.get(key) is module and (id(slots), key) not in seen:
            seen.add((id(slots), key))
            yield slots, path, module


def _is_of_layer(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a module lies inside a layer of torch, which calls it itself, or only reads its
    weight; not inside one that a pass opens.
    """
    parts = path.split(".")
    above = (".".join(parts[:k]) for k in range(1, len(parts)))
    kinds = (type(modules[p]) for p in above if p in modules)
    return any(torch_layer(kind) and kind not in external_state.OPENED for kind in kinds)


def _probe(
    modules: Mapping[str, nn.Module], signature: Signature | None
) -> tuple[dict[str, Any], str, torch.dtype | None] | None:
    """A parameter that tells whether the model was cast, if forward reads dtypes."""
    if signature is None or not signature.strict_dtypes or not signature.dtype:
        return None
    floats = (
        (m._parameters, name, signature.dtype)
        for m in modules.values()
        for name, parameter in m._parameters.items()
        if parameter is not None and parameter.is_floating_point()
    )
    return next(floats, None)
