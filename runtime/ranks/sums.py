"""Sums of a few numbers of every rank, with the same bits on all of them.

An all-reduce may add in a different order on each machine and in each run; here every rank gathers
all numbers and adds them in rank order. For statistics and norms, which are small; not for
gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recast.runtime.ranks import collectives, faults


def gathered(own: Tensor, group: Any = None, what: str = "all_gather of statistics") -> Tensor:
    """(W, *own.shape): ``own`` of each rank of ``group``, in rank order; None: the default group.

    Every rank must call it with the same shape and dtype. Without process groups W is 1. ``what``:
    its name in an error.
    """
    if collectives.ranks() == 1:
        return own.detach().unsqueeze(0)
    own = own.detach().contiguous()
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with faults.collective(what):
        collectives.wait(dist.all_gather(found, own, group, async_op=True), own)
    return torch.stack(found)
