"""Sends the ids of the next batch to the ranks that own them, to prefetch their rows."""

from __future__ import annotations

import torch
from torch import Tensor

from recast.runtime.ranks import collectives
from recast.runtime.ranks.hashed import part_of


def ids_of_owner(ids: Tensor, parts: int, where: torch.device) -> Tensor:
    """(n,) ids of this rank's batch -> (m,) the ids of all ranks' batches that this rank owns.

    ``where``: the device of the table, from which ids are sent. A collective: every rank calls it,
    in the same order among other collectives.
    """
    if parts == 1:
        return ids.to(where, non_blocking=True)
    ids = torch.unique(ids)
    owner = part_of(ids, parts)
    send = torch.bincount(owner, minlength=parts).tolist()
    ones = [1] * parts
    counts = torch.tensor(send, device=where)
    coming = collectives.all_to_all(counts, ones, ones, "counts of ids ahead").read()
    sorted_ids = ids[torch.argsort(owner, stable=True)].to(where)
    return collectives.all_to_all(sorted_ids, send, coming, "ids ahead").wait()
