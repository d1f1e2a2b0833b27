"""Recorded runs of one job, by the form of the batch: when to record, what to keep, what to replay.

The first runs of a form are done as always, which warms up libraries and kernels; then one is
recorded, and from then on replayed as long as everything that the recording took for granted, its
``state``, stays the same. When that has changed, the job runs once as always and is recorded anew.
What cannot be recorded runs as always, with one warning that says why.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from recast.errors import RecastWarning
from recast.runtime import checked
from recast.runtime.gpu import cuda_launch
from recast.runtime.recorded import recording
from recast.runtime.recorded.batches.batch import Batch
from recast.runtime.recorded.batches.room import Room
from recast.runtime.recorded.recording import Recorder, Recording, Unrecordable
from recast.runtime.recorded.state.layers import LayerSettings, layers_of
from recast.runtime.recorded.state.same import addresses_of, shapes_of

State = tuple[tuple[Hashable, ...], ...]  # named parts
_UNSETTLED = 16  # runs in a row that find something changed, before a warning says so


class Job(Protocol):
    """Work that is run, and recorded."""

    def always(self, tree: Any) -> Any:
        """Run it on the batch ``tree``."""

    def begin(self, made: Recording) -> Callable[[Any], Any]:
        """Prepare for recording; returns what is to be recorded, a function of the batch."""

    def check(self) -> None:
        """Raise Unrecordable if a replay would not repeat what was recorded."""

    def undo(self) -> None:
        """Undo what was done on the host while a recording failed."""


@dataclass
class _Recorded:
    room: Room
    recording: Recording
    run: Callable[[], Any]  # replays; results that the next replay does not overwrite
    state: State


class Recordings:
    """At most ``most`` recorded runs of ``job``; ``what`` names it in warnings.

    ``why`` is a reason not to record at all; without a recorder there must be one. ``make`` records
    the job on the batch in a room, and gives what replays it; None records its work as one.
    """

    def __init__(
        self, what: str, job: Job, recorder: Recorder | None, why: str | None, *,
        warmup: int, most: int, make: Callable[[Recording, Room], Callable[[], Any]] | None = None,
    ) -> None:  # fmt: skip
        self._make = make or self._whole
        self._what, self._job, self._recorder, self._why = what, job, recorder, why
        self._warmup, self._most = max(warmup, 1), max(most, 1)
        self._recorded: OrderedDict[Hashable, _Recorded] = OrderedDict()
        self._ran: OrderedDict[int, int] = OrderedDict()  # by form and state
        self._newest: _Recorded | None = None  # the last in their order
        self._unsettled = 0
        self._state: State = ()
        self._warned: set[str] = set()

    def __len__(self) -> int:
        return len(self._recorded)

    @property
    def possible(self) -> bool:
        """Whether anything is recorded at all."""
        return self._why is None

    def run(
        self, batch: Batch, bounds: Sequence[int | None] | None, state: State,
        why: str | None = None,
    ) -> Any:  # fmt: skip
        """Run the job on ``batch``, whose ragged tensors have ``bounds``; None: one of them is too
        long.

        ``why``: a reason not to record it this time.
        """
        why = self._why or why or _why_not_now() or batch.why_not()
        why = why or ("a batch has more ids than max_ids" if bounds is None else None)
        if why is not None or bounds is None:
            self._warn(str(why))
            return self.always(batch)
        form = batch.form(bounds)
        found = self._recorded.get(form)
        if found is not None and found.state == state and self._stands(form, found):
            found.state = state  # comparing a tuple with itself takes no time
            if found is not self._newest:
                self._recorded.move_to_end(form)
                self._newest = found
            found.room.fill(batch)
            found.recording.prepare()
            return found.run()
        if not self._is_settled(form, state):
            return self.always(batch)
        del found  # its memory is for the next
        self._forget(form)
        return self._record(batch, bounds, form, state)

    def always(self, batch: Batch) -> Any:
        """Run the job as always, without asking whether it could be recorded."""

        def run() -> Any:
            return self._job.always(batch.tree())

        return run() if self._recorder is None else self._recorder.eagerly(run)

    def _stands(self, form: Hashable, found: _Recorded) -> bool:
        """Whether what ``found`` reads, recorded for ``form`` and the present state, still exists.

        If not, it is dropped, and the count of such runs starts anew.
        """
        if found.recording.stands():
            return True
        self._forget(form)
        self._ran.pop(hash((form, found.state)), None)
        return False

    def _is_settled(self, form: Hashable, state: State) -> bool:
        """Count this run; returns whether there have been enough like it to record the next."""
        if self._state and state != self._state:
            self._unsettled += 1
            if self._unsettled == _UNSETTLED:
                changed = [a[0] for a, b in zip(self._state, state, strict=True) if a != b]
                self._warn(f"{', '.join(map(str, changed))} change from one to the next")
        self._state = state
        key, known = hash((form, state)), form in self._recorded
        ran = self._ran.get(key, 0)
        # If the form was recorded before, libraries are warm: one run is enough.
        if ran >= (1 if known else self._warmup):
            self._unsettled = 0
            return True
        self._ran[key] = ran + 1
        self._ran.move_to_end(key)
        while len(self._ran) > 8 * self._most:
            self._ran.popitem(last=False)
        return False

    def _forget(self, form: Hashable) -> None:
        """Make room for a recording of ``form``."""
        old = [form] if form in self._recorded else []
        if not old and len(self._recorded) >= self._most:
            old = [next(iter(self._recorded))]
        if old:
            assert self._recorder is not None
            self._recorder.drain()
            if self._recorded.pop(old[0]) is self._newest:
                self._newest = None

    def _record(
        self, batch: Batch, bounds: Sequence[int | None], form: Hashable, state: State
    ) -> Any:
        assert self._recorder is not None
        if not batch.is_as_asked():
            return self.always(batch)
        found = self._try(Room(batch, bounds), state)
        if found is not None:
            self._recorded[form] = self._newest = found
            return found.run()
        # By now the error is gone, whose frames kept the memory of the failed recording alive.
        self._recorder.free()
        if self._why is not None:
            self._warn(self._why)
        return self.always(batch)

    def _try(self, room: Room, state: State) -> _Recorded | None:
        """A recording of the job on the batch in ``room``; None if it fails, and why, where another
        would too.
        """
        try:
            with recording.recording() as made:
                made.give(room.tensors)
                run = self._make(made, room)
            self._job.check()
        except Exception as error:
            self._job.undo()
            if cuda_launch.load_refused():
                return None  # the next run of this form finds them
            told = str(error).partition("\n")[0]
            own = isinstance(error, Unrecordable)
            self._why = told if own else f"{type(error).__name__}: {told}"
            return None
        return _Recorded(room, made, run, state)

    def _whole(self, made: Recording, room: Room) -> Callable[[], Any]:
        """Record the work of the job as one graph."""
        assert self._recorder is not None
        work = self._job.begin(made)
        result, replay = self._recorder.record(lambda: work(room.tree))

        def run() -> Any:
            replay()
            if isinstance(result, Tensor):
                return result.clone()
            return pytree.tree_map_only(Tensor, Tensor.clone, result)

        return run

    def _warn(self, why: str) -> None:
        if why not in self._warned:
            self._warned.add(why)
            warnings.warn(
                f"{self._what} runs without being recorded: {why}. The numbers are the same, the"
                " speed is not",
                RecastWarning,
                stacklevel=4,
            )


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


def _why_not_now() -> str | None:
    """Why nothing may be recorded or replayed right now, or None."""
    if checked.is_checked():
        return "ids are checked (recast.checked(), RECAST_CHECKED), which a replay would not do"
    if torch.is_anomaly_enabled():
        return "torch.autograd.detect_anomaly looks into each backward, and a replay has none"
    if _saved_hooks is not None and _saved_hooks(True) is not None:
        return "there are hooks for saved tensors, which a replay would not call"
    return None


def settings_of(device: str) -> tuple[Hashable, ...]:
    """The global settings that work on devices of the type ``device`` depends on."""
    return (
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        *_kernels(),
    )


def _by_name() -> tuple[Hashable, ...]:
    """The settings for how a GPU may round products, convolutions and recurrent layers, and for
    which kernels torch may choose for them and for attention.
    """
    products, attention = torch.backends.cuda.matmul, torch.backends.cuda
    return (
        products.fp32_precision,
        _cudnn.conv.fp32_precision,
        _cudnn.rnn.fp32_precision,
        products.allow_bf16_reduced_precision_reduction,
        products.allow_fp16_reduced_precision_reduction,
        products.allow_fp16_accumulation,
        _cudnn.enabled,
        _cudnn.benchmark,
        _cudnn.deterministic,
        attention.preferred_blas_library(),
        attention.flash_sdp_enabled(),
        attention.mem_efficient_sdp_enabled(),
        attention.math_sdp_enabled(),
        attention.cudnn_sdp_enabled(),
        attention.fp16_bf16_reduction_math_sdp_allowed(),
    )


def _at_once() -> tuple[Hashable, ...]:
    """The same through torch's internal getters, in a fifth of the time."""
    return (
        _c._get_fp32_precision_getter("cuda", "matmul"),
        _c._get_fp32_precision_getter("cuda", "conv"),
        _c._get_fp32_precision_getter("cuda", "rnn"),
        _c._get_cublas_allow_bf16_reduced_precision_reduction(),
        _c._get_cublas_allow_fp16_reduced_precision_reduction(),
        _c._get_cublas_allow_fp16_accumulation(),
        _c._get_cudnn_enabled(),
        _c._get_cudnn_benchmark(),
        _c._get_cudnn_deterministic(),
        _c._get_blas_preferred_backend(),
        _c._get_flash_sdp_enabled(),
        _c._get_mem_efficient_sdp_enabled(),
        _c._get_math_sdp_enabled(),
        _c._get_cudnn_sdp_enabled(),
        _c._get_math_sdp_allow_fp16_bf16_reduction(),
    )


_c: Any = torch._C
_cudnn: Any = torch.backends.cudnn
_saved_hooks: Any = getattr(_c._autograd, "_top_saved_tensors_default_hooks", None)
try:
    _at_once()
    _kernels = _at_once
except (AttributeError, TypeError):  # another version of torch
    _kernels = _by_name


def why_not_of(model: nn.Module) -> str | None:
    """Why calls of ``model``, or of an optimised model inside it, may not be replayed, or None.

    An optimised model says so by its method ``unrecordable``; after ``inplace=True`` it is the
    object whose ``forward`` the user's module has.
    """
    for module in model.modules():
        for held in (module, getattr(vars(module).get("forward"), "__self__", None)):
            ask = getattr(type(held), "unrecordable", None)
            why = None if ask is None else ask(held)
            if why is not None:
                return str(why)
    return None


def why_not_on(device: torch.device) -> str | None:
    """Why nothing can be recorded on ``device``, or None."""
    return None if device.type == "cuda" else f"there are no CUDA graphs on a {device.type} device"
