"""What recordings of a model take for granted, checked at every call.

To read all of it from 60 modules and their parameters, and to compare it with the time of
recording, takes the host as long as everything else in a replayed forward. So what was read is kept
together with the objects that it was read from. If these are still the same objects, and each
tensor has the same address, the answer is the tuple of the previous call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from torch import Tensor, nn

from recast.runtime.recorded.recordings import State, settings_of, state_of
from recast.runtime.recorded.state.layers import Layers, hooks_of, why_not_hooked
from recast.runtime.recorded.state.same import (
    Where,
    attributes,
    attributes_of,
    items,
    values,
    values_of,
)

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
        self._where = Where([])  # parameters and buffers
        self._states: dict[Hashable, State] = {}  # by settings
        self._layers = Layers(uncaptured)
        self._settings = self._layers.of([])
        self._hooks: list[dict[int, object]] = []
        self._hooked: list[object] = []  # all hooks
        self.wants = False
        self.why: str | None = None

    def of(self, modules: list[nn.Module]) -> State:
        """The state of ``modules``, a list that must not be changed."""
        if modules is not self._modules or not self._stands():
            self._states.clear()
            self._keep(modules)
        settings = settings_of(self._device)
        state = None if self._modules is None else self._states.get(settings)
        if state is None:
            state = self._states[settings] = state_of(
                modules, self._parameters, self._device, self._settings
            )
        return state

    def _stands(self) -> bool:
        """Whether the modules hold the same objects as before, unchanged."""
        assert self._modules is not None
        return (
            items(self._dicts, self._names, self._own, None)
            and attributes(self._computing, _READ, self._computed)
            and values(self._slots, self._held)
            and self._layers.of(self._modules) is self._settings
            and values(self._hooks, self._hooked)
            and attributes(self._parameters, self._asked, self._flags)
            and self._where.stands()
        )

    def _keep(self, modules: list[nn.Module]) -> None:
        """Read ``modules`` for the next call."""
        slots = attributes_of(modules, _SLOTS)
        plain = all([isinstance(held, dict) for held in slots])  # those of TorchScript are not
        self._modules = modules if plain else None
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
            self._where = Where([*self._parameters, *buffers])
