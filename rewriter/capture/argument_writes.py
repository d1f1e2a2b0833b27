"""The containers that are passed to forward, and whether forward changed their contents.

The caller sees ``batch["emb"] = self.emb(batch["ids"])`` and ``losses.append(loss)``, but a graph
does neither. The former is done by the runner after the graph; the latter is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from recast.rewriter.compiled.object_contents import attributes

_DEEP = 6
_ABSENT = object()

Place = tuple[Any, ...]  # the number of an argument, and the keys down to an entry of a dict


class ArgumentContents:
    """What the arguments of a call contain before it, by identity."""

    def __init__(self, arguments: Iterable[tuple[str, Any]]) -> None:
        self.before = [(name, value, _seen(value, 0)) for name, value in arguments]

    def written(self) -> dict[Place, Any] | str:
        """The dict entries that forward added or replaced, in order; or the name and kind of an
        argument that it changed in another way.
        """
        found: dict[Place, Any] = {}
        for k, (name, value, before) in enumerate(self.before):
            if not _written(value, before, (k,), found):
                return f"{name}, a {type(value).__name__}"
        return found


def _written(value: Any, before: Any, place: Place, found: dict[Place, Any]) -> bool:
    """Whether only dict entries are new in ``value``; they are added to ``found``."""
    if before is not None and isinstance(value, (tuple, list)):
        return len(value) == len(before) and all(
            one is was and _written(one, inner, (*place, k), found)
            for one, (k, was, inner) in zip(value, before, strict=True)
        )
    if type(value) is not dict or before is None:
        return not _differs(value, before, len(place) - 1)
    old = {key: (one, inner) for key, one, inner in before}
    if list(value)[: len(old)] != list(old):
        return False
    for key, one in value.items():
        was, inner = old.get(key, (_ABSENT, None))
        if one is not was:
            found[*place, key] = one
        elif not _written(one, inner, (*place, key), found):
            return False
    return True


def shared(ordered: tuple[Any, ...], places: Iterable[Place]) -> bool:
    """Whether one of the dicts whose entries ``places`` are is met twice in ``ordered``: what a
    graph reads of the second is what was there before.
    """
    met: list[Any] = []
    for value in ordered:
        _meet(value, met, 0)
    for *place, _ in places:
        held: Any = ordered
        for one in place:
            held = held[one]
        if sum([one is held for one in met]) > 1:
            return True
    return False


def _meet(value: Any, met: list[Any], depth: int) -> None:
    """Append the dicts in ``value``. Written so that torch.compile can follow."""
    if isinstance(value, (torch.Tensor, int, float, str, type(None))) or depth > _DEEP:
        return
    if isinstance(value, dict):
        met.append(value)
        held = list(value.values())
    elif isinstance(value, (list, tuple)):
        held = list(value)
    else:
        held = [one for _, one in _entries(value) or ()]
    for one in held:
        _meet(one, met, depth + 1)


def holds_itself(value: Any, around: tuple[Any, ...] = ()) -> bool:
    """Whether ``value`` contains itself."""
    if not isinstance(value, (dict, list, tuple)):
        return False
    if any(value is one for one in around):
        return True
    held = value.values() if isinstance(value, dict) else value
    return any(holds_itself(one, (*around, value)) for one in held)


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
    if held is None and hasattr(type(value), "__slots__"):
        held = attributes(value)
    if not isinstance(held, Mapping):
        return None
    # What an object keeps for itself, as offsets computed of its lengths, nobody else reads.
    return [(name, one) for name, one in held.items() if not name.startswith("_")]
