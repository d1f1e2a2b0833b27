"""Means, sums and variances over the rows of all ranks, of what each rank has of its own.

All ranks get the same bits. Gradients are those of all ranks' uses: as the loss of one process is
the mean of the ranks' losses, its gradients are the mean of the ranks', as those of all other
parameters. Ranks may have batches of any size, including empty ones. Without process groups each of
these is what one process computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from recast.runtime.batched_grads import one_at_a_time
from recast.runtime.ranks import call_mode, collectives
from recast.runtime.ranks.sums import gathered

_HERE = local()


@contextmanager
def own_means() -> Iterator[None]:
    """While it runs, means and sums on this thread are those of this rank's rows, as the plain
    model has them of this rank's batch.
    """
    _HERE.own = True
    try:
        yield
    finally:
        _HERE.own = False


def _alone(of: Tensor) -> bool:
    return collectives.ranks() == 1 or of.is_meta or getattr(_HERE, "own", False)


@_disable_dynamo
def counted_of_all(target: Tensor, ignore_index: int, weight: Tensor | None = None) -> Tensor:
    """(W,) on the device of ``target``: of each rank, how many of these classes are not
    ``ignore_index``, or the sum of their ``weight``. A collective.
    """
    counts = target != ignore_index
    own = counts.sum() if weight is None else weight.detach()[target[counts]].sum()
    if _alone(target):
        return own.unsqueeze(0)
    call_mode.exchange_once()
    return gathered(own, what="all_gather of sizes")  # not waited for, as .cpu() would


@_disable_dynamo
def mean_of_all(mean: Tensor, sizes: Tensor) -> Tensor:
    """The mean over the rows of all ranks, of the ``mean`` over this rank's; ``sizes``: by how many
    rows each has, or the sum of their weights. A collective, also in the backward pass.
    """
    if _alone(mean):
        return mean
    own, total = sizes[collectives.rank()].double(), sizes.sum()
    none, share = (own == 0) & (total != 0), own / total
    if sizes.device != mean.device:
        none, share = none.to(mean.device), share.to(mean.device)
    result: Tensor = _SumOfAll.apply(mean.masked_fill(none, 0.0) * share)  # of none, it is NaN
    return result


@_disable_dynamo
def sum_of_all(sum: Tensor, sizes: Tensor) -> Tensor:
    """The sum over the rows of all ranks, of the ``sum`` over this rank's, of any dtype. A
    collective, also in the backward pass. ``sizes``: exchanged before it, and not read.
    """
    if _alone(sum):
        return sum
    result: Tensor = _SumOfAll.apply(sum)
    return result


@_disable_dynamo
def variance_of_all(
    input: Tensor, sizes: Tensor, dims: list[int], correction: float, keepdim: bool, root: bool
) -> Tensor:
    """``torch.var`` of the rows of all ranks over ``dims``, or ``torch.std`` if ``root``. Three
    collectives, and two in the backward pass. ``sizes``: exchanged before it, and not read.
    """
    if _alone(input):
        plain = torch.std if root else torch.var
        return plain(input, dims, correction=correction, keepdim=keepdim)
    own = torch.tensor(math.prod(input.shape[d] for d in dims), device=input.device)
    count = int(gathered(own, what="all_gather of sizes").sum())
    mean: Tensor = _SumOfAll.apply(input.sum(dims, keepdim=True)) / count
    squares = (input - mean).square().sum(dims, keepdim=keepdim)
    variance: Tensor = _SumOfAll.apply(squares) / max(count - correction, 0)
    if not root:
        return variance
    still = variance == 0  # where the gradient of torch.std is 0, and that of a root infinite
    return variance.masked_fill(still, 1).sqrt().masked_fill(still, 0)


OF_ALL = mean_of_all, sum_of_all, counted_of_all, variance_of_all


class _SumOfAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        parts = gathered(part, what="all_gather of sums")
        if part.dtype.is_floating_point:
            parts = parts.to(torch.promote_types(part.dtype, torch.float32))
        return parts.sum(0).to(part.dtype)

    @staticmethod
    @one_at_a_time
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _SumOfAll.apply(grad)
