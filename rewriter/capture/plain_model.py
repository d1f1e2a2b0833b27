"""The user's own model: without results of optimize in it, on copies, run as it is."""

from __future__ import annotations

import inspect
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recast.rewriter.compiled.copies import modules_by_path, shallow_copy
from recast.rewriter.compiled.signature import Signature
from recast.rewriter.compiled.trees import rebuild
from recast.rewriter.order import renormalises


def uncompiled(module: nn.Module) -> nn.Module:
    """The user's module in a result of optimize; it is captured anew, since the old graphs hold for
    the old surroundings. Not if a trainer wrapped its forward.
    """
    own = vars(module)
    ours = "_root" in own and "_runner" in own and "forward" not in own
    root: nn.Module = own["_root"] if ours else module
    return root


def uncompile(root: nn.Module) -> None:
    """Put the user's own modules and forwards in the place of results of optimize."""
    for module in list(root.modules()):
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = uncompiled(child)
        restore_forward(module)


def live_copy(root: nn.Module, training: bool = False) -> nn.Module:
    """A copy in one mode with its own buffers, on which layers run the examples."""
    live = shallow_copy(root)
    for module in live.modules():
        if not isinstance(module, torch.jit.ScriptModule):
            vars(module)["training"] = training
            restore_forward(module)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.detach().clone()
        if renormalises(module):  # reading it writes to its table
            _own_table(module)
    return live


def _own_table(module: nn.Module) -> None:
    """Give a table a copy of its weight, or of what a parametrization makes the weight of, which
    may be the very tensor. (The hooks of the old ``weight_norm`` make a new one.)
    """
    held = module._parameters
    names = ["weight"] if "weight" in held else []
    if nn.utils.parametrize.is_parametrized(module, "weight"):
        held = module.get_submodule("parametrizations.weight")._parameters
        names = list(held)
    for name in names:
        table: Any = held[name]
        held[name] = nn.Parameter(table.detach().clone())


def restore_forward(module: nn.Module) -> None:
    """Restore the user's own forward where graphs run in its place, since those read the old
    tensors.
    """
    forward = vars(module).get("forward")
    runner = getattr(getattr(forward, "__self__", None), "_runner", None)
    if runner is not None:
        if not runner.built:  # of a copy, which finds the forward behind its own so
            runner.build()
        del vars(module)["forward"]
        if runner.original is not None:
            vars(module)["forward"] = runner.original


@dataclass
class Call:
    """One call of a submodule."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inside: frozenset[str]  # the modules whose forwards were running


def record_calls(
    root: nn.Module, signature: Signature, batches: tuple[Any, Any]
) -> dict[str, list[list[Call]]]:
    """Record the arguments of every call of every submodule, for both batches."""
    live = live_copy(root)
    seen: dict[str, list[list[Call]]] = {}
    at = [0]
    running: list[str] = []

    def watch(path: str, module: nn.Module) -> None:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            kept = Call(
                rebuild(args, lambda t: t.detach().clone()),
                rebuild(kwargs, lambda t: t.detach().clone()),
                frozenset(running),
            )
            seen.setdefault(path, [[], []])[at[0]].append(kept)
            running.append(path)
            try:
                return original(*args, **kwargs)
            finally:
                running.pop()

        vars(module)["forward"] = forward

    for path, module in modules_by_path(live).items():
        if path and not isinstance(module, torch.jit.ScriptModule):
            watch(path, module)
    for k, batch in enumerate(batches):
        at[0] = k
        try:
            run_plain(live, signature, batch)
        except Exception:  # the model itself does not take this batch: what was seen so far counts
            break
    return seen


def run_plain(live: nn.Module, signature: Signature, args: tuple[Any, ...]) -> Any:
    """Run the plain forward on clones of ``args``, with gradients enabled in case forward needs
    them.
    """
    given = rebuild(args, lambda t: t.detach().clone())
    positional, named = signature.unbind(given)
    with torch.enable_grad():
        return live.forward(*positional, **named)


def rehearse(live: nn.Module, signature: Signature, args: tuple[Any, ...]) -> bool:
    """Run the plain forward for what it leaves in ``live``; False if it raised. What it raises is
    left to the trace to report; a forward may call backward, which adds no gradients here.
    """
    grads = [(p, p.grad) for p in live.parameters()]
    for parameter, _ in grads:
        parameter.grad = None
    try:
        with suppress(Exception):
            run_plain(live, signature, args)
            return True
        return False
    finally:
        for parameter, grad in grads:
            parameter.grad = grad


def place_of(module: nn.Module) -> str | None:
    """The file and line of the forward of ``module``."""
    try:
        code = inspect.unwrap(type(module).forward).__code__
    except AttributeError:
        return None
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
