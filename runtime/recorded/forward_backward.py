"""One recorded forward with its backward, and the autograd function through which a loop replays
them; :mod:`.training` says when.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from recast.errors import UsageError
from recast.runtime.gpu import copies
from recast.runtime.recorded.gradients import one_thread
from recast.runtime.recorded.gradients.early_sorts import EarlySorts
from recast.runtime.recorded.gradients.grad_buffers import GradBuffers
from recast.runtime.recorded.gradients.lent_row_grads import LentRowGrads
from recast.runtime.recorded.gradients.weights_node import WeightsNode
from recast.runtime.recorded.state.same import set_attributes
from recast.runtime.recorded.state.saved_parameters import SavedParameters
from recast.runtime.rows.grad import RowGrad

if TYPE_CHECKING:
    from recast.runtime.recorded.training import RecordedTraining


class ReplayedForward:
    """One replayed forward, as long as a backward through it is possible."""

    done = False


class ForwardBackward:
    """A recorded forward and its backward, with the memory that they use.

    differentiable: indices of the ``results`` with gradients, which are to be in ``upstream``;
    grads: of the ``weights``.
    """

    def __init__(
        self, owner: RecordedTraining, forward: Callable[[], None], backward: Callable[[], None],
        results: list[Any], spec: pytree.TreeSpec, differentiable: list[int],
        upstream: list[Tensor], weights: list[Tensor], grads: Sequence[Tensor | None],
        saved: SavedParameters,
    ) -> None:  # fmt: skip
        self._owner, self._replay_forward, self._replay_backward = owner, forward, backward
        self._saved = saved
        self.early_sorts = EarlySorts()
        self._results, self._spec, self._differentiable = results, spec, differentiable
        self._single = spec.is_leaf()  # the result is a tensor, which has a gradient
        self._upstream, self._grads, self.weights = upstream, grads, weights
        self._dense, self._lent = _dense(grads), LentRowGrads(grads)
        self.of_batch = self._lent.of_batch
        self._weights_node = WeightsNode(weights)
        owner.weights_nodes.add(self._weights_node)
        self._buffers = GradBuffers({k: weights[k] for k in self._dense})
        self._sources = list(self._dense.values())
        self._copy_to_buffers = self._copies()
        # Of each weight where its gradient is in a list of rows, dense ones and None.
        own = {k: n for n, k in enumerate((*self._lent.places, *self._dense))}
        self._order = [own.get(k, len(own)) for k in range(len(weights))]
        # Those that are neither are delivered by autograd.
        self._all_settable = all([g is None or k in own for k, g in enumerate(grads)])
        self._given_grads: list[Tensor | None] | None = None

    def run(self) -> Any:
        """Replay the forward; returns results that the next replay does not overwrite."""
        self.early_sorts.start()
        self._owner.running_sorts = self.early_sorts
        self._replay_forward()
        self._saved.begin()
        replayed = ReplayedForward()
        self._owner.last = weakref.ref(replayed)
        found = iter(_apply(self, replayed, self._weights_node.output()))
        one_thread.begin()
        if self._single:
            return next(found)
        differentiable = {*self._differentiable}
        return pytree.tree_unflatten(
            [
                next(found) if k in differentiable else t.clone() if isinstance(t, Tensor) else t
                for k, t in enumerate(self._results)
            ],
            self._spec,
        )

    def copied_results(self) -> tuple[Tensor, ...]:
        """Copies of the results with gradients."""
        return tuple([self._results[k].clone() for k in self._differentiable])

    def given_grads(self) -> list[Tensor | None] | None:
        """The gradients that the last backward gave to the weights, if they are still in their
        usual memory and rows were not scaled; None otherwise.
        """
        if self._given_grads is None or not self._lent.unchanged() or not self._buffers.in_place():
            return None
        return self._given_grads

    def still_in_use(self) -> list[Tensor]:
        """Those of the lent gradients that are still in use."""
        self._given_grads = None
        return self._lent.still_in_use()

    def grad_aliases(self) -> list[Tensor | None]:
        """Gradients in the same memory as those of :meth:`given_grads`, for a recording to keep."""
        own = {**self._lent.aliases(), **self._buffers.aliases()}
        return [own.get(k) for k in range(len(self.weights))]

    def differentiate(
        self, replayed: ReplayedForward, grads: Sequence[Tensor | None]
    ) -> Tensor | None:
        """Replay the backward and set the gradients of the weights; returns the gradient for the
        node of the weights if autograd has to deliver some of them.
        """
        last = self._owner.last
        if replayed.done or last is None or last() is not replayed:
            raise UsageError(
                'mode="graph": a second backward through one forward',
                why="its memory has been given to what came after the first",
                tries=("sum the losses and call backward once", 'leave mode="graph" out'),
            )
        replayed.done = True
        self._saved.check()
        if self.weights[0].is_cuda:
            _queue_callback(self._weights_node.sync_current_stream)
        for held, grad in zip(self._upstream, grads, strict=True):
            if grad is None:
                held.zero_()
            else:
                held.copy_(grad)
        self._replay_backward()
        return self._set_grads()

    def _copies(self) -> Callable[[], None] | None:
        """What copies all dense gradients to their buffers; None where torch has to."""
        buffers, grads = list(self._buffers.aliases().values()), self._sources
        alike = [(a.dtype, a.shape) for a in buffers] == [(b.dtype, b.shape) for b in grads]
        made = copies.to(buffers) if alike else None
        return made.from_fixed(grads) if made is not None and made.takes(grads) else None

    def _set_grads(self) -> Tensor | None:
        settable = self._weights_node.settable()
        lent, buffers = self._lent.lend(), self._buffers
        self._owner.lending.add(self)
        unused = buffers.unused()
        if settable is self._weights_node.all and self._all_settable and all(unused):
            every: list[Tensor | None] = [*lent.grads, *buffers.tensors, None]
            found = [every[n] for n in self._order]
            self._copy_dense(buffers.tensors, True)
            set_attributes(self.weights, "grad", found)
            self._given_grads = found
            self._owner.steps.set_source(self)
            return None
        return self._set_some_grads(lent.grads, settable or [False] * len(self.weights), unused)

    def _set_some_grads(
        self, rows: Sequence[Tensor], settable: list[bool], unused: list[bool]
    ) -> Tensor | None:
        """Where not every gradient can be set, or not to what was given out before."""
        found = list(self._grads)
        for k, row in zip(self._lent.places, rows, strict=True):
            found[k] = row
        dense: list[Tensor] = []
        for k, buffer, is_unused in zip(self._dense, self._buffers.tensors, unused, strict=True):
            own = buffer if settable[k] and is_unused else torch.empty_like(self.weights[k])
            dense.append(own)
            found[k] = own
        pairs = zip(dense, self._buffers.tensors, strict=True)
        fixed = all([own is buffer for own, buffer in pairs])
        self._copy_dense(dense, fixed)
        left: list[Tensor | None] = [None] * len(found)
        some = False
        for k, (weight, grad) in enumerate(zip(self.weights, found, strict=True)):
            if grad is None:
                continue
            if settable[k] and grad is not self._grads[k]:
                weight.grad = grad
            else:
                left[k] = grad.clone() if grad is self._grads[k] else grad
                some = True
        self._given_grads = found if fixed and not some else None
        self._owner.steps.set_source(self)
        return self._weights_node.deliver(left) if some else None

    def _copy_dense(self, targets: list[Tensor], fixed: bool) -> None:
        """Copy dense gradients to ``targets``; ``fixed``: which are their buffers."""
        if fixed and self._copy_to_buffers is not None:
            self._copy_to_buffers()
        elif self._sources:
            torch._foreach_copy_(targets, self._sources)


class Replayed(torch.autograd.Function):
    """Its forward, which has been replayed already, gives the results. ``weights``: the output of
    the node of all weights.
    """

    @staticmethod
    def forward(
        ctx: Any, recorded: ForwardBackward, replayed: ReplayedForward, weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.recorded, ctx.replayed = recorded, replayed
        ctx.set_materialize_grads(False)
        return recorded.copied_results()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UsageError(
                'mode="graph": backward with create_graph=True',
                why="a replayed backward cannot be differentiated",
                tries=('leave mode="graph" out',),
            )
        recorded: ForwardBackward = ctx.recorded
        return None, None, recorded.differentiate(ctx.replayed, grads)


_queue_callback: Any = torch.autograd.Variable._execution_engine.queue_callback
# Skips the search for torch transforms among the arguments: a replay has none.
_apply: Any = super(torch.autograd.Function, Replayed).apply


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
