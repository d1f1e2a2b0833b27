"""What a model says about the tensors of a batch: which may get more ids, which be narrower."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules import module as _module

from recast.runtime.recorded.batches.batch import Batch, form_of

_Method = Callable[..., Sequence[Tensor]]  # from arguments to some of their tensors
_KEPT = 64  # answers


class InputRoles(NamedTuple):
    """Indices of tensors in a batch.

    ragged: those to which ids may be appended without effect. looked_up: those that are used only
    as ids and offsets of lookups.
    """

    ragged: list[int]
    looked_up: list[int]


class AskedRoles(NamedTuple):
    """What the model said about a batch, and how to ask it again."""

    roles: InputRoles
    inputs: ModelInputs
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def still_hold(self, batch: Batch) -> bool:
        """Whether the model says the same now."""
        return self.inputs.ask(batch, self.args, self.kwargs) == self.roles


class ModelInputs:
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
        self._ragged = method_of(model, "ragged_inputs")
        self._looked_up = method_of(model, "looked_up_inputs")
        self.generation = 0
        self._lengths: dict[Hashable, list[int]] = {}  # by structure: ragged, as first told
        self._known: dict[Hashable, InputRoles] = {}

    def of(self, batch: Batch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """The ragged tensors of ``batch``, which was made from ``args`` and ``kwargs`` (and
        others). The whole answer is kept in the batch.
        """
        known = batch.known
        if known is not None and known.roles is not None and known.generation == self.generation:
            roles = known.roles
        else:
            roles = self._of(batch, args, kwargs)
            if known is not None:
                if known.free <= {*roles.ragged}:
                    known.roles, known.generation = roles, self.generation
                else:
                    batch.known = None  # it does not determine the lengths of this batch
        batch.asked_roles = AskedRoles(roles, self, args, kwargs)
        return roles.ragged

    def _of(self, batch: Batch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> InputRoles:
        if self._ragged is None and self._looked_up is None:
            return InputRoles([], [])
        free = self._lengths.get(batch.structure)
        if free is None:
            roles = self.ask(batch, args, kwargs)
            self._lengths[batch.structure] = free = roles.ragged
            self._known[_form_without_lengths(batch, free)] = roles
            return roles
        key = _form_without_lengths(batch, free)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            found = self._known[key] = self.ask(batch, args, kwargs)
        return found

    def ask(self, batch: Batch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> InputRoles:
        """What the model says now."""
        if self._model is not None and _others_read(self._model):
            return InputRoles([], [])
        times = Counter(batch.parts.places)
        numbers = {id(t): k for k, t in enumerate(batch.tensors)}

        def places(ask: _Method | None) -> list[int]:
            if ask is None:
                return []
            found = Counter(numbers.get(id(t), -1) for t in ask(*args, **kwargs))
            return sorted(k for k, n in found.items() if k >= 0 and n == times[k])

        return InputRoles(places(self._ragged), places(self._looked_up))

    def forget(self) -> None:
        """Ask again."""
        self.generation += 1
        self._lengths.clear()
        self._known.clear()


def method_of(model: nn.Module, name: str) -> Callable[..., Any] | None:
    """The method ``name`` of ``model``, or of what has taken over its ``forward``."""
    for held in (model, getattr(vars(model).get("forward"), "__self__", None)):
        if getattr(type(held), name, None) is not None:
            ask: Callable[..., Any] = getattr(held, name)
            return ask
    return None


def _others_read(model: nn.Module) -> bool:
    """Whether anything but its own forward gets the arguments of ``model``."""
    hooks = (
        model._forward_pre_hooks, model._forward_hooks,
        _module._global_forward_pre_hooks, _module._global_forward_hooks,
    )  # fmt: skip
    put = vars(model).get("forward")
    holder = getattr(put, "__self__", None)
    own = put is None or getattr(put, "__func__", ...) is getattr(type(holder), "forward", None)
    return any(hooks) or not own


def _form_without_lengths(batch: Batch, free: Sequence[int]) -> Hashable:
    """The form of ``batch``, regardless of the lengths of the tensors in ``free``."""
    bounds: list[int | None] = [None] * len(batch.tensors)
    for k in free:
        bounds[k] = -1
    return form_of(batch, bounds)
