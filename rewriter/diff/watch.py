"""Run a model or a graph, and keep every intermediate value and its gradient."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from recast.rewriter.autocast import inside
from recast.rewriter.capture.constants import Constants
from recast.rewriter.compiled.copies import seed_all
from recast.rewriter.ir import Graph, Node, note

from . import model_runs


@dataclass
class Seen:
    """What was computed, by the name of the module or node, in order."""

    values: dict[str, Any] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    needs: set[str] = field(default_factory=set)  # values that carry a gradient
    parameters: dict[str, Tensor] = field(default_factory=dict)  # gradients of parameters
    inputs: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # of modules
    failed: str | None = None  # where it raised
    error: Exception | None = None

    def keep(self, name: str, value: Any) -> None:
        """Record ``value`` as it is now, and its gradient when it comes."""
        if name in self.values:
            return
        self.values[name] = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), value)
        if isinstance(value, Tensor) and value.requires_grad:
            self.needs.add(name)
            if not value.is_leaf:
                value.register_hook(lambda g: self._came(name, g))

    def _came(self, name: str, grad: Tensor | None) -> None:
        if grad is not None:
            self.grads[name] = model_runs.dense(grad)


def modules(
    model: nn.Module,
    batch: tuple[Any, ...],
    *,
    training: bool,
    seed: int,
    loss: model_runs.Loss | None,
    skip: tuple[str, ...] = (),
) -> Seen:
    """The outputs of all submodules that are called (the first time), but those under ``skip``."""
    seen = Seen()
    entered: list[str] = []

    def before(path: str) -> Any:
        def hook(m: nn.Module, args: tuple[Any, ...]) -> None:
            entered.append(path)
            if path not in seen.inputs:
                seen.inputs[path] = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), args)

        return hook

    def after(path: str) -> Any:
        def hook(m: nn.Module, args: Any, output: Any) -> None:
            entered.pop()
            if isinstance(output, Tensor):
                seen.keep(path, output)

        return hook

    hooks = []
    for path, m in model.named_modules():
        if path and not path.startswith(skip):
            hooks += [
                m.register_forward_pre_hook(before(path), prepend=True),
                m.register_forward_hook(after(path)),
            ]
    try:
        seen.parameters = model_runs.once(
            model, batch, training=training, seed=seed, loss=loss
        ).grads
    except Exception as error:
        seen.failed, seen.error = entered[-1] if entered else "", error
    finally:
        for h in hooks:
            h.remove()
    return seen


def graph(graph: Graph, root: nn.Module, inputs: list[Any], *, training: bool, seed: int) -> Seen:
    """Every value of ``graph`` run over ``root``, with random upstream gradients of the outputs."""
    seen = Seen()
    root.train(training)
    for p in root.parameters():
        p.grad = None
    seed_all(seed)
    run = _Run(root, graph, seen)
    try:
        output = run.run(*inputs, enable_io_processing=False)
        total = model_runs.weighted(model_runs.leaves(output).values(), seed)
        if total is not None and total.requires_grad:
            total.backward()
    except Exception as error:
        seen.failed, seen.error = run.now, error
    seen.parameters = {
        name: model_runs.dense(p.grad) for name, p in root.named_parameters() if p.grad is not None
    }
    return seen


class _Run(fx.Interpreter):
    def __init__(self, root: nn.Module, graph: Graph, seen: Seen) -> None:
        super().__init__(root, garbage_collect_values=False, graph=graph)
        self.extra_traceback = False
        self.seen = seen
        self.now = ""

    def run_node(self, n: Node) -> Any:
        self.now = n.name
        about = note(n)
        with inside(about.autocast), torch.no_grad() if about.no_grad else nullcontext():
            value = super().run_node(n)
        if n.op not in ("output", "placeholder"):
            self.seen.keep(n.name, value)
        return value


@contextmanager
def constants_of(root: nn.Module, model: nn.Module) -> Iterator[nn.Module]:
    """``model``, with the constants lent to it that graphs captured from it read from ``root``."""
    name = Constants.ATTRIBUTE
    held = vars(root).get(name)
    if held is None or name in vars(model):
        yield model
        return
    object.__setattr__(model, name, held)
    try:
        yield model
    finally:
        object.__delattr__(model, name)
