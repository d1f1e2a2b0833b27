"""Norms and finiteness of the gradient of a whole table, of which this rank holds only a part.

Clipping and loss scaling act on one number, the norm or the finiteness of all gradients. If each
rank used its own, the replicas of the dense parameters would diverge. So both are computed for the
whole gradient, with the same bits on every rank: one collective for all tables in one call.

Every rank must ask for the same, in the same order: a norm that only rank 0 asks for would wait for
ever. Element-wise questions (values, isnan) are answered for the local part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recast.runtime.ranks.sums import gathered
from recast.runtime.rows.grad import RowGrad


def norms(grads: Sequence[Tensor], local: Sequence[Tensor], order: Any) -> list[Tensor]:
    """``local`` norms of order p, with those of sharded tables combined over ranks::

        (sum_r local_r^p)^(1/p)         max and min for inf and -inf, the sum for 0

    Computed in float64, in rank order: the square of an fp32 norm may not fit in fp32.
    """
    found = list(local)
    for group, places in _by_group(grads):
        own = torch.stack([local[k].double() for k in places])
        whole = _combined(gathered(own, group, "norms of gradients"), float(order))
        for k, norm in zip(places, whole, strict=True):
            found[k] = norm.to(local[k].dtype)
    return found


def _combined(norms: Tensor, order: float) -> Tensor:
    """(W, k) norms of the parts -> (k,) norms of the wholes."""
    if order in (0.0, 1.0):
        return norms.sum(0)
    if order == float("inf"):
        return norms.amax(0)
    if order == float("-inf"):
        return norms.amin(0)
    # Divided by the largest norm, so that no power leaves the range of float64.
    largest = norms.amax(0) if order > 0 else norms.amin(0)
    unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    return (norms / unit).pow(order).sum(0).pow(1.0 / order) * unit


def agree(grads: Sequence[Tensor], found_inf: Tensor) -> None:
    """Set ``found_inf``, (1,), to 1 if it is 1 on any rank that holds a part of the tables."""
    for group, _ in _by_group(grads):
        found_inf.copy_(gathered(found_inf, group, "finiteness of gradients").amax(0))


def _by_group(grads: Sequence[Tensor]) -> list[tuple[Any, list[int]]]:
    """(process group, indices in ``grads``) of the gradients of sharded tables, in order."""
    found: list[tuple[Any, list[int]]] = []
    for k, grad in enumerate(grads):
        table = grad.cell.table if isinstance(grad, RowGrad) else None
        if table is None or not dist.is_initialized():
            continue
        places = next((places for group, places in found if group is table.group), None)
        if places is None:
            found.append((table.group, places := []))
        places.append(k)
    return found
