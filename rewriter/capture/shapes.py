"""``x.shape`` of which some sizes depend on the batch, and what else makes a ``torch.Size``.

Torch's own takes real numbers alone, and asks a traced size for one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any

import torch

from .frames import by_torch
from .values import Value


class Shape(tuple):
    """A ``torch.Size`` with Values for the sizes that depend on the batch; made of ints alone, as
    when a call returns it, it is torch's own.
    """

    def __new__(cls, sizes: Iterable[Any]) -> Any:
        held = tuple(sizes)
        if all(type(one) is int for one in held):
            return torch.Size(held)
        return super().__new__(cls, held)

    @classmethod
    def part(cls, sizes: Iterable[Any]) -> Any:
        """One that is this class's also where it is of ints alone, as ``x.shape[1:]`` may be:
        torch's own would not take others beside them.
        """
        return tuple.__new__(cls, sizes)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what isinstance(x.shape, torch.Size) asks
        return torch.Size

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return Shape.part(found) if isinstance(key, slice) else found

    def __add__(self, other: Any) -> Any:
        return Shape.part((*self, *other)) if isinstance(other, tuple) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return Shape.part((*other, *self)) if isinstance(other, tuple) else NotImplemented

    def __reversed__(self) -> Iterator[Any]:
        sizes = reversed(tuple(self))
        if by_torch("distributions"):  # it asks whether two shapes broadcast, as what follows does
            return iter([1 if isinstance(one, Value) else one for one in sizes])
        return sizes

    def __mul__(self, times: Any) -> Any:
        return Shape.part(tuple(self) * times)

    __rmul__ = __mul__

    def __reduce__(self) -> Any:
        return Shape, (tuple(self),)

    def __repr__(self) -> str:
        return f"torch.Size([{', '.join(map(repr, self))}])"

    def numel(self) -> Any:
        product: Any = 1
        for one in self:
            product = product * one
        return product


class _OfSize(type):
    """The type of :class:`Size`, for ``torch.Size`` has no subclasses."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, torch.Size)


class Size(metaclass=_OfSize):
    """A ``torch.Size`` that takes sizes which depend on the batch, and adds such to real ones."""

    def __new__(cls, sizes: Iterable[Any] = ()) -> Any:
        return Shape.part(sizes)


def broadcast_shapes(*shapes: Any) -> Any:
    """``torch.broadcast_shapes``, which compares sizes. Of two that depend on the batch, which are
    the same, it is the first one; a real one beside it is 1.
    """
    alike = [(one,) if isinstance(one, (int, Value)) else tuple(one) for one in shapes]
    if not any(isinstance(n, Value) for one in alike for n in one):
        return torch.broadcast_shapes(*shapes)
    sizes = zip_longest(*(one[::-1] for one in alike), fillvalue=1)
    return Shape([_broadcast(*own) for own in sizes][::-1])


def _broadcast(*sizes: Any) -> Any:
    traced = [n for n in sizes if isinstance(n, Value)]
    return (*traced, *(n for n in sizes if type(n) is int and n != 1), 1)[0]
