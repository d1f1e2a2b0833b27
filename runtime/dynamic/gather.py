"""Rows of all ranks, joined in the order of the ranks, sent a block at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from recast.errors import UsageError
from recast.runtime.dynamic.parts import BY_ROW
from recast.runtime.ranks import collectives, faults
from recast.runtime.ranks.sums import gathered

KEYS = (*BY_ROW, "clock", "seen", "initial", "padding")  # of a module's state
BLOCK = 1 << 26  # bytes
To = Literal[0, "all"]


def wants(ranks: object) -> bool:
    """Whether this rank is among ``ranks``, 0 or "all". Raises UsageError for anything else."""
    if ranks not in (0, "all"):
        raise UsageError(
            f"ranks={ranks!r}",
            why="it says which ranks get the rows of all: None for none, 0, or 'all'",
            tries=("ranks=0", "ranks='all'"),
        )
    return ranks == "all" or not dist.is_initialized() or dist.get_rank() == 0


@torch.no_grad()
def joined(local: Tensor, to: To) -> Tensor:
    """(n, ...) on each rank -> (sum of n, ...); no rows on ranks that are not in ``to``.

    A collective: every rank calls it, with the same dtype and width.
    """
    wanted = wants(to)
    if collectives.ranks() == 1:
        return local
    where = _sent_from(local)
    sizes = gathered(torch.tensor([len(local)], device=where)).reshape(-1).tolist()
    whole = local.new_empty(sum(sizes) if wanted else 0, *local.shape[1:])
    step = max(1, BLOCK // max(1, local[:1].numel() * local.itemsize, local.itemsize))
    step = int(gathered(torch.tensor([step], device=where)).min())
    rank, at = dist.get_rank(), 0
    for source, size in enumerate(sizes):
        for first in range(0, size, step):
            n = min(step, size - first)
            block = local.new_empty(n, *local.shape[1:], device=where)
            if source == rank:
                block.copy_(local[first : first + n])
            with faults.collective("rows of dynamic tables"):
                dist.broadcast(block, source)
            if wanted:
                whole[at : at + n] = block
            at += n
    return whole


def _sent_from(local: Tensor) -> torch.device:
    """The device to send blocks of ``local`` from: NCCL takes only GPUs, gloo also the CPU."""
    there = collectives._device()
    return there if there.type == "cuda" else local.device


def entries(state: Mapping[str, Any], to: To) -> dict[str, Tensor]:
    """The entries of a dynamic module for all ranks, from those of each; see ``module``."""
    found: dict[str, Tensor] = dict(state)
    for key in BY_ROW:
        found[key] = joined(state[key], to)
    found["seen"] = joined(state["seen"].t().contiguous(), to).t().contiguous()
    own = state["clock"]
    clock = own[None] if collectives.ranks() == 1 else gathered(own.to(_sent_from(own))).to(own)
    found["clock"] = clock[0].clone()
    found["clock"][2] = clock[:, 2].sum()  # lookups since counts were last halved
    return found
