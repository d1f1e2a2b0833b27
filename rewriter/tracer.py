"""Runs ``forward`` once on :class:`Value` inputs and writes down every torch call as a graph node.

Nothing global is patched. A ``TorchFunctionMode`` (of this thread only) sees every torch call,
factory functions included; leaf modules are seen because the trace runs on a scratch copy of the
module tree whose ``forward`` attributes are ours. A failed trace leaves nothing behind.
"""

from __future__ import annotations

import gc
import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import fx, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from recast.errors import CaptureError

from .calls import (
    GETTERS,
    INPLACE,
    METADATA,
    METHODS,
    OPERATORS,
    REFUSED,
    SETTERS,
    SWAPPED,
)  # fmt: skip
from .copies import modules_by_path, shallow_copy
from .ir import KEY, Note, spec_of
from .layers import is_leaf, torch_layer
from .named import closed_over
from .order import draws
from .outside import Outside, candidates, versions, watched
from .rule import constants
from .running import Running
from .sizes import Sizes
from .trees import flatten, rebuild
from .values import Flag, Value, make

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).resolve().parent) + os.sep
_LINK = str(Path(__file__).parent) + os.sep

_LITERALS = (
    int,
    float,
    bool,
    str,
    complex,
    type(None),
    torch.dtype,
    torch.layout,
    torch.memory_format,
)
_PLAIN = (int, float, bool, str, type(None))
_SLOTS = frozenset({*vars(nn.Module()), "forward"})  # what nn.Module keeps of its own
_REMEDIES = (
    "torch.where / masked_fill instead of python control flow on values",
    "example=[batch, batch_of_another_size]",
    "keep this part in a submodule of its own: it then stays as it is and all else is rewritten",
)


class Refused(CaptureError):
    """This module cannot be traced; ``path`` is the innermost module whose forward did it."""

    path: str = ""
    size: str = ""  # "len", "int" or "float" of a size, which python wants real: see :mod:`.sizes`
    inside: tuple[CodeType, ...] = ()  # the user's functions in which it was: see :mod:`.outside`


class Question(NamedTuple):
    """Python asked for a value that depends on the batch; both examples gave the same answer."""

    node: fx.Node
    convert: Callable[[Any], Any]
    expected: Any
    where: str | None
    path: str  # the module that asked


class Tracer:
    """One trace of one mode. Use :func:`trace`."""

    def __init__(
        self, root: nn.Module, live: nn.Module, *, training: bool, sizes: tuple[int, int],
        opaque: frozenset[str], prefix: str, plain_flags: bool,
        sizes_kept: frozenset[str] = frozenset(), outside: frozenset[CodeType] = frozenset(),
    ) -> None:  # fmt: skip
        self.root = root  # where lifted constants go
        self.live = live  # runs leaf modules on the examples
        self.training = training
        self.sizes = sizes
        self.prefix = prefix
        self.graph = fx.Graph()
        self.running = False
        self.baked: set[fx.Node] = set()  # inputs whose fixed sizes the graph relies on
        self._sources: dict[fx.Node, frozenset[fx.Node]] = {}
        self.bakes_dtypes = False
        self.reads: dict[tuple[str, str], Any] = {}  # plain attributes that forward read: baked
        self.taken: dict[tuple[str, str], None] = {}  # all others that it read off a module itself
        self.answers: dict[tuple[str, str], Any] = {}  # plain ones of a __getattr__ of the user's
        self.inherited: dict[tuple[str, str], None] = {}  # and off its class
        self.grads: dict[str, bool] = {}  # parameters that it asked whether they require grad
        self.codes: dict[CodeType, str] = {}  # the user's code that ran, with its Python module
        self.closed: dict[tuple[CodeType, str, int], Any] = {}  # and what its closures hold
        self.forks: set[str] = set()  # modules whose training flag python asked for
        self.guards: list[Question] = []
        self.failed: CaptureError | None = None
        self.stack: list[str] = [""]
        self.innermost: str | None = None
        self.devices: dict[int, tuple[torch.device, fx.Node]] = {}
        self.held: dict[int, Value] = {}  # what the model holds, by identity of the real tensor
        self.written: set[int] = set()  # storages written in place
        self.outs: set[int] = set()  # those written through out=
        self.mixed: set[int] = set()  # those into which something of the inputs was written
        self.parameters: set[int] = set()  # storages of the user's parameters
        self.pairs: dict[fx.Node, tuple[Any, Any]] = {}
        self.storages: dict[fx.Node, int] = {}
        self.shapes: dict[fx.Node, torch.Size] = {}
        self.static: set[fx.Node] = set()
        self._alive: list[Any] = []  # so that no storage address is used twice
        self.autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
        self.saving = _saving()
        self.asked: set[tuple[str, str]] = set()  # attributes that forward asked for in vain
        self.owners: dict[int, str] = {}  # whose methods are called from outside torch, by identity
        self.outsiders: dict[Outside, str] = {}  # with the line of the first call
        self.profile: Running | None = None  # while forward runs
        self.environment: dict[str, None] = {}  # variables that forward read
        self.scratch = shallow_copy(root)
        own = Sizes(self, sizes_kept, outside) if sizes_kept or outside else None
        self._prepare(opaque, plain_flags, own)

    # ------------------------------------------------------------ the scratch copy

    def _prepare(self, opaque: frozenset[str], plain_flags: bool, kept: Sizes | None) -> None:
        live = modules_by_path(self.live)
        for path, module in modules_by_path(self.scratch).items():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            leaf = bool(path) and (path in opaque or is_leaf(module))
            self._hold(module, path, live[path])
            self.owners[id(module)] = path
            state = vars(module)
            for name, value in list(state.items()) if kept else ():
                twin = kept.twin(value) if kept else None
                if twin is not None:
                    self.owners[id(twin)] = f"{path}.{name}" if path else name
                    state[name] = twin
            for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
                state[hooks] = {}
            state["_backward_pre_hooks"] = {}
            state["training"] = self.training if plain_flags or leaf else Flag(self, path)
            if plain_flags and not leaf:
                self.forks.add(path)
            if not leaf and not type(module).__module__.startswith("torch.nn"):
                own = kept.methods(type(module)) if kept else {}
                module.__class__ = _watched(type(module), self, path, own)
            run = self._leaf(path) if leaf else self._inside(path, module.forward)
            state["forward"] = run

    def _hold(self, module: nn.Module, path: str, live: nn.Module) -> None:
        """Put Values in the place of all tensors of ``module``."""
        dot = f"{path}." if path else ""
        both: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
            (module._parameters, live._parameters), (module._buffers, live._buffers)
        )  # fmt: skip
        for slots, real in both:
            for name, tensor in slots.items():
                if tensor is not None:
                    slots[name] = self._held(tensor, real[name], f"{dot}{name}")
        for name, kept in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules", "forward"):
                continue
            if isinstance(kept, torch.Tensor):
                vars(module)[name] = self._held(kept, kept, f"{dot}{name}")
            elif type(kept) in (list, tuple, dict):
                vars(module)[name] = rebuild(kept, partial(self._lift, hint=name))

    def _held(self, tensor: torch.Tensor, real: torch.Tensor, path: str) -> Value:
        known = self.held.get(id(tensor))
        if known is None:
            if isinstance(tensor, nn.Parameter):
                self.parameters.add(tensor.untyped_storage().data_ptr())
                pair: tuple[Any, Any] = (tensor, tensor)
            else:
                pair = (real.detach().clone(), real.detach().clone())
            known = make(self, pair, static=False, path=path)
            self.held[id(tensor)] = known
            self._alive.append(tensor)
        return known

    def _lift(self, tensor: torch.Tensor, hint: str) -> Value:
        """A tensor that has no name of its own: in a list, a closure, a foreign object."""
        if isinstance(tensor, Value):
            return tensor
        known = self.held.get(id(tensor))
        if known is None:
            holder = constants(self.root)
            known = self._held(tensor, tensor, f"{holder.ATTRIBUTE}.{lift(holder, tensor, hint)}")
        return known

    def held_node(self, value: Value) -> fx.Node:
        assert value.path is not None
        owner = value.path.rpartition(".")[0]
        if owner == "_recast_constants":
            owner = self.stack[-1]
        return self._node("get_attr", value.path, (), {}, value.pair, origin=owner)

    def _leaf(self, path: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.record("call_module", path, args, kwargs)

        return forward

    def _inside(self, path: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.stack.append(path)
            try:
                return original(*args, **kwargs)
            except Exception:
                if self.innermost is None:
                    self.innermost = path
                raise
            finally:
                self.stack.pop()

        return forward

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Work on example values without recording it."""
        before, self.running = self.running, True
        profile = None if before else self.profile
        if profile is not None:
            sys.setprofile(None)
        try:
            yield
        finally:
            self.running = before
            if profile is not None:
                sys.setprofile(profile)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note all code of the user's that runs inside, but for what a debugger hides from us."""
        if sys.getprofile() is not None:  # somebody else's
            yield
            return
        self.profile = Running(self.ran, self.refuse, self.environment.setdefault)
        collects = gc.isenabled()
        gc.disable()  # what others do when it has run would look like the model's
        sys.setprofile(self.profile)
        try:
            yield
        finally:
            self.profile = None
            sys.setprofile(None)
            if collects:
                gc.enable()

    # ------------------------------------------------------------ torch calls

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the mode does with a torch call."""
        if func is torch._C._set_grad_enabled or isinstance(func, type):
            return func(*args, **kwargs)
        getter = GETTERS.get(func) if _wrapper(func) else None
        if getter is not None:
            return self.attribute(args[0], getter)
        setter = SETTERS.get(func) if _wrapper(func) else None
        if setter is not None:
            self.refuse(f"assigns to .{setter} of a tensor")
        name = METHODS.get(id(func))
        if name is None:
            return self.record("call_function", func, args, kwargs)
        if name in OPERATORS:
            return self.record("call_function", OPERATORS[name], args, kwargs)
        if name in SWAPPED:
            return self.record("call_function", SWAPPED[name], (args[1], args[0]), kwargs)
        if name in ("__bool__", "__int__", "__float__", "__index__", "__len__", "__iter__"):
            return self._python(name, args)
        if name == "size":
            return self._size(*args, **kwargs)
        return self.record("call_method", name, args, kwargs)

    def _python(self, name: str, args: tuple[Any, ...]) -> Any:
        """``bool(t)`` and its like on a tensor that is not a Value: one from outside, never
        changing.
        """
        with torch._C.DisableTorchFunction():
            return getattr(torch.Tensor, name)(*args)

    def attribute(self, owner: Any, name: str) -> Any:
        """``owner.name``."""
        if not isinstance(owner, Value):
            owner = self._lift(owner, "constant")
        if name in ("shape",):
            return self._size(owner)
        if name == "requires_grad" and owner.path is None:
            self.refuse("asks whether an inner tensor requires grad")
        if name == "requires_grad":
            self.grads[str(owner.path)] = bool(owner.pair[0].requires_grad)
        if name == "dtype":
            self.bakes_dtypes = True
        first = getattr(owner.pair[0], name)
        if isinstance(first, torch.device):
            node = self._node("call_function", getattr, (owner.node, name), {}, owner.pair)
            self.devices[id(first)] = (first, node)
            return first
        if isinstance(first, torch.Tensor):
            return self.record("call_function", getattr, (owner, name), {})
        second = getattr(owner.pair[1], name)
        if first is not second and first != second:
            self.refuse(f"reads .{name}, which differs between the example batches")
        return first

    def _size(self, tensor: Any, dim: int | None = None) -> Any:
        """``tensor.shape`` or ``tensor.size(dim)``; sizes that depend on the batch are Values."""
        if not isinstance(tensor, Value):
            tensor = self._lift(tensor, "constant")
        first, second = (v.size() for v in tensor.pair)
        if len(first) != len(second):
            self.refuse("the number of dimensions differs between the example batches")
        if tensor.path is None and not tensor.static:
            self.bake(tensor.node)
        if first == second:
            return first if dim is None else first[dim]
        if dim is not None:
            if first[dim] == second[dim]:
                return first[dim]
            return self._value("call_method", "size", (tensor, dim), (first[dim], second[dim]))
        shape = self._node("call_function", getattr, (tensor.node, "shape"), {}, (None, None))
        return Shape(
            a if a == b else self._wrap_number(
                self._node("call_function", operator.getitem, (shape, k), {}, (a, b)), (a, b)
            )
            for k, (a, b) in enumerate(zip(first, second, strict=True))
        )  # fmt: skip

    def _value(self, kind: str, target: Any, args: Any, pair: tuple[Any, Any]) -> Value:
        return self._wrap_number(self._node(kind, target, self.argument(args), {}, pair), pair)

    def _wrap_number(self, node: fx.Node, pair: tuple[Any, Any]) -> Value:
        return make(self, pair, static=False, node=node)

    # ------------------------------------------------------------ recording

    def record(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call on both examples and write its node."""
        with self.quiet():
            return self._record(kind, target, args, kwargs)

    def _record(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        if kind != "call_module" and name in REFUSED and not self._static((args, kwargs)):
            self.refuse(REFUSED[name])
        if (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")) != self.autocast:
            self.refuse("switches autocast inside forward")
        if _saving() != self.saving:
            self.refuse("saves tensors its own way, as activation checkpointing does")
        beyond = isinstance(target, Outside)
        in_place = kind != "call_module" and not beyond and _in_place(target, name, kwargs)
        frozen = not torch.is_grad_enabled()
        if in_place:
            self._writes(args, kwargs)
            if frozen:
                args = tuple(self._detached(a) for a in args)
        node_args, node_kwargs = self.argument(args), self.argument(kwargs)
        if beyond:
            pair = tuple(self._run_outside(target, args, kwargs, k) for k in (0, 1))
        else:
            pair = tuple(self._run(kind, target, args, kwargs, k) for k in (0, 1))
        static = kind != "call_module" and not beyond and self._static((args, kwargs))
        if in_place and not static:
            self._no_longer_static(args, kwargs)
        if kind != "call_module" and not beyond and name in METADATA and _same(pair):
            for value in _nodes((node_args, node_kwargs)):
                self.bake(value)
            return pair[0]
        if static and literal(pair[0]) and pair[0] is not None:
            return pair[0]
        node = self._node(kind, target, node_args, node_kwargs, pair)
        static = static and not draws(node, self.root)
        if static:
            self.static.add(node)
        given: dict[int, Value] = {}
        if kind == "call_module" or beyond:
            leaves: list[Any] = []
            flatten((args, kwargs), leaves, [])
            given = {id(v.pair[0]): v for v in leaves if isinstance(v, Value)}
        result = self._wrap(node, pair[0], pair[1], static, given)
        if in_place and isinstance(args[0] if args else None, Value):
            if pair[0] is not args[0].pair[0]:
                return result
            args[0].made = node  # what comes after reads the result, so the order is in the graph
            return args[0]
        if frozen and isinstance(result, Value) and _differentiable(result.pair[0]):
            return self._detached(result)
        return rebuild(result, self._detached) if frozen and isinstance(result, tuple) else result

    def _detached(self, value: Any) -> Any:
        """Under ``no_grad`` results carry no history: said by ``detach``, which any pass may
        move.
        """
        if not isinstance(value, Value) or not _differentiable(value.pair[0]):
            return value
        pair = tuple(v.detach() for v in value.pair)
        node = self._node("call_method", "detach", (value.node,), {}, pair)
        return make(self, pair, static=value.static, node=node)

    def _writes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        targets = [args[0]] if args else []
        targets += [t for t in (kwargs.get("out"),) if t is not None]
        for target in targets:
            if not isinstance(target, Value):
                if isinstance(target, torch.Tensor):
                    self.refuse("writes in place to a tensor that was made outside torch")
                continue
            if target.number:
                continue
            storage = target.pair[0].untyped_storage().data_ptr()
            if storage in self.parameters:
                self.refuse("writes in place to a parameter")
            if target.path is not None and target.path.startswith("_recast_constants."):
                self.refuse("writes in place to a tensor that is not a buffer")
            self.written.add(storage)
            if target is kwargs.get("out"):
                self.outs.add(storage)

    def _no_longer_static(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What depends on the inputs was written into these tensors, and so into their views."""
        for value in (*args[:1], kwargs.get("out")):
            if isinstance(value, Value) and not value.number:
                self.mixed.add(value.pair[0].untyped_storage().data_ptr())

    def _run(self, kind: str, target: Any, args: Any, kwargs: Any, k: int) -> Any:
        args, kwargs = self._example(args, k), self._example(kwargs, k)
        if kind == "call_module":
            layer = self.live.get_submodule(target)
            own = not torch_layer(type(layer))  # may ask for gradients inside
            with self.quiet(), torch.set_grad_enabled(own):
                result = layer(*args, **kwargs)
                return rebuild(result, lambda t: t.detach() if t.requires_grad else t)
        with self.quiet(), torch.no_grad():
            if kind == "call_method":
                return getattr(args[0], target)(*args[1:], **kwargs)
            return target(*args, **kwargs)

    def owner_of(self, value: Any) -> str | None:
        """The path of a module of the model, or of what it holds, that is ``self`` of a method."""
        return None if isinstance(value, torch.Tensor) else self.owners.get(id(value))

    def _run_outside(self, target: Outside, args: Any, kwargs: Any, k: int) -> Any:
        """A function that leaves torch, on example ``k``."""
        self.outsiders.setdefault(target, self.where() or "")
        values: list[Any] = []
        flatten((args, kwargs), values, [])
        for value in values:  # it may write to all that it gets, and differently at each call
            if isinstance(value, Value) and not value.number:
                storage = value.pair[0].untyped_storage().data_ptr()
                self.written.add(storage)
                self.mixed.add(storage)
        given = self._example((args, kwargs), k)
        before = versions(given)
        with watched(target, self.live, given) as why, torch.enable_grad():
            result = target.over(self.live)(*given[0], **given[1])
        kept = [v for v in values if not isinstance(v, Value) or (v.path or "").startswith("_")]
        if kept and versions(given) != before:
            why.append("it writes to a tensor that is not made in forward")
        if why:
            self.refuse(f"{target.__name__}() leaves torch, and {why[0]}")
        return rebuild(result, lambda t: t.detach() if t.requires_grad else t)

    def _example(self, value: Any, k: int) -> Any:
        """The argument as it is in example ``k``."""
        if isinstance(value, Value):
            return value.pair[k]
        if isinstance(value, Flag):
            return False
        if isinstance(value, slice):
            return slice(*(self._example(v, k) for v in (value.start, value.stop, value.step)))
        if isinstance(value, torch.Tensor):
            return self._lift(value, "constant").pair[k]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._example(v, k) for v in value))
        if isinstance(value, (tuple, list)):
            items = [self._example(v, k) for v in value]
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, dict):
            return {key: self._example(v, k) for key, v in value.items()}
        return value

    def argument(self, value: Any) -> Any:
        """The argument as a node holds it."""
        if isinstance(value, Value):
            return value.node if not (value.static and value.number) else value.pair[0]
        if isinstance(value, Flag):
            path = f"{value.path}.training" if value.path else "training"
            return self._node("get_attr", path, (), {}, (None, None), origin=value.path)
        if isinstance(value, torch.device):
            known = self.devices.get(id(value))
            return known[1] if known and known[0] is value else value
        if isinstance(value, torch.Tensor):
            return self._lift(value, "constant").node
        if isinstance(value, slice):
            return slice(*(self.argument(v) for v in (value.start, value.stop, value.step)))
        if isinstance(value, PackedSequence):  # checks its fields as it is made: so it is a call
            fields = tuple(self.argument(v) for v in value)
            return self._node("call_function", PackedSequence, fields, {}, (None, None))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.argument(v) for v in value))
        if isinstance(value, tuple):
            return tuple(self.argument(v) for v in value)
        if isinstance(value, list):
            return [self.argument(v) for v in value]
        if isinstance(value, dict):
            return {self._key(k): self.argument(v) for k, v in value.items()}
        if type(value).__module__ == "numpy":
            return self.argument(value.tolist())
        return value

    def _key(self, key: Any) -> Any:
        if isinstance(key, Value):
            self.refuse("uses a traced value as the key of a dict")
        return key

    def _static(self, value: Any) -> bool:
        if isinstance(value, Value):
            if not value.static or value.number or not self.mixed:
                return value.static
            return value.pair[0].untyped_storage().data_ptr() not in self.mixed
        if isinstance(value, torch.device):
            return id(value) not in self.devices
        if isinstance(value, torch.Tensor):
            return self._lift(value, "constant").static
        if isinstance(value, Flag):
            return False
        if isinstance(value, slice):
            return all(self._static(v) for v in (value.start, value.stop, value.step))
        if isinstance(value, (tuple, list)):
            return all(self._static(v) for v in value)
        if isinstance(value, dict):
            return all(self._static(v) for v in value.values())
        return True

    def _wrap(
        self, node: fx.Node, first: Any, second: Any, static: bool, given: dict[int, Value]
    ) -> Any:
        """Values for what a call returned; ``given`` are the arguments of a layer, by identity."""
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
            if first.dim() != second.dim():
                self.refuse("the number of dimensions differs between the example batches")
            return make(self, (first, second), static=static, node=node)
        if first is None and second is None:
            return None
        if isinstance(first, (bool, int, float, complex)):
            return make(self, (first, second), static=static, node=node)
        if isinstance(first, (tuple, list)) and isinstance(second, (tuple, list)):
            if len(first) != len(second):
                self.refuse(
                    f"{node.target} returns {len(first)} values for one example batch and"
                    f" {len(second)} for the other"
                )
            self.bake(node)
            items = []
            for k, (a, b) in enumerate(zip(first, second, strict=True)):
                if id(a) in given and given[id(a)].pair[1] is b:  # handed through as it was
                    items.append(given[id(a)])
                    continue
                item = self._node("call_function", operator.getitem, (node, k), {}, (a, b))
                if static:
                    self.static.add(item)
                items.append(self._wrap(item, a, b, static, given))
            if hasattr(first, "_fields"):  # not through its own __new__, which may look inside
                kind: Any = type(first)
                return tuple.__new__(kind, items)
            return type(first)(items)
        if type(first) is type(second) and _same((first, second)):
            return first
        self.refuse(f"{node.target} returns a {type(first).__name__}, which cannot be followed")

    def _node(
        self, kind: str, target: Any, args: Any, kwargs: Any, pair: tuple[Any, Any],
        origin: str | None = None, name: str | None = None,
    ) -> fx.Node:  # fmt: skip
        node = self.graph.create_node(kind, target, tuple(args), dict(kwargs), name=name)
        if origin is None:
            origin = str(target) if kind == "call_module" else self.stack[-1]
        full = ".".join(p for p in (self.prefix, origin) if p)
        spec = spec_of(pair[0], pair[1], self.sizes)
        self.pairs[node] = pair
        if isinstance(pair[0], torch.Tensor):
            self.shapes[node] = pair[0].shape  # a later unsqueeze_ changes that of the value
        if isinstance(pair[0], torch.Tensor) and pair[0].layout is torch.strided:
            self.storages[node] = pair[0].untyped_storage().data_ptr()
        node.meta[KEY] = Note(origin=(full,) if full else (), where=self.where(), spec=spec)
        return node

    def bake(self, node: fx.Node) -> None:
        """The graph relies on a size of ``node``, or on how many values it is."""
        self.baked |= self.sources(node)

    def sources(self, node: fx.Node) -> frozenset[fx.Node]:
        """The inputs on whose sizes the sizes of ``node`` may depend."""
        known = self._sources.get(node)
        if known is None:
            if node.op == "placeholder":
                known = frozenset({node})
            else:
                known = frozenset().union(*(self.sources(n) for n in self._shapes_from(node)))
            self._sources[node] = known
        return known

    def _shapes_from(self, node: fx.Node) -> Sequence[fx.Node]:
        """The inputs that shape ``node``: for pooled lookups the offsets, not the flat ids."""
        bag = node.target is nn.functional.embedding_bag or (
            node.op == "call_module"
            and isinstance(self.root.get_submodule(str(node.target)), nn.EmbeddingBag)
        )
        if bag:
            place = 1 if node.op == "call_module" else 2
            offsets = node.kwargs.get(
                "offsets", node.args[place] if len(node.args) > place else None
            )
            if isinstance(offsets, fx.Node):
                return (offsets,)
        return node.all_input_nodes

    # ------------------------------------------------------------ what went wrong

    def guard(self, value: Value, convert: Callable[[Any], Any], expected: Any) -> None:
        if not any(g.node is value.node and g.convert is convert for g in self.guards):
            question = Question(value.node, convert, expected, self.where(), self.stack[-1])
            self.guards.append(question)

    def refuse_value(self, value: Value, what: str, first: Any, second: Any) -> NoReturn:
        name = what.partition("(")[0]
        number = name in ("int", "float") and value.number
        self.refuse(
            f"{what} of a value that depends on the batch: {first} for one example,"
            f" {second} for the other",
            size=name if name == "len" or number else "",
        )

    def refuse(self, why: str, size: str = "") -> NoReturn:
        error = refusal(why, self.where(), self.stack[-1])
        error.size = size
        error.inside = tuple(candidates(sys._getframe(1), (_OURS, _LINK), _TORCH))
        self.failed = self.failed or error  # also when forward swallows it
        raise error

    def where(self) -> str | None:
        """The user's line that is running: ``model.py:41``."""
        frame: FrameType | None = sys._getframe(1)
        found = None
        while frame is not None:
            file = frame.f_code.co_filename
            mine = file.startswith((_OURS, _LINK))
            if mine and frame.f_code.co_name == "trace":
                break  # who called us is not the model
            if not mine and not file.startswith((_TORCH, "<frozen")):
                if found is None:
                    self._custom_function(frame)
                    found = f"{os.path.basename(file)}:{frame.f_lineno}"
                self.ran(frame)
            frame = frame.f_back
        return found

    def ran(self, frame: FrameType) -> None:
        """Note the user's code that runs: what it names is what it can see."""
        if frame.f_code not in self.codes:
            self.codes[frame.f_code] = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_freevars:
            self.closed.update(closed_over(frame))

    def _custom_function(self, frame: FrameType) -> None:
        if frame.f_code.co_name != "forward" or not frame.f_code.co_varnames:
            return
        first = frame.f_locals.get(frame.f_code.co_varnames[0])
        if isinstance(first, torch._C._FunctionBase) and self.failed is None:
            self.failed = refusal(
                "a torch.autograd.Function of its own, whose backward would be lost",
                f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}", self.stack[-1],
            )  # fmt: skip
            raise self.failed


class Shape(tuple):
    """``x.shape`` with Values for the sizes that depend on the batch."""

    def numel(self) -> Any:
        product: Any = 1
        for size in self:
            product = product * size
        return product


class Recorder(TorchFunctionMode):
    """Hands every torch call of this thread to a tracer."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self.tracer.running:
            return func(*args, **(kwargs or {}))
        return self.tracer.call(func, tuple(args), dict(kwargs or {}))


def refusal(why: str, where: str | None, path: str) -> Refused:
    """The error that says what cannot be traced, where, and what to do."""
    error = Refused(
        f"capture: {path or 'the model'} cannot be traced", where=where, why=why, tries=_REMEDIES
    )
    error.path = path
    return error


def lift(holder: Any, tensor: torch.Tensor, hint: str) -> str:
    """Keep ``tensor`` itself (not a copy) in the constants of a root; return its name there."""
    for name, held in vars(holder).items():
        if held is tensor:
            return name
    hint = "".join(c if c.isalnum() else "_" for c in hint)
    name = f"{hint}_{len(vars(holder))}"
    setattr(holder, name, tensor)
    return name


def _watched(kind: Any, tracer: Tracer, path: str, own: dict[str, Any]) -> type:
    """A subclass of ``kind``, with the methods ``own``, that notes which plain attributes are read
    (the graph bakes their values) and which are asked for but not there.
    """

    def read(self: Any, name: str) -> Any:
        if name == "__class__":  # what super(self.__class__, self) and friends expect
            return kind
        try:
            value = kind.__getattribute__(self, name)
        except AttributeError:
            tracer.asked.add((path, name))
            raise
        if name in kind.__getattribute__(self, "__dict__"):
            if type(value) in _PLAIN and name != "training":
                tracer.reads.setdefault((path, name), value)
            elif name not in _SLOTS:
                tracer.taken[path, name] = None
        elif name in shared:
            tracer.inherited[path, name] = None
        frame = sys._getframe(1)
        if not frame.f_code.co_filename.startswith((_OURS, _LINK, _TORCH)):
            tracer.ran(frame)
            if name == "__dict__" and frame.f_code.co_name != "__getattr__":  # its answers are seen
                tracer.taken.update(((path, held), None) for held in value if held not in _SLOTS)
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
        if type(value) in _PLAIN:
            tracer.answers[path, name] = value
        return value

    names = {**own, "__getattribute__": read, "__module__": kind.__module__}
    if kind.__getattr__ is not nn.Module.__getattr__:
        names["__getattr__"] = missing
    return type(kind.__name__, (kind,), names)


def _nodes(value: Any) -> list[fx.Node]:
    """All nodes inside an argument."""
    found: list[fx.Node] = []

    def keep(node: fx.Node) -> fx.Node:
        found.append(node)
        return node

    fx.node.map_arg(value, keep)
    return found


def _saving() -> Any:
    """The hooks on tensors saved for backward that are in force."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _wrapper(func: Any) -> bool:
    return type(func).__name__ == "method-wrapper"


def _in_place(target: Any, name: str, kwargs: dict[str, Any]) -> bool:
    if target is operator.setitem or kwargs.get("inplace") is True or kwargs.get("out") is not None:
        return True
    if getattr(target, "__module__", "") == "_operator":
        return name.startswith("i") and hasattr(operator, f"__{name}__") and name in INPLACE
    return name.endswith("_") and not name.endswith("__")


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def literal(value: Any) -> bool:
    """Whether a value is plain, or a tuple or list of plain ones."""
    if isinstance(value, (tuple, list)):
        return all(literal(v) for v in value)
    return isinstance(value, _LITERALS)


def _same(pair: Sequence[Any]) -> bool:
    if not literal(pair[0]) and not isinstance(pair[0], (torch.device, torch.Size)):
        return False
    return type(pair[0]) is type(pair[1]) and bool(pair[0] == pair[1])
