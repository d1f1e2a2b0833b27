"""Gradients that have a graph of their own: what our backward returns under ``create_graph``.

They come from autograd, through the definition of the op, computed again. The inputs of an op may
depend on each other, as where a table is the layer after it too, or one layer is applied twice; and
one tensor may be given in two places. Autograd would follow the ways from one input to the other as
well, which are the business of the pass that called our backward. So the definition is computed of
views, which nothing else leads to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

Given = TypeVar("Given", Tensor, Tensor | None)


def apart(inputs: Sequence[Given]) -> list[Given]:
    """A view of each input."""
    return [t if t is None else t.view_as(t) for t in inputs]


def gradients(
    outs: Sequence[Tensor], own: Sequence[Tensor | None], needs: Sequence[bool],
    grads: Sequence[Tensor], *, further: bool = True,
) -> list[Tensor | None]:  # fmt: skip
    """Those of ``outs`` for the inputs that are needed.

    ``own``: what :func:`apart` made of the inputs, and ``outs`` are computed of. ``further``:
    whether they are to have a graph.
    """
    wants = [t is not None and t.requires_grad and need for t, need in zip(own, needs, strict=True)]
    wanted = [t for t, want in zip(own, wants, strict=True) if t is not None and want]
    found = iter(torch.autograd.grad(outs, wanted, grads, create_graph=further, allow_unused=True))
    return [next(found) if want else None for want in wants]
