"""Properties of a result that are the user's own attributes where the model has such: models for
graphs have a ``graph``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

from torch import nn

from .external_state import slots

_T = TypeVar("_T")


class gives_way(Generic[_T]):
    """Like ``property``, for a class whose objects keep the user's module in ``_root``."""

    def __init__(self, ours: Callable[[Any], _T]) -> None:
        self.ours = ours
        self.__doc__ = ours.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, held: None, kind: type) -> gives_way[_T]: ...
    @overload
    def __get__(self, held: object, kind: type) -> _T: ...

    def __get__(self, held: Any, kind: type) -> Any:
        if held is None:
            return self
        root = vars(held)["_root"]
        return getattr(root, self._name) if _has(root, self._name) else self.ours(held)


def _has(root: nn.Module, name: str) -> bool:
    """Whether the user's model or its class has an attribute of that name."""
    return any(name in held for held in (*slots(root), *map(vars, type(root).__mro__)))
