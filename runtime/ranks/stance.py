"""The mode in which a rank calls the model; the other ranks learn it together with its ids.

A rank that evaluates while others train takes no part in the statistics and masks of the global
batch, and the others would wait for it.

If no ids are sent, because every rank has every table, ranks tell each other before the first joint
computation of a call: statistics and masks in train mode, gradients in eval mode. A rank that
evaluates by itself sends nothing, which is allowed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from recast.errors import UsageError
from recast.runtime.ranks import collectives
from recast.runtime.ranks.sums import gathered

_HERE = threading.local()  # ranks that are threads call for themselves
_MOST = 2**60
_UNSAID = 0


def say(modules: Iterable[nn.Module], training: bool) -> None:
    """Set the mode of the call that begins: the flags of ``modules``; ``training``: the model's."""
    flags = tuple(module.training for module in modules)
    _HERE.told = (1 + hash(flags) % _MOST) * 2 + training  # hashes of bools: the same everywhere


def silent() -> None:
    """The call that begins is the same in both modes."""
    _HERE.told = _UNSAID


class Meeting:
    """An exchange of modes between all ranks, once in a call that sends no ids."""

    def __init__(self) -> None:
        self.told, self.done = said(), False

    def hold(self) -> None:
        """Raise UsageError, on every rank, unless all call in the same mode. A collective."""
        if not self.done:
            self.done = True
            own = torch.tensor(self.told, device=collectives._device())
            check(gathered(own, what="all_gather of modes").tolist())


@contextmanager
def met_inside() -> Iterator[Meeting]:
    """The call inside sends no ids: ranks exchange modes before their first joint computation."""
    meeting = _HERE.meeting = Meeting()
    try:
        yield meeting
    finally:
        _HERE.meeting = None


def meet() -> None:
    """Called before a joint computation of all ranks: exchange modes if that is still to do."""
    meeting: Meeting | None = getattr(_HERE, "meeting", None)
    if meeting is not None:
        meeting.hold()


def said() -> int:
    """The mode of this rank, as a number for the others; 0: it does not matter."""
    told: int = getattr(_HERE, "told", _UNSAID)
    return told


def check(told: Sequence[int]) -> None:
    """Raise UsageError, on every rank, unless all have ``told`` the same mode."""
    if len(set(told)) == 1:
        return
    usual, _ = Counter(told).most_common(1)[0]
    odd = next(rank for rank, one in enumerate(told) if one != usual)
    other = told.index(usual)
    if told[odd] % 2 != usual % 2:
        modes = ("eval", "train")
        what = f"in {modes[told[odd] % 2]} mode, rank {other} in {modes[usual % 2]} mode"
    else:
        what = f"with other modules in eval mode than rank {other}"
    raise UsageError(
        f"rank {odd} of {len(told)} calls the model {what}",
        why="batch norm and dropout are those of the batch of all ranks, which compute it together",
        tries=("train() and eval() alike on every rank",
               "evaluate on every rank, as many batches (they may be empty)"),
    )  # fmt: skip
