"""What a check or a benchmark of a GPU is made of: groups of named items."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch

LIMIT = 120.0  # seconds that an item may take
REST = "(all of the rest)"  # the name of a row for all items of which nothing is known


class Item(NamedTuple):
    """One thing to check or to measure: ``run()`` raises, or returns what is to be recorded.

    limit: seconds after which its process is ended, whatever it is doing.
    """

    name: str
    run: Callable[[], Mapping[str, object] | None]
    limit: float = LIMIT


class Skip(Exception):
    """Why an item cannot be run here."""


Group = Callable[[torch.device, bool], Iterable[Item]]  # the device, and whether sizes are tiny
