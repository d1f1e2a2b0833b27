"""Which graphs run a call of a model that was captured in several forms: with labels, as it trains,
and without, as it is evaluated.

Each form has a signature and guards of its own. The first that takes a call runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._compile import _disable_dynamo

from .runner import Runner


def index_of(runners: Sequence[Runner], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The index of the runner whose graphs take this call. If none does, that of the first whose
    example was like it but for sizes and values, so that it says what else is different; 0, the
    example's form, if there is none.
    """
    if not torch.compiler.is_compiling():
        for k, runner in enumerate(runners):
            if runner.known_call(args, kwargs) is not None:
                return k
    for k, runner in enumerate(runners):
        if runner.fitting(args, kwargs) is not None:
            return k
    return next((k for k, runner in enumerate(runners) if runner.resembles(args, kwargs)), 0)


@_disable_dynamo  # on ranks, where torch.compile takes up what is between exchanges alone
def index_apart(runners: Sequence[Runner], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """:func:`index_of`, outside of what is compiled."""
    return index_of(runners, args, kwargs)
