"""Hooks that a copy took over from the user's model: when removed there, they stop working here
too.

``handle.remove()`` removes a hook only from the module on which it was registered. So a copy calls
each hook of the original through a :class:`LinkedHook`, which checks that it is still registered.
Hook objects such as those of ``torch.nn.utils.prune`` stay as they are: torch looks for them by
class.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class LinkedHook:
    """Calls a hook as long as the module that it was registered on still has it, or no longer
    exists.
    """

    def __init__(self, hook: Callable[..., Any], there: weakref.ref[Any], key: int) -> None:
        self.hook, self.there, self.key = hook, there, key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        held = self.there()
        if held is not None and self.key not in held:
            return None  # like a hook that changes nothing
        return self.hook(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("hook", "there", "key"):  # of one that is being made
            raise AttributeError(name)
        return getattr(self.hook, name)

    def __reduce__(self) -> Any:
        return _unlinked, (self.hook,)  # elsewhere there is no original


def _unlinked(hook: Callable[..., Any]) -> Callable[..., Any]:
    return hook


def link_hooks(copied: nn.Module, original: nn.Module) -> None:
    """Make the hooks of ``copied``, a copy of ``original``, stop when they are removed from it."""
    for mine, theirs in zip(copied.modules(), original.modules(), strict=True):
        for name in _HOOKS:
            there = vars(theirs).get(name)
            if not there or mine is theirs:
                continue
            ref, held = weakref.ref(there), vars(mine)[name]
            for key, hook in held.items():
                if isinstance(hook, (FunctionType, MethodType, functools.partial)):
                    held[key] = LinkedHook(hook, ref, key)
