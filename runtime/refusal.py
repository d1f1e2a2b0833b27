"""A node that marks what a model does on one process but cannot do on several ranks."""

from __future__ import annotations

from collections.abc import Sequence

from recast.errors import UsageError
from recast.runtime.ranks import collectives


def refuse(active: bool, what: str, why: str, tries: Sequence[str], p: float = 1.0) -> None:
    """Nothing on one rank, or where the node behind it is not ``active`` in this call, or p is 0.

    Raises UsageError otherwise.
    """
    if active and p != 0 and collectives.ranks() > 1:
        raise UsageError(what, why=why, tries=tries)
