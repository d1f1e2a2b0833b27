"""Uploads the words that kernels read (descriptors of tables and lookups), cached by contents.

    words = array("q", [...]);  uploads.of(words)  # (n,) int64 on the device

A step describes itself to the kernels in addresses and sizes. If the next step has the same ones,
as it has whenever the allocator returns the same memory, the last upload is still there and nothing
is copied. New words go through a ring of pinned buffers that are allocated once: pinning and
unpinning memory makes up most of the 38 us of an upload.

The cache is per stream: the copy, its event and all that reads the words are on the stream that is
current at the call, on the device of these uploads, which need not be the current device.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from recast.runtime.gpu import cuda_launch

_SLOTS = 32  # copies in flight before the host must wait for the first
_KEPT = 128  # uploads kept, of some kB each
_LEAST = 2048  # words per slot, at least


class _Slot:
    """Pinned memory, and the event after the last copy from it."""

    def __init__(self, words: int, pinned: bool, event: Callable[[], Any]) -> None:
        self.pinned = torch.empty(words, dtype=torch.int64, pin_memory=pinned)
        self.host = self.pinned.numpy()
        self.copied = event()


class Uploads:
    """The uploads of one device. Only tests without a GPU pass ``pinned``, ``event``, ``stream``
    (returns the stream's address) or ``on`` (makes the device current); the defaults are torch's.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        pinned: bool = True,
        event: Callable[[], Any] = torch.cuda.Event,
        stream: Callable[[], int] | None = None,
        on: Callable[[torch.device], AbstractContextManager[object]] = torch.cuda.device,
    ) -> None:
        self._device, self._pinned, self._event, self._on = device, pinned, event, on
        self._stream = stream or (lambda: cuda_launch.raw_stream(device.index))
        self._slots: list[_Slot | None] = [None] * _SLOTS
        self._next = 0
        self._known: OrderedDict[tuple[int, bytes], Tensor] = OrderedDict()
        self._lock = threading.Lock()  # backward has threads of its own

    def of(self, words: array[int]) -> Tensor:
        """(n,) int64 for work on the current stream; not to be written to."""
        # The allocator reuses freed memory in stream order, so each stream has its own uploads.
        key = self._stream(), words.tobytes()
        with self._lock:
            found = self._known.get(key)
            if found is None:
                # An event is recorded on the current stream of the current device; on another
                # device it would not follow this copy.
                with self._on(self._device):
                    found = self._copied(words)
                self._known[key] = found
                if len(self._known) > _KEPT:
                    self._known.popitem(last=False)
            else:
                self._known.move_to_end(key)
            return found

    def _copied(self, words: array[int]) -> Tensor:
        n, at = len(words), self._next
        self._next = (at + 1) % _SLOTS
        slot = self._slots[at]
        if slot is None or slot.pinned.numel() < n:
            room = max(_LEAST, 1 << (n - 1).bit_length())
            slot = self._slots[at] = _Slot(room, self._pinned, self._event)
        else:
            slot.copied.synchronize()
        slot.host[:n] = words
        made = torch.empty(n, dtype=torch.int64, device=self._device)
        self._start(made, slot.pinned[:n])
        slot.copied.record()
        return made

    def _start(self, made: Tensor, pinned: Tensor) -> None:
        """Start the copy; ``pinned`` is read until the event after it."""
        made.copy_(pinned, non_blocking=True)
