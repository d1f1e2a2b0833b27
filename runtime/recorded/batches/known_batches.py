"""Recognises batches like the last ones of a recording, without taking them apart.

A step with 55 tables gets 57 tensors; to ask each for its type, position and metadata takes Python
60 us, where the whole replay takes 200. Once a batch has been recorded, the next one like it is
recognised by one walk through its containers and one call of torch (:mod:`.tensor_metadata`). A
batch that is not recognised is taken apart as always.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recast.runtime.recorded.batches.batch import Batch, Form, form_of, key_of
from recast.runtime.recorded.batches.input_roles import InputRoles
from recast.runtime.recorded.batches.tensor_metadata import TensorMetadata

_MOST = 4  # batches remembered at a time
_WASTED = 32  # batches remembered in vain before it is given up: they are never alike
_PLAIN = (Tensor, torch.nn.Parameter)
_CONSTANTS = (bool, int, float, str, type(None))


class Outline(NamedTuple):
    """A container in a batch: its class, the keys of a dict, its size; for each entry None (a
    tensor), the outline of a container, or a constant. ``parts`` is None when all entries are
    tensors.
    """

    kind: Any
    keys: list[Any] | None
    size: int
    parts: list[Any] | None


class _Constant(NamedTuple):
    key: Hashable


class KnownBatch:
    """A remembered batch, by which the next one like it is recognised.

    ``free``: indices of tensors of any length. ``roles``, ``generation``: see
    :class:`.input_roles.ModelInputs`. ``inputs``: identifies the :class:`.StaticInputs` that were
    filled last; ``one_launch``: whether by one launch.
    """

    def __init__(self, batch: Batch, outline: Outline, free: Sequence[int]) -> None:
        self.parts, self.free = batch.parts, frozenset(free)
        self.roles: InputRoles | None = None
        self.generation = -1
        self.inputs: object = None
        self.one_launch = False
        self._outline = outline
        leaves = [place for place in self.parts.places if place >= 0]
        firsts: dict[int, int] = {}  # the first leaf of each tensor, in the order of tensors
        for at, place in enumerate(leaves):
            firsts.setdefault(place, at)
        self._firsts = [*firsts.values()]
        # For tensors that occur again: their leaf, and the first one.
        pairs = [(at, firsts[place]) for at, place in enumerate(leaves)]
        self._again = [(at, first) for at, first in pairs if first < at]
        self._metadata = TensorMetadata(batch.tensors, free)
        self._forms: dict[tuple[tuple[int, int], ...], Form] = {}

    def tensors_of(self, tree: Any) -> list[Tensor] | None:
        """The tensors of ``tree``, each once, if it is like this batch; else None."""
        leaves: list[Any] = []
        if not _follow(tree, self._outline, leaves):
            return None
        if self._again:
            if any([leaves[at] is not leaves[first] for at, first in self._again]):
                return None
            leaves = [leaves[at] for at in self._firsts]
        return leaves if self._metadata.matches(leaves) else None

    def form(
        self, batch: Batch, key: tuple[tuple[int, int], ...], bounds: Sequence[int | None]
    ) -> Form:
        """The form of ``batch`` with ``bounds``; ``key`` lists those that are not None."""
        found = self._forms.get(key)
        if found is None:
            if len(self._forms) >= _WASTED:
                self._forms.clear()
            found = self._forms[key] = form_of(batch, bounds)
        return found


class Batches:
    """Makes the batches of one job, on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: list[KnownBatch] = []
        self._wasted = 0

    def of(self, tree: Any) -> Batch:
        """``tree`` as a batch."""
        for known in self._known:
            tensors = known.tensors_of(tree)
            if tensors is not None:
                self._wasted = 0
                return Batch(tree, self._device, self, known, tensors)
        return Batch(tree, self._device, self)

    def learn(self, batch: Batch, tree: Any, free: Sequence[int]) -> KnownBatch | None:
        """Remember ``batch``, made from ``tree``; None if the next cannot be recognised, or never
        is.
        """
        if self._wasted >= _WASTED or not _is_plain(batch.tensors, free):
            return None
        outline = _outline_of(tree)
        if not isinstance(outline, Outline):
            return None
        self._wasted += 1
        made = KnownBatch(batch, outline, free)
        self._known = [made, *self._known[: _MOST - 1]]
        return made


def _is_plain(tensors: Sequence[Tensor], free: Sequence[int]) -> bool:
    """Whether sizes, strides, dtypes and classes say everything about these, and none wants a
    gradient.
    """
    if not tensors or not all([type(t) in _PLAIN for t in tensors]):
        return False
    if any([t.layout is not torch.strided or t.requires_grad for t in tensors]):
        return False
    return all(tensors[k].dim() == 1 and tensors[k].stride() == (1,) for k in free)


def _outline_of(tree: Any) -> Any:
    """The outline of a container, None for a tensor, or a constant; False when it has none of
    these.
    """
    if isinstance(tree, Tensor):
        return None
    kind = type(tree)
    if kind in _CONSTANTS:
        return _Constant(key_of(tree))
    if kind is not tuple and kind is not list and kind is not dict:
        return False
    keys = list(tree) if kind is dict else None
    parts = [_outline_of(x) for x in (tree.values() if kind is dict else tree)]
    if any(part is False for part in parts):
        return False
    return Outline(kind, keys, len(parts), parts if any(p is not None for p in parts) else None)


def _follow(tree: Any, outline: Outline, leaves: list[Any]) -> bool:
    """Add the tensors of ``tree`` to ``leaves`` if it has this outline. What is in the place of a
    tensor is added unchecked.
    """
    kind, keys, size, parts = outline
    held: Any = tree
    if type(held) is not kind or len(held) != size:
        return False
    if keys is not None:
        if list(held) != keys:
            return False
        held = held.values()
    if parts is None:
        leaves.extend(held)
        return True
    for x, part in zip(held, parts, strict=True):
        if part is None:
            leaves.append(x)
        elif type(part) is Outline:
            if not _follow(x, part, leaves):
                return False
        elif key_of(x) != part.key:
            return False
    return True
