"""A whole training step as one CUDA graph: forward, loss, backward and optimizer, replayed.

    step = recast.TrainingStep(fast, F.binary_cross_entropy, optimizer)
    for inputs, labels in loader:
        loss = step(inputs, labels)

The first steps run as always, and train. Then one step is recorded, and from then on replayed: no
Python runs for it, and the GPU finds its next kernel without waiting for the host. A recording is
valid for one form of batch (:mod:`.batches.batch`), for the parameters at their addresses, and for
the numbers of the optimizer except its learning rate, which may change at every step. For other
batches, and for what cannot be recorded, see :mod:`.recordings`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from recast.errors import UsageError
from recast.runtime.ranks import late_optimizers
from recast.runtime.recorded import recording
from recast.runtime.recorded.batches.batch import key_of
from recast.runtime.recorded.batches.bounds import Bounds
from recast.runtime.recorded.batches.input_roles import ModelInputs, method_of
from recast.runtime.recorded.batches.known_batches import Batches
from recast.runtime.recorded.optimizer import dense_step
from recast.runtime.recorded.optimizer.dense_step import DenseStep
from recast.runtime.recorded.optimizer.loss_scaling import Scaling
from recast.runtime.recorded.recording import CudaRecorder, Recorder, Recording
from recast.runtime.recorded.recordings import Recordings
from recast.runtime.recorded.state.host import HostState, step_tables
from recast.runtime.recorded.state.model import ModelState, State, children_of
from recast.runtime.recorded.state.optimizer import OptimizerStates
from recast.runtime.recorded.state.same import same_attributes, same_values, values_of
from recast.runtime.recorded.why_not import why_not_of, why_not_on
from recast.runtime.rows import optimizer as row_optimizer


class TrainingStep:
    """``loss = step(inputs, *targets)``: one step of training.

    Args:
        model: the module, optimised or not, all on one device.
        loss: a function; ``loss(output, *targets)`` is a scalar tensor.
        optimizer: one, or several over different parameters. SGD, Adagrad, those that
            ``recast.optimize`` updates on rows, Adam and AdamW of float32 parameters, and all of
            torch's with ``capturable=True`` can be recorded. The learning rate of SGD, Adagrad,
            Adam and AdamW may change at every step.
        autocast: dtype of :class:`torch.autocast` around forward and loss; None leaves it as it is.
        before_step: called between backward and the optimizer, for example to clip gradients; it is
            recorded with the rest, so it must not read numbers from the device.
        warmup: steps of each form of batch that run as always before one is recorded.
        recordings: how many are kept; the least recently used one is dropped first.
        max_ids: room for the ids of each feature with bags that are cut by offsets with an end
            (``include_last_offset=True``), so that batches with different numbers of ids share a
            recording; None is the largest number seen, rounded up. A longer batch runs as always.
        recorder: what records; None is the CUDA graph recorder of the model's device.
        scaler: a GradScaler for float16: its ``scale``, ``unscale_`` (before ``before_step``),
            ``step`` and ``update`` are part of the step, and its state is that of any loop. In a
            recorded step the device decides whether to step (:mod:`.optimizer.loss_scaling`).

    A call sets all gradients to None, before and after. Dropout draws new masks at every step.
    ``inputs`` are the arguments of the model in a tuple, or its sole argument. Tensors on another
    device are copied to the model's; pinned ones may still be read when the call returns, so their
    memory must not be reused for the next batch. No Python runs in a replay: prints and counters in
    the model happen only in steps that run as always, and anything but modules and tensors that a
    model which was not optimised reads keeps the value it had when it was recorded. A step is not
    recorded, with a warning, if a replay would leave something out: hooks of modules, parameters
    and optimizers, functions in the graph that leave torch (the report names them), and the checks
    of ``recast.checked()`` and of anomaly mode.

    Raises UsageError when the parameters are on several devices, the optimizer owns none or the
    loss cannot be called, and at a call where the loss is no scalar tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        autocast: torch.dtype | None = None,
        before_step: Callable[[], object] | None = None,
        warmup: int = 3,
        recordings: int = 8,
        max_ids: int | None = None,
        recorder: Recorder | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        if not callable(loss):
            raise UsageError(
                f"TrainingStep: the loss is of type {type(loss).__name__}, which cannot be called",
                why="it is called with the output of the model and the targets",
                tries=("TrainingStep(fast, F.binary_cross_entropy, optimizer)",),
            )
        self._model, self._loss = model, loss
        self._optimizers = _optimizers_of(model, optimizer)
        self._autocast, self._before_step = autocast, before_step
        enabled = scaler is not None and scaler.is_enabled()
        self._scaling = Scaling(scaler, self._optimizers) if scaler and enabled else None
        self._bounds = Bounds(max_ids)
        self._modules = self._all_modules()
        self._why_stale = method_of(model, "why_stale")
        self._inputs = ModelInputs(model, called=True)
        self._trained = self._parameters()
        self._device = _device_of(self._trained)
        self._batches = Batches(self._device)
        why = None if recorder is not None else why_not_on(self._device)
        why = why or why_not_of(model)
        if recorder is None and why is None:
            recorder = CudaRecorder(self._device)
        self._recordings = Recordings(
            "TrainingStep", self, recorder, why, warmup=warmup, most=recordings
        )
        self._host: HostState | None = None
        self._model_state = ModelState(
            self._device.type, whole=True, uncaptured=method_of(model, "uncaptured_modules")
        )
        self._optimizer_states = OptimizerStates(self._optimizers)
        self._step_hooks: list[Any] = []
        self._why_hooked: str | None = None

    @property
    def recorded(self) -> int:
        """How many recordings are held."""
        return len(self._recordings)

    def __call__(self, inputs: Any, *targets: Any) -> Tensor:
        """Run one step; returns the loss before the update, a scalar on the model's device."""
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        batch = self._batches.of((args, targets))
        if not self._recordings.possible:
            loss: Tensor = self._recordings.run(batch, (), ())
            return loss
        if self._scaling is not None and not self._scaling.settled:
            first: Tensor = self._recordings.run_eagerly(batch)
            return first
        bounds = self._bounds.of(batch, self._inputs.of(batch, args, {}))
        loss = self._recordings.run(batch, bounds, self._state(), self._why_not())
        if self._scaling is not None:
            self._scaling.settle()
        if not same_attributes(self._trained, ("grad",), [None] * len(self._trained)):
            self._clear_grads()  # somebody else's, from before a replay
        return loss

    # ------------------------------------------------------------ the job: see recordings.Job

    def run_eagerly(self, tree: Any) -> Tensor:
        """Run the step as any loop would."""
        self._modules = self._all_modules()
        self._trained = self._parameters()
        self._inputs.forget()
        with recording.whole_step():
            if self._scaling is not None:
                return self._run(tree, self._scaling.step)
            return self._run(tree, lambda: [o.step() for o in self._optimizers])

    def begin(self, made: Recording) -> Callable[[Any], Tensor]:
        """The step that is recorded: tables by our kernels, the rest with rates on the device."""
        self._host = HostState(self._optimizers)
        made.keep([o.state for o in self._optimizers])  # its id is another's once it is gone
        made.keep(*children_of(self._modules))
        made.valid_while(self._optimizer_states.here())
        if self._scaling is not None:
            self._scaling.begin(made)
        dense = [DenseStep(o, self._device) for o in self._optimizers]
        for each in dense:
            made.before_replay(each.renew)

        def step() -> None:
            if self._scaling is not None:
                self._scaling.recorded([partial(step_tables, o) for o in self._optimizers], dense)
                return
            for optimizer, own in zip(self._optimizers, dense, strict=True):
                own.run(step_tables(optimizer))

        return lambda tree: self._run(tree, step)

    def check(self) -> None:
        """Raise Unrecordable where the recorded step made state of an optimizer."""
        if self._host is not None:
            self._host.check()
            self._host = None
        if self._scaling is not None:
            self._scaling.end()

    def undo(self) -> None:
        """Undo what the host counted, and drop the gradients."""
        if self._host is not None:
            self._host.restore()
            self._host = None
        if self._scaling is not None:
            self._scaling.undo()
        self._clear_grads()

    def _run(self, tree: Any, step: Callable[[], object]) -> Tensor:
        args, targets = tree
        # Casts of weights that autocast keeps are those of another step.
        torch.clear_autocast_cache()
        self._clear_grads()
        with torch.enable_grad(), self._casting():
            loss = self._loss(self._model(*args), *targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise _no_scalar(loss)
        (loss if self._scaling is None else self._scaling.scale(loss)).backward()
        if self._before_step is not None:
            if self._scaling is not None:
                self._scaling.unscale()
            self._before_step()
        step()
        self._clear_grads()
        torch.clear_autocast_cache()
        return loss.detach()

    def _casting(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._autocast)

    def _clear_grads(self) -> None:
        for parameter in self._parameters():
            parameter.grad = None

    def _parameters(self) -> list[Tensor]:
        """Of the model and of the optimizers, each once."""
        held = [p for m in self._modules for p in m._parameters.values() if p is not None]
        held += (p for o in self._optimizers for g in o.param_groups for p in g["params"])
        return list({id(p): p for p in held}.values())

    def _all_modules(self) -> list[nn.Module]:
        """Of the model, which is the first, and of the loss where it is a module, each once."""
        of_loss = self._loss.modules() if isinstance(self._loss, nn.Module) else ()
        return list(dict.fromkeys([*self._model.modules(), *of_loss]))

    def _why_not(self) -> str | None:
        """Why this step can be neither recorded nor replayed, or None, after :meth:`_state`."""
        hooks: list[Any] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
        for o in self._optimizers:
            hooks += (o._optimizer_step_pre_hooks, o._optimizer_step_post_hooks)
        if not same_values(hooks, self._step_hooks):
            self._step_hooks = values_of(hooks)
            self._why_hooked = next(filter(None, map(_why_not, self._optimizers)), None)
        return self._model_state.why or self._why_hooked

    def _state(self) -> State:
        """What a recording takes for granted besides the form of the batch."""
        forwards = [f for m in self._modules if (f := vars(m).get("forward")) is not None]
        return (
            *self._model_state.of(self._modules),
            (
                "attributes that forward reads",
                None if self._why_stale is None else self._why_stale(),
            ),
            ("forwards", *map(key_of, forwards)),
            *self._optimizer_states.of(),
            ("numbers of steps", tuple(dense_step.written(o) for o in self._optimizers)),
            ("loss scaling", *(() if self._scaling is None else self._scaling.state())),
        )


def _optimizers_of(model: nn.Module, given: Any) -> tuple[Optimizer, ...]:
    """One or several. Raises UsageError for what is none, or would not train ``model``."""
    found = (given,) if isinstance(given, Optimizer) else given
    if not isinstance(found, Sequence) or not all(isinstance(o, Optimizer) for o in found):
        raise UsageError(
            f"TrainingStep: the optimizer is of type {type(given).__name__}",
            why="it is a torch.optim.Optimizer, or several in a list",
            tries=("recast.TrainingStep(fast, loss, optimizer)",),
        )
    own = {id(p) for p in model.parameters()}
    if not any(id(p) in own for o in found for group in o.param_groups for p in group["params"]):
        raise UsageError(
            "TrainingStep: none of the optimizer's parameters belong to the model",
            why="it was built over another model, or over a copy of this one: no step would train",
            tries=("Adagrad(fast.parameters(), ...)",),
        )
    return tuple(found)


def _device_of(parameters: Iterable[Tensor]) -> torch.device:
    devices = {p.device for p in parameters}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices))) or "no device at all"
        raise UsageError(
            f"TrainingStep: the parameters are on {names}",
            why="a step is recorded on one device",
            tries=('model.to("cuda")',),
        )
    return devices.pop()


def _no_scalar(loss: object) -> UsageError:
    shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
    return UsageError(
        f"TrainingStep: the loss returned {shape}",
        why="gradients are those of one number, a scalar tensor",
        tries=("recast.TrainingStep(fast, F.mse_loss, optimizer)",),
    )


def _why_not(optimizer: Optimizer) -> str | None:
    ours = (*row_optimizer.hooks(), *late_optimizers.hooks())
    hooks = (
        _global_optimizer_pre_hooks, _global_optimizer_post_hooks,
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks,
    )  # fmt: skip
    if any(hook not in ours for each in hooks for hook in each.values()):
        return f"{type(optimizer).__name__} has step hooks, which a replay would not call"
    return None
