"""A recorder without a GPU: it notes torch's operations and the emulator's launches, and repeats
them.

It repeats what a CUDA graph would: operations on fixed memory with the numbers they had when
recorded, and no host code. It refuses what a capture would: reading the device and, when the
emulator loads kernels as a GPU does, kernels that nothing has used before. Tensors of the
optimizers named ``step`` stand for host memory.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar, cast
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from recast.runtime import OPS
from recast.runtime.gpu import cuda_launch, gpu
from recast.runtime.gpu.cuda_launch import Argument, Dims, Kernel
from recast.runtime.recorded import recording
from recast.runtime.rows.grad import RowGrad

T = TypeVar("T")

_READS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select", "equal"}
_NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "detach"}


class Tape(TorchDispatchMode):
    """Notes what runs inside it."""

    def __init__(self, host: Iterable[Tensor]) -> None:
        super().__init__()
        self._host = {t.untyped_storage().data_ptr() for t in host}
        self._steps: list[Callable[[], None]] = []
        self._first: list[Callable[[], None]] = []  # what replays begin with
        self._kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if func.namespace == "recast":  # one of ours: what it does is noted, not the op
            op = OPS[name]
            with self:
                return (op.forward or op.reference)(*args, **kwargs)
        if RowGrad in types:  # likewise: what it does inside
            with self:
                return RowGrad.__torch_dispatch__(func, types, args, kwargs)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        on_host = bool(tensors) and tensors[0].untyped_storage().data_ptr() in self._host
        if name in _READS and not on_host:
            raise RuntimeError(f"{name} waits for the device while it is recorded")
        versions = [t._version for t in tensors]
        out = func(*args, **kwargs)
        if name.startswith("_foreach") and name.endswith("_"):
            # Under a mode torch does not count these writes; while a graph is captured it does.
            _count_writes(args[0], tensors, versions)
        self._kept.append((args, kwargs, out))
        if not on_host and name not in _NOTHING:
            self.note(lambda: self._again(func, args, kwargs, out))
        return out

    @staticmethod
    def _again(func: Any, args: Any, kwargs: Any, before: Any) -> None:
        out = func(*args, **kwargs)
        for old, new in zip(pytree.tree_leaves(before), pytree.tree_leaves(out), strict=True):
            if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)

    def note(self, step: Callable[[], None]) -> None:
        self._steps.append(step)

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Replays do what is noted inside before all else."""
        before, self._steps = self._steps, self._first
        try:
            yield
        finally:
            self._steps = before

    @torch.no_grad()
    def replay(self) -> None:
        for step in (*self._first, *self._steps):
            step()


def _count_writes(written: list[Tensor], tensors: list[Tensor], versions: list[int]) -> None:
    """Raise the versions of those ``written`` that still have those that ``tensors`` had."""
    before = dict(zip(map(id, tensors), versions, strict=True))
    torch.autograd.graph.increment_version([t for t in written if t._version == before[id(t)]])


class _Noting:
    """The emulated GPU, whose launches are noted too."""

    def __init__(self, inner: Any, tape: Callable[[], Tape]) -> None:
        self._inner, self._tape = inner, tape

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(
        self, kernel: Kernel, grid: Dims, block: Dims, shared: int, arguments: Iterable[Argument]
    ) -> None:
        call = (kernel, grid, block, shared, list(arguments))
        if all(grid) and self._inner.lacks(kernel, shared):
            raise cuda_launch.refusal(kernel.name, partial(self._inner.warm, kernel, shared))
        self._inner.launch(*call)
        self._tape().note(lambda: self._inner.launch(*call))

    def upload(self, words: array[int]) -> Tensor:
        made = self._inner.upload(words)
        now = recording.current()
        assert now is not None
        now.keep(made)
        return made

    def counters(self, n: int) -> Tensor:
        with _disable_current_modes():  # memory of the host, which a capture does not make
            return self._inner.counters(n)

    def from_start(self) -> contextlib.AbstractContextManager[None]:
        return self._tape().first()


class Replay:
    """Repeats a tape."""

    def __init__(self, recorder: TapeRecorder, tape: Tape) -> None:
        self._recorder, self._tape, self._first = recorder, tape, True

    def __call__(self) -> None:
        if self._first:  # it stands for the work that was done while recording
            self._first = False
            return
        self._recorder.replays += 1
        self._tape.replay()


class ParallelWork:
    """Work beside other work: done when it is begun or, if ``late``, when it is joined."""

    late = False

    def __init__(self, tape: Tape) -> None:
        self.tape, self.begun, self.joined, self._first = tape, 0, 0, True

    def start(self) -> None:
        assert self.begun == self.joined, "begun twice"
        self.begun += 1
        if not self.late:
            self._do()

    def join(self) -> None:
        self.joined += 1
        assert self.begun == self.joined, "joined twice"
        if self.late:
            self._do()

    def _do(self) -> None:
        if self._first:
            self._first = False
        else:
            self.tape.replay()


class TapeRecorder:
    """Records on a :class:`Tape`."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers
        self.recordings = self.replays = 0
        self.parallel: list[ParallelWork] = []
        self._now: Tape | None = None
        self.refuse: Exception | None = None

    def eagerly(self, run: Callable[[], T]) -> T:
        return run()

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        result, tape = self._taped(run)
        self.recordings += 1
        return result, Replay(self, tape)

    def record_parallel(self, run: Callable[[], T]) -> tuple[T, ParallelWork]:
        result, tape = self._taped(run)
        self.parallel.append(ParallelWork(tape))
        return result, self.parallel[-1]

    def _taped(self, run: Callable[[], T]) -> tuple[T, Tape]:
        if self.refuse is not None:
            raise self.refuse
        states = (held for o in self._optimizers for held in o.state.values())
        tape = self._now = Tape(s for held in states if isinstance(s := held.get("step"), Tensor))
        inner = gpu._emulated
        # Weak: what ops cache for each GPU they have served would keep the models of every test.
        weak = WeakMethod(self._tape)
        noting = (
            contextlib.nullcontext()
            if inner is None
            else gpu.emulate(_Noting(inner, lambda: cast(Callable[[], Tape], weak())()))
        )
        with noting, tape:
            result = run()
        return result, tape

    @property
    def early(self) -> int:
        """How many steps its replays begin with: those noted inside ``first``."""
        return len(self._tape()._first)

    def _tape(self) -> Tape:
        """The one that runs now: a backward has the GPU of its forward, on the tape before."""
        assert self._now is not None
        return self._now

    def drain(self) -> None:
        pass

    def free(self) -> None:
        pass


class Pairs(TapeRecorder):
    """The tape does while it records what a capture leaves to the first replay: right for a
    forward, but the gradients of a backward come with its replay only.
    """

    _forward: object = None

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        held = [p for o in self._optimizers for g in o.param_groups for p in g["params"]]
        held += [v for o in self._optimizers for s in o.state.values() for v in s.values()]
        before = [(t, t.detach().clone()) for t in held if isinstance(t, Tensor)]
        try:
            result, replay = super().record(run)
        except Exception:  # of a capture that fails the device has done nothing
            with torch.no_grad():
                for t, old in before:
                    t.copy_(old)
            raise
        backward = self._forward is recording.current()
        self._forward = recording.current()
        if backward:
            replay()
        return result, replay
