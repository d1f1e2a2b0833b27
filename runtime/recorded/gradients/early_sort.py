"""The sort of a batch's ids for a recorded step, done beside the forward.

A step sums the gradients of a row by sorting ids, which are there before the forward begins; but
what is to be sorted is known only when a step is recorded, and a loop may call forwards that no
step follows. So the sort is recorded apart, in memory of its own. It is begun before each replay of
the forward for as long as steps use it, beside forward, loss and backward, and joined by the step.
A step that finds it not done does it first.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from recast.errors import RecastWarning
from recast.runtime.recorded import recording
from recast.runtime.recorded.recording import Aside, Recorder
from recast.runtime.rows import cuda as row_cuda
from recast.runtime.rows.grad import RowGrad

_UNUSED = 8  # forwards in a row with a sort that no step has used: the next does none
_USED = 4  # steps that had to sort: then forwards do it again


class EarlySort:
    """A recorded sort. ``kept``: what it reads and writes."""

    def __init__(self, aside: Aside, *kept: object) -> None:
        self._aside, self._kept = aside, kept
        self._unused, self._used = 0, _USED - 1  # one step shows that there will be more
        self._of = -1  # the turn whose batch it has sorted
        self._under_way = False

    def ready(self, beside: Beside) -> None:
        """Have the batch sorted that the last forward, that of ``beside``, was given."""
        self._unused = 0
        if self._of != beside.turn:
            self._start(beside.turn)
            self._used += 1
            if self._used == _USED:
                beside.sorts.append(self)
        self.join()

    def begins(self, turn: int) -> bool:
        """A forward is about to be replayed; whether it goes on having the sort beside it."""
        self._unused += 1
        if self._unused > _UNUSED:
            self._used = 0
            return False
        self._start(turn)
        return True

    def _start(self, turn: int) -> None:
        self._of, self._under_way = turn, True
        self._aside.start()

    def join(self) -> None:
        """What follows may use the sort, and write to what it has read."""
        if self._under_way:
            self._under_way = False
            self._aside.join()


class Beside:
    """The sorts that are done beside one recorded forward."""

    def __init__(self) -> None:
        self.turn = 0  # of the forward
        self.sorts: list[EarlySort] = []

    def begins(self) -> None:
        """The forward is about to be replayed, on the batch that is there."""
        self.turn += 1
        if self.sorts:
            self.sorts = [sort for sort in self.sorts if sort.begins(self.turn)]

    def join(self) -> None:
        """The batch is about to go."""
        for sort in self.sorts:
            sort.join()

    def drop(self, sort: EarlySort) -> None:
        """Do ``sort`` no more."""
        if sort in self.sorts:
            self.sorts.remove(sort)


def recorded(recorder: Recorder, grads: Sequence[RowGrad]) -> EarlySort | None:
    """A sort that the next step of all of ``grads`` finds; None where no sort can go before others.

    ``grads``: of a recorded backward, in the memory of its replays.
    """
    run = row_cuda.sorting(grads)
    if run is None:
        return None
    try:
        with recording.recording() as made:
            sort, aside = recorder.aside(run)
        return EarlySort(aside, made, sort)
    except Exception as error:  # mostly that there is no memory: in the step there is
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    for grad in grads:
        grad.cell.place = None
    recorder.free()
    warnings.warn(
        f'mode="graph": ids are sorted in the step, not beside the forward: {why}. The numbers are'
        " the same, the speed is not",
        RecastWarning,
        stacklevel=12,
    )
    return None
