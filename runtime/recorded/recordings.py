"""Recorded runs of one job, by the form of the batch: when to record, what to keep, what to replay.

The first runs of a form are done as always, which warms up libraries and kernels; then one is
recorded, and from then on replayed as long as everything that the recording took for granted, its
``state``, stays the same. When that has changed, the job runs once as always and is recorded anew.
What cannot be recorded runs as always, with one warning that says why.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.utils import _pytree as pytree

from recast.errors import RecastWarning
from recast.runtime.gpu import cuda_launch
from recast.runtime.recorded import recording
from recast.runtime.recorded.batches.batch import Batch
from recast.runtime.recorded.batches.static_inputs import StaticInputs
from recast.runtime.recorded.recording import Recorder, Recording, Unrecordable
from recast.runtime.recorded.state.model import State
from recast.runtime.recorded.why_not import why_not_now

_UNSETTLED = 16  # runs in a row that find something changed, before a warning says so


class Job(Protocol):
    """Work that is run, and recorded."""

    def run_eagerly(self, tree: Any) -> Any:
        """Run it on the batch ``tree``."""

    def begin(self, made: Recording) -> Callable[[Any], Any]:
        """Prepare for recording; returns what is to be recorded, a function of the batch."""

    def check(self) -> None:
        """Raise Unrecordable if a replay would not repeat what was recorded."""

    def undo(self) -> None:
        """Undo what was done on the host while a recording failed."""


@dataclass
class _Recorded:
    inputs: StaticInputs
    recording: Recording
    run: Callable[[], Any]  # replays; results that the next replay does not overwrite
    state: State


class Recordings:
    """At most ``most`` recorded runs of ``job``; ``what`` names it in warnings.

    ``why`` is a reason not to record at all; without a recorder there must be one. ``make`` records
    the job on the batch in static inputs, and gives what replays it; None records its work as one.
    """

    def __init__(
        self, what: str, job: Job, recorder: Recorder | None, why: str | None, *,
        warmup: int, most: int,
        make: Callable[[Recording, StaticInputs], Callable[[], Any]] | None = None,
    ) -> None:  # fmt: skip
        self._make = make or self._record_as_one
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
        why = self._why or why or why_not_now() or batch.why_not()
        why = why or ("a batch has more ids than max_ids" if bounds is None else None)
        if why is not None or bounds is None:
            self._warn(str(why))
            return self.run_eagerly(batch)
        form = batch.form(bounds)
        found = self._recorded.get(form)
        if found is not None and found.state == state and self._is_valid(form, found):
            found.state = state  # comparing a tuple with itself takes no time
            if found is not self._newest:
                self._recorded.move_to_end(form)
                self._newest = found
            found.inputs.fill(batch)
            found.recording.prepare()
            return found.run()
        if not self._is_settled(form, state):
            return self.run_eagerly(batch)
        del found  # its memory is for the next
        self._drop_for(form)
        return self._record(batch, bounds, form, state)

    def run_eagerly(self, batch: Batch) -> Any:
        """Run the job as always, without asking whether it could be recorded."""

        def run() -> Any:
            return self._job.run_eagerly(batch.tree())

        return run() if self._recorder is None else self._recorder.eagerly(run)

    def _is_valid(self, form: Hashable, found: _Recorded) -> bool:
        """Whether what ``found`` reads, recorded for ``form`` and the present state, still exists.

        If not, it is dropped, and the count of such runs starts anew.
        """
        if found.recording.is_valid():
            return True
        self._drop_for(form)
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

    def _drop_for(self, form: Hashable) -> None:
        """Make inputs for a recording of ``form``."""
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
        if not batch.has_same_roles():
            return self.run_eagerly(batch)
        found = self._try(StaticInputs(batch, bounds), state)
        if found is not None:
            self._recorded[form] = self._newest = found
            return found.run()
        # By now the error is gone, whose frames kept the memory of the failed recording alive.
        self._recorder.free()
        if self._why is not None:
            self._warn(self._why)
        return self.run_eagerly(batch)

    def _try(self, inputs: StaticInputs, state: State) -> _Recorded | None:
        """A recording of the job on the batch in ``inputs``; None if it fails, and if another would
        too, ``self._why``.
        """
        try:
            with recording.recording() as made:
                made.declare_inputs(inputs.tensors)
                run = self._make(made, inputs)
            self._job.check()
        except Exception as error:
            self._job.undo()
            if cuda_launch.load_refused():
                return None  # the next run of this form finds them
            told = str(error).partition("\n")[0]
            own = isinstance(error, Unrecordable)
            self._why = told if own else f"{type(error).__name__}: {told}"
            return None
        return _Recorded(inputs, made, run, state)

    def _record_as_one(self, made: Recording, inputs: StaticInputs) -> Callable[[], Any]:
        """Record the work of the job as one graph."""
        assert self._recorder is not None
        work = self._job.begin(made)
        result, replay = self._recorder.record(lambda: work(inputs.tree))

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
