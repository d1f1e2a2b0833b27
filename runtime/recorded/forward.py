"""Forwards as CUDA graphs: what ``mode="graph"`` does when a model is called.

A forward with gradients is recorded together with its backward (:mod:`.training`), one without by
itself. Inside a :class:`~.training_step.TrainingStep`, which records loss and optimizer as well,
forwards are not recorded separately.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from recast.errors import UsageError
from recast.runtime.recorded import recording
from recast.runtime.recorded.batches.bounds import Bounds
from recast.runtime.recorded.batches.input_roles import ModelInputs, method_of
from recast.runtime.recorded.batches.known_batches import Batches
from recast.runtime.recorded.gradients import one_thread
from recast.runtime.recorded.recording import CudaRecorder, Recorder, Recording
from recast.runtime.recorded.recordings import Recordings
from recast.runtime.recorded.state.model import ModelState, children_of
from recast.runtime.recorded.training import RecordedTraining, Run, must_not_record
from recast.runtime.recorded.why_not import why_not_of, why_not_on


def device_for(model: nn.Module) -> torch.device:
    """The CUDA device that holds ``model``. Raises UsageError unless there is exactly one."""
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1 or why_not_on(next(iter(devices))) is not None:
        raise UsageError(
            'optimize: mode="graph" needs a model on one CUDA device',
            why=f"its parameters are on {', '.join(sorted(map(str, devices))) or 'none'}",
            tries=('model.to("cuda") before optimize', 'leave mode="graph" out'),
        )
    return devices.pop()


class RecordedForward:
    """Calls ``run`` of one model, by replays.

    Forwards with and without gradients have a recorder each (``training`` is the former), which
    never share memory, so that a model may be evaluated between a forward and its backward. A model
    that calls functions outside torch is not recorded: all of its calls run as always, with one
    warning that names the function; ``why`` is another reason not to record it. Raises UsageError
    when the parameters are not all on one CUDA device.
    """

    def __init__(
        self, model: nn.Module, recorder: Recorder | None = None,
        training: Recorder | None = None, why: str | None = None,
    ) -> None:  # fmt: skip
        self._model = model
        self._device = device_for(model) if recorder is None else next(model.parameters()).device
        self._run: Run | None = None
        self._modules = list(model.modules())
        self._inputs = ModelInputs(model)
        self._batches = Batches(self._device)
        self._bounds = Bounds(None)
        self._state = ModelState(
            self._device.type, uncaptured=method_of(model, "uncaptured_modules")
        )
        self._why_stale = method_of(model, "why_stale")
        self._training: RecordedTraining | None = None
        why = why or why_not_of(model)
        if why is None:
            training = training or recorder or CudaRecorder(self._device)
            self._training = RecordedTraining(model, self._device, training)
            recorder = recorder or CudaRecorder(self._device)
        else:
            recorder = None
        self._recordings = Recordings('mode="graph"', self, recorder, why, warmup=2, most=8)

    def __call__(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``run(args, kwargs)`` returns."""
        if recording.in_progress() or torch.compiler.is_compiling():
            return run(args, kwargs)
        self._run = run
        if self._training is None:
            return self._recordings.run(self._batches.of((args, kwargs)), (), ())
        one_thread.end()
        if torch.is_grad_enabled():
            return self._training(run, args, kwargs)
        if must_not_record(self._why_stale):
            return run(args, kwargs)
        batch = self._batches.of((args, kwargs))
        state = self._state.of(self._modules)
        places = self._inputs.of(batch, args, kwargs)
        return self._recordings.run(batch, self._bounds.of(batch, places), state, self._state.why)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a model starts without recordings: its parameters are different ones."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    # ------------------------------------------------------------ the job: see recordings.Job

    def run_eagerly(self, tree: Any) -> Any:
        """Run the forward as always."""
        assert self._run is not None
        self._modules = list(self._model.modules())
        self._inputs.forget()
        return self._run(*tree)

    def begin(self, made: Recording) -> Callable[[Any], Any]:
        """The same is recorded."""
        made.keep(*children_of(self._modules))
        return self.run_eagerly

    def check(self) -> None:
        """A forward leaves nothing on the host."""

    def undo(self) -> None:
        """Nothing to take back."""
