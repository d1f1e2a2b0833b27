"""A call in the form that :mod:`.normalize` writes, and the type of what reads one off a node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from recast.rewriter.ir import Node


@dataclass(frozen=True, slots=True)
class Form:
    """``function(*args, **kwargs)``, or a method when ``function`` is a name."""

    function: Callable[..., Any] | str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


Reader: TypeAlias = Callable[[Node], Form | None]  # None: no call that has another spelling


def call(function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Form:
    """The form of this call."""
    return Form(function, args, kwargs)
