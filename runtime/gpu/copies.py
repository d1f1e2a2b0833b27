"""Copies of many tensors to fixed addresses on a GPU, in one launch, whatever their dtypes.

The targets are described once; the addresses of the sources are uploaded, which costs nothing if
they are the same as before. Torch's own copy of a list takes the host several times as long.

int64 values may be narrowed to int32 on the way. Those that do not fit are clamped, and the first
such value of each chunk is kept, for whoever must name it in an error (:func:`original_id`).
"""

from __future__ import annotations

import threading
import weakref
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from ctypes import c_void_p
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from recast.runtime import device
from recast.runtime.gpu import gpu as gpus
from recast.runtime.gpu import nvrtc
from recast.runtime.gpu.cuda_launch import Kernel
from recast.runtime.gpu.gpu import Gpu

LEAST, MOST = -(2**31), 2**31 - 1  # of int32; values beyond are clamped to these
_BLOCK = 256
CHUNK = _BLOCK * 16 * 4  # bytes of a source per block


class Copies:
    """Copies to ``targets``, which are contiguous and on one device.

    ``narrowed``: indices of int32 targets with int64 sources. ``ragged``: indices of targets whose
    sources may be shorter; the rest of such a target keeps its values.
    """

    def __init__(
        self,
        gpu: Gpu,
        targets: Sequence[Tensor],
        narrowed: Collection[int] = (),
        ragged: Collection[int] = (),
    ) -> None:
        self._gpu, self._targets = gpu, list(targets)
        self._where = [t.device for t in targets]
        self._dtypes = [torch.int64 if k in narrowed else t.dtype for k, t in enumerate(targets)]
        # These may be lazily conjugated or negated, so that their memory is not their value.
        self._lazy = [k for k, t in enumerate(targets) if t.is_floating_point() or t.is_complex()]
        self._narrowed, self._ragged = frozenset(narrowed), sorted(ragged)
        self._widths = [8 if k in self._narrowed else t.itemsize for k, t in enumerate(targets)]
        sizes = [t.numel() * w for t, w in zip(targets, self._widths, strict=True)]
        self._sources = array("q", [x for size in sizes for x in (0, size)])
        parts = [(k, at) for k, size in enumerate(sizes) for at in range(0, size, CHUNK)]
        # By target address: the first chunk of a narrowed tensor among all narrowed chunks.
        self._chunk_at: dict[int, int] = {}
        words, beyond = array("q"), 0
        count = sum([k in self._narrowed for k, _ in parts])
        self._beyond = torch.full((count, 2), -1, device=gpu.device) if count else None
        for k, at in parts:
            to, kept = self._targets[k].data_ptr() + at, 0
            if self._beyond is not None and k in self._narrowed:
                to -= at // 2
                kept = self._beyond.data_ptr() + 16 * beyond
                if at == 0:
                    self._chunk_at[to] = beyond
                beyond += 1
            words.extend((to, k, at, min(CHUNK, sizes[k] - at), kept))
        self._last_beyond: Tensor | None = None
        self._blocks = len(parts)
        self._chunks = gpu.upload(words) if words else None
        if self._beyond is not None:
            _register(self)

    def takes(self, tensors: Sequence[Tensor]) -> bool:
        """Whether ``tensors``, which have the sources' dtypes and shapes, can be copied as is:
        plain, contiguous, on the devices of their targets.
        """
        if not set(map(type, tensors)) <= _PLAIN or [t.device for t in tensors] != self._where:
            return False
        if not all([t.layout is torch.strided for t in tensors]):
            return False
        if any([tensors[k].is_neg() or tensors[k].is_conj() for k in self._lazy]):
            return False
        return all(map(_is_contiguous, tensors))

    @torch.no_grad()
    def made_readable(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """``tensors`` in a form that :meth:`run` takes: where needed, a copy, made on the current
        stream.
        """
        found = []
        for t, dtype, where in zip(tensors, self._dtypes, self._where, strict=True):
            plain = type(t) in _PLAIN and t.device == where and t.layout is torch.strided
            if not plain or not t.is_contiguous() or t.is_neg() or t.is_conj():
                t = torch.empty(t.shape, dtype=dtype, device=where).copy_(t, non_blocking=True)
            found.append(t)
        return found

    def run(self, tensors: Sequence[Tensor]) -> None:
        """Copy each of ``tensors`` to its target, on the current stream; see :meth:`takes`."""
        if self._chunks is None:
            return
        self._launch(self._gpu.upload(self._described(tensors)), self._chunks)

    def from_fixed(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """What copies ``tensors`` as :meth:`run` does, in half the time. They must stay where they
        are. To be called while a recording is made, which uploads the addresses before all else.
        """
        sources, chunks = self._gpu.upload(self._described(tensors)), self._chunks

        def run() -> None:
            if chunks is not None:
                self._launch(sources, chunks)

        return run

    def _described(self, tensors: Sequence[Tensor]) -> array[int]:
        """The address and the bytes of each source."""
        words = self._sources[:]
        _put_addresses(tensors, words, 2)
        for k in self._ragged:
            words[2 * k + 1] = tensors[k].numel() * self._widths[k]
        return words

    def _launch(self, sources: Tensor, chunks: Tensor) -> None:
        self._gpu.launch(
            _kernel(), (self._blocks, 1, 1), (_BLOCK, 1, 1), 0,
            (c_void_p(sources.data_ptr()), c_void_p(chunks.data_ptr())),
        )  # fmt: skip
        torch.autograd.graph.increment_version(self._targets)
        self._last_beyond = None

    def originals_at(self, address: int) -> Originals | None:
        """What the last run knows of the narrowed target at ``address``; None if it is not one."""
        chunk = self._chunk_at.get(address)
        if chunk is None or self._beyond is None:
            return None
        if self._last_beyond is None:
            self._last_beyond = self._beyond.clone()
        return Originals(self._last_beyond, chunk)


class Originals(NamedTuple):
    """The values of a tensor that did not fit into int32: the first one of each chunk."""

    beyond: Tensor  # (chunks, 2) int64: index in the tensor, and value
    chunk: int  # the tensor's first chunk

    def at(self, place: int) -> int | None:
        """The value at index ``place`` before it was narrowed; None if it is not known."""
        where, number = self.beyond[self.chunk + place * 8 // CHUNK].tolist()
        return int(number) if where == place else None


_PLAIN = {Tensor, torch.nn.Parameter}
_is_contiguous, _data_ptr = Tensor.is_contiguous, Tensor.data_ptr
_NARROWING: weakref.WeakSet[Copies] = weakref.WeakSet()
_LOCK = threading.Lock()  # for _NARROWING: it must not grow while it is iterated over
_ORIGINALS = "_recast_originals"  # attribute of narrowed tensors that were moved


def _put_addresses(tensors: Sequence[Tensor], words: array[int], step: int) -> None:
    """Write the addresses of ``tensors`` to every ``step``-th of ``words``."""
    put = getattr(device.extension(), "put_addresses", None)
    if put is None or not put(list(tensors), words, step):
        words[: step * len(tensors) : step] = array("q", map(_data_ptr, tensors))


def serves(where: torch.device) -> bool:
    """Whether :class:`Copies` can be made to memory on ``where``."""
    return device.held() != "torch" and gpus.serving(torch.empty(0, device=where)) is not None


def to(
    targets: Sequence[Tensor], narrowed: Collection[int] = (), ragged: Collection[int] = ()
) -> Copies | None:
    """:class:`Copies` to ``targets``; None if torch must copy instead."""
    if not targets or device.held() == "torch":
        return None
    served = gpus.serving(targets[0])
    where = targets[0].device
    if served is None or not all([t.device == where and t.is_contiguous() for t in targets]):
        return None
    return Copies(served, targets, narrowed, ragged)


def original_id(ids: Tensor, place: int) -> int:
    """The id at index ``place`` of flat ``ids``, as in the batch even if ``ids`` were narrowed.

    Waits for the device. Meant for the first id outside its table: of later ones beyond int32, the
    value may be lost.
    """
    found = int(ids.reshape(-1)[place])
    if ids.dtype is not torch.int32 or found not in (LEAST, MOST):
        return found
    known: Originals | None = getattr(ids, _ORIGINALS, None) or _originals(ids, _makers())
    original = None if known is None else known.at(place)
    return found if original is None else original


def move_to_own_memory(tensors: Iterable[Tensor]) -> None:
    """Move ``tensors`` to memory of their own; :func:`original_id` answers for them as before."""
    makers = _makers()
    for tensor in tensors:
        known = _originals(tensor, makers)
        tensor.data = tensor.clone()
        if known is not None:
            setattr(tensor, _ORIGINALS, known)


def _register(made: Copies) -> None:
    with _LOCK:
        _NARROWING.add(made)


def _makers() -> list[Copies]:
    with _LOCK:
        return list(_NARROWING)


def _originals(ids: Tensor, makers: Iterable[Copies]) -> Originals | None:
    """What is known of ``ids``; None if none of ``makers`` has narrowed them."""
    if ids.dtype is torch.int32 and ids.is_contiguous():
        address = ids.data_ptr()
        for made in makers:
            known = made.originals_at(address)
            if known is not None:
                return known
    return None


@cache
def _kernel() -> Kernel:
    return Kernel(
        nvrtc.program("copy_tensors.cu", defines={"RECAST_BLOCK": _BLOCK}), "copy_tensors"
    )
