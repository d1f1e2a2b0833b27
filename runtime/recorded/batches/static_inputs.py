"""The fixed memory from which recorded work reads its batch.

Ids and offsets that only lookups of plain tables read are int32 there, whatever they are given as:
the kernels read them two or three times per step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recast.runtime.gpu import copies
from recast.runtime.recorded.batches.batch import Batch
from recast.runtime.recorded.state.same import held_in_torch

_MOST = copies.MOST - 1  # the most ids of a lookup for which offsets fit into int32


class StaticInputs:
    """Fixed memory for the batches of one form, made like ``batch``, but with the length
    ``bounds[k]`` for each tensor k with a bound.
    """

    def __init__(self, batch: Batch, bounds: Sequence[int | None]) -> None:
        self.tensors = list[Tensor]()
        self._ragged = [k for k, bound in enumerate(bounds) if bound is not None]
        narrowed = _narrowed(batch, bounds)
        with torch.inference_mode(False):  # batches made outside of it are written there too
            for k, (t, bound) in enumerate(zip(batch.tensors, bounds, strict=True)):
                shape = tuple(t.shape) if bound is None else (bound,)
                dtype = torch.int32 if k in narrowed else t.dtype
                # Nothing reads ids behind the last end, but they must be valid: 0 is an id in every
                # table.
                self.tensors.append(torch.zeros(shape, dtype=dtype, device=batch.device))
            self._copies = copies.to(self.tensors, narrowed, self._ragged)
        self._in_torch = held_in_torch(self.tensors)
        self._narrows = bool(narrowed)
        assert self._copies is not None or not narrowed  # torch's would wrap numbers
        # Torch copies tensors of one dtype on one device in one launch.
        self._together: dict[torch.dtype, list[int]] = {}
        for k, t in enumerate(self.tensors):
            self._together.setdefault(t.dtype, []).append(k)
        self.tree = batch.tree(self.tensors)
        self._itself = object()  # batches may refer to it without keeping the memory alive
        self.fill(batch)

    def fill(self, batch: Batch) -> None:
        """Copy ``batch`` in, on the current stream; the host waits for pageable memory only."""
        known = batch.learn(self._ragged)
        if known is None or known.inputs is not self._itself:
            one_launch = self._copies is not None and self._copies.takes(batch.tensors)
            if known is not None:
                known.inputs, known.one_launch = self._itself, one_launch
        else:
            one_launch = known.one_launch
        if self._copies is not None and (one_launch or self._narrows):
            self._copies.run(
                batch.tensors if one_launch else self._copies.made_readable(batch.tensors)
            )
        else:
            self._fill_by_torch(batch)

    @torch.no_grad()
    def _fill_by_torch(self, batch: Batch) -> None:
        targets = list(self.tensors)
        for k in self._ragged:
            targets[k] = targets[k][: batch.tensors[k].shape[0]]
        for places in self._together.values():
            there = [k for k in places if batch.tensors[k].device == batch.device]
            if there:
                torch._foreach_copy_([targets[k] for k in there], [batch.tensors[k] for k in there])
            for k in set(places).difference(there):
                targets[k].copy_(batch.tensors[k], non_blocking=True)


def _narrowed(batch: Batch, bounds: Sequence[int | None]) -> frozenset[int]:
    """The tensors of ``batch`` to be stored as int32: those that are int64 and only looked up."""
    looked_up = [] if batch.asked_roles is None else batch.asked_roles.roles.looked_up
    found = frozenset(k for k in looked_up if batch.tensors[k].dtype is torch.int64)
    if not found or not copies.serves(batch.device):
        return frozenset()
    # Offsets must be able to reach the end of the ids, which may be any tensor of the batch.
    sizes = [t.numel() if b is None else b for t, b in zip(batch.tensors, bounds, strict=True)]
    return found if max(sizes) <= _MOST else frozenset()
