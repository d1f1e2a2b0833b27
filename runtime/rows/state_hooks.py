"""Hooks of an optimizer's state_dict that its copies have too: torch copies and pickles none.

A copy that saved its state as it lies in memory, and not as the model's ``state_dict()`` has the
rows, could not be loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeAlias

from torch.optim import Optimizer

Hook: TypeAlias = Callable[[Optimizer, dict[str, Any]], dict[str, Any]]
_KEPT = "_recast_state_hooks"


def add(optimizer: Optimizer, saving: Hook, loading: Hook) -> None:
    """Let ``saving`` have what ``state_dict()`` returns, and ``loading`` what ``load_state_dict``
    takes; once, however often it is called. Both are functions of a module.
    """
    if has(optimizer, saving):
        return
    optimizer.register_state_dict_post_hook(saving)
    optimizer.register_load_state_dict_pre_hook(loading)
    own = vars(optimizer)
    own[_KEPT] = (*own.get(_KEPT, ()), (saving, loading))
    own["__reduce_ex__"] = MethodType(_reduce, optimizer)  # which copy and pickle ask an object for


def has(optimizer: Optimizer, saving: Hook) -> bool:
    """Whether :func:`add` was called with it, for this optimizer or what it is a copy of."""
    return saving in optimizer._optimizer_state_dict_post_hooks.values()


def _reduce(optimizer: Optimizer, protocol: int) -> tuple[Any, ...]:
    return _blank, (type(optimizer), vars(optimizer)[_KEPT]), optimizer.__getstate__()


def _blank(kind: type[Optimizer], kept: tuple[tuple[Hook, Hook], ...]) -> Optimizer:
    """One without state, but with the hooks; ``__setstate__`` leaves those that are there."""
    made: Optimizer = kind.__new__(kind)
    made._optimizer_state_dict_post_hooks = OrderedDict()
    made._optimizer_load_state_dict_pre_hooks = OrderedDict()
    for saving, loading in kept:
        add(made, saving, loading)
    return made
