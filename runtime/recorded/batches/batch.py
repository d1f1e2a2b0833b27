"""A batch, taken apart into its tensors.

Batches of one *form* (structure, constants, shapes, dtypes, and which places hold the same tensor)
can share a recording. The number of ids may differ where bags are cut by offsets with an end: they
get room up to a bound, and what lies behind the last end belongs to no bag.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from recast.runtime.recorded.batches.input_roles import AskedRoles
    from recast.runtime.recorded.batches.known_batches import Batches, KnownBatch


class Parts(NamedTuple):
    """What a batch is besides its tensors. ``structure`` says which tensor is where."""

    structure: Hashable
    places: list[int]  # for each leaf the index of its tensor, or -1
    constants: list[Any]


class Form:
    """What one recording covers: a tuple whose hash is computed once."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: tuple[Hashable, ...]) -> None:
        self._parts, self._hash = parts, hash(parts)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Form) and self._parts == other._parts)

    def __hash__(self) -> int:
        return self._hash


class Batch:
    """The tensors of ``tree``, each once, on ``device``.

    A tensor on another device is copied to ``device`` when it is needed; ``tensors`` are as given.
    ``known``: the earlier batch that it was recognised by, whose ``tensors`` it then has the same
    order of; ``maker``: remembers it, to recognise the next one.
    """

    __slots__ = ("_tree", "asked_roles", "device", "known", "maker", "parts", "tensors")

    def __init__(
        self,
        tree: Any,
        device: torch.device,
        maker: Batches | None = None,
        known: KnownBatch | None = None,
        tensors: list[Tensor] | None = None,
    ) -> None:
        self.device, self._tree, self.maker, self.known = device, tree, maker, known
        self.asked_roles: AskedRoles | None = None
        self.tensors: list[Tensor]
        self.parts: Parts
        if known is not None and tensors is not None:
            self.tensors, self.parts = tensors, known.parts
        else:
            self.tensors, self.parts = _take_apart(tree)

    @property
    def structure(self) -> Hashable:
        """Which tensor stands where."""
        return self.parts.structure

    def form(self, bounds: Sequence[int | None]) -> Form:
        """What one recording covers, with ``bounds[k]`` in place of the length of tensor k.

        A mutable constant is equal only to itself: see :meth:`why_not`.
        """
        if self.known is None:
            return form_of(self, bounds)
        key = tuple([(k, bound) for k, bound in enumerate(bounds) if bound is not None])
        return self.known.form(self, key, bounds)

    def why_not(self) -> str | None:
        """Why a recording with this batch may not be used for the next one, or None."""
        if self.known is not None:
            return None
        for c in self.parts.constants:
            if type(key_of(c)) is _SameObject:
                return f"a batch holds an object that may be written to, of type {type(c).__name__}"
        return None

    def tree(self, tensors: Sequence[Tensor] | None = None) -> Any:
        """The batch put together again, from ``tensors`` or from its own tensors on ``device``."""
        if tensors is None:
            tensors = [t.to(self.device, non_blocking=True) for t in self.tensors]
        constants = iter(self.parts.constants)
        leaves = [next(constants) if place < 0 else tensors[place] for place in self.parts.places]
        return pytree.tree_unflatten(leaves, pytree.tree_structure(self._tree))

    def wants_grad(self) -> bool:
        """Whether a tensor requires a gradient."""
        return self.known is None and any([t.requires_grad for t in self.tensors])

    def learn(self, free: Sequence[int]) -> KnownBatch | None:
        """Remember this batch, to recognise the next like it; ``free``: tensors of any length."""
        if self.known is None and self.maker is not None:
            self.known = self.maker.learn(self, self._tree, free)
        return self.known

    def has_same_roles(self) -> bool:
        """Whether the model says the same about this batch as about the earlier one like it."""
        return self.asked_roles is None or self.asked_roles.still_hold(self)


def form_of(batch: Batch, bounds: Sequence[int | None]) -> Form:
    """:meth:`Batch.form`, computed anew."""
    structure, _, held = batch.parts
    constants = tuple(map(key_of, held))
    shapes: list[Hashable] = [t.shape for t in batch.tensors]
    for k, bound in enumerate(bounds):
        if bound is not None:
            shapes[k] = bound
    return Form((structure, constants, tuple(shapes), tuple([t.dtype for t in batch.tensors])))


def _take_apart(tree: Any) -> tuple[list[Tensor], Parts]:
    leaves: list[Any] = []
    shape = _flatten(tree, leaves)
    once = len(set(map(id, leaves))) == len(leaves)
    if once and all([isinstance(x, Tensor) for x in leaves]):
        places = [*range(len(leaves))]
        return leaves, Parts((shape, tuple(places)), places, [])
    tensors: list[Tensor] = []
    constants: list[Any] = []
    places = []
    known: dict[int, int] = {}
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            places.append(-1)
            constants.append(leaf)
            continue
        place = known.setdefault(id(leaf), len(tensors))
        if place == len(tensors):
            tensors.append(leaf)
        places.append(place)
    return tensors, Parts((shape, tuple(places)), places, constants)


def _flatten(tree: Any, leaves: list[Any]) -> Hashable:
    """Add the leaves of ``tree`` in the order of torch's pytrees, in a tenth of the time. Two trees
    with equal results have the same structure.
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
    return None if spec.is_leaf() else _OtherStructure(spec)


class _OtherStructure:
    """The structure of a part of a batch, hashable whatever the keys of its containers are."""

    def __init__(self, spec: pytree.TreeSpec) -> None:
        self._spec = spec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OtherStructure) and self._spec == other._spec

    def __hash__(self) -> int:
        return hash(self._spec.num_leaves)


_FIXED = {
    bool, int, str, bytes, type(None), type(...), range, type, FunctionType, BuiltinFunctionType,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
}  # fmt: skip


def key_of(constant: object) -> Hashable:
    """A key that is equal for constants that behave alike, and for no others: 0.0 and -0.0 differ,
    and a mutable object equals only itself.
    """
    kind = type(constant)
    if kind in _FIXED or isinstance(constant, Enum):
        return kind, constant
    if kind is float:
        return kind, float.hex(constant)  # type: ignore[arg-type]
    if kind is complex:
        return kind, float.hex(constant.real), float.hex(constant.imag)  # type: ignore[attr-defined]
    return _SameObject(constant)


class _SameObject:
    """A constant that equals nothing but the same object."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameObject) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)
