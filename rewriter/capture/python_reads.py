"""Which Python state ``forward`` reads while it is traced.

That state is baked into the graph, so it is checked again at each call: see
:mod:`~recast.rewriter.compiled.baked_values` and :mod:`~recast.rewriter.compiled.external_state`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper, wraps
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from recast.rewriter.compiled.code_names import closed_over
from recast.rewriter.compiled.homes import home_of
from recast.rewriter.compiled.object_contents import PLAIN

from . import frames, profilers
from .code_watcher import CodeWatcher

_SLOTS = frozenset({*vars(nn.Module()), "forward"})  # what nn.Module keeps of its own
_PARTS = ("_parameters", "_buffers", "_modules")
_AS_MADE: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()  # names in watched classes
_Attribute = tuple[str, str]  # path of a module, name


@dataclass
class PythonReads:
    """What one trace has seen. Dicts without values are sets that keep their order."""

    plain: dict[_Attribute, Any] = field(default_factory=dict)  # attributes with their values
    taken: dict[_Attribute, Any] = field(default_factory=dict)  # all others of a module itself
    inherited: dict[_Attribute, None] = field(default_factory=dict)  # and those of its class
    answers: dict[_Attribute, Any] = field(default_factory=dict)  # plain, of a user's __getattr__
    absent: set[_Attribute] = field(default_factory=set)  # asked for in vain
    unset: set[_Attribute] = field(default_factory=set)  # and so before forward set them, if it did
    listed: set[str] = field(default_factory=set)  # modules whose attributes were listed
    cached: dict[_Attribute, Any] = field(default_factory=dict)  # what an lru_cache was given
    grads: dict[str, bool] = field(default_factory=dict)  # parameters: do they require grad?
    codes: dict[CodeType, str] = field(default_factory=dict)  # the user's, with its Python module
    closed: dict[tuple[CodeType, str, int], Any] = field(default_factory=dict)  # of its closures
    environment: dict[str, None] = field(default_factory=dict)  # variables; "" for which there are
    autocast_dtypes: dict[str, None] = field(default_factory=dict)  # devices whose dtype was asked
    prints: dict[str, None] = field(default_factory=dict)  # lines that print or log
    enables_grad: bool = False  # also if the caller has switched gradients off
    facts: dict[tuple[str, str], Any] = field(default_factory=dict)  # of the model's tensors
    profile: CodeWatcher | None = None  # while forward runs

    def ran(self, frame: FrameType) -> None:
        """Note user code that runs: it can only see what it names."""
        if frame.f_code not in self.codes:
            self.codes[frame.f_code] = home_of(frame.f_globals)
        if frame.f_code.co_freevars:
            self.closed.update(closed_over(frame))

    def _enabled_grad(self) -> None:
        self.enables_grad = True

    @contextmanager
    def watching(self, refuse: Callable[[str], None]) -> Iterator[None]:
        """Note all user code that runs inside."""
        self.profile = CodeWatcher(
            self.ran, refuse, self.environment.setdefault, self.autocast_dtypes.setdefault,
            self.prints.setdefault, self._enabled_grad,
        )  # fmt: skip
        with profilers.aside(refuse), _unseen_collections(self.profile):
            sys.setprofile(self.profile)
            try:
                yield
            finally:
                self.profile = None
                sys.setprofile(None)


@contextmanager
def _unseen_collections(profile: CodeWatcher) -> Iterator[None]:
    """Callbacks and finalizers that the garbage collector runs do not belong to the model."""
    paused = False

    def begin(phase: str, info: dict[str, int]) -> None:
        nonlocal paused
        if phase == "start" and sys.getprofile() is profile:
            paused = True
            sys.setprofile(None)

    def end(phase: str, info: dict[str, int]) -> None:
        nonlocal paused
        if phase == "stop" and paused:
            paused = False
            sys.setprofile(profile)

    gc.callbacks.insert(0, begin)
    gc.callbacks.append(end)
    try:
        yield
    finally:
        gc.callbacks.remove(begin)
        gc.callbacks.remove(end)


def observed(kind: Any, reading: PythonReads, path: str, own: dict[str, Any]) -> type:
    """A subclass of ``kind``, with the methods ``own``, that notes what is read from a module at
    ``path``, and what is asked for but missing.
    """

    def read(self: Any, name: str) -> Any:
        if name == "__class__":  # what super(self.__class__, self) and friends expect
            return kind
        held = kind.__getattribute__(self, "__dict__")
        there = name in held
        try:
            value = kind.__getattribute__(self, name)
        except AttributeError:
            reading.absent.add((path, name))
            empty = all(held.get(slots, {}).get(name) is None for slots in _PARTS)
            if empty and not _registers(sys._getframe(1)):
                reading.unset.add((path, name))
            raise
        if not there and name in shared:  # a cached_property sets it while it is asked
            reading.unset.add((path, name))
        if name in held:
            if type(value) in PLAIN and name != "training":
                reading.plain.setdefault((path, name), value)
            elif name not in _SLOTS:
                reading.taken.setdefault((path, name), value)
        elif name in shared:
            reading.inherited[path, name] = None
        frame = sys._getframe(1)
        if frames.users(frame):
            reading.ran(frame)
            if name == "__dict__" and frame.f_code.co_name != "__getattr__":  # its answers are seen
                for one in value.keys() - _SLOTS:
                    reading.taken.setdefault((path, one), value[one])
                reading.listed.add(path)
        if (name in _PARTS and frames.users(frame)) or (name == "__dict__" and _is_dir(frame)):
            reading.listed.add(path)
        return value

    shared = {
        name
        for base in kind.__mro__
        if not base.__module__.startswith(("torch.", "builtins"))
        for name in vars(base)
        if not name.startswith("__") and name != "forward"
    }

    def missing(self: Any, name: str) -> Any:
        value = kind.__getattr__(self, name)
        if type(value) in PLAIN:
            reading.answers[path, name] = value
        return value

    kept = caches_of(kind).items()
    names = {**{name: _noting(held, reading.cached, (path, name)) for name, held in kept}, **own}
    names |= {"__getattribute__": read, "__module__": kind.__module__}
    if kind.__getattr__ is not nn.Module.__getattr__:
        names["__getattr__"] = missing
    made = type(kind.__name__, (kind,), names)
    _AS_MADE[made] = frozenset(vars(made))
    return made


def _registers(frame: FrameType) -> bool:
    """Whether torch asks, because forward sets a buffer."""
    return frame.f_code is nn.Module.register_buffer.__code__


def _is_dir(frame: FrameType) -> bool:
    """Whether a module is asked for all its names by user code."""
    asks = frame.f_back
    return frame.f_code.co_name == "__dir__" and asks is not None and frames.users(asks)


def caches_of(kind: type) -> dict[str, _lru_cache_wrapper[Any]]:
    """The methods of ``kind`` that keep what they return, by object: those under ``lru_cache``."""
    found = {name: held for base in reversed(kind.__mro__) for name, held in vars(base).items()}
    return {name: held for name, held in found.items() if isinstance(held, _lru_cache_wrapper)}


def _noting(
    cache: _lru_cache_wrapper[Any], found: dict[_Attribute, Any], key: _Attribute
) -> Callable[..., Any]:
    """``cache``, with a note of what is new to it."""

    @wraps(cache)
    def method(*args: Any, **kwargs: Any) -> Any:
        known = cache.cache_info().misses
        value = cache(*args, **kwargs)
        if cache.cache_info().misses > known:
            found[key] = [value, found.get(key)]
        return value

    return method


def bound_on_class(modules: Iterable[nn.Module]) -> str | None:
    """What forward bound on the class of a module, as by ``type(self).calls += 1``, or None."""
    for module in modules:
        kind = type(module)
        new = vars(kind).keys() - _AS_MADE.get(kind, vars(kind).keys())
        if new:
            return f"{kind.__name__}.{min(new)}"
    return None
