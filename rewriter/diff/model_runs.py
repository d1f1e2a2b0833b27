"""Run a model and record everything that it computes, without changing it."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from recast.errors import UsageError
from recast.rewriter.compiled import trees
from recast.rewriter.compiled.copies import seed_all

from . import call_effects
from .call_effects import Effects

Loss: TypeAlias = Callable[[Any], Tensor]
MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Train: TypeAlias = Callable[
    [nn.Module, list[tuple[Any, ...]]], tuple[nn.Module, torch.optim.Optimizer]
]


@dataclass
class Pass:
    """One forward, and its backward."""

    outputs: dict[str, Any]  # by path in the output: "", "['click']", "[0]"
    grads: dict[str, Tensor]  # by parameter name, and "input[...]"; without those that are None
    buffers: dict[str, Tensor]
    effects: Effects  # of the forward

    @property
    def written(self) -> Mapping[str, Tensor]:
        """What forward wrote to, or set as attributes."""
        return self.effects.written


@dataclass
class Steps:
    """The state after k optimizer steps."""

    parameters: dict[str, Tensor]
    state: dict[str, Tensor] = field(default_factory=dict)  # "emb.weight [sum]"
    buffers: dict[str, Tensor] = field(default_factory=dict)


# ---------------------------------------------------------------- leaving no trace


@contextmanager
def undisturbed(*models: nn.Module) -> Iterator[Callable[[], None]]:
    """Yields a function that restores all ``models``, and calls it at the end in any case.

    Restored: values of parameters and buffers (shared ones once), which objects they are, tensors
    and plain values that are attributes of modules (a cache, a counter), ``.grad``, training flags,
    and the random number generators, those of Python and numpy too.
    """
    tensors: dict[int, tuple[Tensor, Tensor]] = {}
    owners: list[tuple[dict[str, Any], dict[str, Any]]] = []
    modules: list[tuple[nn.Module, bool]] = []
    for model in models:
        for m in model.modules():
            modules.append((m, m.training))
            owners += [(d, dict(d)) for d in (m._parameters, m._buffers)]
            for t in (*m._parameters.values(), *m._buffers.values()):
                if t is not None and id(t) not in tensors:
                    tensors[id(t)] = (t, t.detach().clone())
    grads = [(t, t.grad) for t, _ in tensors.values() if t.is_leaf]
    kept = [(held, dict(held)) for model in models for held in call_effects.held_by(model)]

    def restore() -> None:
        for held, names in owners:
            if [*held] != [*names] or not all(map(is_, held.values(), names.values())):
                held.clear()
                held.update(names)
        for held, before in kept:
            call_effects.take_back(held, before)
        with torch.no_grad():
            for t, value in tensors.values():
                t.copy_(value)
        for t, _ in grads:
            t.grad = None

    drawn = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        for t, _ in grads:
            t.grad = None
        try:
            yield restore
        finally:
            restore()
            random.setstate(drawn[0])
            np.random.set_state(drawn[1])
            for t, grad in grads:
                t.grad = grad
            for m, training in modules:
                m.training = training


# ---------------------------------------------------------------- one run


def seeded(number: int) -> None:
    """Seed every generator that a forward may draw from: torch's, Python's and numpy's."""
    seed_all(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def forward(model: nn.Module, batch: tuple[Any, ...], seed: int) -> Any:
    """The output for a private copy of ``batch``, after seeding."""
    seeded(seed)
    return model(*_copied(batch))


def once(
    model: nn.Module,
    batch: tuple[Any, ...],
    *,
    training: bool,
    seed: int,
    loss: Loss | None,
    gradients: bool = True,
) -> Pass:
    """Forward and backward from a fresh seed, in train or eval mode; without ``gradients``, only
    the forward, under ``no_grad``.

    Without a ``loss`` every floating output is weighted by its own random tensor, the same for
    every model that is given the same ``seed``.
    """
    model.train(training)
    for p in model.parameters():
        p.grad = None
    seeded(seed)
    given = _copied(batch)
    inputs, before = leaves(given), call_effects.attributes(model)
    with torch.set_grad_enabled(gradients):
        output = model(*given)
    drawn = torch.get_rng_state()
    named = leaves(output)
    effects = Effects(
        call_effects.form(output),
        {k: v.requires_grad for k, v in named.items() if isinstance(v, Tensor)},
        call_effects.written_to(inputs, leaves(batch)) | call_effects.set_since(before, model),
        drawn,
        call_effects.on_cpu(model),
    )
    total = scalar(loss, output) if loss else weighted(named.values(), seed)
    if total is not None and total.requires_grad:
        total.backward()
    outputs = {k: v.detach() if isinstance(v, Tensor) else v for k, v in named.items()}
    grads = {k: dense(p.grad) for k, p in model.named_parameters() if p.grad is not None}
    for path, t in leaves(given).items():
        # What forward has put there is not a leaf.
        if isinstance(t, Tensor) and t.requires_grad and t.is_leaf and t.grad is not None:
            grads[f"input{path}"] = dense(t.grad)
    buffers = {k: dense(b).clone() for k, b in model.named_buffers()}
    return Pass(outputs, grads, buffers, effects)


def scalar(loss: Loss, output: Any) -> Tensor:
    """The loss of ``output``. A loss without gradients would prove nothing, so it is refused."""
    total: Any = loss(output)
    wanted = [t for t in leaves(output).values() if isinstance(t, Tensor) and t.requires_grad]
    if not isinstance(total, Tensor):
        got = f"returned {total!r}"
    elif total.numel() != 1:
        got = f"returned a tensor of shape {tuple(total.shape)}"
    elif wanted and not total.requires_grad:
        got = "does not depend on the output in a way that gradients see"
    else:
        return total
    code = getattr(inspect.unwrap(loss), "__code__", None)
    raise UsageError(
        f"diff: the loss {got}",
        where=code and f"{Path(code.co_filename).name}:{code.co_firstlineno}",
        why="gradients are those of one number, a scalar tensor",
        tries=("loss=lambda output: F.mse_loss(output, labels)", "leave loss out"),
    )


def train(
    model: nn.Module,
    batches: list[tuple[Any, ...]],
    *,
    steps: int,
    seed: int,
    loss: Loss | None,
    make: MakeOptimizer,
    before_step: Callable[[], object] = lambda: None,
) -> Steps:
    """Take optimizer steps in train mode, over the batches in turn, each from its own seed."""
    model.train()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    for k in range(steps):
        optimizer.zero_grad()
        output = forward(model, batches[k % len(batches)], seed + k)
        total = scalar(loss, output) if loss else weighted(leaves(output).values(), seed + k)
        if total is None or not total.requires_grad:
            break
        total.backward()
        before_step()
        optimizer.step()
    return after(model, optimizer)


def after(model: nn.Module, optimizer: torch.optim.Optimizer) -> Steps:
    """Record the state of a model and its optimizer after training."""
    result = Steps({k: dense(p) for k, p in model.named_parameters()})
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor):
                result.state[f"{name} [{key}]"] = value.detach().clone()
    result.buffers = {k: dense(b).clone() for k, b in model.named_buffers()}
    return result


def weighted(values: Iterable[Any], seed: int) -> Tensor | None:
    """The sum of all floating values, each entry weighted by its own normal random number."""
    generator = torch.Generator().manual_seed(seed + 1)
    total: Tensor | None = None
    for t in values:
        if isinstance(t, Tensor) and t.is_complex():
            t = torch.view_as_real(t)
        if isinstance(t, Tensor) and t.is_floating_point():
            weight = torch.randn(t.shape, generator=generator, dtype=torch.float32)
            part = (t * weight.to(t.device, t.dtype)).sum()
            total = part if total is None else total + part.to(total.dtype)
    return total


def leaves(value: Any) -> dict[str, Any]:
    """The leaves of a nested value by their paths: ``"['click']"``, ``"[0]"``, ``".y"``, ``""``.

    Objects that hold tensors (a dataclass, a batch class) are no leaves, as in a capture.
    """
    found: dict[str, Any] = {}
    for path, leaf in pytree.tree_leaves_with_path(value):
        name, inside = pytree.keystr(path), trees.members(leaf)
        if inside is None:
            found[name] = leaf
            continue
        for text, one in inside.items():
            found.update((f"{name}{text}{rest}", v) for rest, v in leaves(one).items())
    return found


def dense(grad: Tensor) -> Tensor:
    """A plain dense copy of a dense, sparse or row gradient, of a parameter, or of a buffer."""
    if grad.layout != torch.strided:
        return grad.detach().to_dense()
    return grad.detach().clone() if type(grad) is not Tensor else grad.detach()


def _copied(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    def fresh(t: Tensor) -> Tensor:
        return t.detach().clone().requires_grad_(t.requires_grad)

    copied: tuple[Any, ...] = trees.mapped(fresh, batch)
    return copied


# ---------------------------------------------------------------- optimizers


def maker(
    optimizer: torch.optim.Optimizer | MakeOptimizer | None,
    *models: nn.Module,
    saved: dict[str, Any] | None = None,
) -> Callable[[nn.Module], MakeOptimizer]:
    """A function that makes the optimizer of a model: a fresh one like ``optimizer``, with its
    state.

    None is Adagrad with an accumulator that starts at 0.1: from 0 it would turn the sign of
    rounding noise (a true gradient of zero, as for a bias before BatchNorm) into a whole step.
    ``saved``: the state of ``optimizer``, where it is not what its ``state_dict`` says.
    """
    if optimizer is None:
        return lambda model: _default
    if not isinstance(optimizer, torch.optim.Optimizer):
        return lambda model: optimizer
    names = {id(p): n for m in models for n, p in m.named_parameters()}
    groups = [
        {k: v for k, v in g.items() if k != "params"}
        | {"names": [names[id(p)] for p in g["params"]]}
        for g in optimizer.param_groups
    ]
    accepted = inspect.signature(type(optimizer)).parameters
    options = {k: v for k, v in optimizer.defaults.items() if k in accepted}
    # What ``optimize`` has set with the same numbers (``runtime/rows/settings.py``).
    with_settings = getattr(optimizer.defaults, "of_twin", None)
    saved = copy.deepcopy(optimizer.state_dict()) if saved is None else saved

    def of(model: nn.Module) -> MakeOptimizer:
        def make(_: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            held = dict(model.named_parameters())
            own = [
                {k: v for k, v in g.items() if k not in ("names", "param_names")}
                | {"params": [held[n] for n in g["names"]]}
                for g in groups
            ]
            made = type(optimizer)(own, **options)
            made.load_state_dict(copy.deepcopy(saved))
            if with_settings is not None:
                made.defaults = with_settings(made.defaults)
            return made

        return make

    return of


def _default(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.05, initial_accumulator_value=0.1)
