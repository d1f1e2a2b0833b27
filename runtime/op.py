"""The op interface: what every op consists of, and how it is registered with torch.

An op is one file, to be read from top to bottom: a reference in plain torch (the definition, the
fallback and the truth), a schema, a fake, a forward and a backward by kernels, samples, and a cost.
This module registers it so that each way of calling reaches the right part::

    under autocast                                            -> its ``autocast``, else reference
    under vmap, grad transforms, forward AD                   -> reference
    with a tensor that has the negative bit                   -> reference
    traced with gradients (torch.compile, export, make_fx)    -> reference
    traced without gradients                                  -> fake; the op stays one node
    a device without kernels                                  -> reference
    everything else                                           -> kernels, hand-written backward

Ops are registered with ``torch.library.Library.define`` / ``impl``, which costs about 7 us per
call; with the decorator ``torch.library.custom_op`` it would be about 23 us. Long lists cost more:
22 us for 26 lookups. Therefore ``op.target.direct`` is the same call without torch's dispatcher,
for callers that run graphs; it uses the dispatcher whenever the difference could be observed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._C import _TorchDispatchModeKey as _ModeKey
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from recast.runtime import device
from recast.runtime.cost import Cost
from recast.runtime.embedding import unread_rows
from recast.runtime.gpu import cuda_launch, gpu

NAMESPACE = "recast"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")

_PLAIN: frozenset[type] = frozenset((Tensor, torch.nn.Parameter, type(None), bool, int, float, str))
_CONSTANTS = frozenset((bool, int, float, str))  # a list that begins with one holds no tensors
_TRACED: frozenset[type] = _PLAIN | {FakeTensor, FunctionalTensor}
_TRACING_MODES = (_ModeKey.FAKE, _ModeKey.PROXY, _ModeKey.FUNCTIONAL)
_NEGATIVE = torch._C.DispatchKey.Negative  # of a tensor whose memory holds its values negated

# Every call asks them; looked up each time they would take three times as long.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._are_functorch_transforms_active
_autocast = torch._C._is_any_autocast_enabled
_tracer = torch._C._get_tracing_state
_profiler = torch._C._autograd._profiler_enabled


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of an op.

    ``condition`` says in words when it is used; ``why_not`` returns the reason why this machine
    cannot use it at all, or None when it can.
    """

    name: str
    device: str
    condition: str
    why_not: Callable[[], str | None]


def cpu_kernels(condition: str) -> tuple[Kernel, ...]:
    """One kernel for each instruction set of the C++ extension, the fastest first."""
    return tuple(Kernel(isa, "cpu", condition, device.why_not(isa)) for isa in device.ISAS)


@dataclass(frozen=True, slots=True)
class Sample:
    """Arguments on which an op is tested; floating-point tensors may be cast to any float dtype."""

    label: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Op:
    """A runtime operation.

    ``forward`` computes without autograd; ``differentiable`` does the same with a hand-written
    backward. Both are called only with plain tensors on a device in ``devices``; an op without them
    runs its reference. ``casts``: the op contains matrix products, which autocast casts.
    ``autocast(dtype, *args)`` is the call under autocast to ``dtype`` on the devices in
    ``autocast_on``, with or without autograd; autocast is off inside. It must take every call that
    ``forward`` takes.
    """

    name: str
    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    samples: Callable[[], Iterable[Sample]]
    cost: Callable[..., Cost]
    forward: Callable[..., Any] | None = None
    differentiable: Callable[..., Any] | None = None
    kernels: tuple[Kernel, ...] = ()
    devices: tuple[str, ...] = ("cpu",)
    casts: bool = False
    autocast: Callable[..., Any] | None = None
    autocast_on: tuple[str, ...] = ("cuda",)  # an emulated GPU counts as one
    random: bool = False  # it draws numbers: rewrites must keep its place among the draws
    trains: bool = True  # False: for inference; what it reads gets no gradient
    not_worth: Mapping[str, str] = field(default_factory=dict)  # device -> why it does not pay
    # ``stacked(stacks, *args)``: ``differentiable``, but free to return the results whose numbers
    # are in one of ``stacks`` as one tensor; ``count``: how many results a call in a graph has,
    # None when unknown; ``takes_stacks``: whether the first argument, a list of (B, D), may hold
    # such tensors (B, n, D) instead. See :func:`_direct`.
    stacked: Callable[..., Any] | None = None
    count: Callable[..., int | None] | None = None
    takes_stacks: bool = False
    # ``unread``: ``stacked``, but free to leave its rows unread; ``takes_unread``: the call that
    # accepts such rows (it returns None when it does not). Without gradients only; see
    # :mod:`~recast.runtime.embedding.unread_rows`.
    unread: Callable[..., Any] | None = None
    takes_unread: Callable[..., Any] | None = None

    @property
    def target(self) -> torch._ops.OpOverload:
        """The overload that graphs call: ``torch.ops.recast.<name>.default``."""
        packet: torch._ops.OpOverloadPacket = getattr(getattr(torch.ops, NAMESPACE), self.name)
        return packet.default

    def usable(self) -> list[tuple[str, bool, str]]:
        """``(kernel, usable, condition or why it is not)`` for each kernel."""
        found = [(k, k.why_not() or _device_why_not(k)) for k in self.kernels]
        return [(f"{k.device}/{k.name}", why is None, why or k.condition) for k, why in found]

    def pays(self, device: str) -> bool:
        """Whether the op is faster than the plain torch calls it replaces on ``device``."""
        return device not in self.not_worth


def _device_why_not(kernel: Kernel) -> str | None:
    """Why no device here runs ``kernel``: GPUs may all be too old for ours."""
    ours = kernel.device == "cuda" and kernel.name != "torch"
    return cuda_launch.why_not_on_any() if ours else None


OPS: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Define ``op`` in torch's dispatcher and list it in :data:`OPS`.

    Raises ValueError when the name is taken.
    """
    if op.name in OPS:
        raise ValueError(f"an op named {op.name!r} is registered already")
    lib = _LIBRARY
    lib.define(op.name + op.schema, tags=_tags(op))
    lib.impl(op.name, op.reference, "CompositeExplicitAutograd")
    lib.impl(op.name, op.reference, "FuncTorchBatched")
    lib.impl(op.name, op.reference, "Negative")  # torch's own fallback skips optional lists
    lib.impl(op.name, _entry(op), "Autograd", with_keyset=True)
    if op.forward is not None:
        for device in op.devices:
            lib.impl(op.name, op.forward, device.upper())
    if op.casts or op.autocast is not None:
        for device in ("cpu", "cuda"):
            key = f"Autocast{device.upper()}"
            lib.impl(op.name, _under_autocast(op, device), key, with_keyset=True)
    torch.library.register_fake(f"{NAMESPACE}::{op.name}", op.fake, lib=lib)
    if _written(op):
        _define_reading(op)
    if op.differentiable is not None:
        direct: Any = _direct(op, op.differentiable)
        if op.stacked is not None:
            direct.stacked = _of_stacks(op, op.stacked)
            direct.count = op.count
        if op.unread is not None:
            direct.unread = _of_stacks(op, op.unread)
        if op.takes_unread is not None:
            direct = _reading(direct, op.takes_unread)
        direct.takes_stacks, direct.takes_unread = op.takes_stacks, op.takes_unread is not None
        op.target.direct = direct  # type: ignore[attr-defined]
    OPS[op.name] = op
    return op


def _tags(op: Op) -> tuple[torch.Tag, ...]:
    return torch.Tag.pt2_compliant_tag, *([torch.Tag.nondeterministic_seeded] * op.random)


_READING = "reading"  # the overload of an op for calls that write to no argument


def _written(op: Op) -> list[int]:
    """The positions of the arguments that the op writes to, according to its schema."""
    info = (a.alias_info for a in op.target._schema.arguments)
    return [k for k, a in enumerate(info) if a is not None and a.is_write]


def _define_reading(op: Op) -> None:
    """Define the overload of ``op`` that is traced when there is no tensor to write to.

    When an op could write but does not, torch's functionalisation makes a node that Inductor does
    not understand (2.13: "getitem is not an OpOverload").
    """
    name = f"{op.name}.{_READING}"
    _LIBRARY.define(name + op.schema.replace("(a!)", ""), tags=_tags(op))
    _LIBRARY.impl(name, op.reference, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, op.reference, "Negative")
    _LIBRARY.impl(name, _entry(op), "Autograd", with_keyset=True)
    if op.forward is not None:
        for device in op.devices:
            _LIBRARY.impl(name, op.forward, device.upper())
    torch.library.register_fake(f"{NAMESPACE}::{name}", op.fake, lib=_LIBRARY)


def _entry(op: Op) -> Callable[..., Any]:
    """The implementation above autograd: chooses between the reference and the kernels."""
    reference, differentiable, devices = op.reference, op.differentiable, op.devices
    target, written = op.target, _written(op)

    def entry(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        types = _types(args)
        if transformed() or not types <= _TRACED:
            return reference(*args)
        if types <= _PLAIN and not tracing():
            # torch resolves negative bits further down, which the kernels called here never reach.
            if differentiable is None or keys.has(_NEGATIVE):
                return reference(*args)
            if not all(t.device.type in devices for t in _some(args)):
                return reference(*args)
            return differentiable(*args)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors(args)):
            return reference(*args)
        reads = written and not any(True for _ in tensors(args[k] for k in written))
        traced = getattr(target._overloadpacket, _READING) if reads else target
        with torch._C._AutoDispatchBelowAutograd():
            return traced(*args)

    return entry


def _direct(op: Op, differentiable: Callable[..., Any]) -> Callable[..., Any]:
    """A call of ``op`` that goes straight to its kernels when the dispatcher would do no more."""
    devices, target, on_cpu = op.devices, op.target, "cpu" in op.devices
    takes = [k for k, a in enumerate(target._schema.arguments) if "Tensor" in str(a.type)]

    def plain(args: tuple[Any, ...]) -> bool:
        """``_types(args) <= _PLAIN``, looking only at those that the schema says are tensors."""
        for k in takes:
            if k >= len(args):
                break  # the rest have their defaults
            kind = type(args[k])
            if not _PLAIN.issuperset(map(type, args[k]) if kind is list else (kind,)):
                return False
        return True

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs or _watched() or not plain(args):
            return target(*args, **kwargs)
        first = args[0]
        if type(first) is list:
            first = first[0] if first else None
        if not isinstance(first, Tensor):
            return target(*args)
        if not (on_cpu and first.is_cpu) and first.device.type not in devices:
            return target(*args)
        return differentiable(*args)

    return call


def _of_stacks(op: Op, stacked: Callable[..., Any]) -> Callable[..., Any]:
    """Such a call for given stacks of results. It may return each of them, (B, D) or (B, 1, D) of
    one size, as one tensor (B, n, D), the other results behind them; or all results apart.
    """
    return lambda stacks: _direct(op, partial(stacked, stacks))


def _reading(direct: Callable[..., Any], takes: Callable[..., Any]) -> Callable[..., Any]:
    """``direct``, except that unread rows in the first argument go to ``takes``, if that accepts
    them.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if not unread_rows.are_in(args[0]):
            return direct(*args, **kwargs)
        found = None if kwargs or _watched() else takes(*args)
        return direct(unread_rows.read(args[0]), *args[1:], **kwargs) if found is None else found

    return call


def _watched() -> bool:
    """Whether a mode, a transform, autocast, a tracer or a profiler may be observing calls."""
    return bool(
        _dispatch_modes()
        or _function_modes()
        or transformed()
        or _autocast()
        or _tracer() is not None
        or _profiler()
    )


def _under_autocast(op: Op, device: str) -> Callable[..., Any]:
    """The implementation above that, for autocast: ``op.autocast``, or what the reference does."""
    reference, autocast, casts = op.reference, op.autocast, op.casts
    target = op.target

    def entry(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        if autocast is not None and not keys.has(_NEGATIVE) and _served(op, args):
            dtype = torch.get_autocast_dtype(device)
            with torch._C._DisableAutocast():
                return autocast(dtype, *args)
        if casts:
            return reference(*args)
        with torch._C._DisableAutocast():
            return target(*args)

    return entry


def _served(op: Op, args: tuple[Any, ...]) -> bool:
    """Whether ``op.autocast`` may take this call; torch reports mixed devices itself."""
    if transformed() or tracing() or not _types(args) <= _PLAIN:
        return False
    first = next(tensors(args), None)
    if first is None:
        return False
    return ("cpu" in op.autocast_on and first.is_cpu) or gpu.serving(first) is not None


def transformed() -> bool:
    """Whether a function transform or forward AD is active."""
    # Asking torch for the level makes it keep transform state in this thread for good, and hand
    # that from node to node in every backward: a tenth of the time of a cheap node. So ask only if
    # need be.
    level = _functorch.maybe_current_level() if _transforms() else None
    return level is not None or forward_ad._current_level >= 0


def tracing() -> bool:
    """Whether torch is recording this call into a graph rather than only running it."""
    if not _dispatch_modes():
        return False
    return any(torch._C._get_dispatch_mode(k) is not None for k in _TRACING_MODES)


def tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    """All tensors in ``args``, with lists flattened."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif type(arg) is list:
            yield from (t for t in arg if isinstance(t, Tensor))


def wants_grad(args: Iterable[Any]) -> bool:
    """Whether autograd must record a call with ``args``."""
    if not torch.is_grad_enabled():
        return False
    for arg in args:  # tensors() without its generator: every op asks at every call
        for t in arg if type(arg) is list else (arg,):
            if isinstance(t, Tensor) and t.requires_grad:
                return True
    return False


def _some(args: tuple[Any, ...]) -> Iterator[Tensor]:
    """The first tensor of every argument; torch reports mixed devices itself."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif type(arg) is list and arg and isinstance(arg[0], Tensor):
            yield arg[0]


def _types(args: tuple[Any, ...]) -> set[type]:
    found: set[type] = set()
    for arg in args:
        if type(arg) is list:
            if arg and type(arg[0]) not in _CONSTANTS:
                found.update(map(type, arg))
        else:
            found.add(type(arg))
    return found
