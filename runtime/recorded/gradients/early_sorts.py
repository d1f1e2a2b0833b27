"""Sorts the ids of a batch for a recorded step, in parallel with the forward.

A step sums the gradients of a row by sorting ids, which exist before the forward starts. But what
to sort is known only when a step is recorded, and a loop may call forwards that no step follows. So
the sort is recorded separately, in memory of its own. As long as steps use it, it is started before
each replay of the forward, runs in parallel with forward, loss and backward, and is joined by the
step. A step for which it has not been started does it first.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from recast.errors import RecastWarning
from recast.runtime.gpu import cuda_launch
from recast.runtime.recorded import recording
from recast.runtime.recorded.recording import ParallelWork, Recorder
from recast.runtime.rows import cuda_shared_sorts as row_sorts
from recast.runtime.rows.grad import RowGrad

_UNUSED = 8  # forwards in a row whose sort no step used, after which it is no longer started
_USED = 4  # steps that had to sort, after which forwards start it again


class EarlySort:
    """A recorded sort. ``kept``: what it reads and writes, to be kept alive."""

    def __init__(self, work: ParallelWork, *kept: object) -> None:
        self._work, self._kept = work, kept
        self._unused, self._used = 0, _USED - 1  # after the first step, more are expected
        self._batch = -1  # the number of the one that it has sorted last
        self._under_way = False

    def ensure_sorted(self, sorts: EarlySorts) -> None:
        """Make sure that the batch of the last forward, that of ``sorts``, is sorted."""
        self._unused = 0
        if self._batch != sorts.batch:
            self._start(sorts.batch)
            self._used += 1
            if self._used == _USED:
                sorts.used.append(self)
        self.join()

    def start_if_used(self, batch: int) -> bool:
        """Called before a forward is replayed; returns whether the sort is still run next to it."""
        self._unused += 1
        if self._unused > _UNUSED:
            self._used = 0
            return False
        self._start(batch)
        return True

    def _start(self, batch: int) -> None:
        self._batch, self._under_way = batch, True
        self._work.start()

    def join(self) -> None:
        """Make later work wait for the sort, so that it may use it and write to its inputs."""
        if self._under_way:
            self._under_way = False
            self._work.join()


class EarlySorts:
    """The sorts that run in parallel with one recorded forward."""

    def __init__(self) -> None:
        self.batch = 0  # the number of the present one
        self.used: list[EarlySort] = []  # by recent steps

    def start(self) -> None:
        """Called before the forward is replayed on the present batch."""
        self.batch += 1
        if self.used:
            self.used = [sort for sort in self.used if sort.start_if_used(self.batch)]

    def join(self) -> None:
        """Called before the batch is overwritten."""
        for sort in self.used:
            sort.join()

    def drop(self, sort: EarlySort) -> None:
        """Stop running ``sort``."""
        if sort in self.used:
            self.used.remove(sort)


def recorded(recorder: Recorder, grads: Sequence[RowGrad]) -> EarlySort | None:
    """A sort for the next step on all of ``grads``; None if it cannot be separated from the step.

    ``grads``: those of a recorded backward, in the memory of its replays.
    """
    run = row_sorts.sort_ahead(grads)
    if run is None:
        return None
    try:
        with recording.recording() as made:
            sort, work = recorder.record_parallel(run)
        return EarlySort(work, made, sort)
    except Exception as error:  # mostly for want of memory; inside the step there is enough
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    for grad in grads:
        grad.cell.place = None
    recorder.free()
    if cuda_launch.load_refused():
        return recorded(recorder, grads)
    warnings.warn(
        f'mode="graph": ids are sorted in the step, not beside the forward: {why}. The numbers are'
        " the same, the speed is not",
        RecastWarning,
        stacklevel=12,
    )
    return None
