"""How the gradients of a replayed backward reach the weights: through one node of the autograd
graph.

A forward with an input for each of 60 weights, and a backward that asks the engine about each of
them, take the host longer than all of its other work. So the weights are inputs of one node that is
made once (:class:`Ends`), and forwards use the output of that node. If a pass ends at the leaves,
the replay sets the gradients of the weights itself, where this cannot be noticed; otherwise
autograd takes them from the node.

Gradients of dense parameters have homes: memory outside the recording, to which each replay copies
them. If a gradient from the last replay is no longer in use, the next replay hands out the same
tensor again, so that a recorded optimizer step finds it at the same address. As with any in-place
write, the loop must wait for other streams that were given that memory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recast.runtime.gpu import cuda_launch
from recast.runtime.recorded.state.same import Where, attributes

_TAKEN = ("grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_GROUPS = torch.distributed.is_available()


class _Left:
    """Gradients that autograd has to deliver to the weights."""

    grads: Sequence[Tensor | None] = ()


class _Joint(torch.autograd.Function):
    """Inputs: the gradients left to autograd, a probe, the weights. The output stands for all
    weights.
    """

    @staticmethod
    def forward(ctx: Any, left: _Left, probe: Tensor, *weights: Tensor) -> Tensor:
        ctx.left, ctx.count = left, len(weights)
        ctx.set_materialize_grads(False)
        return torch.zeros((), device=probe.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        left, ctx.left.grads = ctx.left.grads, ()
        if grad is None or not left:
            return (None,) * (2 + ctx.count)
        return None, None, *left


class Ends:
    """The ends of all backwards through one recording. ``weights``: leaves that require gradients,
    on one device.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = list(weights)
        self._shapes = [w.shape for w in self._weights]
        self._nothing = [None] * (len(_TAKEN) * len(self._weights))
        self.all = [True] * len(self._weights)
        self._device = self._weights[0].device
        self._left = _Left()
        self.signal = torch.zeros((), device=self._device)
        self._joint: Tensor | None = None
        self._make()

    def let_go(self) -> None:
        """Release the nodes if the shape of a weight has changed: autograd keeps one node per
        weight as long as it is referenced, and that accepts only gradients of the shape it was made
        for.
        """
        if [w.shape for w in self._weights] != self._shapes:
            self._joint = None

    def _make(self) -> Tensor:
        self._stream = self._current()
        self._there = (
            torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        )
        with torch.enable_grad():
            probe = torch.zeros((), device=self._device, requires_grad=True)
            self._joint = joint = _Joint.apply(self._left, probe, *self._weights)
        return joint

    def _current(self) -> int:
        return cuda_launch.raw_stream(self._device.index) if self._device.type == "cuda" else 0

    def joint(self) -> Tensor:
        """The input for a forward; to be called on the forward's stream."""
        if self._joint is None or self._current() != self._stream:
            return self._make()  # a node runs on the stream it was made on
        return self._joint

    def lets_follow(self) -> None:
        """Make the current stream wait for that of the ends; the engine does the same for gradients
        that it sets itself, with the stream on which backward was called.
        """
        if self._there is not None and self._current() != self._stream:
            torch.cuda.current_stream(self._device).wait_stream(self._there)

    def open(self) -> list[bool] | None:
        """For each weight, whether the replay may set its gradient in the running pass; ``all`` if
        it may set every one, None if it may set none.

        The engine has to deliver it if the pass does not end at the leaves, if the weight has a
        gradient or hooks, if its node is referenced elsewhere, or if there are several processes
        (DDP hooks those nodes invisibly).
        """
        if _GROUPS and torch.distributed.is_initialized():
            return None
        if self._joint is None or self._joint.grad_fn is None:
            return None
        # Fetched anew at each pass: other recordings end at the same nodes, and references kept
        # there would count.
        nodes = [node for node, _ in self._joint.grad_fn.next_functions]
        # The first belongs to the probe, a private leaf: only a pass to all leaves reaches it.
        if not torch._C._will_engine_execute_node(nodes[0]):  # type: ignore[arg-type]
            return None
        alone, *held = map(sys.getrefcount, nodes)
        if held.count(alone) == len(held) and attributes(self._weights, _TAKEN, self._nothing):
            return self.all
        return [
            count == alone and w.grad is None
            and not w._backward_hooks and not w._post_accumulate_grad_hooks
            for w, count in zip(self._weights, held, strict=True)
        ]  # fmt: skip

    def leave(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Leave ``grads`` for autograd to deliver; returns the gradient for :meth:`joint`."""
        self._left.grads = grads
        return self.signal


class _Home(NamedTuple):
    """A gradient tensor that is handed out, and its storage.

    ``twin`` has the same memory, for recordings to keep.
    """

    tensor: Tensor
    twin: Tensor
    storage: torch.UntypedStorage
    key: int  # of the storage


class Homes:
    """Fixed memory for the gradients of ``weights``, by their index."""

    def __init__(self, weights: dict[int, Tensor]) -> None:
        self._homes = {k: self._made(w) for k, w in weights.items()}
        self._all = list(self._homes.values())
        self.tensors = [home.tensor for home in self._all]  # in the order of the weights
        self._where = [Where([home.tensor]) for home in self._all]
        self._everywhere = Where(self.tensors)
        self._alone = [_holders(home) for home in self._all]

    @staticmethod
    def _made(weight: Tensor) -> _Home:
        twin = torch.empty_like(weight, requires_grad=False)
        tensor = twin.detach()
        storage = tensor.untyped_storage()
        return _Home(tensor, twin, storage, storage._cdata)

    def free(self) -> list[bool]:
        """For each, whether it is not in use elsewhere, and still as it was made."""
        now = [*map(_holders, self._all)]
        if now == self._alone and self._everywhere.stands():
            return [True] * len(now)
        return [
            held == alone and where.stands()
            for held, alone, where in zip(now, self._alone, self._where, strict=True)
        ]

    def are_there(self) -> bool:
        """Whether each tensor still has the memory that it was made with."""
        return self._everywhere.stands()

    def twins(self) -> dict[int, Tensor]:
        """Tensors in the same memory, for a recording to keep."""
        return {k: home.twin for k, home in self._homes.items()}


def _holders(home: _Home) -> tuple[object, ...]:
    """The reference counts of its parts, and what only a holder of it can have changed."""
    tensor, count = home.tensor, sys.getrefcount
    return (
        count(tensor), tensor._use_count(), count(home.storage),  # type: ignore[attr-defined]
        torch._C._storage_Use_Count(home.key), len(tensor.__dict__), tensor.requires_grad,
        tensor._backward_hooks is None,
    )  # fmt: skip
