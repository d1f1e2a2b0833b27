"""Words that kernels read, on the device: descriptors of tables and lookups, by the contents.

    words = array("q", [...]);  uploads.of(words)  # (n,) int64 on the device

A step describes itself to the kernels in addresses and sizes. Where the next one has the same, as
whenever the allocator gives out the same memory again, what was uploaded is still there and nothing
is copied. What is new goes through a ring of pinned buffers that are made once: pinning memory and
giving it back is most of the 38 us of an upload.

What is kept is one stream's: the copy, the event behind it and all that reads the words are on the
stream that was current at the call, on the device of these uploads, whichever is the current one.
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

_SLOTS = 32  # copies under way before the host would wait for the first
_KEPT = 128  # uploads that are kept, of some kB each
_LEAST = 2048  # words of a slot


class _Slot:
    """Pinned memory, and when the last copy from it was done."""

    def __init__(self, words: int, pinned: bool, event: Callable[[], Any]) -> None:
        self.pinned = torch.empty(words, dtype=torch.int64, pin_memory=pinned)
        self.host = self.pinned.numpy()
        self.copied = event()


class Uploads:
    """Those of one device. ``pinned``, ``event``, ``stream`` (its address) and ``on`` (what makes
    the device the current one) are torch's own, but for tests without a GPU.
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
        # Memory given back is taken again in the order of its own stream: so each has its own.
        key = self._stream(), words.tobytes()
        with self._lock:
            found = self._known.get(key)
            if found is None:
                # An event is recorded on the current stream of the current device, which may be
                # another's: it would say nothing of this copy.
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
        """Begin the copy; ``pinned`` is read until the event behind it."""
        made.copy_(pinned, non_blocking=True)
