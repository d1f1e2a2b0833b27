"""Forward and backward of a model as two CUDA graphs: ``mode="graph"`` in a loop left as it is.

    optimizer.zero_grad()
    loss = loss_fn(fast(*batch), label)    # the forward is replayed
    loss.backward()                        # and here the backward, between the loss and the grads
    optimizer.step()

Loss, clipping, scaling and optimizer run as always; :class:`~.training_step.TrainingStep` records
those too. The memory of a replay belongs to the next one, so:

* results are copies; so are gradients of dense parameters. Row gradients are lent, and turned into
  copies before the next forward where somebody holds them still: no copy is made where gradients
  are set to None before the forward.
* one forward is under way at a time. Another one before its backward runs as always, with the same
  numbers.
* a second backward through one forward, and ``create_graph=True``, raise.

A call runs as always, and is not recorded, where an input requires a gradient, no parameter does,
or a tracer or transform of torch is at work.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from recast.errors import UsageError
from recast.runtime.batch import Batch, Bounds, Places, Ragged, Room
from recast.runtime.embedding_backward import left_to_autograd
from recast.runtime.lent_rows import Lent
from recast.runtime.op import transformed
from recast.runtime.recording import Recorder, Recording, Unrecordable
from recast.runtime.recordings import Recordings, state_of
from recast.runtime.rows import cuda as row_cuda
from recast.runtime.rows.grad import RowGrad

Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]

_WARM = 2  # backwards that run as always first: libraries and kernels prepare themselves


class RecordedTraining:
    """Calls ``run`` of ``model``, which is on ``device``, where gradients are asked for.

    ragged: of the arguments of a call, those to which ids may be added without effect.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, recorder: Recorder, ragged: Ragged | None
    ) -> None:
        self._model, self._device, self._recorder = model, device, recorder
        self._modules = list(model.modules())
        self._places = Places(ragged)
        self._run: Run | None = None
        self._bounds = Bounds(None)
        self._backwards = 0
        self._recordings = Recordings(
            'mode="graph"', self, recorder, None, warmup=2, most=8, make=self._make
        )
        self.lent: set[Lent] = set()
        self.last: weakref.ref[Turn] | None = None

    def __call__(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``run(args, kwargs)`` returns."""
        batch = Batch((args, kwargs), self._device)
        modules = self._modules
        held = {id(p): p for m in modules for p in m._parameters.values() if p is not None}
        if self._leaves_alone(run, batch, held.values()):
            return run(args, kwargs)
        self._run = run
        if self._backwards < _WARM:
            return self._watched(self._recordings.always(batch))
        if self._is_under_way():
            return self._recordings.always(batch)
        self._part()
        places = self._places.of(batch, args, kwargs)
        state = state_of(modules, held.values(), self._device.type)
        return self._recordings.run(batch, self._bounds.of(batch, places), state)

    @staticmethod
    def _leaves_alone(run: Run, batch: Batch, parameters: Any) -> bool:
        """Whether this call is none to be recorded."""
        if torch._C._len_torch_dispatch_stack() or transformed():
            return True
        if any(t.requires_grad for t in batch.tensors):
            return True
        unfused = getattr(run, "unfused", None)
        if unfused is not None and unfused() is not None:
            return True  # what a replay would not call was hooked or replaced
        return not any(p.requires_grad for p in parameters)

    def _watched(self, result: Any) -> Any:
        """Count the backward through ``result``."""
        first = True

        def seen(grad: Tensor) -> None:
            nonlocal first
            self._backwards += first
            first = False

        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(seen)
        return result

    def _is_under_way(self) -> bool:
        """Whether a replayed forward may still be followed by its backward."""
        turn = None if self.last is None else self.last()
        return turn is not None and not turn.done

    def _part(self) -> None:
        """Give what is still held of the last gradients memory of its own."""
        held = [t for lent in self.lent for t in lent.parted()]
        self.lent.clear()
        for t in held:
            t.data = t.clone()
        if held:
            row_cuda.forget()

    # ------------------------------------------------------------ the job: see recordings.Job

    def always(self, tree: Any) -> Any:
        """A forward as always."""
        assert self._run is not None
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
        """Record a forward and its backward; what replays the forward. Raises Unrecordable."""
        result, forward = self._recorder.record(lambda: self.always(room.tree))
        leaves, spec = pytree.tree_flatten(result)
        wanting = [k for k, t in enumerate(leaves) if isinstance(t, Tensor) and t.requires_grad]
        if not wanting:
            raise Unrecordable("no result wants a gradient")
        outs = [leaves[k] for k in wanting]
        weights: list[Tensor] = [p for p in self._model.parameters() if p.requires_grad]
        upstream = [torch.zeros_like(t, requires_grad=False) for t in outs]

        def differentiate() -> tuple[Tensor | None, ...]:
            found: tuple[Tensor | None, ...] = torch.autograd.grad(
                outs, weights, upstream, allow_unused=True
            )
            return found

        grads, backward = self._recorder.record(differentiate)
        results = [t.detach() if isinstance(t, Tensor) else t for t in leaves]
        return Pair(
            self, forward, backward, results, spec, wanting, upstream, weights, grads,
            _dense(grads), Lent(grads),
        ).run  # fmt: skip


class Turn:
    """One replayed forward, as long as a backward through it is possible."""

    done = False


@dataclass(frozen=True, eq=False)
class Pair:
    """A recorded forward and its backward, with the memory that they read and write."""

    owner: RecordedTraining
    forward: Callable[[], None]
    backward: Callable[[], None]
    results: list[Any]
    spec: pytree.TreeSpec
    wanting: list[int]  # results with gradients
    upstream: list[Tensor]  # their gradients
    weights: list[Tensor]
    grads: Sequence[Tensor | None]  # of the weights
    dense: dict[int, Tensor]  # those of them that are copied
    lent: Lent  # and those that are lent

    def run(self) -> Any:
        """Replay the forward; results that the next replay does not overwrite."""
        self.forward()
        turn = Turn()
        self.owner.last = weakref.ref(turn)
        found = iter(Replayed.apply(self, turn, *self.weights))
        wanting = {*self.wanting}
        return pytree.tree_unflatten(
            [
                next(found) if k in wanting else t.clone() if isinstance(t, Tensor) else t
                for k, t in enumerate(self.results)
            ],
            self.spec,
        )

    def gradients(self, turn: Turn, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay the backward; gradients of the weights."""
        last = self.owner.last
        if turn.done or last is None or last() is not turn:
            raise UsageError(
                'mode="graph": a second backward through one forward',
                why="its memory has been given to what came after the first",
                tries=("sum the losses and call backward once", 'leave mode="graph" out'),
            )
        turn.done = True
        for held, grad in zip(self.upstream, grads, strict=True):
            if grad is None:
                held.zero_()
            else:
                held.copy_(grad)
        self.backward()
        own = [torch.empty_like(t) for t in self.dense.values()]
        if own:
            torch._foreach_copy_(own, list(self.dense.values()))
        rows = self.lent.again()
        self.owner.lent.add(self.lent)
        copied: dict[int, Tensor] = {**rows, **dict(zip(self.dense, own, strict=True))}
        return [
            g if g is None else copied[k] if k in copied else g.clone()
            for k, g in enumerate(self.grads)
        ]


class Replayed(torch.autograd.Function):
    """Inputs: the pair, its turn, the weights. The forward has been replayed."""

    @staticmethod
    def forward(ctx: Any, pair: Pair, turn: Turn, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.pair, ctx.turn = pair, turn
        ctx.set_materialize_grads(False)
        return tuple([pair.results[k].clone() for k in pair.wanting])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UsageError(
                'mode="graph": backward with create_graph=True',
                why="a replayed backward cannot be differentiated",
                tries=('leave mode="graph" out',),
            )
        pair: Pair = ctx.pair
        found = pair.gradients(ctx.turn, grads)
        return None, None, *left_to_autograd(ctx, pair.weights, found)


def _dense(grads: Sequence[Tensor | None]) -> dict[int, Tensor]:
    """The dense tensors of those gradients that are such, by their places."""
    found: dict[int, Tensor] = {}
    for k, grad in enumerate(grads):
        if isinstance(grad, RowGrad):
            if not grad.lazy:
                found[k] = grad.dense()
        elif grad is not None and grad.layout is torch.strided:
            found[k] = grad
    return found
