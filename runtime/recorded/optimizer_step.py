"""The step of an optimizer as a CUDA graph: ``mode="graph"`` in a loop left as it is.

    loss.backward()      # replayed (training)
    optimizer.step()     # and so is this, if the gradients are those of the replay

A step is recorded for the gradients of one recorded backward, which have the same addresses at
every replay: rows in the memory of the recording, dense gradients in fixed memory of their own
(:mod:`.gradients.grad_buffers`). Dense gradients may have been modified since, for example by
clipping; the recorded step reads what is there. The step is not replayed, and the optimizer steps
as always with the same numbers, when a gradient is another tensor, when rows were scaled or added
to, when a parameter or its state is another tensor or has moved, or when a number of the optimizer
other than the learning rate has changed. Hooks of the optimizer are called as always, and so is
torch's own step, for no parameters.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from recast.errors import RecastWarning
from recast.runtime import checked
from recast.runtime.dynamic.step import tables as dynamic_tables
from recast.runtime.gpu import cuda_launch
from recast.runtime.recorded import recording
from recast.runtime.recorded.gradients import early_sorts, one_thread
from recast.runtime.recorded.gradients.early_sorts import EarlySort, EarlySorts
from recast.runtime.recorded.optimizer.dense_step import DenseStep
from recast.runtime.recorded.recording import Recorder, Recording, Unrecordable
from recast.runtime.recorded.state.host import HostState, step_tables
from recast.runtime.recorded.state.optimizer import OptimizerState
from recast.runtime.recorded.state.same import same_attributes
from recast.runtime.rows import optimizer as row_optimizer
from recast.runtime.rows.count import count
from recast.runtime.rows.grad import RowGrad

_UNSETTLED = 16  # steps in a row that find a change, before recording is given up


class RecordedBackward(Protocol):
    """A recorded backward."""

    weights: list[Tensor]
    of_batch: set[int]  # places of the weights whose row gradients have ids of the batch
    early_sorts: EarlySorts  # beside its forward

    def given_grads(self) -> list[Tensor | None] | None:
        """The gradients of the weights that it gave last, if a recorded step may read them."""

    def grad_aliases(self) -> Sequence[Tensor | None]:
        """Gradients in the same memory, which a recording may hold."""


class _RecordedStep(NamedTuple):
    """A recorded step."""

    recording: Recording
    replay: Callable[[], None]
    tables: int
    sort: EarlySort | None


class _Candidate:
    """What is known of stepping one optimizer on the gradients of one recorded backward."""

    def __init__(self) -> None:
        self.state: OptimizerState | None = None  # at the last step
        self.recorded: _RecordedStep | None = None
        # For each parameter its index among the weights of the backward, or -1.
        self.weight_places: list[int] | None = None
        self.in_order = False  # the parameters are the weights, one by one
        self.steps = False  # any of the weights at all
        self.written: list[Tensor] = []  # by a step: parameters and state
        self.unsettled = 0  # how many times in a row the optimizer had changed
        self.stepped_eagerly = False  # since the last replay, maybe some parameters only
        self.leads: list[float] = []  # :meth:`step_leads` at the time of recording

    def counts_diverged(self) -> bool:
        """Whether something else has counted steps since the last replay, and not for all alike."""
        assert self.state is not None
        if not self.stepped_eagerly and self.state.writes.unchanged():
            return False
        return self.step_leads() != self.leads

    def step_leads(self) -> list[float]:
        """How many steps more the host has counted of each stepped parameter than of the first: a
        recorded step goes on from one count.
        """
        assert self.state is not None
        stepped = set(map(id, self.written))
        counts = [
            float(held["step"]) for p, held in self.state.state.items()
            if id(p) in stepped and _is_on_host(held.get("step"))
        ]  # fmt: skip
        return [count - counts[0] for count in counts]

    def find_weights(self, weights: Sequence[Tensor], given: Sequence[Tensor | None]) -> None:
        """The gradients of ``weights`` are ``given``: those that are None always are."""
        assert self.state is not None
        params, count = self.state.params, len(weights)
        at = dict(zip(map(id, weights), range(count), strict=True))
        self.weight_places = [at.get(id(p), -1) for p in params]
        self.in_order = self.weight_places == [*range(count)]
        places = zip(params, self.weight_places, strict=True)
        stepped = [p for p, k in places if k >= 0 and given[k] is not None]
        self.steps = bool(stepped)  # another model's optimizer has nothing to do with these
        self.written = [*stepped, *self.state.tensors]

    def has_grads(self, given: list[Tensor | None]) -> bool:
        """Whether the gradients of the parameters are those of ``given``, and no others."""
        assert self.state is not None and self.weight_places is not None
        if not self.in_order:
            given = [given[k] if k >= 0 else None for k in self.weight_places]
        return same_attributes(self.state.params, ("grad",), given)


class ReplayedSteps:
    """Recorded steps on the gradients of the recorded backwards of one model.

    ``under_way``: whether a forward has been replayed whose backward may come: what a recorded
    step writes to while it runs is memory of forwards and backwards too.
    """

    def __init__(
        self, recorder: Recorder, device: torch.device, under_way: Callable[[], bool]
    ) -> None:
        self._recorder, self._device, self._under_way = recorder, device, under_way
        self._last: weakref.ref[RecordedBackward] | None = None
        self._candidates: weakref.WeakKeyDictionary[
            RecordedBackward, weakref.WeakKeyDictionary[Optimizer, _Candidate]
        ] = weakref.WeakKeyDictionary()
        # The last: of which backward, of which optimizer.
        self._newest: tuple[weakref.ref[Any], weakref.ref[Any], weakref.ref[_Candidate]] | None = (
            None
        )
        self._refused: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        _ALL.append(weakref.ref(self))

    @property
    def recorded(self) -> int:
        """How many steps are recorded."""
        known = [each for of in self._candidates.values() for each in of.values()]
        return sum(each.recorded is not None for each in known)

    def set_source(self, source: RecordedBackward) -> None:
        """``source`` has just given its gradients."""
        self._last = weakref.ref(source)

    def run(self, optimizer: Optimizer) -> bool:
        """Step ``optimizer`` by a replay; False, and nothing was done, where that cannot be."""
        source = None if self._last is None else self._last()
        if source is None or self._under_way() or (self._refused and optimizer in self._refused):
            return False
        given = source.given_grads()
        if given is None:
            return False
        candidate = self._candidate_of(source, optimizer)
        if candidate.state is None or not candidate.state.is_of(optimizer):
            self._drop(candidate, source)
            candidate.state, candidate.weight_places = OptimizerState(optimizer), None
            own = set(map(id, source.weights))
            candidate.unsettled += any(id(p) in own for p in candidate.state.params)
            if candidate.unsettled == _UNSETTLED:
                self._refuse(optimizer, "its numbers or its state change from step to step")
            return False
        if candidate.weight_places is None:
            candidate.find_weights(source.weights, given)
        if not candidate.steps or not candidate.has_grads(given):
            return False
        if candidate.recorded is not None and candidate.counts_diverged():
            self._drop(candidate, source)
        candidate.stepped_eagerly = False
        first = candidate.recorded is None
        if first:
            candidate.leads = candidate.step_leads()
            candidate.recorded = self._record(optimizer, source)
        if candidate.recorded is None:
            return False
        if candidate.recorded.sort is not None:
            candidate.recorded.sort.ensure_sorted(source.early_sorts)
        if first:
            candidate.unsettled = 0
        else:
            candidate.recorded.recording.prepare()
            # As any operation in place: a graph that saved a parameter must refuse to go on.
            torch.autograd.graph.increment_version(candidate.written)
            count("fused-step", times=candidate.recorded.tables)
        candidate.recorded.replay()
        candidate.state.writes.renew()
        return True

    def _candidate_of(self, source: RecordedBackward, optimizer: Optimizer) -> _Candidate:
        if self._newest is not None:
            of, by, newest = self._newest
            found = newest()
            if found is not None and of() is source and by() is optimizer:
                return found
        of_source = self._candidates.get(source)
        if of_source is None:
            of_source = self._candidates[source] = weakref.WeakKeyDictionary()
        candidate = of_source.get(optimizer)
        if candidate is None:
            candidate = of_source[optimizer] = _Candidate()
        self._newest = weakref.ref(source), weakref.ref(optimizer), weakref.ref(candidate)
        return candidate

    def stepped_eagerly(self, optimizer: Optimizer) -> None:
        """``optimizer`` steps as always now."""
        for of_source in self._candidates.values():
            candidate = of_source.get(optimizer)
            if candidate is not None:
                candidate.stepped_eagerly = True

    def _drop(self, candidate: _Candidate, source: RecordedBackward) -> None:
        """Forget what was recorded; replays of it may be under way."""
        if candidate.recorded is not None:
            self._recorder.drain()
            if candidate.recorded.sort is not None:
                source.early_sorts.drop(candidate.recorded.sort)
            candidate.recorded = None

    def _record(self, optimizer: Optimizer, source: RecordedBackward) -> _RecordedStep | None:
        """Record the step; None, and the reason is told once, if that cannot be."""
        why = _why_not(optimizer)
        if why is None:
            try:
                return self._record_now(optimizer, source)
            except Exception as error:
                said = str(error).partition("\n")[0]
                own = isinstance(error, Unrecordable)
                why = said if own else f"{type(error).__name__}: {said}"
            # By now nothing holds the error, whose frames hold the memory of what failed.
            self._recorder.free()
            if cuda_launch.load_refused():
                return None  # the next step finds them
        self._refuse(optimizer, why)
        return None

    def _record_now(self, optimizer: Optimizer, source: RecordedBackward) -> _RecordedStep:
        before = HostState([optimizer])
        params = [p for group in optimizer.param_groups for p in group["params"]]
        given = [p.grad for p in params]
        aliases = dict(zip(map(id, source.weights), source.grad_aliases(), strict=True))
        sort = self._sort(source, aliases, params)
        # A recording that held the optimizer would keep it, and its state, as long as the model.
        same = row_optimizer.stand_in(optimizer, optimizer.param_groups)
        for name in [k for k in vars(same) if k.endswith("_hooks")]:
            del vars(same)[name]  # they are not called here, and may hold the optimizer
        try:
            with recording.recording() as made:
                dense = DenseStep(same, self._device)
                made.before_replay(dense.renew)
                for p, grad in zip(params, given, strict=True):
                    p.grad = None if grad is None else aliases[id(p)]
                made.keep(aliases, dense)
                _, replay = self._recorder.record(lambda: dense.run(step_tables(same)))
            before.check()
        except BaseException:
            before.restore()
            raise
        finally:
            for p, grad in zip(params, given, strict=True):
                p.grad = grad
        return _RecordedStep(made, replay, sum([type(g) is RowGrad for g in given]), sort)

    def _sort(
        self, source: RecordedBackward, aliases: dict[int, Tensor | None], params: Sequence[Tensor]
    ) -> EarlySort | None:
        """The sort of the gradients of ``params``, if the forward can do it; ``aliases`` of all."""
        rows = [id(p) for p in params if type(p.grad) is RowGrad]
        if not rows or not {id(source.weights[k]) for k in source.of_batch}.issuperset(rows):
            return None
        grads = [alias for at in rows if isinstance(alias := aliases[at], RowGrad)]
        return early_sorts.recorded(self._recorder, grads)

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


def _is_on_host(step: Any) -> bool:
    """Whether a number of steps is the host's."""
    return step is not None and (not isinstance(step, Tensor) or step.is_cpu)


_ALL: list[weakref.ref[ReplayedSteps]] = []


def step_by_replay(optimizer: Optimizer) -> bool:
    """Step ``optimizer`` by a replay, if one of a recorded model can be; whether it was."""
    one_thread.end()
    if not _ALL:
        return False
    done = _was_replayed(optimizer)
    if not done:
        for ref in _ALL:
            steps = ref()
            if steps is not None:
                steps.stepped_eagerly(optimizer)
    return done


def _was_replayed(optimizer: Optimizer) -> bool:
    if recording.in_progress() or checked.is_checked() or torch.is_inference_mode_enabled():
        return False
    scaling = vars(optimizer)
    if scaling.get("grad_scale") is not None or scaling.get("found_inf") is not None:
        return False  # set by a GradScaler to a step that scales by itself
    for ref in _ALL[:]:
        steps = ref()
        if steps is None:
            _ALL.remove(ref)
        elif steps.run(optimizer):
            return True
    return False


row_optimizer.instead.append(step_by_replay)
