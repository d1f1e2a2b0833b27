"""A batch as the tensors it is made of, and the fixed memory that recorded work reads it from.

Two batches of one *form* (structure, constants, shapes, dtypes, and which places hold the same
tensor) can be given to one recording. Ids of bags that are cut by offsets with an end may differ in
number: they are given room for a bound, and what stands behind the last end belongs to no bag.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from recast.runtime.gpu import copies

Ragged = Callable[..., Sequence[Tensor]]  # of arguments: those to which ids may be added

_CHUNKS = 8  # a bound is rounded up to an eighth of its power of two


class Batch:
    """The tensors of ``tree``, each once, on ``device``.

    A tensor elsewhere is brought to ``device`` when it is needed; ``tensors`` are as given.
    ``structure`` tells which tensor stands where.
    """

    def __init__(self, tree: Any, device: torch.device) -> None:
        leaves: list[Any] = []
        shape = _flatten(tree, leaves)
        self.device = device
        self.tensors: list[Tensor] = []
        self._tree = tree
        self._places: list[int] = []  # for each leaf its tensor, or -1
        self._constants: list[Any] = []
        once = len(set(map(id, leaves))) == len(leaves)
        if once and all([isinstance(x, Tensor) for x in leaves]):
            self.tensors, self._places = leaves, [*range(len(leaves))]
        else:
            self._sort_out(leaves)
        self.structure: Hashable = (shape, tuple(self._places))

    def _sort_out(self, leaves: list[Any]) -> None:
        """Constants apart, and each tensor once."""
        known: dict[int, int] = {}
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                self._places.append(-1)
                self._constants.append(leaf)
                continue
            place = known.setdefault(id(leaf), len(self.tensors))
            if place == len(self.tensors):
                self.tensors.append(leaf)
            self._places.append(place)

    def form(self, bounds: Sequence[int | None]) -> Hashable:
        """What one recording covers, with ``bounds[k]`` in place of the length of tensor k.

        Constants of types that cannot be hashed stand for themselves only.
        """
        constants = tuple(c if _hashable(c) else _Itself(c) for c in self._constants)
        shapes: list[Hashable] = [t.shape for t in self.tensors]
        for k, bound in enumerate(bounds):
            if bound is not None:
                shapes[k] = bound
        return self.structure, constants, tuple(shapes), tuple([t.dtype for t in self.tensors])

    def tree(self, tensors: Sequence[Tensor] | None = None) -> Any:
        """The batch again, of ``tensors`` or of its own brought to the device."""
        if tensors is None:
            tensors = [t.to(self.device, non_blocking=True) for t in self.tensors]
        constants = iter(self._constants)
        leaves = [next(constants) if place < 0 else tensors[place] for place in self._places]
        return pytree.tree_unflatten(leaves, pytree.tree_structure(self._tree))


class Room:
    """Fixed memory for the batches of one form."""

    def __init__(self, batch: Batch, bounds: Sequence[int | None]) -> None:
        self.tensors = self._held = list[Tensor]()
        self._ragged = [k for k, bound in enumerate(bounds) if bound is not None]
        with torch.inference_mode(False):  # batches that come outside of it are written there too
            for t, bound in zip(batch.tensors, bounds, strict=True):
                shape = tuple(t.shape) if bound is None else (bound,)
                # Ids behind the last end nobody reads, but they are ids: 0 is one in every table.
                self._held.append(torch.zeros(shape, dtype=t.dtype, device=batch.device))
        # By torch, copies of one dtype between tensors of one device go in one launch.
        self._together: dict[torch.dtype, list[int]] = {}
        for k, t in enumerate(self._held):
            self._together.setdefault(t.dtype, []).append(k)
        self.tree = batch.tree(self._held)
        self._copies = None if self._ragged else copies.to(self._held)
        self.fill(batch)

    def fill(self, batch: Batch) -> None:
        """Copy ``batch`` in, on the current stream; the host waits for pageable memory only."""
        if self._copies is not None and self._copies.takes(batch.tensors):
            self._copies.run(batch.tensors)
            return
        targets = list(self._held)
        for k in self._ragged:
            targets[k] = targets[k][: batch.tensors[k].shape[0]]
        for places in self._together.values():
            there = [k for k in places if batch.tensors[k].device == batch.device]
            if there:
                torch._foreach_copy_([targets[k] for k in there], [batch.tensors[k] for k in there])
            for k in set(places).difference(there):
                targets[k].copy_(batch.tensors[k], non_blocking=True)


class Bounds:
    """How much room each ragged tensor of a batch is given.

    Args:
        most: the bound of all, or None: the longest seen, rounded up.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._seen: dict[int, int] = {}

    def of(self, batch: Batch, ragged: Collection[int]) -> list[int | None] | None:
        """A bound for each tensor of ``batch``, None for those that are not ``ragged``.

        None in all when one of them is longer than the bound that was declared.
        """
        found: list[int | None] = [None] * len(batch.tensors)
        for k in ragged:
            length = batch.tensors[k].shape[0]
            if self._most is not None:
                if length > self._most:
                    return None
                found[k] = self._most
            else:
                if length > self._seen.get(k, -1):
                    self._seen[k] = rounded(length)
                found[k] = self._seen[k]
        return found


class Places:
    """Which tensors of a batch ``ragged`` names of its arguments: asked once for each structure.

    What is named depends on the model too, whose every change runs a call as always: forget then.
    """

    def __init__(self, ragged: Ragged | None) -> None:
        self._ragged = ragged
        self._known: dict[Hashable, list[int]] = {}

    def of(self, batch: Batch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """Their places in ``batch``, which is made of ``args`` and ``kwargs`` (and others)."""
        if self._ragged is None:
            return []
        known = self._known.get(batch.structure)
        if known is None:
            found = {id(t) for t in self._ragged(*args, **kwargs)}
            known = [k for k, t in enumerate(batch.tensors) if id(t) in found]
            self._known[batch.structure] = known
        return known

    def forget(self) -> None:
        """Ask again."""
        self._known.clear()


def rounded(length: int) -> int:
    """``length`` rounded up so that lengths which differ by chance get one bound."""
    unit = max(64, (1 << max(length - 1, 1).bit_length()) // (2 * _CHUNKS) * 2)
    return -(-length // unit) * unit


def _flatten(tree: Any, leaves: list[Any]) -> Hashable:
    """Add the leaves of ``tree`` in the order of torch's pytrees, at a tenth of their time.

    Two trees with equal results are of one structure.
    """
    kind = type(tree)
    if kind is not tuple and kind is not list and kind is not dict:
        return _flatten_others(tree, leaves)
    parts: list[Any] = [kind]
    if kind is dict:
        parts += tree
        tree = tree.values()
    for x in tree:
        if isinstance(x, Tensor):
            leaves.append(x)
            parts.append(None)
        else:
            parts.append(_flatten(x, leaves))
    return tuple(parts)


def _flatten_others(tree: Any, leaves: list[Any]) -> Hashable:
    found, spec = pytree.tree_flatten(tree)
    leaves.extend(found)
    return None if spec.is_leaf() else _Form(spec)


class _Form:
    """The structure of a part of a batch, with a hash whatever the keys of its containers are."""

    def __init__(self, spec: pytree.TreeSpec) -> None:
        self._spec = spec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Form) and self._spec == other._spec

    def __hash__(self) -> int:
        return hash(self._spec.num_leaves)


class _Itself:
    """A constant that equals nothing but the same object."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def _hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
