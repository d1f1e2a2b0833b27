"""The tail of a cross layer: all that follows its matrix products, in one pass over rows.

    out = x_0 ∘ (m + inner) ∘ gate + outer + x           (B, d); inner, gate and outer may be absent

Backward, with g = grad and s = gate, where the gate is the sigmoid of some z::

    dm = g ∘ x_0 ∘ s     dx_0 = g ∘ (m + inner) ∘ s     dz = dm ∘ (m + inner) ∘ (1 - s)     dx = g
    dinner = Σ dm        douter = Σ g                    over samples

This file only calls the kernels, for float32 on a CPU or a GPU; the ops that use it are
``cross_matrix`` and ``cross_mixture``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recast.runtime import device
from recast.runtime.gpu import gpu
from recast.runtime.interactions import cross_tail_cuda


def rows(x: Tensor) -> Tensor:
    """(rows, d) of any (..., d), with each row contiguous."""
    x = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return x if x.shape[1] == 1 or x.stride(1) == 1 else x.contiguous()


def takes(tensors: Sequence[Tensor | None]) -> bool:
    """Whether the kernels serve these."""
    given = [t for t in tensors if t is not None]
    first = given[0]
    if any(t.dtype is not torch.float32 or t.device != first.device for t in given):
        return False
    if gpu.serving(first) is not None:
        return cross_tail_cuda.takes(first)
    return first.is_cpu and device.extension() is not None


class Gradients(NamedTuple):
    """What :meth:`Tail.backward` finds; the sums where they were asked for."""

    m: Tensor
    gate: Tensor | None  # at the sigmoid's input
    inner: Tensor | None
    outer: Tensor | None
    of_gate: Tensor | None  # the sum of ``gate``


@dataclass(frozen=True, slots=True)
class Tail:
    """The tail of one layer, of (B, d) tensors for which :func:`takes` said yes."""

    native: Any
    m: Tensor
    gate: Tensor | None

    @staticmethod
    def of(x0: Tensor, m: Tensor, inner: Tensor | None, gate: Tensor | None) -> Tail:
        """``x0``, ``m``, ``gate``: as :func:`rows` gives them; ``inner``: d numbers."""
        bias = None if inner is None else inner.reshape(-1).contiguous()
        where = gpu.serving(x0)
        if where is not None:
            return Tail(cross_tail_cuda.CudaTail(where, x0, m, bias, gate), m, gate)
        native = device.extension().cross_tail(x0, m, bias, gate)
        if native is None:
            raise ValueError(f"cross_tail of {tuple(x0.shape)} and {tuple(m.shape)}")
        return Tail(native, m, gate)

    def forward(self, x: Tensor, outer: Tensor | None, into: Tensor | None = None) -> Tensor:
        """The layer's value; ``into``, which may be ``m`` itself, if given."""
        out = self.m.new_empty(self.m.shape) if into is None else into
        bias = None if outer is None else outer.reshape(-1).contiguous()
        self.native.forward(x, bias, out, device.threads())
        return out

    def backward(
        self, grad: Tensor, into: Tensor, sums: tuple[bool, bool, bool], *, fresh: bool, whole: bool
    ) -> Gradients:
        """The gradients; that of x_0 is added to ``into``, or written to it when it is ``fresh``.

        ``sums``: which of inner, outer and gate have a bias. ``whole``: x is x_0, so that ``grad``
        belongs to it too.
        """
        width = self.m.shape[1]
        dm = self.m.new_empty(self.m.shape)
        dz = None if self.gate is None else torch.empty_like(dm)
        inner, outer, of_gate = (self.m.new_empty(width) if wanted else None for wanted in sums)
        self.native.backward(
            grad, dm, into, dz, inner, outer, of_gate, fresh, whole, device.threads()
        )
        return Gradients(dm, dz, inner, outer, of_gate)
