"""How the gradients of a replayed backward reach the weights: through one node of the autograd
graph.

A forward with an input for each of 60 weights, and a backward that asks the engine about each of
them, take the host longer than all of its other work. So the weights are inputs of one node that is
made once (:class:`WeightsNode`), and forwards use the output of that node. If a pass ends at the
leaves, the replay sets the gradients of the weights itself, where this cannot be noticed; otherwise
autograd takes them from the node.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recast.runtime.gpu import cuda_launch
from recast.runtime.recorded.state.same import same_attributes

_TAKEN = ("grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_GROUPS = torch.distributed.is_available()


class _ToDeliver:
    """Gradients that autograd has to deliver to the weights."""

    grads: Sequence[Tensor | None] = ()


class _AllWeights(torch.autograd.Function):
    """Inputs: the gradients to deliver, a probe, the weights. The output stands for all weights."""

    @staticmethod
    def forward(ctx: Any, to_deliver: _ToDeliver, probe: Tensor, *weights: Tensor) -> Tensor:
        ctx.to_deliver, ctx.count = to_deliver, len(weights)
        ctx.set_materialize_grads(False)
        return torch.zeros((), device=probe.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        to_deliver, ctx.to_deliver.grads = ctx.to_deliver.grads, ()
        if grad is None or not to_deliver:
            return (None,) * (2 + ctx.count)
        return None, None, *to_deliver


class WeightsNode:
    """The node in which all backwards through one recording end. ``weights``: leaves that require
    gradients, on one device.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = list(weights)
        self._shapes = [w.shape for w in self._weights]
        self._nothing = [None] * (len(_TAKEN) * len(self._weights))
        self.all = [True] * len(self._weights)
        self._device = self._weights[0].device
        self._to_deliver = _ToDeliver()
        self.signal = torch.zeros((), device=self._device)
        self._output: Tensor | None = None
        self._make()

    def drop_if_reshaped(self) -> None:
        """Release the nodes if the shape of a weight has changed: autograd keeps one node per
        weight as long as it is referenced, and that accepts only gradients of the shape it was made
        for.
        """
        if [w.shape for w in self._weights] != self._shapes:
            self._output = None

    def _make(self) -> Tensor:
        self._stream = self._current()
        self._stream_of_node = (
            torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        )
        with torch.enable_grad():
            probe = torch.zeros((), device=self._device, requires_grad=True)
            self._output = output = _AllWeights.apply(self._to_deliver, probe, *self._weights)
        return output

    def _current(self) -> int:
        return cuda_launch.raw_stream(self._device.index) if self._device.type == "cuda" else 0

    def output(self) -> Tensor:
        """The input for a forward; to be called on the forward's stream."""
        if self._output is None or self._current() != self._stream:
            return self._make()  # a node runs on the stream it was made on
        return self._output

    def sync_current_stream(self) -> None:
        """Make the current stream wait for that of the node; the engine does the same for gradients
        that it sets itself, with the stream on which backward was called.
        """
        if self._stream_of_node is not None and self._current() != self._stream:
            torch.cuda.current_stream(self._device).wait_stream(self._stream_of_node)

    def settable(self) -> list[bool] | None:
        """For each weight, whether the replay may set its gradient in the running pass; ``all`` if
        it may set every one, None if it may set none.

        The engine has to deliver it if the pass does not end at the leaves, if the weight has a
        gradient or hooks, if its node is referenced elsewhere, or if there are several processes
        (DDP hooks those nodes invisibly).
        """
        if _GROUPS and torch.distributed.is_initialized():
            return None
        if self._output is None or self._output.grad_fn is None:
            return None
        # Fetched anew at each pass: other recordings end at the same nodes, and references kept
        # there would count.
        nodes = [node for node, _ in self._output.grad_fn.next_functions]
        # The first belongs to the probe, a private leaf: only a pass to all leaves reaches it.
        if not torch._C._will_engine_execute_node(nodes[0]):  # type: ignore[arg-type]
            return None
        alone, *held = map(sys.getrefcount, nodes)
        if held.count(alone) == len(held) and same_attributes(self._weights, _TAKEN, self._nothing):
            return self.all
        return [
            count == alone and w.grad is None
            and not w._backward_hooks and not w._post_accumulate_grad_hooks
            for w, count in zip(self._weights, held, strict=True)
        ]  # fmt: skip

    def deliver(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Leave ``grads`` for autograd to deliver; returns the gradient for :meth:`output`."""
        self._to_deliver.grads = grads
        return self.signal
