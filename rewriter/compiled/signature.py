"""How a graph is called: turns the user's arguments into the flat tensors of its placeholders."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from .array_inputs import array_of, tensor_of
from .trees import Key, Outline, flatten, freeze, members, outline, outlined, signs
from .unread import Unread

OTHER_FORM = "the arguments have another structure, or other constants, than the example"
Sizes: TypeAlias = "tuple[tuple[int, tuple[tuple[int, int], ...]], ...]"


@dataclass
class Signature:
    """The form of the calls that a graph covers."""

    names: tuple[str, ...]  # parameters of forward, in order
    defaults: dict[str, Any]
    variadic: tuple[str | None, str | None]  # names of *args and **kwargs
    key: Key  # structure and constants of the arguments
    numbers: tuple[int, ...]  # positions in the key of numbers that differ between batches
    alike: Sizes = ()  # leaf -> (dim, size) that both examples have
    fixed: Sizes = ()  # those of them that a graph relies on
    wide: Sizes = ()  # those of which it relies on not being 1
    dtypes: tuple[torch.dtype, ...] = ()
    labels: tuple[str, ...] = ()  # one name per leaf
    strict_dtypes: bool = False  # forward reads dtypes: those below, and that of the parameters
    computed_dtypes: bool = False  # it reads others, too, which autocast changes
    dtype: torch.dtype | None = None  # of the first floating point parameter
    keywords: int = 0  # how many of the last names are keyword-only
    outline: Outline | None = None  # of the key, made at the first call
    signs: list[tuple[int, str]] | None = None  # likewise
    ranks: tuple[int, ...] = ()  # dimensions of the leaves in the example
    arrays: tuple[int, ...] = ()  # positions of arguments that are arrays of numpy, tensors here
    rows: tuple[tuple[int, int], ...] = ()  # (leaf, dim) of rows, where they have to be several
    unread: tuple[Unread, ...] = ()

    @property
    def every_name(self) -> list[str]:
        """The names of the ordered arguments, those of ``*args`` and ``**kwargs`` at the end."""
        return [*self.names, *(n for n in self.variadic if n)]

    @property
    def binds_as_given(self) -> bool:
        """Whether arguments that are given by position, or by name in order, stay what they are."""
        return self.variadic == (None, None) and not self.keywords and not self.arrays

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments in the order of ``names``. Raises TypeError as the user's forward would."""
        count = len(self.names) - self.keywords
        if not kwargs and len(args) == len(self.names) == count and self.variadic == (None, None):
            return self._made(tensor_of, args) if self.arrays else args
        bound = dict(zip(self.names[:count], args, strict=False))
        rest = args[count:]
        extra: dict[str, Any] = {}
        if rest and self.variadic[0] is None:
            raise TypeError(
                f"forward() takes {count + 1} positional arguments but {len(args) + 1} were given"
            )
        for name, value in kwargs.items():
            if name in bound:
                raise TypeError(f"forward() got multiple values for argument {name!r}")
            if name in self.names:
                bound[name] = value
            elif self.variadic[1] is None:
                raise TypeError(f"forward() got an unexpected keyword argument {name!r}")
            else:
                extra[name] = value
        for name in self.names:
            if name not in bound:
                if name not in self.defaults:
                    raise TypeError(f"forward() missing a required argument: {name!r}")
                bound[name] = self.defaults[name]
        ordered = tuple(bound[name] for name in self.names)
        if self.variadic[0] is not None:
            ordered += (rest,)
        if self.variadic[1] is not None:
            ordered += (extra,)
        return self._made(tensor_of, ordered)

    def in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """:meth:`bind`, in a fraction of its time, for a call whose names are in the order of
        ``names``; None for any other.
        """
        if kwargs:
            at = len(args)
            if (*kwargs,) != self.names[at : at + len(kwargs)]:
                return None
            args = (*args, *kwargs.values())
        for name in self.names[len(args) :]:
            if name not in self.defaults:
                return None
            args = (*args, self.defaults[name])
        return args

    def unbind(self, ordered: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What to call the user's forward with; the inverse of :meth:`bind`."""
        ordered = self._made(array_of, ordered)
        every = len(self.names)
        count = every - self.keywords
        args, rest = ordered[:count], ordered[every:]
        named = dict(zip(self.names[count:], ordered[count:every], strict=True))
        if self.variadic[0] is not None:
            args, rest = args + rest[0], rest[1:]
        return args, {**named, **(rest[0] if rest else {})}

    def _made(self, made: Callable[[Any], Any], ordered: tuple[Any, ...]) -> tuple[Any, ...]:
        """``ordered`` with ``made`` of what is an array to the user."""
        if not self.arrays:
            return ordered
        return tuple(made(v) if k in self.arrays else v for k, v in enumerate(ordered))

    def settled(self, ordered: tuple[Any, ...]) -> tuple[Any, ...]:
        """``ordered`` with what forward never reads as it was in the example."""
        if not self.unread:
            return ordered
        made = [*ordered]
        for one in self.unread:
            made[one.position] = one.settled(made[one.position])
        return tuple(made)

    def leaves(self, ordered: tuple[Any, ...]) -> tuple[list[Any], str | None]:
        """The flat inputs of the graph, and why this call is not covered (None: it is)."""
        leaves = outlined(self.form(), ordered)
        if leaves is None:
            ordered = self.settled(ordered)
            leaves, same = self._flattened(ordered)
            if not same:
                return leaves, f"{OTHER_FORM} ({self._differs(ordered)})"
        if self.strict_dtypes and tuple(v.dtype for v in leaves[: len(self.dtypes)]) != self.dtypes:
            return leaves, "the inputs have other dtypes than the example, and forward reads dtypes"
        for k, sizes in self.fixed:
            shape = leaves[k].shape
            for dim, size in sizes:
                if dim >= len(shape) or shape[dim] != size:
                    return leaves, (  # told once of a dimension: see Runner.warn
                        f"{self.labels[k]} had {size} in dimension {dim} in the example, on which"
                        " forward or a rewrite of it relies (two batches that differ there,"
                        f" example=[a, b], may cover any size), and is now of shape {tuple(shape)}"
                    )
        for k, sizes in self.wide:
            if 1 in leaves[k].shape and (told := _other_size(leaves[k], sizes, only=1)):
                return leaves, f"{self.labels[k]} {told}"
        for k, dim in self.rows:
            if leaves[k].shape[dim : dim + 1] == (1,):
                return leaves, (
                    f"{self.labels[k]} has 1 in dimension {dim}, and what forward squeezes has then"
                    " fewer dimensions than in the example"
                )
        for k, sizes in self.alike:  # the mean of no items is no number, their sum is zero
            if not leaves[k].numel():
                told = _other_size(leaves[k], [(d, n) for d, n in sizes if d], only=0)
                if told is not None:  # and there may well be no samples
                    return leaves, f"{self.labels[k]} {told}"
        return leaves, None

    def other_kind(self, leaves: Sequence[Any]) -> str | None:
        """Which of the flat inputs means something else than in the example: a mask, not ids, say.
        Asked at each call.
        """
        if tuple([leaf.dtype for leaf in leaves[: len(self.dtypes)]]) == self.dtypes:
            return None
        for leaf, then, label in zip(leaves, self.dtypes, self.labels, strict=False):
            if _kind(leaf.dtype) != _kind(then):
                return f"{label} is {leaf.dtype}, and was {then} in the example"
        return None

    def other_size(self, leaves: Sequence[Any]) -> str | None:
        """Which of the flat inputs has, in one dimension, another size than both examples had."""
        for k, sizes in self.alike:
            if told := _other_size(leaves[k], sizes):
                return f"{self.labels[k]} {told}"
        return None

    def relying(
        self, fixed: Iterable[tuple[int, int]], wide: Iterable[tuple[int, int]]
    ) -> Signature:
        """The same for calls that have the example's sizes at ``fixed``, (leaf, dimension), and not
        1 at ``wide``.
        """
        return replace(self, fixed=self._with(self.fixed, fixed), wide=self._with(self.wide, wide))

    def _with(self, sizes: Sizes, places: Iterable[tuple[int, int]]) -> Sizes:
        """``sizes``, and those of the example at ``places``."""
        example = {k: dict(told) for k, told in self.alike}
        found = {k: dict(told) for k, told in sizes}
        for k, dim in places:
            found.setdefault(k, {})[dim] = example[k][dim]
        return tuple((k, tuple(sorted(told.items()))) for k, told in sorted(found.items()))

    def unresolved(self, leaves: list[Any], lazy: tuple[int, ...]) -> str | None:
        """Why our kernels would misread one of the flat inputs ``lazy``, or None: they read memory
        as it is, and torch negates what has its bit for that on reading.
        """
        for k in lazy:
            tensor = leaves[k]
            if tensor.is_neg() or (self.dtypes[k].is_complex and tensor.is_conj()):
                return (
                    f"{self.labels[k]} is a view that torch has yet to negate or conjugate;"
                    " resolve_neg().resolve_conj() does"
                )
        return None

    def form(self) -> Outline:
        """The outline of the arguments; False where a number may be any."""
        if self.outline is None:
            self.outline = not self.numbers and outline(self.key)
        return self.outline

    def difference(self, ordered: tuple[Any, ...]) -> str:
        """What sets these arguments apart from the example, in a few words."""
        settled = self.settled(ordered)
        return "other sizes or values" if self._flattened(settled)[1] else self._differs(settled)

    def _flattened(self, ordered: tuple[Any, ...]) -> tuple[list[Any], bool]:
        """The flat inputs, and whether all else is as in the example."""
        leaves: list[Any] = []
        key: Key = []
        for value in ordered:
            flatten(value, leaves, key)
        for place in self.numbers:
            if place < len(key) and type(key[place]) in (int, float):
                leaves.append(key[place])
                key[place] = self.key[place]
        return leaves, len(key) == len(self.key) and self._has(key, 0)

    def _has(self, key: Key, at: int) -> bool:
        """Whether ``key`` is what stands at ``at`` in that of the example."""
        past = at + len(key)
        if key != self.key[at:past]:
            return False
        if self.signs is None:
            self.signs = signs(self.key)
        return all(repr(key[k - at]) == sign for k, sign in self.signs if at <= k < past)

    def _differs(self, ordered: tuple[Any, ...]) -> str:
        """The first value that is not as in the example, in words without itself."""
        at = 0
        for name, value in zip(self.every_name, ordered, strict=True):
            same, length = self._same(value, at)
            if not same:
                return self._unlike(name, value, at)
            at += length
        return "there is less than in it"

    def _same(self, value: Any, at: int) -> tuple[bool, int]:
        """Whether ``value`` has the key that begins at ``at``, and the length of its own."""
        key: Key = []
        flatten(value, [], key)
        for place in self.numbers:
            if at <= place < at + len(key) and type(key[place - at]) in (int, float):
                key[place - at] = self.key[place]
        return self._has(key, at), len(key)

    def _unlike(self, name: str, value: Any, at: int) -> str:
        """What sets ``value`` apart from the one whose key begins at ``at``: by the path to it."""
        key: Key = []
        flatten(value, [], key)
        inside = members(value)
        if inside and key[:2] == self.key[at : at + 2]:  # the same container, with other contents
            at += 2
            for text, inner in inside.items():
                same, length = self._same(inner, at)
                if not same:
                    return self._unlike(f"{name}{text}", inner, at)
                at += length
        return f"{name} {_unlike(value, self.key[at:])}"


def _kind(dtype: torch.dtype) -> str:
    """What an index or a mask of ``dtype`` means to torch, in a word."""
    if dtype in (torch.bool, torch.uint8):
        return str(dtype)
    return "number" if dtype.is_floating_point or dtype.is_complex else "whole number"


def _other_size(
    tensor: torch.Tensor, sizes: Sequence[tuple[int, int]], only: int | None = None
) -> str | None:
    """What sets ``tensor`` apart from ``sizes``, those in the example: any other, or ``only``."""
    for dim, size in sizes:
        now = tensor.shape[dim] if dim < tensor.dim() else size
        if now != size and only in (None, now):
            return f"has {now} in dimension {dim}, and had {size} in the example"
    return None


def forward_of(model: nn.Module) -> Callable[..., Any]:
    """What a call of ``model`` runs: a ``forward`` of its own, or that of its class."""
    own: Callable[..., Any] | None = vars(model).get("forward")
    return own or class_forward(model)


def class_forward(model: nn.Module) -> Callable[..., Any]:
    """The ``forward`` of the class of ``model``, of whatever kind: a function, which is bound to
    ``model``, a static method, a ``functools.partial`` or another object that can be called.
    """
    held: Any = inspect.getattr_static(type(model), "forward")
    bound: Callable[..., Any] = held
    if hasattr(type(held), "__get__"):
        bound = held.__get__(model, type(model))
    return bound


def of_forward(model: nn.Module, *, decorated: bool = False) -> Signature:
    """The parameters of ``model.forward``, without a key yet. Raises ValueError when they cannot be
    read. ``decorated``: those of what a decorator made, which may take others than what it wraps.
    """
    names, defaults = [], {}
    keywords = 0
    star: str | None = None
    stars: str | None = None
    taken = inspect.signature(forward_of(model), follow_wrapped=not decorated)
    for p in taken.parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            star = p.name
        elif p.kind is p.VAR_KEYWORD:
            stars = p.name
        else:
            keywords += p.kind is p.KEYWORD_ONLY
            names.append(p.name)
            if p.default is not p.empty:
                defaults[p.name] = p.default
    return Signature(tuple(names), defaults, (star, stars), [], (), keywords=keywords)


def _unlike(value: Any, was: Key) -> str:
    """What sets ``value`` apart from the argument whose key starts as ``was``."""
    if not was or value is None:
        return "is None" if value is None else "is more than was given"
    if isinstance(value, Mapping) and isinstance(was[1:2] and was[1], tuple):
        new, gone = (
            [str(k) for k in a if k not in b] for a, b in ((value, was[1]), (was[1], value))
        )
        said = [f"has also {', '.join(new)}"] if new else []
        said += [f"lacks {', '.join(gone)}"] if gone else []
        return " and ".join(said) or "has its keys in another order, or is of another class"
    kinds = type(value).__name__, getattr(was[0], "__name__", str(was[0]))
    if kinds[0] != kinds[1]:
        return f"is a {kinds[0]}, not {'None' if was[0] is type(None) else f'a {kinds[1]}'}"
    if isinstance(value, (tuple, list)) and was[1:2] != [len(value)]:
        return f"has {len(value)} entries, not {was[1]}"
    return f"is another {kinds[0]}"


def complete(
    base: Signature, first: tuple[Any, ...], second: tuple[Any, ...]
) -> tuple[Signature, list[tuple[Any, Any]]]:
    """The signature for two ordered example batches, and their flat inputs in pairs.

    Raises ValueError when the batches differ in structure.
    """
    flats: list[list[Any]] = []
    keys: list[Key] = []
    for ordered in (first, second):
        leaves: list[Any] = []
        key: Key = []
        for value in ordered:
            flatten(value, leaves, key)
        flats.append(leaves)
        keys.append(key)
    a, b = keys
    if len(a) != len(b):
        raise ValueError("the two example batches have different structures")
    numbers = []
    for k, (x, y) in enumerate(zip(a, b, strict=True)):
        if x is y or (x == y and (type(x) not in (float, complex) or repr(x) == repr(y))):
            continue
        if type(x) in (int, float) and type(x) is type(y):
            numbers.append(k)
            continue
        raise ValueError(
            f"the two example batches differ in structure: {_brief(x)} and {_brief(y)}"
        )
    freeze(a)
    pairs = list(zip(flats[0], flats[1], strict=True))
    fixed = []
    for k, (x, y) in enumerate(pairs):
        sizes = tuple(
            (d, n) for d, (n, m) in enumerate(zip(x.shape, y.shape, strict=False)) if n == m
        )
        if sizes:
            fixed.append((k, sizes))
    done = Signature(
        base.names, base.defaults, base.variadic, a, tuple(numbers), tuple(fixed), tuple(fixed), (),
        tuple(x.dtype for x, _ in pairs), tuple(_labels(base, first)), keywords=base.keywords,
        ranks=tuple(x.dim() for x, _ in pairs), arrays=base.arrays, unread=base.unread,
    )  # fmt: skip
    return done, pairs + [(a[k], b[k]) for k in numbers]


def _brief(part: Any) -> str:
    text = " ".join(str(part).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _labels(base: Signature, ordered: tuple[Any, ...]) -> list[str]:
    """A name for every tensor, from the names of the parameters and the keys on the way to it."""
    found: list[str] = []
    for name, value in zip(base.every_name, ordered, strict=True):
        _label(value, name, found)
    return found


def _label(value: Any, name: str, found: list[str]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(name)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for field_name, item in zip(value._fields, value, strict=True):
            _label(item, f"{name}_{field_name}", found)
    elif isinstance(value, (tuple, list)):
        for k, item in enumerate(value):
            _label(item, f"{name}_{k}", found)
    elif isinstance(value, Mapping):
        for k, item in value.items():
            _label(item, f"{name}_{k}", found)
    elif (inside := members(value)) is not None:
        for text, item in inside.items():
            _label(item, f"{name}_{text[1:]}", found)
