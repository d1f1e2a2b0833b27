"""What forward never reads of a dict or object that it is given: any call may have other values
there, and a dict other keys and another order. (:mod:`.capture.unread_entries` finds it.)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .object_contents import attributes


@dataclass(frozen=True)
class Unread:
    """Of the argument at ``position``: the ``constants`` of the example that are never read.

    ``keys``: all of the example, of a dict that is only asked for keys; ``absent``: those that it
    was asked for and had not. None of other dicts, and of objects.
    """

    position: int
    constants: Mapping[str, Any]
    keys: tuple[str, ...] | None = None
    absent: frozenset[str] = frozenset()

    def settled(self, value: Any) -> Any:
        """A copy of ``value`` with all that is never read as in the example."""
        then = self.constants
        if type(value) is dict:
            keys = self.keys
            if keys is None or not self.absent.isdisjoint(value):
                return {key: then.get(key, one) for key, one in value.items()}
            if not all(key in value or key in then for key in keys):
                return value
            return {key: then[key] if key in then else value[key] for key in keys}
        held = attributes(value)
        if not then.keys() <= held.keys():
            return value
        made = copy.copy(value)
        for name, one in then.items():
            object.__setattr__(made, name, one)
        return made
