"""What ranks tell each other before ids are sent: how many are coming, and that all are in step.

A batch that is wrong on one rank is an error on all of them, as are ranks of which one evaluates,
trains other tables or has stepped otherwise: none is left waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recast.errors import IdError, InputError, UsageError
from recast.runtime.op import wants_grad
from recast.runtime.ranks import call_mode, collectives, step_record
from recast.runtime.ranks.exchange_buckets import Bucket

if TYPE_CHECKING:
    from recast.runtime.ranks.exchange_ids import Exchange

HEAD = 3  # numbers per lookup: ids, bags, ids per bag or -1
# Numbers per rank: whether its batch is fine and what it records; its mode; what it has stepped.
_STATE = 2 + step_record.NUMBERS
_MOST = 2**59
_FINE, _BAD_IDS, _BAD_INPUT = range(3)
_RECORDED = 4  # to these is added _RECORDED times recorded_grads()


def announce(x: Exchange, wrong: Exception | None, recorded: int) -> None:
    """Tell every rank what is coming, or that this batch is wrong. Raises, on every rank, if any
    batch is wrong, or the modes or the optimizer steps differ.
    """
    route, ranks = x.route, range(x.route.world_size)
    state = _FINE if wrong is None else _BAD_IDS if isinstance(wrong, IdError) else _BAD_INPUT
    steps = step_record.current()
    own = (state + _RECORDED * recorded, call_mode.current(), *steps.numbers())
    numbers: list[int] = []
    for rank in ranks:
        numbers += own
        for k in route.owned(rank):
            bucket = x.bucket(rank, k) if wrong is None else None
            numbers += (0, 0, 0) if bucket is None else head_of(bucket)
    send = [_STATE + HEAD * len(route.owned(rank)) for rank in ranks]
    receive = [send[x.rank]] * len(ranks)
    buffer = torch.tensor(numbers, dtype=torch.int64, device=x.where)
    told = collectives.all_to_all(buffer, send, receive, "counts of ids").read()
    size = send[x.rank]
    parts = [told[r * size : (r + 1) * size] for r in ranks]
    if wrong is not None:
        raise wrong
    for rank, part in enumerate(parts):
        if part[0] % _RECORDED != _FINE:
            kind = IdError if part[0] % _RECORDED == _BAD_IDS else InputError
            raise kind(
                f"the batch of rank {rank} was refused",
                why="all ranks compute one step together; the error of that rank says more",
            )
    _check_together([part[0] for part in parts])
    call_mode.check_equal([part[1] for part in parts])
    step_record.check_equal(steps, [part[2:_STATE] for part in parts])
    x.heads = [part[_STATE:] for part in parts]


def recorded_grads(given: Sequence[Tensor | None]) -> int:
    """A number that identifies which of ``given`` get gradients; 0: none."""
    if not wants_grad(given):
        return 0
    wanted = tuple(t is not None and t.requires_grad for t in given)
    return hash(wanted) % _MOST + 1  # hashes of bools are the same in every process


def _check_together(told: Sequence[int]) -> None:
    """Raise UsageError, on every rank, unless all record gradients of the same tables."""
    if len(set(told)) == 1:
        return
    usual, _ = Counter(told).most_common(1)[0]
    odd = next(rank for rank, one in enumerate(told) if one != usual)
    other = told.index(usual)
    what = f"rank {odd} of {len(told)} trains other tables than rank {other}"
    if min(told[odd], usual) < _RECORDED:
        first, second = ("without", "with") if told[odd] < usual else ("with", "without")
        what = f"rank {odd} of {len(told)} looks rows up {first} gradients, rank {other} {second}"
    raise UsageError(
        what,
        why="all ranks compute one step together: none can evaluate while others train, nor freeze"
        " what others train",
        tries=(
            "evaluate on every rank, as many batches (they may be empty)",
            "the same number of training batches on every rank",
            "requires_grad_() alike on all",
        ),
    )


def head_of(bucket: Bucket) -> tuple[int, int, int]:
    return bucket.count, bucket.bags, bucket.fixed
