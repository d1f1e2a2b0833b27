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
from collections import Counter
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from recast.runtime.gpu import cuda_launch
from recast.runtime.recorded.state.same import same_attributes, same_reference_counts

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


class _Leaves:
    """The ``nodes`` in which the gradients of some weights end.

    Python makes an object of each when it is asked for, which for 61 takes as long as all other
    checks of a backward. So they are kept, once for all recordings with the same weights: anybody
    else who holds one is noticed by the number of its references.
    """

    def __init__(self, nodes: Sequence[Any]) -> None:
        with torch.enable_grad():
            self._product = torch.zeros((), device="cpu", requires_grad=True) * 1
        assert self._product.grad_fn is not None
        alone = self._product.grad_fn.next_functions[0][0]  # which nobody else can hold
        self._counted = [alone, *nodes]

    def are_alone(self) -> bool:
        """Whether nobody else holds any of them."""
        return same_reference_counts(self._counted)

    def nodes(self) -> Sequence[Any]:
        """All of them."""
        return self._counted[1:]


_LEAVES: WeakValueDictionary[tuple[int, ...], _Leaves] = WeakValueDictionary()  # by their nodes


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
        self._probe: Any = None  # the node of a private leaf: only a pass to all leaves reaches it
        self._leaves: _Leaves | None = None
        self._make()

    def prepare_for_eager(self) -> None:
        """Called before the weights are used without a replay. Releases the objects of the nodes of
        the weights, whose references others count, too; and if the shape of a weight has changed,
        the nodes: autograd keeps one node per weight as long as it is referenced, and that accepts
        only gradients of the shape it was made for.
        """
        self._leaves = None
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
        self._probe, self._leaves = output.grad_fn.next_functions[0][0], None
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
        if self._output is None or not torch._C._will_engine_execute_node(self._probe):
            return None
        if self._leaves is None:
            self._leaves = self._kept_leaves()
        if self._leaves.are_alone() and same_attributes(self._weights, _TAKEN, self._nothing):
            return self.all
        return self._settable_one_by_one()

    def _kept_leaves(self) -> _Leaves:
        """The leaves of this node, if they are kept already, or else from now on."""
        nodes = self._leaf_nodes()
        key = tuple(map(id, nodes))
        found = _LEAVES.get(key)
        if found is None:
            found = _LEAVES[key] = _Leaves(nodes)
        return found

    def _leaf_nodes(self) -> list[Any]:
        assert self._output is not None and self._output.grad_fn is not None
        return [node for node, _ in self._output.grad_fn.next_functions[1:]]

    def _settable_one_by_one(self) -> list[bool]:
        # Recordings of other sets of the same weights keep some of these nodes as well.
        # A list of references: other threads may add to the dict meanwhile.
        known = [leaves for ref in _LEAVES.valuerefs() if (leaves := ref()) is not None]
        kept = Counter(id(node) for leaves in known for node in leaves.nodes())
        nodes = [self._probe, *self._leaf_nodes()]
        counts = [*map(sys.getrefcount, nodes)]  # all in one way, which adds to each the same
        held = [n - kept[id(node)] for n, node in zip(counts, nodes, strict=True)]
        alone, held = held[0] - 1, held[1:]  # the first is held by ``self`` as well
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
