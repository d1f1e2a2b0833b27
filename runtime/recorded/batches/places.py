"""What a model says about the tensors of a batch: which may get more ids, which be narrower."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules import module as _module

from recast.runtime.recorded.batches.batch import Batch, form_of

_Ask = Callable[..., Sequence[Tensor]]  # from arguments to some of their tensors
_CHUNKS = 8  # a bound is rounded up to an eighth of its power of two
_KEPT = 64  # answers


class Told(NamedTuple):
    """Indices of tensors in a batch.

    ragged: those to which ids may be appended without effect. looked_up: those that are used only
    as ids and offsets of lookups.
    """

    ragged: list[int]
    looked_up: list[int]


class Asked(NamedTuple):
    """What the model said about a batch, and how to ask it again."""

    told: Told
    places: Places
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def is_so(self, batch: Batch) -> bool:
        """Whether the model says the same now."""
        return self.places.ask(batch, self.args, self.kwargs) == self.told


class Places:
    """What ``model`` says about batches, asked once for each form.

    It answers through its methods ``ragged_inputs`` and ``looked_up_inputs``, or those of what runs
    in its place. From the arguments of a call they return the tensors that qualify, each as often
    as it occurs in a place where it does; a tensor counts only if it qualifies in all its places.
    The answer also depends on the model: whenever that changes, a call runs as always, and
    :meth:`forget` has to be called. ``called``: the model is called as a whole, with its hooks and
    whatever replaced its forward; if there are any, nothing qualifies, since they may read
    anything.
    """

    def __init__(self, model: nn.Module, called: bool = False) -> None:
        self._model = model if called else None
        self._ragged = asks(model, "ragged_inputs")
        self._looked_up = asks(model, "looked_up_inputs")
        self.generation = 0
        self._lengths: dict[Hashable, list[int]] = {}  # by structure: ragged, as first told
        self._known: dict[Hashable, Told] = {}

    def of(self, batch: Batch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """The ragged tensors of ``batch``, which was made from ``args`` and ``kwargs`` (and
        others). The whole answer is kept in the batch.
        """
        known = batch.known
        if known is not None and known.told is not None and known.generation == self.generation:
            told = known.told
        else:
            told = self._of(batch, args, kwargs)
            if known is not None:
                if known.free <= {*told.ragged}:
                    known.told, known.generation = told, self.generation
                else:
                    batch.known = None  # it does not determine the lengths of this batch
        batch.asked = Asked(told, self, args, kwargs)
        return told.ragged

    def _of(self, batch: Batch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Told:
        if self._ragged is None and self._looked_up is None:
            return Told([], [])
        free = self._lengths.get(batch.structure)
        if free is None:
            told = self.ask(batch, args, kwargs)
            self._lengths[batch.structure] = free = told.ragged
            self._known[_but_for(batch, free)] = told
            return told
        key = _but_for(batch, free)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            found = self._known[key] = self.ask(batch, args, kwargs)
        return found

    def ask(self, batch: Batch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Told:
        """What the model says now."""
        if self._model is not None and _others_see(self._model):
            return Told([], [])
        times = Counter(batch.parts.places)
        numbers = {id(t): k for k, t in enumerate(batch.tensors)}

        def places(ask: _Ask | None) -> list[int]:
            if ask is None:
                return []
            found = Counter(numbers.get(id(t), -1) for t in ask(*args, **kwargs))
            return sorted(k for k, n in found.items() if k >= 0 and n == times[k])

        return Told(places(self._ragged), places(self._looked_up))

    def forget(self) -> None:
        """Ask again."""
        self.generation += 1
        self._lengths.clear()
        self._known.clear()


def asks(model: nn.Module, name: str) -> Callable[..., Any] | None:
    """The method ``name`` of ``model``, or of what has taken over its ``forward``."""
    for held in (model, getattr(vars(model).get("forward"), "__self__", None)):
        if getattr(type(held), name, None) is not None:
            ask: Callable[..., Any] = getattr(held, name)
            return ask
    return None


def _others_see(model: nn.Module) -> bool:
    """Whether anything but its own forward gets the arguments of ``model``."""
    hooks = (
        model._forward_pre_hooks, model._forward_hooks,
        _module._global_forward_pre_hooks, _module._global_forward_hooks,
    )  # fmt: skip
    put = vars(model).get("forward")
    holder = getattr(put, "__self__", None)
    own = put is None or getattr(put, "__func__", ...) is getattr(type(holder), "forward", None)
    return any(hooks) or not own


def _but_for(batch: Batch, free: Sequence[int]) -> Hashable:
    """The form of ``batch``, regardless of the lengths of the tensors in ``free``."""
    bounds: list[int | None] = [None] * len(batch.tensors)
    for k in free:
        bounds[k] = -1
    return form_of(batch, bounds)


class Bounds:
    """How much room each ragged tensor of a batch is given.

    Args:
        most: the bound for all; None is the longest seen, rounded up.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._seen: dict[int, int] = {}

    def of(self, batch: Batch, ragged: Collection[int]) -> list[int | None] | None:
        """A bound for each tensor of ``batch``, None for those that are not ``ragged``. Returns
        None when one of them is longer than the declared bound.
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


def rounded(length: int) -> int:
    """``length`` rounded up, so that lengths that differ by chance get the same bound."""
    unit = max(64, (1 << max(length - 1, 1).bit_length()) // (2 * _CHUNKS) * 2)
    return -(-length // unit) * unit
