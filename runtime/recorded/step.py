"""The step of an optimizer as a CUDA graph: ``mode="graph"`` in a loop left as it is.

    loss.backward()      # replayed (training)
    optimizer.step()     # and so is this, if the gradients are those of the replay

A step is recorded for the gradients of one recorded backward, which have the same addresses at
every replay: rows in the memory of the recording, dense gradients in fixed memory of their own,
their homes. Dense gradients may have been modified since, for example by clipping; the recorded
step reads what is there. The step is not replayed, and the optimizer steps as always with the same
numbers, when a gradient is another tensor, when rows were scaled or added to, when a parameter or
its state is another tensor or has moved, or when a number of the optimizer other than the learning
rate has changed. Hooks of the optimizer are called as always, and so is torch's own step, for no
parameters.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from recast.errors import RecastWarning
from recast.runtime import checked
from recast.runtime.dynamic.step import tables as dynamic_tables
from recast.runtime.gpu import cuda_launch
from recast.runtime.recorded import recording
from recast.runtime.recorded.gradients import early_sort, one_thread
from recast.runtime.recorded.gradients.early_sort import Beside, EarlySort
from recast.runtime.recorded.optimizer.dense_step import DenseStep
from recast.runtime.recorded.recording import Recorder, Recording, Unrecordable
from recast.runtime.recorded.state.host import HostState, step_tables
from recast.runtime.recorded.state.optimizer import OptimizerState
from recast.runtime.recorded.state.same import attributes
from recast.runtime.rows import optimizer as row_optimizer
from recast.runtime.rows.count import count
from recast.runtime.rows.grad import RowGrad

_UNSETTLED = 16  # steps in a row that find a change, before recording is given up
_version = attrgetter("_version")


class Source(Protocol):
    """A recorded backward."""

    weights: list[Tensor]
    of_batch: set[int]  # places of the weights whose row gradients have ids of the batch
    beside: Beside  # its forward

    def given(self) -> list[Tensor | None] | None:
        """The gradients of the weights that it gave last, if a recorded step may read them."""

    def twins(self) -> Sequence[Tensor | None]:
        """Gradients in the same memory, which a recording may hold."""


class _Made(NamedTuple):
    """A recorded step."""

    recording: Recording
    replay: Callable[[], None]
    tables: int
    sort: EarlySort | None


class _Known:
    """Of one optimizer, and the gradients of one recorded backward."""

    def __init__(self) -> None:
        self.held: OptimizerState | None = None
        self.made: _Made | None = None
        self.places: list[int] | None = None  # of each parameter its place among the weights, or -1
        self.in_order = False  # they are the weights, one by one
        self.steps = False
        self.written: list[Tensor] = []
        self.unsettled = 0
        self.apart = False  # a step as always was since: maybe of some parameters only
        self.lead: list[float] = []
        self.versions: list[int] = []  # of the counts, when this was last done

    def counted(self) -> list[int]:
        """How often each count was written."""
        assert self.held is not None
        return [*map(_version, self.held.counts)]

    def leads(self) -> list[float]:
        """How many steps more the host has counted of each stepped parameter than of the first: a
        recorded step goes on from one count.
        """
        assert self.held is not None
        stepped = set(map(id, self.written))
        counts = [
            float(held["step"]) for p, held in self.held.state.items()
            if id(p) in stepped and _is_here(held.get("step"))
        ]  # fmt: skip
        return [count - counts[0] for count in counts]

    def look(self, weights: Sequence[Tensor], given: Sequence[Tensor | None]) -> None:
        """The gradients of ``weights`` are ``given``: those that are None always are."""
        assert self.held is not None
        params, count = self.held.params, len(weights)
        at = dict(zip(map(id, weights), range(count), strict=True))
        self.places = [at.get(id(p), -1) for p in params]
        self.in_order = self.places == [*range(count)]
        stepped = [
            p for p, k in zip(params, self.places, strict=True) if k >= 0 and given[k] is not None
        ]
        self.steps = bool(stepped)  # another model's optimizer has nothing to do with these
        self.written = [*stepped, *self.held.tensors]

    def has(self, given: list[Tensor | None]) -> bool:
        """Whether the gradients of the parameters are those of ``given``, and no others."""
        assert self.held is not None and self.places is not None
        if not self.in_order:
            given = [given[k] if k >= 0 else None for k in self.places]
        return attributes(self.held.params, ("grad",), given)


class Steps:
    """Recorded steps on the gradients of the recorded backwards of one model.

    ``under_way``: whether a forward has been replayed whose backward may come: what a recorded
    step writes to while it runs is memory of forwards and backwards too.
    """

    def __init__(
        self, recorder: Recorder, device: torch.device, under_way: Callable[[], bool]
    ) -> None:
        self._recorder, self._device, self._under_way = recorder, device, under_way
        self._last: weakref.ref[Source] | None = None
        self._known: weakref.WeakKeyDictionary[
            Source, weakref.WeakKeyDictionary[Optimizer, _Known]
        ] = weakref.WeakKeyDictionary()
        self._refused: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        _ALL.append(weakref.ref(self))

    def gave(self, source: Source) -> None:
        """``source`` has just given its gradients."""
        self._last = weakref.ref(source)

    def run(self, optimizer: Optimizer) -> bool:
        """Step ``optimizer`` by a replay; False, and nothing was done, where that cannot be."""
        source = None if self._last is None else self._last()
        if source is None or self._under_way() or (self._refused and optimizer in self._refused):
            return False
        given = source.given()
        if given is None:
            return False
        known = self._known_of(source, optimizer)
        if known.held is None or not known.held.is_of(optimizer):
            self._drop(known, source)
            known.held, known.places = OptimizerState(optimizer), None
            own = set(map(id, source.weights))
            known.unsettled += any(id(p) in own for p in known.held.params)
            if known.unsettled == _UNSETTLED:
                self._refuse(optimizer, "its numbers or its state change from step to step")
            return False
        if known.places is None:
            known.look(source.weights, given)
        if not known.steps or not known.has(given):
            return False
        other = known.apart or (known.made is not None and known.counted() != known.versions)
        if other and known.made is not None and known.leads() != known.lead:
            self._drop(known, source)
        known.apart = False
        first = known.made is None
        if first:
            known.lead = known.leads()
            known.made = self._record(optimizer, source)
        if known.made is None:
            return False
        if known.made.sort is not None:
            known.made.sort.ready(source.beside)
        if first:
            known.unsettled = 0
        else:
            known.made.recording.prepare()
            # As any operation in place: a graph that saved a parameter must refuse to go on.
            torch.autograd.graph.increment_version(known.written)
            count("fused-step", times=known.made.tables)
        known.made.replay()
        known.versions = known.counted()
        return True

    def _known_of(self, source: Source, optimizer: Optimizer) -> _Known:
        of_source = self._known.get(source)
        if of_source is None:
            of_source = self._known[source] = weakref.WeakKeyDictionary()
        known = of_source.get(optimizer)
        if known is None:
            known = of_source[optimizer] = _Known()
        return known

    def always(self, optimizer: Optimizer) -> None:
        """``optimizer`` steps as always now."""
        for of_source in self._known.values():
            known = of_source.get(optimizer)
            if known is not None:
                known.apart = True

    def _drop(self, known: _Known, source: Source) -> None:
        """Forget what was recorded; replays of it may be under way."""
        if known.made is not None:
            self._recorder.drain()
            if known.made.sort is not None:
                source.beside.drop(known.made.sort)
            known.made = None

    def _record(self, optimizer: Optimizer, source: Source) -> _Made | None:
        """Record the step; None, and the reason is told once, if that cannot be."""
        why = _why_not(optimizer)
        if why is None:
            try:
                return self._made(optimizer, source)
            except Exception as error:
                told = str(error).partition("\n")[0]
                own = isinstance(error, Unrecordable)
                why = told if own else f"{type(error).__name__}: {told}"
            # By now nothing holds the error, whose frames hold the memory of what failed.
            self._recorder.free()
            if cuda_launch.load_refused():
                return None  # the next step finds them
        self._refuse(optimizer, why)
        return None

    def _made(self, optimizer: Optimizer, source: Source) -> _Made:
        before = HostState([optimizer])
        params = [p for group in optimizer.param_groups for p in group["params"]]
        given = [p.grad for p in params]
        twins = dict(zip(map(id, source.weights), source.twins(), strict=True))
        sort = self._sort(source, twins, params)
        # A recording that held the optimizer would keep it, and its state, as long as the model.
        same = row_optimizer.stand_in(optimizer, optimizer.param_groups)
        for name in [k for k in vars(same) if k.endswith("_hooks")]:
            del vars(same)[name]  # they are not called here, and may hold the optimizer
        try:
            with recording.recording() as made:
                dense = DenseStep(same, self._device)
                made.before_replay(dense.renew)
                for p, grad in zip(params, given, strict=True):
                    p.grad = None if grad is None else twins[id(p)]
                made.keep(twins, dense)
                _, replay = self._recorder.record(lambda: dense.run(step_tables(same)))
            before.check()
        except BaseException:
            before.restore()
            raise
        finally:
            for p, grad in zip(params, given, strict=True):
                p.grad = grad
        return _Made(made, replay, sum([type(g) is RowGrad for g in given]), sort)

    def _sort(
        self, source: Source, twins: dict[int, Tensor | None], params: Sequence[Tensor]
    ) -> EarlySort | None:
        """The sort of the gradients of ``params``, if the forward can do it; ``twins`` of all."""
        rows = [id(p) for p in params if type(p.grad) is RowGrad]
        if not rows or not {id(source.weights[k]) for k in source.of_batch}.issuperset(rows):
            return None
        grads = [twin for at in rows if isinstance(twin := twins[at], RowGrad)]
        return early_sort.recorded(self._recorder, grads)

    def _refuse(self, optimizer: Optimizer, why: str) -> None:
        self._refused.add(optimizer)
        warnings.warn(
            f'mode="graph": {type(optimizer).__name__}.step() runs without being recorded: {why}.'
            " The numbers are the same, the speed is not",
            RecastWarning,
            stacklevel=9,
        )


def _why_not(optimizer: Optimizer) -> str | None:
    """Why a step of ``optimizer`` cannot be recorded, as far as can be told before it is tried."""
    if row_optimizer.rounds_at_random(optimizer):
        return "tables are rounded at random"
    if next(dynamic_tables(optimizer), None) is not None:
        return "rows of dynamic tables go to other ids after a step"
    for group in optimizer.param_groups:
        tables = any(type(p.grad) is RowGrad for p in group["params"])
        why = row_optimizer.support(optimizer, group) if tables else None
        if why is not None:
            return f"{why}, so that tables get dense gradients"
    return None


def _is_here(step: Any) -> bool:
    """Whether a number of steps is the host's."""
    return step is not None and (not isinstance(step, Tensor) or step.is_cpu)


_ALL: list[weakref.ref[Steps]] = []


def replayed(optimizer: Optimizer) -> bool:
    """Step ``optimizer`` by a replay, if one of a recorded model can be; whether it was."""
    one_thread.end()
    if not _ALL:
        return False
    done = _is_replayed(optimizer)
    if not done:
        for ref in _ALL:
            steps = ref()
            if steps is not None:
                steps.always(optimizer)
    return done


def _is_replayed(optimizer: Optimizer) -> bool:
    if recording.taken() or checked.is_checked() or torch.is_inference_mode_enabled():
        return False
    scaling = vars(optimizer)
    if scaling.get("grad_scale") is not None or scaling.get("found_inf") is not None:
        return False  # told by a GradScaler to a step that scales by itself
    for ref in _ALL[:]:
        steps = ref()
        if steps is None:
            _ALL.remove(ref)
        elif steps.run(optimizer):
            return True
    return False


row_optimizer.instead.append(replayed)
