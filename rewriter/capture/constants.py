"""Tensors that belong to a graph rather than to the user's model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Constants:
    """The constants of one captured root. They follow ``.to()`` and are not in ``state_dict()``."""

    ATTRIBUTE = "_recast_constants"
    __slots__ = ("__dict__", "__weakref__", "_made")  # __dict__ holds the constants alone

    def __init__(self) -> None:
        self._made = set[str]()  # the names of those that rewrites made

    def add(self, value: torch.Tensor, hint: str) -> str:
        """Keep ``value``, unless an equal one was added already; returns the path for a
        ``get_attr`` node.
        """
        for name, held in vars(self).items():
            if name not in self._made:  # the user's, who may write to it
                continue
            alike = held.dtype == value.dtype and held.device == value.device
            if name.startswith(hint) and alike and torch.equal(held, value):
                return f"{self.ATTRIBUTE}.{name}"
        path = self._set(value.detach(), hint)
        self._made.add(path.rpartition(".")[2])
        return path

    def hold(self, value: torch.Tensor, hint: str) -> str:
        """Keep ``value`` itself, even if it is written to; returns the path for a ``get_attr``
        node.
        """
        for name, held in vars(self).items():
            if held is value:
                return f"{self.ATTRIBUTE}.{name}"
        return self._set(value, "".join(c if c.isalnum() else "_" for c in hint))

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Forgets, at the end, what rewrites have added since."""
        before = dict(vars(self)), set(self._made)
        try:
            yield
        finally:
            self._made = before[1]
            for name in vars(self).keys() - before[0].keys():
                delattr(self, name)

    def _set(self, value: torch.Tensor, hint: str) -> str:
        name = f"{hint}_{len(vars(self))}"
        setattr(self, name, value)
        return f"{self.ATTRIBUTE}.{name}"

    def place(self, where: torch.device) -> None:
        """Bring those that rewrites made on the CPU, as most make them, to ``where``.

        Torch would copy an index to what it indexes at every call, which waits for the copy and
        cannot be captured in a CUDA graph. What the user's code holds stays where it is.
        """
        for name in self._made:
            held = getattr(self, name)
            if held.is_cpu:
                setattr(self, name, held.to(where))

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Move or cast all of them, as ``nn.Module._apply`` does for buffers."""
        for name, held in vars(self).items():
            setattr(self, name, fn(held))


def constants(root: nn.Module) -> Constants:
    """The constants held by ``root``, made on first use."""
    held = root.__dict__.get(Constants.ATTRIBUTE)
    if held is None:
        held = Constants()
        object.__setattr__(root, Constants.ATTRIBUTE, held)
    return held
