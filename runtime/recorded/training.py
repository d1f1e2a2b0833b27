"""Forward and backward of a model as two CUDA graphs: ``mode="graph"`` in a loop left as it is.

    optimizer.zero_grad()
    loss = loss_fn(fast(*batch), label)    # the forward is replayed
    loss.backward()                        # and here the backward, from the output to the gradients
    optimizer.step()

The optimizer's step is replayed as well if the gradients are still those of the backward
(:mod:`.step`). Loss, clipping and scaling run as always; :class:`~.training_step.TrainingStep`
records those too. The next replay reuses the memory of the present one, so:

* results are copies, and so are gradients of dense parameters (:mod:`.gradients.ends`). Row
  gradients are lent; those that are still in use before the next forward are turned into copies
  then, and none is copied if gradients are set to None before the forward.
* one forward can await its backward at a time. Another one before that backward runs as always,
  with the same numbers.
* a second backward through one forward, and ``create_graph=True``, raise.

The backward runs in the thread that calls it (:mod:`.gradients.one_thread`). Where the step is
replayed too, its ids are sorted beside the forward (:mod:`.gradients.early_sort`).

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

from recast.errors import UsageError
from recast.runtime.gpu import copies
from recast.runtime.gpu.copies import Copies
from recast.runtime.op import transformed
from recast.runtime.recorded.batches.known import Batches
from recast.runtime.recorded.batches.places import Bounds, Places, asks
from recast.runtime.recorded.batches.room import Room
from recast.runtime.recorded.gradients import one_thread
from recast.runtime.recorded.gradients.early_sort import Beside
from recast.runtime.recorded.gradients.ends import Ends, Homes
from recast.runtime.recorded.gradients.lent_rows import Lent
from recast.runtime.recorded.recording import Recorder, Recording, Unrecordable
from recast.runtime.recorded.recordings import Recordings, children_of
from recast.runtime.recorded.state.model import ModelState
from recast.runtime.recorded.state.reads import Reads
from recast.runtime.recorded.step import Steps
from recast.runtime.rows import cuda as row_cuda
from recast.runtime.rows.grad import RowGrad

Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]

_WARM = 2  # backwards that run as always first, to warm up libraries and kernels


class RecordedTraining:
    """Calls ``run`` of ``model``, which is on ``device``, where gradients are asked for."""

    def __init__(self, model: nn.Module, device: torch.device, recorder: Recorder) -> None:
        self._model, self._device, self._recorder = model, device, recorder
        self._modules = list(model.modules())
        self._places = Places(model)
        self._batches = Batches(device)
        self._state = ModelState(device.type, uncaptured=asks(model, "uncaptured"))
        self._unfused = asks(model, "unfused")
        self._run: Run | None = None
        self._bounds = Bounds(None)
        self._backwards = 0
        self._recordings = Recordings(
            'mode="graph"', self, recorder, None, warmup=2, most=8, make=self._make
        )
        self.lenders: set[Pair] = set()
        self.ends: weakref.WeakSet[Ends] = weakref.WeakSet()
        self.last: weakref.ref[Turn] | None = None
        self.begun: Beside | None = None  # of the last forward
        self.steps = Steps(recorder, device, self.is_under_way)

    def __call__(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``run(args, kwargs)`` returns."""
        batch = self._batches.of((args, kwargs))
        if batch.wants_grad() or leaves_alone(self._unfused):
            return run(args, kwargs)
        state = self._state.of(self._modules)
        if not self._state.wants:
            return run(args, kwargs)
        self._run = run
        if self._backwards < _WARM:
            return self._watched(self._recordings.always(batch))
        if self.is_under_way():
            return self._recordings.always(batch)
        self._part()
        places = self._places.of(batch, args, kwargs)
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
        turn = None if self.last is None else self.last()
        return turn is not None and not turn.done

    def _part(self) -> None:
        """Finish what reads the last batch; copy those of its gradients that are still in use."""
        if self.begun is not None:
            self.begun.join()
            self.begun = None
        held = [t for pair in self.lenders for t in pair.parted()]
        self.lenders.clear()
        if held:
            copies.part(held)
            row_cuda.forget()

    # ------------------------------------------------------------ the job: see recordings.Job

    def always(self, tree: Any) -> Any:
        """A forward as always."""
        assert self._run is not None
        for ends in self.ends:
            ends.let_go()
        self._modules = list(self._model.modules())
        self._places.forget()
        # Casts of weights that autocast keeps are those of another call.
        torch.clear_autocast_cache()
        result = self._run(*tree)
        torch.clear_autocast_cache()
        return result

    def begin(self, made: Recording) -> Callable[[Any], Any]:
        """The same is recorded."""
        return self.always

    def check(self) -> None:
        """Neither leaves anything on the host."""

    def undo(self) -> None:
        """Nothing to take back."""

    def _make(self, made: Recording, room: Room) -> Callable[[], Any]:
        """Record a forward and its backward; returns what replays it. Raises Unrecordable."""
        made.keep(*children_of(self._modules))
        result, forward = self._recorder.record(lambda: self.always(room.tree))
        leaves, spec = pytree.tree_flatten(result)
        wanting = [k for k, t in enumerate(leaves) if isinstance(t, Tensor) and t.requires_grad]
        if not wanting:
            raise Unrecordable("no result wants a gradient")
        outs = [leaves[k] for k in wanting]
        reads = Reads(outs, self._model.parameters())
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
        return Pair(
            self, forward, backward, results, spec, wanting, upstream, weights, grads, reads
        ).run


def leaves_alone(unfused: Callable[[], str | None] | None) -> bool:
    """Whether a call must not be recorded. ``unfused``: of the model, where it has such: why its
    graphs no longer match its modules.
    """
    if torch._C._len_torch_dispatch_stack() or transformed():
        return True
    return unfused is not None and unfused() is not None


class Turn:
    """One replayed forward, as long as a backward through it is possible."""

    done = False


class Pair:
    """A recorded forward and its backward, with the memory that they use.

    wanting: places of the ``results`` with gradients, which are to be in ``upstream``; grads: of
    the ``weights``.
    """

    def __init__(
        self, owner: RecordedTraining, forward: Callable[[], None], backward: Callable[[], None],
        results: list[Any], spec: pytree.TreeSpec, wanting: list[int], upstream: list[Tensor],
        weights: list[Tensor], grads: Sequence[Tensor | None], reads: Reads,
    ) -> None:  # fmt: skip
        self._owner, self._forward, self._backward = owner, forward, backward
        self._reads = reads
        self.beside = Beside()
        self._results, self._spec, self._wanting = results, spec, wanting
        self._single = spec.is_leaf()  # the result is a tensor, which has a gradient
        self._upstream, self._grads, self.weights = upstream, grads, weights
        self._dense, self._lent = _dense(grads), Lent(grads)
        self.of_batch = self._lent.of_batch
        self._ends = Ends(weights)
        owner.ends.add(self._ends)
        self._homes = Homes({k: weights[k] for k in self._dense})
        self._to_homes, self._sources = self._copies(), list(self._dense.values())
        # Of each weight where its gradient is in a list of rows, dense ones and None.
        own = {k: n for n, k in enumerate((*self._lent.places, *self._dense))}
        self._order = [own.get(k, len(own)) for k in range(len(weights))]
        # Those that are neither autograd brings.
        self._simple = all([g is None or k in own for k, g in enumerate(grads)])
        self._given: list[Tensor | None] | None = None

    def run(self) -> Any:
        """Replay the forward; returns results that the next replay does not overwrite."""
        self.beside.begins()
        self._owner.begun = self.beside
        self._forward()
        self._reads.begin()
        turn = Turn()
        self._owner.last = weakref.ref(turn)
        found = iter(_apply(self, turn, self._ends.joint()))
        one_thread.begin()
        if self._single:
            return next(found)
        wanting = {*self._wanting}
        return pytree.tree_unflatten(
            [
                next(found) if k in wanting else t.clone() if isinstance(t, Tensor) else t
                for k, t in enumerate(self._results)
            ],
            self._spec,
        )

    def wanted(self) -> tuple[Tensor, ...]:
        """Copies of the results with gradients."""
        return tuple([self._results[k].clone() for k in self._wanting])

    def given(self) -> list[Tensor | None] | None:
        """The gradients that the last backward gave to the weights, if they are still in their
        usual memory and rows were not scaled; None otherwise.
        """
        there = self._given is not None and self._lent.as_given() and self._homes.are_there()
        return self._given if there else None

    def parted(self) -> list[Tensor]:
        """Those of the lent gradients that are still in use."""
        self._given = None
        return self._lent.parted()

    def twins(self) -> list[Tensor | None]:
        """Gradients in the same memory as those of :meth:`given`, for a recording to keep."""
        own = {**self._lent.twins(), **self._homes.twins()}
        return [own.get(k) for k in range(len(self.weights))]

    def differentiate(self, turn: Turn, grads: Sequence[Tensor | None]) -> Tensor | None:
        """Replay the backward and bring the gradients to the weights; what :meth:`Ends.leave`
        gives where autograd has to bring some.
        """
        last = self._owner.last
        if turn.done or last is None or last() is not turn:
            raise UsageError(
                'mode="graph": a second backward through one forward',
                why="its memory has been given to what came after the first",
                tries=("sum the losses and call backward once", 'leave mode="graph" out'),
            )
        turn.done = True
        self._reads.check()
        if self.weights[0].is_cuda:
            _queue_callback(self._ends.lets_follow)
        for held, grad in zip(self._upstream, grads, strict=True):
            if grad is None:
                held.zero_()
            else:
                held.copy_(grad)
        self._backward()
        return self._bring()

    def _copies(self) -> Copies | None:
        """What copies all dense gradients to their homes; None where torch has to."""
        homes, grads = list(self._homes.twins().values()), list(self._dense.values())
        alike = [(a.dtype, a.shape) for a in homes] == [(b.dtype, b.shape) for b in grads]
        made = copies.to(homes) if alike else None
        return made if made is not None and made.takes(grads) else None

    def _bring(self) -> Tensor | None:
        free = self._ends.open()
        lent, homes = self._lent.again(), self._homes
        self._owner.lenders.add(self)
        at_home = homes.free()
        if free is self._ends.all and self._simple and all(at_home):
            every: list[Tensor | None] = [*lent.grads, *homes.tensors, None]
            found = [every[n] for n in self._order]
            self._fill(homes.tensors, True)
            for weight, grad in zip(self.weights, found, strict=True):
                weight.grad = grad
            self._given = found
            self._owner.steps.gave(self)
            return None
        return self._bring_some(lent.grads, free or [False] * len(self.weights), at_home)

    def _bring_some(
        self, rows: Sequence[Tensor], free: list[bool], at_home: list[bool]
    ) -> Tensor | None:
        """Where not every gradient can be set, or not to what was given out before."""
        found = list(self._grads)
        for k, row in zip(self._lent.places, rows, strict=True):
            found[k] = row
        dense: list[Tensor] = []
        for k, home, is_free in zip(self._dense, self._homes.tensors, at_home, strict=True):
            own = home if free[k] and is_free else torch.empty_like(self.weights[k])
            dense.append(own)
            found[k] = own
        fixed = all([own is home for own, home in zip(dense, self._homes.tensors, strict=True)])
        self._fill(dense, fixed)
        left: list[Tensor | None] = [None] * len(found)
        some = False
        for k, (weight, grad) in enumerate(zip(self.weights, found, strict=True)):
            if grad is None:
                continue
            if free[k] and grad is not self._grads[k]:
                weight.grad = grad
            else:
                left[k] = grad.clone() if grad is self._grads[k] else grad
                some = True
        self._given = found if fixed and not some else None
        self._owner.steps.gave(self)
        return self._ends.leave(left) if some else None

    def _fill(self, targets: list[Tensor], fixed: bool) -> None:
        """Copy dense gradients to ``targets``; ``fixed``: which are their homes."""
        if fixed and self._to_homes is not None:
            self._to_homes.run(self._sources)
        elif self._sources:
            torch._foreach_copy_(targets, self._sources)


class Replayed(torch.autograd.Function):
    """Inputs: the pair, its turn, the ends of the pair. The forward has been replayed."""

    @staticmethod
    def forward(ctx: Any, pair: Pair, turn: Turn, ends: Tensor) -> tuple[Tensor, ...]:
        ctx.pair, ctx.turn = pair, turn
        ctx.set_materialize_grads(False)
        return pair.wanted()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UsageError(
                'mode="graph": backward with create_graph=True',
                why="a replayed backward cannot be differentiated",
                tries=('leave mode="graph" out',),
            )
        pair: Pair = ctx.pair
        return None, None, pair.differentiate(ctx.turn, grads)


_queue_callback: Any = torch.autograd.Variable._execution_engine.queue_callback
# Skips the search for torch transforms among the arguments: a replay has none.
_apply: Any = super(torch.autograd.Function, Replayed).apply


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


def _dense(grads: Sequence[Tensor | None]) -> dict[int, Tensor]:
    """The dense ones among these gradients, by their positions."""
    found: dict[int, Tensor] = {}
    for k, grad in enumerate(grads):
        if isinstance(grad, RowGrad):
            if not grad.lazy:
                found[k] = grad.dense()
        elif grad is not None and grad.layout is torch.strided:
            found[k] = grad
    return found
