"""The containers that are handed to forward, and whether it changed what is in them.

A caller sees ``batch["emb"] = self.emb(batch["ids"])`` and ``losses.append(loss)``; a graph would
do neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

_DEEP = 6


class Handed:
    """What the arguments of a call hold before it, by identity."""

    def __init__(self, arguments: Iterable[tuple[str, Any]]) -> None:
        self.before = [(name, value, _seen(value, 0)) for name, value in arguments]

    def changed(self) -> str | None:
        """The name and kind of an argument that holds something else now, or None."""
        for name, value, before in self.before:
            if _differs(value, before, 0):
                return f"{name}, a {type(value).__name__}"
        return None


def _seen(value: Any, depth: int) -> Any:
    entries = _entries(value) if depth < _DEEP else None
    if entries is None:
        return None
    return [(key, one, _seen(one, depth + 1)) for key, one in entries]


def _differs(value: Any, before: Any, depth: int) -> bool:
    entries = _entries(value) if depth < _DEEP else None
    if entries is None or before is None:
        return False
    now = list(entries)
    if len(now) != len(before):
        return True
    return any(
        (key is not old_key and key != old_key) or one is not old or _differs(one, inner, depth + 1)
        for (key, one), (old_key, old, inner) in zip(now, before, strict=True)
    )


def _entries(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """What a container or an object holds, with its keys; None of anything else."""
    if isinstance(value, (torch.Tensor, nn.Module, type)) or callable(value):
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple, deque)):
        return list(enumerate(value))
    if isinstance(value, set):
        return [(len(value), None)]
    held = getattr(value, "__dict__", None)
    if not isinstance(held, dict):
        return None
    # What an object keeps for itself, as offsets computed of its lengths, nobody else reads.
    return [(name, one) for name, one in held.items() if not name.startswith("_")]
