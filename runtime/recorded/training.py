"""Forward and backward of a model as two CUDA graphs: ``mode="graph"`` in a loop left as it is.

    optimizer.zero_grad()
    loss = loss_fn(fast(*batch), label)    # the forward is replayed
    loss.backward()                        # and here the backward, from the output to the gradients
    optimizer.step()

The optimizer's step is replayed as well if the gradients are still those of the backward
(:mod:`.optimizer_step`). Loss, clipping and scaling run as always;
:class:`~.training_step.TrainingStep` records those too. The next replay reuses the memory of the
present one, so:

* results are copies, and so are gradients of dense parameters (:mod:`.gradients.grad_buffers`). Row
  gradients are lent; those that are still in use before the next forward are turned into copies
  then, and none is copied if gradients are set to None before the forward.
* one forward can await its backward at a time. Another one before that backward runs as always,
  with the same numbers.
* a second backward through one forward, and ``create_graph=True``, raise.

The backward runs in the thread that calls it (:mod:`.gradients.one_thread`). Where the step is
replayed too, its ids are sorted beside the forward (:mod:`.gradients.early_sorts`).

A call runs as always, and is not recorded, when an input requires a gradient, when no parameter
does, or when a tracer or transform of torch is active.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from recast.runtime.gpu import copies
from recast.runtime.op import transformed
from recast.runtime.recorded.batches.bounds import Bounds
from recast.runtime.recorded.batches.input_roles import ModelInputs, method_of
from recast.runtime.recorded.batches.known_batches import Batches
from recast.runtime.recorded.batches.static_inputs import StaticInputs
from recast.runtime.recorded.forward_backward import ForwardBackward, ReplayedForward
from recast.runtime.recorded.gradients.early_sorts import EarlySorts
from recast.runtime.recorded.gradients.weights_node import WeightsNode
from recast.runtime.recorded.optimizer_step import ReplayedSteps
from recast.runtime.recorded.recording import Recorder, Recording, Unrecordable
from recast.runtime.recorded.recordings import Recordings
from recast.runtime.recorded.state.model import ModelState, children_of
from recast.runtime.recorded.state.saved_parameters import SavedParameters
from recast.runtime.rows import cuda_shared_sorts as row_sorts

Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]

_WARM = 2  # backwards that run as always first, to warm up libraries and kernels


class RecordedTraining:
    """Calls ``run`` of ``model``, which is on ``device``, where gradients are asked for."""

    def __init__(self, model: nn.Module, device: torch.device, recorder: Recorder) -> None:
        self._model, self._device, self._recorder = model, device, recorder
        self._modules = list(model.modules())
        self._inputs = ModelInputs(model)
        self._batches = Batches(device)
        self._state = ModelState(device.type, uncaptured=method_of(model, "uncaptured_modules"))
        self._why_stale = method_of(model, "why_stale")
        self._run: Run | None = None
        self._bounds = Bounds(None)
        self._backwards = 0
        self._recordings = Recordings(
            'mode="graph"', self, recorder, None, warmup=2, most=8, make=self._make
        )
        self.lending: set[ForwardBackward] = set()
        self.weights_nodes: weakref.WeakSet[WeightsNode] = weakref.WeakSet()
        self.last: weakref.ref[ReplayedForward] | None = None
        self.running_sorts: EarlySorts | None = None  # of the last forward
        self.steps = ReplayedSteps(recorder, device, self.is_under_way)

    def __call__(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``run(args, kwargs)`` returns."""
        batch = self._batches.of((args, kwargs))
        if batch.wants_grad() or must_not_record(self._why_stale):
            return run(args, kwargs)
        state = self._state.of(self._modules)
        if not self._state.wants:
            return run(args, kwargs)
        self._run = run
        if self._backwards < _WARM:
            return self._watched(self._recordings.run_eagerly(batch))
        if self.is_under_way():
            return self._recordings.run_eagerly(batch)
        self._free_last_batch()
        places = self._inputs.of(batch, args, kwargs)
        return self._recordings.run(batch, self._bounds.of(batch, places), state, self._state.why)

    def _watched(self, result: Any) -> Any:
        """Count the backwards through ``result``."""
        first = True

        def seen(grad: Tensor) -> None:
            nonlocal first
            self._backwards += first
            first = False

        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(seen)
        return result

    def is_under_way(self) -> bool:
        """Whether a replayed forward may still be followed by its backward."""
        replayed = None if self.last is None else self.last()
        return replayed is not None and not replayed.done

    def _free_last_batch(self) -> None:
        """Finish what reads the last batch; copy those of its gradients that are still in use."""
        if self.running_sorts is not None:
            self.running_sorts.join()
            self.running_sorts = None
        held = [t for recorded in self.lending for t in recorded.still_in_use()]
        self.lending.clear()
        if held:
            copies.move_to_own_memory(held)
            row_sorts.forget()

    # ------------------------------------------------------------ the job: see recordings.Job

    def run_eagerly(self, tree: Any) -> Any:
        """A forward as always."""
        assert self._run is not None
        for node in self.weights_nodes:
            node.prepare_for_eager()
        self._modules = list(self._model.modules())
        self._inputs.forget()
        # Casts of weights that autocast keeps are those of another call.
        torch.clear_autocast_cache()
        result = self._run(*tree)
        torch.clear_autocast_cache()
        return result

    def begin(self, made: Recording) -> Callable[[Any], Any]:
        """The same is recorded."""
        return self.run_eagerly

    def check(self) -> None:
        """Neither leaves anything on the host."""

    def undo(self) -> None:
        """Nothing to take back."""

    def _make(self, made: Recording, inputs: StaticInputs) -> Callable[[], Any]:
        """Record a forward and its backward; returns what replays it. Raises Unrecordable."""
        made.keep(*children_of(self._modules))
        result, forward = self._recorder.record(lambda: self.run_eagerly(inputs.tree))
        leaves, spec = pytree.tree_flatten(result)
        differentiable = [
            k for k, t in enumerate(leaves) if isinstance(t, Tensor) and t.requires_grad
        ]
        if not differentiable:
            raise Unrecordable("no result wants a gradient")
        outs = [leaves[k] for k in differentiable]
        saved = SavedParameters(outs, self._model.parameters())
        weights: list[Tensor] = [p for p in self._model.parameters() if p.requires_grad]
        upstream = [torch.zeros_like(t, requires_grad=False) for t in outs]

        def differentiate() -> tuple[Tensor | None, ...]:
            found: tuple[Tensor | None, ...] = torch.autograd.grad(
                outs, weights, upstream, allow_unused=True
            )
            return found

        with _unhooked(weights):  # hooks are called with what replays give
            grads, backward = self._recorder.record(differentiate)
        results = [t.detach() if isinstance(t, Tensor) else t for t in leaves]
        return ForwardBackward(
            self, forward, backward, results, spec, differentiable, upstream, weights, grads, saved
        ).run


def must_not_record(why_stale: Callable[[], str | None] | None) -> bool:
    """Whether a call must not be recorded. ``why_stale``: of the model, where it has such: why its
    graphs no longer match its modules.
    """
    if torch._C._len_torch_dispatch_stack() or transformed():
        return True
    return why_stale is not None and why_stale() is not None


@contextlib.contextmanager
def _unhooked(weights: Sequence[Tensor]) -> Iterator[None]:
    """Inside, hooks of the ``weights`` are not called, since their work would be recorded."""
    kept = [(hooks, dict(hooks)) for w in weights if (hooks := w._backward_hooks)]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, known in kept:
            hooks.update(known)
