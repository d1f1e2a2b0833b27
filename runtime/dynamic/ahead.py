"""Ids of the batch to come, at the ranks that have their rows."""

from __future__ import annotations

import torch
from torch import Tensor

from recast.runtime.ranks import collectives
from recast.runtime.ranks.hashed import part_of


def at_owner(ids: Tensor, parts: int) -> Tensor:
    """(n,) ids of this rank's batch -> (m,) those of all ranks' batches whose rows are here.

    A collective: every rank calls it, at the same place among its others.
    """
    if parts == 1:
        return ids
    ids = torch.unique(ids)
    owner = part_of(ids, parts)
    send = torch.bincount(owner, minlength=parts).tolist()
    ones = [1] * parts
    coming = collectives.all_to_all(torch.tensor(send), ones, ones, "counts of ids ahead").wait()
    sorted_ids = ids[torch.argsort(owner, stable=True)]
    return collectives.all_to_all(sorted_ids, send, coming.tolist(), "ids ahead").wait()
