"""The mode in which a rank calls the model, and the form of the call; the other ranks learn them
together with its ids.

A rank that evaluates while others train takes no part in the statistics and masks of the global
batch, and the others would wait for it. So would they if its arguments were of another form.

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
from torch._compile import _disable_dynamo

from recast.errors import UsageError
from recast.runtime.ranks import collectives
from recast.runtime.ranks.sums import gathered

_HERE = threading.local()  # ranks that are threads call for themselves
_MOST = 2**48  # kinds of flags, with none
_FORM = 2 * _MOST  # to these numbers is added _FORM times that of the form
_NO_MODE = 0


def set_from(modules: Iterable[nn.Module], training: bool, form: int = 0) -> None:
    """Set the mode of the call that begins: the flags of ``modules``; ``training``: the model's."""
    flags = tuple(module.training for module in modules)
    kind = 1 + hash(flags) % (_MOST - 1)  # hashes of bools: the same everywhere
    _HERE.mode = form * _FORM + kind * 2 + training


def clear(form: int = 0) -> None:
    """The call that begins is the same in both modes."""
    _HERE.mode = form * _FORM + _NO_MODE


class ModeExchange:
    """An exchange of modes between all ranks, once in a call that sends no ids."""

    def __init__(self) -> None:
        self.mode, self.done = current(), False

    @_disable_dynamo
    def run(self) -> None:
        """Raise UsageError, on every rank, unless all call in the same mode. A collective."""
        if not self.done:
            self.done = True
            own = torch.tensor(self.mode, device=collectives._device())
            check_equal(gathered(own, what="all_gather of modes").tolist())


@contextmanager
def deferred_exchange() -> Iterator[ModeExchange]:
    """The call inside sends no ids: ranks exchange modes before their first joint computation."""
    exchange = _HERE.exchange = ModeExchange()
    try:
        yield exchange
    finally:
        _HERE.exchange = None


def exchange_once() -> None:
    """Called before a joint computation of all ranks: exchange modes if that is still to do."""
    exchange: ModeExchange | None = getattr(_HERE, "exchange", None)
    if exchange is not None:
        exchange.run()


def current() -> int:
    """The mode of this rank, as a number for the others; 0: it does not matter."""
    mode: int = getattr(_HERE, "mode", _NO_MODE)
    return mode


def check_equal(modes: Sequence[int]) -> None:
    """Raise UsageError, on every rank, unless all ``modes`` are the same."""
    if len(set(modes)) == 1:
        return
    usual, _ = Counter(modes).most_common(1)[0]
    odd = next(rank for rank, one in enumerate(modes) if one != usual)
    other = modes.index(usual)
    if modes[odd] // _FORM != usual // _FORM:
        raise UsageError(
            f"rank {odd} of {len(modes)} calls the model with arguments of another form than rank"
            f" {other}",
            why="each form has exchanges of its own, in which all ranks take part",
            tries=("the same calls on every rank, as many (batches may be empty)",),
        )
    if modes[odd] % 2 != usual % 2:
        names = ("eval", "train")
        what = f"in {names[modes[odd] % 2]} mode, rank {other} in {names[usual % 2]} mode"
    else:
        what = f"with other modules in eval mode than rank {other}"
    raise UsageError(
        f"rank {odd} of {len(modes)} calls the model {what}",
        why="batch norm and dropout are those of the batch of all ranks, which compute it together",
        tries=("train() and eval() alike on every rank",
               "evaluate on every rank, as many batches (they may be empty)"),
    )  # fmt: skip
