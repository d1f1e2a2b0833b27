"""What the CUDA recorder does with memory when a recording fails, with a stand-in for torch."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tape import TapeRecorder
from torch import nn

from recast.errors import RecastWarning
from recast.runtime.gpu import cuda_launch, gpu
from recast.runtime.recorded import recording
from recast.runtime.recorded.recording import CudaRecorder
from recast.runtime.recorded.training_step import TrainingStep


class Allocator:
    """Uses of pools, as torch's allocator counts them: one for each graph."""

    def __init__(self) -> None:
        self.uses: dict[int, int] = {}
        self.under_way: int | None = None
        self.breaks = ""  # "end": the capture does not end; "instantiate": after it has
        self.emptied = 0

    def handle(self) -> int:
        self.uses[len(self.uses)] = 0
        return len(self.uses) - 1

    def begin(self, pool: int) -> None:
        assert self.under_way is None, "a capture inside a capture"
        self.under_way = pool
        self.uses[pool] += 1

    def end(self, index: int, pool: int) -> None:
        if self.under_way != pool:
            raise RuntimeError("no such capture")
        self.under_way = None

    def release(self, index: int, pool: int) -> None:
        self.uses[pool] -= 1
        assert self.uses[pool] >= 0, "torch would end the process"

    def empty(self) -> None:
        self.emptied += 1


class Graph:
    """torch.cuda.CUDAGraph, as far as pools go."""

    def __init__(self, allocator: Allocator, kept: bool) -> None:
        self.allocator, self.kept, self.ended = allocator, kept, False

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        self.held = pool
        self.allocator.begin(pool)

    def capture_end(self) -> None:
        if self.allocator.breaks == "end":
            raise RuntimeError("the capture was invalidated")
        self.allocator.end(0, self.held)
        self.ended = True
        if self.allocator.breaks == "instantiate" and not self.kept:
            raise RuntimeError("out of memory")

    def raw_cuda_graph(self) -> int:
        assert self.kept, "what is instantiated is not kept"
        return 7

    def pool(self) -> int:
        if not self.ended:
            raise RuntimeError("without a preceding successful capture")
        return self.held

    def reset(self) -> None:
        if self.ended:
            self.allocator.release(0, self.held)
            self.ended = False

    def replay(self) -> None:
        pass

    def __del__(self) -> None:
        self.reset()


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    made = Allocator()
    for name, call in {
        "CUDAGraph": lambda keep_graph: Graph(made, keep_graph),
        "graph_pool_handle": made.handle,
        "empty_cache": made.empty,
        "synchronize": lambda device: None,
        "current_device": lambda: 0,
        "Stream": lambda device: SimpleNamespace(cuda_stream=5),
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, call)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", made.release, raising=False)
    yield made


def fail() -> None:
    raise torch.OutOfMemoryError("no memory")


@pytest.mark.parametrize("breaks", ["", "end", "instantiate"])
def test_a_failed_recording_keeps_no_pool(allocator: Allocator, breaks: str) -> None:
    recorder = CudaRecorder(torch.device("cuda"))
    kept = recorder.record(lambda: 1)
    allocator.breaks = breaks
    with pytest.raises(torch.OutOfMemoryError):
        recorder.record(fail)
    assert allocator.uses == {0: 1} and allocator.under_way is None
    if breaks:
        with pytest.raises(RuntimeError):
            recorder.record(lambda: 2)
        assert allocator.uses == {0: 1} and allocator.under_way is None
    allocator.breaks = ""
    again = recorder.record(lambda: 3)
    assert allocator.uses == {0: 2}, "recordings share a pool"
    del kept, again
    assert allocator.uses == {0: 0}
    recorder.record(lambda: 4)
    assert len(allocator.uses) == 2, "a pool without graphs is gone"


@pytest.mark.parametrize("run", [lambda seen: seen.append(gc.isenabled()), lambda seen: fail()])
def test_no_garbage_is_collected_during_a_capture(allocator: Allocator, run: Any) -> None:
    seen: list[bool] = []
    assert gc.isenabled()
    with contextlib.suppress(torch.OutOfMemoryError):
        CudaRecorder(torch.device("cuda")).record(lambda: run(seen))
    assert gc.isenabled() and not any(seen)


def test_what_is_recorded_aside(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its own memory pool, and runs after earlier work and before the work that joins it. No
    call of the driver is made without a context, even where garbage is collected.
    """
    calls: list[tuple[Any, ...]] = []
    made = {"cuEventCreate": iter(("fork", "done")), "cuGraphInstantiate": iter(("ready",))}

    inside = [False]

    @contextlib.contextmanager
    def context(device: int) -> Iterator[None]:
        assert device == 0
        inside[0] = True
        yield
        inside[0] = False

    def bind(device: int) -> None:
        inside[0] = True

    def call(name: str, doing: str, *arguments: Any) -> Any:
        assert inside[0] or name in made, f"{name} without a context"
        calls.append((name, *arguments))
        return next(made[name]) if name in made else None

    monkeypatch.setattr(cuda_launch, "call", call)
    monkeypatch.setattr(cuda_launch, "context", context)
    monkeypatch.setattr(cuda_launch, "bind", bind)
    monkeypatch.setattr(cuda_launch, "raw_stream", lambda device: 3)
    recorder = CudaRecorder(torch.device("cuda", 0))
    kept = recorder.record(lambda: 1)
    found, aside = recorder.record_parallel(lambda: 2)
    assert found == 2 and allocator.uses == {0: 1, 1: 1}
    assert calls.pop() == ("cuGraphInstantiate", 7, 8)
    calls.clear()
    aside.start()
    assert calls == [
        ("cuEventRecord", "fork", 3), ("cuStreamWaitEvent", 5, "fork", 0),
        ("cuGraphLaunch", "ready", 5), ("cuEventRecord", "done", 5),
    ]  # fmt: skip
    calls.clear()
    inside[0] = False  # another thread
    aside.join()
    assert calls == [("cuStreamWaitEvent", 3, "done", 0)]
    calls.clear()
    inside[0] = False
    del aside
    assert calls[:2] == [("cuStreamSynchronize", 5), ("cuGraphExecDestroy", "ready")]
    assert allocator.uses == {0: 1, 1: 0} and kept[0] == 1


def test_what_is_aside_goes_to_its_own_device(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stream 0 is another one on each device."""
    current, calls = [0], list[tuple[str, int]]()

    @contextlib.contextmanager
    def entered(device: Any) -> Iterator[None]:
        before, current[0] = current[0], device if isinstance(device, int) else device.index
        try:
            yield
        finally:
            current[0] = before

    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(
        cuda_launch, "call", lambda name, doing, *arguments: calls.append((name, current[0]))
    )
    monkeypatch.setattr(cuda_launch, "context", entered)
    monkeypatch.setattr(cuda_launch, "bind", lambda device: None)
    monkeypatch.setattr(cuda_launch, "raw_stream", lambda device: 0)
    _, aside = CudaRecorder(torch.device("cuda", 1)).record_parallel(lambda: 2)
    calls.clear()
    aside.start()
    aside.join()
    assert len(calls) == 5 and {device for _, device in calls} == {1} and current == [0]


class Streams:
    """Streams and events as a capture sees them: what each has of the others' work, as counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.origin = Stream()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.now)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        self.gpu: Any = object.__new__(gpu.Cuda)
        self.gpu.device, self.gpu._order = torch.device("cuda", 0), threading.Lock()
        self.gpu._second, self.gpu._third = Stream(), Stream()
        self.gpu._fork, self.gpu._joined, self.gpu._done = Event(), Event(), Event()

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def work(self) -> tuple[Stream, int]:
        self.now.seen[self.now] = self.now.seen.get(self.now, 0) + 1
        return self.now, self.now.seen[self.now]

    def after(self, work: tuple[Stream, int]) -> bool:
        """Whether what comes now runs behind ``work``."""
        return self.now.seen.get(work[0], 0) >= work[1]


class Stream:
    def __init__(self) -> None:
        self.seen: dict[Stream, int] = {}

    def wait_event(self, event: Event) -> None:
        for stream, count in event.seen.items():
            self.seen[stream] = max(count, self.seen.get(stream, 0))


class Event:
    def __init__(self) -> None:
        self.seen: dict[Stream, int] = {}

    def record(self, stream: Stream) -> None:
        self.seen = dict(stream.seen)


@pytest.mark.parametrize("fails", [False, True])
def test_streams_of_a_capture_come_together(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    streams = Streams(monkeypatch)
    with recording.recording() as made:
        made.start = Event()
        made.start.record(streams.origin)
        first = streams.work()
        with streams.gpu.in_parallel([]):
            assert streams.after(first)
            other = streams.work()
        assert not streams.after(other)
        with contextlib.suppress(RuntimeError), streams.gpu.from_start():
            assert not streams.after(first) and not streams.after(other), "it waits for nothing"
            early = streams.work()
            if fails:
                raise RuntimeError
        assert streams.after(early) and not streams.after(other)
        streams.gpu.join([])
        assert streams.after(other)
        second = streams.work()
        # From a stream that is not the first.
        with streams.gpu.in_parallel([]), streams.gpu.from_start():
            assert not streams.after(second)
            last = streams.work()
        streams.gpu.join([])
        assert streams.after(last)


def test_nothing_of_a_failed_recording_lives_when_the_step_runs_as_always() -> None:
    """The frames of the error hold what the recorded step has allocated so far."""

    class Held:
        pass

    class Failing(TapeRecorder):
        def record(self, run: Any) -> Any:
            held = Held()
            seen.append(weakref.ref(held))
            raise torch.OutOfMemoryError("no memory")

        def free(self) -> None:
            freed.append(seen[0]() is None)

        def eagerly(self, run: Any) -> Any:
            ran.append([ref() for ref in seen])
            return run()

    seen: list[Any] = []
    ran: list[Any] = []
    freed: list[bool] = []
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainingStep(
        model, lambda out: out.mean(), optimizer, recorder=Failing(optimizer), warmup=1
    )
    step(torch.randn(2, 3))
    with pytest.warns(RecastWarning, match="OutOfMemoryError: no memory"):
        step(torch.randn(2, 3))
    assert ran == [[], [None]] and freed == [True]
