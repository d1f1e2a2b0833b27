"""prefetch: batches in order, made ahead, moved by a stream of their own; errors in their place."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from recast.errors import UsageError
from recast.runtime.recorded.prefetch import ToCuda, prefetch


class Stream:
    """Stands for a device: batches are sent in one thread and received in another."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.threads: set[int] = set()

    def thread(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def send(self, batch: Any) -> Any:
        self.log.append(("send", batch["k"]))
        self.threads.add(threading.get_ident())
        return ("moved", batch)

    def receive(self, sent: Any) -> Any:
        state, batch = sent
        assert state == "moved"
        self.log.append(("receive", batch["k"]))
        return batch


class Loader:
    def __init__(self, count: int, fails: int | None = None) -> None:
        self.count, self.fails = count, fails
        self.made = 0
        self.closed = False

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            for k in range(self.count):
                if k == self.fails:
                    raise KeyError("broken file")
                self.made += 1
                yield {"k": k, "x": [torch.full((2,), float(k))]}
        finally:
            self.closed = True


def test_order_length_and_threads() -> None:
    stream, loader = Stream(), Loader(7)
    ahead = prefetch(loader, mover=stream)
    assert len(ahead) == 7
    for _ in range(2):  # each pass starts the loader anew
        assert [batch["k"] for batch in ahead] == list(range(7))
    assert threading.get_ident() not in stream.threads


@pytest.mark.parametrize("depth", [1, 3])
def test_ahead_by_its_depth(depth: int) -> None:
    """While a batch is used, ``depth`` wait, and one more may be on its way."""
    stream, loader = Stream(), Loader(20)
    reached = threading.Event()
    inner = stream.send

    def send(batch: Any) -> Any:
        if batch["k"] == depth:
            reached.set()
        return inner(batch)

    stream.send = send  # type: ignore[method-assign]
    for k, _ in enumerate(prefetch(loader, depth=depth, mover=stream)):
        if k == 0:
            assert reached.wait(20)
        sent = sum(kind == "send" for kind, _ in stream.log)
        assert sent <= k + 1 + depth + 1


def test_what_the_loader_raises_comes_in_its_place() -> None:
    found = iter(prefetch(Loader(5, fails=3), mover=Stream()))
    assert [next(found)["k"] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="broken file"):
        next(found)


def test_leaving_early_ends_the_thread() -> None:
    before = threading.active_count()
    loader = Loader(1000)
    for _ in prefetch(loader, mover=Stream()):
        break
    assert threading.active_count() == before
    assert loader.made < 10


def test_a_loader_has_the_current_device_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a thread's own, as torch has it: 0 in a new thread."""
    here = threading.local()
    seen = []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, here.device = getattr(here, "device", 0), index
        yield
        here.device = before

    def loader() -> Iterator[dict[str, Any]]:
        for k in range(3):
            seen.append(getattr(here, "device", 0))
            yield {"k": k}

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(here, "device", 0))
    monkeypatch.setattr(torch.cuda, "device", device)
    mover = ToCuda(torch.device("cuda", 2))
    monkeypatch.setattr(mover, "send", lambda batch: batch)
    monkeypatch.setattr(mover, "receive", lambda batch: batch)
    here.device = 1
    assert [batch["k"] for batch in prefetch(loader(), mover=mover)] == [0, 1, 2]
    assert seen == [1, 1, 1]


def test_on_the_cpu_batches_pass_through() -> None:
    made = [{"x": torch.arange(3)}, (torch.ones(2), "name")]
    for ours, theirs in zip(prefetch(made, "cpu"), made, strict=True):
        assert ours is theirs


def test_a_loader_of_torch() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10), torch.arange(10) * 2)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    ahead = prefetch(loader, "cpu")
    assert len(ahead) == 3
    assert [x.tolist() for x, _ in ahead] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_bad_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="depth=0"):
        prefetch([], "cpu", depth=0)
    with pytest.raises(UsageError, match="device='meta'"):
        prefetch([], "meta")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:1", torch.device("cuda")):
        with pytest.raises(UsageError, match=f"device='{device}'(.|\n)*torch finds no CUDA device"):
            prefetch([], device)
    with pytest.raises(TypeError):
        len(prefetch(iter([]), "cpu"))
