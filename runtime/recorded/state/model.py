"""What recordings of a model take for granted, checked at every call.

To read all of it from 60 modules and their parameters, and to compare it with the time of
recording, takes the host as long as everything else in a replayed forward. So what was read is kept
together with the objects that it was read from. If these are still the same objects, and each
tensor has the same address, the answer is the tuple of the previous call. Most of these objects are
the values of dicts, which need not be looked into as long as nothing was written to them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from recast.runtime.recorded.state.layers import (
    CachedLayerSettings,
    LayerSettings,
    hooks_of,
    layers_of,
    why_not_hooked,
)
from recast.runtime.recorded.state.same import (
    TensorLayouts,
    WatchedDicts,
    addresses_of,
    attributes_of,
    same_attributes,
    same_items,
    same_values,
    shapes_of,
    values_of,
)
from recast.runtime.recorded.state.settings import settings_of

State = tuple[tuple[Hashable, ...], ...]  # named parts
_SLOTS = ("_modules", "_parameters", "_buffers")
_READ = (*_SLOTS, "training")
_NAMES = frozenset(_READ)
_WANTS = ("requires_grad",)
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of a parameter


class ModelState:
    """:func:`state_of` modules, on a device of the type ``device``.

    whole: the hooks of the first module, and those of parameters, are inside what is recorded.
    uncaptured: returns modules whose attributes may be read by their own forward.
    wants: whether any parameter required a gradient at the last call; why: a reason not to record,
    or None.
    """

    def __init__(
        self, device: str, whole: bool = False,
        uncaptured: Callable[[], Iterable[nn.Module]] | None = None,
    ) -> None:  # fmt: skip
        self._device, self._whole = device, whole
        self._asked = (*_WANTS, *_HOOKS) if whole else _WANTS
        self._modules: list[nn.Module] | None = None  # those read; None: nothing can be kept
        # For each module what _READ names: in its dict, or where a property computes some of it.
        self._dicts: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._own: list[object] = []
        self._computing: list[nn.Module] = []
        self._computed: list[object] = []
        self._slots: list[dict[str, object]] = []  # of them the dicts
        self._held: list[object] = []  # everything in these
        self._parameters: list[Tensor] = []
        self._flags: list[Any] = []  # the answers for each: first whether it wants a gradient
        self._where = TensorLayouts([])  # parameters and buffers
        self._states: dict[Hashable, State] = {}  # by settings, of which the last are
        self._last: tuple[Hashable, State] = ((), ())
        self._layers = CachedLayerSettings(uncaptured)
        self._settings = self._layers.of([])
        self._hooks: list[dict[int, object]] = []
        self._hooked: list[object] = []  # all hooks
        self._watched = WatchedDicts([])  # all of these dicts
        self.wants = False
        self.why: str | None = None

    def of(self, modules: list[nn.Module]) -> State:
        """The state of ``modules``, a list that must not be changed."""
        if modules is not self._modules or not self._unchanged():
            self._states.clear()
            self._last = ((), ())
            self._keep(modules)
        settings = settings_of(self._device)
        if settings == self._last[0]:
            return self._last[1]
        state = None if self._modules is None else self._states.get(settings)
        if state is None:
            state = self._states[settings] = state_of(
                modules, self._parameters, self._device, self._settings
            )
        if self._modules is not None:
            self._last = (settings, state)
        return state

    def _unchanged(self) -> bool:
        """Whether the modules hold the same objects as before, unchanged."""
        return (
            (self._watched.unwritten() or self._dicts_hold_same())
            and self._layers.holds_inside()
            and (not self._computing or same_attributes(self._computing, _READ, self._computed))
            and same_attributes(self._parameters, self._asked, self._flags)
            and self._where.unchanged()
        )

    def _dicts_hold_same(self) -> bool:
        modules, self._modules = self._modules, None  # nothing is known if this raises
        assert modules is not None
        self._watched.renew()
        same = (
            same_items(self._dicts, self._names, self._own, None)
            and same_values(self._slots, self._held)
            and self._layers.of(modules) is self._settings
            and same_values(self._hooks, self._hooked)
        )
        if same:
            self._modules = modules
        return same

    def _keep(self, modules: list[nn.Module]) -> None:
        """Read ``modules`` for the next call."""
        self._modules = None
        slots = attributes_of(modules, _SLOTS)
        plain = all([isinstance(held, dict) for held in slots])  # those of TorchScript are not
        self._parameters = [p for m in modules for p in m._parameters.values() if p is not None]
        self._flags = attributes_of(self._parameters, self._asked)
        self.wants = any(self._flags[:: len(self._asked)])
        self._settings = self._layers.of(modules)
        of_modules = hooks_of(modules if self._whole else modules[1:])
        of_parameters = [held for held in self._flags if isinstance(held, dict)]
        self._hooks = [*of_modules, *of_parameters]
        self._hooked = values_of(self._hooks)
        self.why = why_not_hooked(of_modules) or why_not_hooked(of_parameters, "a parameter")
        if plain:
            self._slots, self._held = slots, values_of(slots)
            self._computing = [m for m in modules if not vars(m).keys() >= _NAMES]
            self._computed = attributes_of(self._computing, _READ)
            own = [(vars(m), name) for m in modules for name in _READ if name in vars(m)]
            self._dicts, self._names = [held for held, _ in own], [name for _, name in own]
            self._own = [held[name] for held, name in own]
            buffers = [b for m in modules for b in m._buffers.values() if b is not None]
            self._where = TensorLayouts([*self._parameters, *buffers])
            held = [*self._dicts, *slots, *self._layers.dicts, *self._hooks]
            self._watched = WatchedDicts(held)
            self._modules = modules


def state_of(
    modules: Sequence[nn.Module], parameters: Iterable[Tensor], device: str,
    settings: LayerSettings | None = None,
) -> State:  # fmt: skip
    """What any recording of a model takes for granted besides the form of the batch.

    ``settings``: those of its layers, if they are known.
    """
    held = list(parameters)
    buffers = [b for m in modules if m._buffers for b in m._buffers.values() if b is not None]
    return (
        ("modules", tuple(map(id, children_of(modules)))),
        ("parameters", addresses_of(held)),
        ("shapes of parameters", *shapes_of(held)),
        ("requires_grad flags", tuple([p.requires_grad for p in held])),
        ("buffers", addresses_of(buffers), *shapes_of(buffers)),
        ("training flags", tuple([m.training for m in modules])),
        ("settings of layers", settings or LayerSettings(layers_of(modules))),
        ("autocast or precision settings", *settings_of(device)),
    )


def children_of(modules: Iterable[nn.Module]) -> list[nn.Module | None]:
    """The modules that a state knows by their ids: a recording keeps them, as an id is another's
    once its object is gone.
    """
    return [c for m in modules if m._modules for c in m._modules.values()]
