"""Brings the next batches to the GPU while the present one is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from recast.errors import UsageError

Batch = TypeVar("Batch")


class Mover(Protocol):
    """Copies batches to a device."""

    def thread(self) -> AbstractContextManager[object]:
        """What the loader's thread runs in; called in the thread of the loop."""

    def send(self, batch: Any) -> Any:
        """Start to copy ``batch``; called in the loader's thread."""

    def receive(self, sent: Any) -> Any:
        """The copied batch, ready for use on the caller's current stream."""


class Here:
    """For the CPU: batches are there already."""

    def thread(self) -> AbstractContextManager[object]:
        return nullcontext()

    def send(self, batch: Any) -> Any:
        return batch

    def receive(self, sent: Any) -> Any:
        return sent


class ToCuda:
    """Pins CPU tensors and copies them on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def thread(self) -> AbstractContextManager[object]:
        # The current device is the thread's own: in a new one, a loader's .cuda() would go to 0.
        return torch.cuda.device(torch.cuda.current_device())

    def send(self, batch: Any) -> Any:
        if any(isinstance(t, Tensor) and self._is_there(t) for t in pytree.tree_leaves(batch)):
            # What the loader has made there itself is ready when its own stream says so.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            moved = pytree.tree_map_only(Tensor, self._copy, batch)
            done = torch.cuda.Event()
            done.record(self._stream)
        return moved, done

    def _is_there(self, tensor: Tensor) -> bool:
        return tensor.device == self._device

    def _copy(self, tensor: Tensor) -> Tensor:
        if self._is_there(tensor):
            return tensor
        if tensor.is_cpu and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    def receive(self, sent: Any) -> Any:
        batch, done = sent
        current = torch.cuda.current_stream(self._device)
        current.wait_event(done)
        # The memory belongs to the copying stream, which must not reuse it while this one reads.
        for leaf in pytree.tree_leaves(batch):
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                leaf.record_stream(current)
        return batch


class prefetch(Generic[Batch]):
    """``for batch in prefetch(loader, "cuda"): ...``: makes and copies batches ahead of their use.

    A thread asks ``loader`` for batches, pins their tensors where that is needed, and copies them
    to ``device`` on a stream of its own; at most ``depth`` finished batches wait. Batches are
    pytrees of tensors and other things; only tensors are copied. Each ``iter()`` starts ``loader``
    anew; leaving the loop early ends the thread after the batch it is working on. Do not write to
    what ``loader`` has yielded: it may still be waiting, or being copied from pinned memory. What
    ``loader`` raises is raised in the loop, in place of that batch. For the CPU, batches are made
    ahead but not copied.

    Args:
        loader: any iterable of batches; ``len()`` of the result is that of ``loader``.
        device: where batches are used; None is the current CUDA device, or the CPU without one.
        depth: how many batches may wait, at least 1.

    Raises UsageError for a depth below 1, a device other than CPU and CUDA, or CUDA without one.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        device: torch.device | str | None = None,
        depth: int = 1,
        *,
        mover: Mover | None = None,
    ) -> None:
        if depth < 1:
            raise UsageError(
                f"prefetch: depth={depth}", why="it is the number of batches that wait, at least 1"
            )
        self._loader, self._depth = loader, depth
        self._mover = mover or _mover(device)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        ready: queue.Queue[tuple[str, Any]] = queue.Queue(self._depth)
        stop = threading.Event()
        thread = threading.Thread(
            target=_work,
            args=(self._loader, self._mover.send, self._mover.thread(), ready, stop),
            daemon=True,
        )
        thread.start()
        try:
            while True:
                kind, value = ready.get()
                if kind == "batch":
                    yield self._mover.receive(value)
                elif kind == "raised":
                    raise value
                else:
                    return
        finally:
            stop.set()
            _drain(ready)  # the thread may be waiting to put one more
            thread.join()


def _work(
    loader: Iterable[Any],
    send: Callable[[Any], Any],
    context: AbstractContextManager[object],
    ready: queue.Queue[tuple[str, Any]],
    stop: threading.Event,
) -> None:
    try:
        with context:
            for batch in loader:
                ready.put(("batch", send(batch)))
                if stop.is_set():
                    return
        ready.put(("end", None))
    except BaseException as error:
        ready.put(("raised", error))


def _drain(ready: queue.Queue[tuple[str, Any]]) -> None:
    while True:
        try:
            ready.get_nowait()
        except queue.Empty:
            return


def _mover(device: torch.device | str | None) -> Mover:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        target = torch.device(device)
    except RuntimeError:
        target = None
    if target is None or target.type not in ("cpu", "cuda"):
        raise UsageError(
            f"prefetch: device={str(device)!r}",
            why="batches are used on the CPU or on a CUDA device",
            tries=('"cuda"', '"cpu"'),
        )
    if target.type == "cpu":
        return Here()
    if not torch.cuda.is_available():
        raise UsageError(
            f"prefetch: device={str(device)!r}, and torch finds no CUDA device",
            why="batches are copied to the device on a stream of its own",
            tries=("prefetch(loader), which takes the CPU then", "recast env, which says more"),
        )
    # An index, or the current device's: torch's stubs hide that there may be none.
    index = getattr(target, "index", None)
    return ToCuda(torch.device("cuda", torch.cuda.current_device() if index is None else index))
