"""What recordings of a model take for granted, asked again at every call.

To ask 60 modules and their parameters for all of it, and to compare that with what it was when a
recording was made, takes the host as long as all else in a replayed forward. So what was read is
kept with the objects that it was read from. Where each of these is the very same object still, and
each tensor lies where it did, the answer is the tuple of the call before.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor, nn

from recast.runtime.recorded.recordings import State, settings_of, state_of
from recast.runtime.recorded.state.layers import Layers, hooks_of, why_not_hooked
from recast.runtime.recorded.state.same import Where, attributes, attributes_of, values, values_of

_SLOTS = ("_modules", "_parameters", "_buffers")
_READ = (*_SLOTS, "training")
_WANTS = ("requires_grad",)


class ModelState:
    """:func:`state_of` modules, on a device of the type ``device``.

    wants: whether a parameter of those asked for last wants a gradient; why: a reason to record
    nothing of them, or None.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._modules: list[nn.Module] | None = None  # those read; None: nothing can be kept
        self._read: list[object] = []  # of each module what _READ names
        self._slots: list[dict[str, object]] = []  # of them the dicts
        self._held: list[object] = []  # all that is in these
        self._parameters: list[Tensor] = []
        self._flags: list[bool] = []  # of each whether it wants a gradient
        self._where = Where([])  # parameters and buffers
        self._states: dict[Hashable, State] = {}  # by settings
        self._layers = Layers()
        self._settings = self._layers.of([])
        self._hooks: list[dict[int, object]] = []
        self._hooked: list[object] = []  # all hooks
        self.wants = False
        self.why: str | None = None

    def of(self, modules: list[nn.Module]) -> State:
        """The state of ``modules``, a list that nobody changes."""
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
        """Whether the modules hold what they held, as it was."""
        assert self._modules is not None
        return (
            attributes(self._modules, _READ, self._read)
            and values(self._slots, self._held)
            and self._layers.of(self._modules) is self._settings
            and values(self._hooks, self._hooked)
            and attributes(self._parameters, _WANTS, self._flags)
            and self._where.stands()
        )

    def _keep(self, modules: list[nn.Module]) -> None:
        """Read ``modules`` for the next call."""
        slots = attributes_of(modules, _SLOTS)
        plain = all([isinstance(held, dict) for held in slots])  # those of TorchScript are not
        self._modules = modules if plain else None
        self._parameters = [p for m in modules for p in m._parameters.values() if p is not None]
        self._flags = attributes_of(self._parameters, _WANTS)
        self.wants = any(self._flags)
        self._hooks, self._settings = hooks_of(modules), self._layers.of(modules)
        self._hooked = values_of(self._hooks)
        self.why = why_not_hooked(self._hooks)
        if plain:
            self._slots, self._held = slots, values_of(slots)
            self._read = attributes_of(modules, _READ)
            buffers = [b for m in modules for b in m._buffers.values() if b is not None]
            self._where = Where([*self._parameters, *buffers])
