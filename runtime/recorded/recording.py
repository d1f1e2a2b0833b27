"""Records GPU work once, to replay it as one CUDA graph.

To record is to run the host code once while the device does nothing: launches are only noted, with
the addresses and numbers of that moment. A replay launches all of them at once and runs no host
code. So whatever a replay reads has to stay where it was (:meth:`Recording.keep`), and what changes
from step to step has to be on the device before each replay (:meth:`Recording.before_replay`).

State of proof: the recorder below needs a GPU. The code around it is tested with a recorder that
notes torch's operations and the emulator's launches, and repeats them.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from recast.runtime.gpu import cuda_graph, cuda_launch

T = TypeVar("T")


class Unrecordable(Exception):
    """Something cannot be recorded; the message says why."""


class Recording:
    """What the host code declares about the work that is being recorded."""

    def __init__(self) -> None:
        self._kept: list[object] = []
        self._hooks: list[Callable[[], None]] = []
        self._asks: list[Callable[[], bool]] = []
        self._given: dict[int, int] = {}  # versions by the address of the memory
        self.start: Any = None  # an event of the device before all work, where it has such

    def keep(self, *objects: object) -> None:
        """Keep ``objects``, whose memory a replay reads, alive as long as the recording."""
        self._kept.extend(objects)

    def declare_inputs(self, tensors: Iterable[Tensor]) -> None:
        """Declare that ``tensors``, the batch in its fixed memory, are there before the recorded
        work.
        """
        for t in tensors:
            if t.numel() and not t.is_inference():
                self._given[t.untyped_storage().data_ptr()] = t._version

    def are_inputs(self, tensors: Iterable[Tensor]) -> bool:
        """Whether ``tensors`` are now as the recorded work finds them at its start: they use memory
        that was given, and nothing has been written there since.
        """
        return _early and all(
            not t.is_inference() and self._given.get(t.untyped_storage().data_ptr()) == t._version
            for t in tensors
        )

    def before_replay(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` before every replay, on the replay's stream, in order of registration.

        After recording, the work is run for the first time by a replay without hooks: it finds what
        the host code left while it was recorded.
        """
        self._hooks.append(hook)

    def valid_while(self, ask: Callable[[], bool]) -> None:
        """Replay only as long as ``ask`` says that what the recorded work reads still exists."""
        self._asks.append(ask)

    def is_valid(self) -> bool:
        """Whether all conditions of :meth:`valid_while` hold."""
        return all([ask() for ask in self._asks])

    def prepare(self) -> None:
        """Call the hooks of :meth:`before_replay`."""
        for hook in self._hooks:
            hook()


_current: Recording | None = None
_early = True  # work that needs only the batch may be done first
_whole = False  # inside a step that is recorded as a whole


def current() -> Recording | None:
    """The recording in progress, in whatever thread: work of autograd's threads belongs to it."""
    return _current


def in_progress() -> bool:
    """Whether the present work belongs to a recording, or to a step that is to become one."""
    return _current is not None or _whole


@contextlib.contextmanager
def whole_step() -> Iterator[None]:
    """Inside, nothing is recorded separately: it is a step that will be recorded as a whole."""
    global _whole
    before, _whole = _whole, True
    try:
        yield
    finally:
        _whole = before


@contextlib.contextmanager
def in_host_order() -> Iterator[None]:
    """Recordings made inside keep the order of the host's calls; used to measure what reordering
    gains.
    """
    global _early
    before, _early = _early, False
    try:
        yield
    finally:
        _early = before


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """Make a new recording the current one. A process has one at a time."""
    global _current
    if _current is not None:
        raise RuntimeError("a recording inside a recording")
    _current = made = Recording()
    try:
        yield made
    finally:
        _current = None


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Collect no garbage: a graph or an event that is destroyed during a capture would break it."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Recorder(Protocol):
    """Makes recordings: :class:`CudaRecorder`, or a test's stand-in."""

    def eagerly(self, run: Callable[[], T]) -> T:
        """Call ``run`` as :meth:`record` would, but let the device do the work."""

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Call ``run`` without doing its work; its result, and what does the work once per call.

        Tensors of the result hold numbers after the first replay.
        """

    def record_parallel(self, run: Callable[[], T]) -> tuple[T, ParallelWork]:
        """Like :meth:`record`, for work with memory that no :meth:`record` uses."""

    def drain(self) -> None:
        """Wait for all replays, so that what they read may be freed afterwards."""

    def free(self) -> None:
        """Free the memory of recordings that failed or were dropped."""


class ParallelWork(Protocol):
    """Recorded work in memory of its own, which may run in parallel with any replay."""

    def start(self) -> None:
        """Run it after all earlier work, in parallel with what follows until :meth:`join`."""

    def join(self) -> None:
        """Let all later work wait for it."""


class _CudaParallelWork:
    """``graph`` on the stream of its recorder."""

    def __init__(self, graph: Any, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device, self._stream = device, stream
        handle = graph.raw_cuda_graph()
        self._side = cuda_graph.SideGraph(handle, stream.cuda_stream, device.index)
        self._graph = graph  # whose memory it is; the last to go

    def start(self) -> None:
        with cuda_launch.on_device(self._device.index):
            cuda_launch.bind(self._device.index)
            self._side.start(cuda_launch.raw_stream(self._device.index))

    def join(self) -> None:
        with cuda_launch.on_device(self._device.index):
            cuda_launch.bind(self._device.index)
            self._side.join(cuda_launch.raw_stream(self._device.index))


class CudaRecorder:
    """Records CUDA graphs that share one memory pool, so that replays must not overlap."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()  # whose memory the pool has
        self._apart: CudaRecorder | None = None  # with a pool of its own

    def eagerly(self, run: Callable[[], T]) -> T:
        # On the recording's stream: libraries initialise themselves once per stream.
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            result = run()
        outside.wait_stream(self._stream)
        return result

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        result, graph = self._captured(run)
        return result, graph.replay

    def record_parallel(self, run: Callable[[], T]) -> tuple[T, ParallelWork]:
        if self._apart is None:
            self._apart = CudaRecorder(self._device)
        apart = self._apart
        result, graph = apart._captured(run, kept=True)
        with torch.cuda.device(self._device):
            return result, _CudaParallelWork(graph, self._device, apart._stream)

    def _captured(self, run: Callable[[], T], kept: bool = False) -> tuple[T, Any]:
        """Its result, and the graph; ``kept``: as it was captured, not to be replayed by torch."""
        # A capture cannot use the memory that the allocator caches.
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        if not self._graphs:  # the allocator drops a pool together with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        if _current is not None and _current.start is None:
            _current.start = torch.cuda.Event()
        graph = torch.cuda.CUDAGraph(keep_graph=kept)
        device, stream = torch.cuda.device(self._device), torch.cuda.stream(self._stream)
        with _uncollected(), device, stream:
            # Meanwhile loaders pin and copy, and host code uploads outside the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                if _current is not None:
                    _current.start.record(self._stream)
                result = run()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        self._graphs.add(graph)
        return result, graph

    def _abandon(self, graph: Any) -> None:
        """End a failed capture, and return the memory that it took from the pool.

        A graph whose capture ended properly returns it by itself; any other would keep it for ever.
        """
        index = torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):  # that the capture failed is known
            graph.capture_end()
        try:
            graph.pool()
        except RuntimeError:  # it did not end: the allocator still takes it to be under way
            for give_back in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
                with contextlib.suppress(RuntimeError):
                    give_back(index, self._pool)
        else:
            graph.reset()

    def drain(self) -> None:
        torch.cuda.synchronize(self._device)

    def free(self) -> None:
        """Give the device what failed recordings held: nothing refers to it any more."""
        gc.collect()
        torch.cuda.empty_cache()
