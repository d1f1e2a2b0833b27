"""The copy of a module tree on which ``forward`` is traced, made ready in place.

Its tensors are Values, its training flags are Flags, its layers record their calls, and all other
modules note what is read from them. Hooks are left out: a module that has any runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recast.rewriter.compiled.copies import modules_by_path
from recast.rewriter.compiled.trees import rebuild

from .constants import constants
from .layers import is_leaf
from .python_reads import observed
from .storages import memory
from .values import Flag, Value, make

if TYPE_CHECKING:
    from .replaced_builtins import ReplacedBuiltins
    from .tracer import Tracer

_NO_SETTINGS = {"_parameters", "_buffers", "_modules", "forward"}


def prepare(
    tracer: Tracer, opaque: frozenset[str], plain_flags: bool, sizes: ReplacedBuiltins | None
) -> None:
    """Make ``tracer.scratch`` ready. Modules at the paths ``opaque`` count as layers;
    ``plain_flags``: training flags are real bools; ``sizes`` has other methods for the user's.
    """
    live = modules_by_path(tracer.live)
    held = modules_by_path(tracer.scratch)
    for path, module in held.items():
        if isinstance(module, torch.jit.ScriptModule):
            _replace(tracer, path)
            continue
        leaf = bool(path) and (path in opaque or is_leaf(module))
        _hold(tracer, module, path, live[path])
        tracer.owners[id(module)] = path
        state = vars(module)
        for name, value in list(state.items()) if sizes else ():
            twin = sizes.twin(value) if sizes else None
            if twin is not None:
                tracer.owners[id(twin)] = f"{path}.{name}" if path else name
                state[name] = twin
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            state[hooks] = {}
        state["_backward_pre_hooks"] = {}
        state["training"] = tracer.training if plain_flags or leaf else Flag(tracer, path)
        if plain_flags and not leaf:
            tracer.forks.add(path)
        # Of a module that runs as it is too: other methods of it may be called from outside.
        if not type(module).__module__.startswith("torch.nn"):
            own = sizes.methods(type(module)) if sizes else {}
            module.__class__ = observed(type(module), tracer.reading, path, own)
        if leaf:
            tracer.layers.add(path)
        run = _layer(tracer, path, module) if leaf else _inside(tracer, path, module.forward)
        state["forward"] = run
    tracer.settings = {path: _settings(held[path]) for path in tracer.layers}


def _replace(tracer: Tracer, path: str) -> None:
    """Put a module that records its calls in the place of one of TorchScript, whose forward is no
    attribute.
    """
    owner, _, name = path.rpartition(".")
    if isinstance(tracer.live.get_submodule(owner), torch.jit.ScriptModule):
        return  # called by that one alone
    called = nn.Module()
    called.forward = _layer(tracer, path, None)
    tracer.owners[id(called)] = path
    tracer.scratch.get_submodule(owner)._modules[name] = called


def _layer(tracer: Tracer, path: str, module: nn.Module | None) -> Callable[..., Any]:
    """The forward of a layer, which the graph calls as the model holds it: so ``module``, from
    which forward may read it, must be as it was. None: nothing of it can be set.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        if module is not None:
            name = _other(_settings(module), tracer.settings[path])
            if name is not None:
                tracer.refuse(
                    f"forward sets {path}.{name}, itself or by functional_call, while it calls the"
                    " layer, which reads it"
                )
        return tracer.record("call_module", path, args, kwargs)

    return forward


def _settings(module: nn.Module) -> dict[str, Any]:
    """What a layer and its parts hold, by path: tensors, modules, and all other attributes."""
    held: dict[str, Any] = {}
    for path, part in module.named_modules():
        dot = f"{path}." if path else ""
        slots = (part._parameters, part._buffers, part._modules)
        every = {k: v for k, v in vars(part).items() if k not in _NO_SETTINGS}
        for entries in (every, *slots):
            held.update((f"{dot}{name}", value) for name, value in entries.items())
    return held


def _other(now: dict[str, Any], before: dict[str, Any]) -> str | None:
    """A name under which there is another object now than there was ``before``."""
    names = (name for name in {**before, **now} if now.get(name, now) is not before.get(name, now))
    return next(names, None)


def _inside(tracer: Tracer, path: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        tracer.stack.append(path)
        try:
            return original(*args, **kwargs)
        except Exception:
            if tracer.innermost is None:
                tracer.innermost = path
            raise
        finally:
            tracer.stack.pop()

    return forward


# ---------------------------------------------------------------- tensors


def _hold(tracer: Tracer, module: nn.Module, path: str, live: nn.Module) -> None:
    """Replace all tensors of ``module`` by Values."""
    dot = f"{path}." if path else ""
    both: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        (module._parameters, live._parameters), (module._buffers, live._buffers)
    )  # fmt: skip
    for slots, real in both:
        for name, tensor in slots.items():
            if tensor is not None:
                slots[name] = _held(tracer, tensor, real[name], f"{dot}{name}")
    for name, kept in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules", "forward"):
            continue
        if f"{dot}{name}" in tracer.numbers:
            pair = tracer.numbers[f"{dot}{name}"]
            vars(module)[name] = make(tracer, (*pair,), static=False, path=f"{dot}{name}")
        elif isinstance(kept, torch.Tensor):
            vars(module)[name] = _held(tracer, kept, kept, f"{dot}{name}")
        elif type(kept) in (list, tuple, dict):
            vars(module)[name] = rebuild(kept, partial(lifted, tracer, hint=name))


def _held(tracer: Tracer, tensor: torch.Tensor, real: torch.Tensor, path: str) -> Value:
    """The one Value for ``tensor``; ``real`` is what layers read in its place, and may write to."""
    known = tracer.held.get(id(tensor))
    if known is None:
        if isinstance(tensor, nn.Parameter):
            tracer.parameters |= memory(tensor).keys()
            pair: tuple[Any, Any] = (tensor, tensor)
        else:
            pair = (real.detach().clone(), real.detach().clone())
        known = make(tracer, pair, static=False, path=path)
        tracer.held[id(tensor)] = known
        tracer.alive.append(tensor)
    return known


def lifted(tracer: Tracer, tensor: torch.Tensor, hint: str = "constant") -> Value:
    """The Value for a tensor without a name of its own: in a list, a closure, a foreign object."""
    if isinstance(tensor, Value):
        return tensor
    known = tracer.held.get(id(tensor))
    if known is None:
        known = _held(tracer, tensor, tensor, constants(tracer.root).hold(tensor, hint))
    return known
