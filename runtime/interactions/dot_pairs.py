"""The values of the pairs ``li, lj`` of a dot interaction, for kernels that need them on the host.

They are read back from the device once per pair of tensors, which are recognised by identity and
version (of their base, if they are views): the first call waits for the device, later ones do not.
Tensors that are made anew at each call are read at each call.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from recast.runtime.gpu.gpu import Gpu


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of ``li, lj``: a triangle that the kernels know, or lists on the device.

    ``lists``: int32, of the places i * F + j with j <= i of all pairs; and for backward the
    distinct places, where each one's columns start among the next, the columns.
    """

    kind: int  # RECAST_PAIRS
    count: int
    lists: tuple[Tensor, ...] = ()


class _Known(NamedTuple):
    bases: tuple[weakref.ref[Tensor], ...]
    versions: tuple[int, ...]
    pairs: Pairs | None

    def are(self, bases: Sequence[Tensor]) -> bool:
        return all(ref() is base for ref, base in zip(self.bases, bases, strict=True))


_Key = tuple[object, ...]
_known: dict[_Key, _Known] = {}


def pairs_of(gpu: Gpu, li: Tensor, lj: Tensor, features: int) -> Pairs | None:
    """The pairs that ``li, lj`` name among so many rows; None if they are left to torch.

    That is where they name rows that are not there, for which torch has an error, and where they
    are not known yet while a stream is captured, which must not wait for them.
    """
    if li.is_inference() or lj.is_inference():  # these have no version counter
        return None if _captured(li) else _read(gpu, li, lj, features)
    bases = tuple(map(_base, (li, lj)))
    versions = tuple(base._version for base in bases)
    key = (features, gpu.device, *map(_place, (li, lj), bases))
    known = _known.get(key)
    if known is not None and known.versions == versions and known.are(bases):
        return known.pairs
    if _captured(li):
        return None
    pairs = _read(gpu, li, lj, features)

    def forget(_: object) -> None:
        _known.pop(key, None)

    _known[key] = _Known(tuple(weakref.ref(base, forget) for base in bases), versions, pairs)
    return pairs


def _captured(index: Tensor) -> bool:
    return index.is_cuda and torch.cuda.is_current_stream_capturing()


def _base(index: Tensor) -> Tensor:
    """The tensor that counts the changes of ``index``."""
    base = index._base if index._is_view() else None
    return index if base is None else base


def _place(index: Tensor, base: Tensor) -> _Key:
    return id(base), index.data_ptr(), index.stride(0), index.shape[0]


def _read(gpu: Gpu, li: Tensor, lj: Tensor, features: int) -> Pairs | None:
    found = torch.stack([t.detach().long().cpu() for t in (li, lj)])
    found = torch.where(found < 0, found + features, found)
    count = found.shape[1]
    if count and not 0 <= int(found.min()) <= int(found.max()) < features:
        return None
    triangles = (
        torch.tril_indices(features, features, -1),
        torch.tril_indices(features, features),
        torch.triu_indices(features, features, 1),
    )
    for kind, triangle in enumerate(triangles, 1):
        if torch.equal(found, triangle):
            return Pairs(kind, count)
    places = found.amax(0) * features + found.amin(0)
    cells, sizes = places.unique(return_counts=True)
    starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    columns = places.argsort(stable=True)
    lists = (t.to(gpu.device, torch.int32) for t in (places, cells, starts, columns))
    return Pairs(0, count, tuple(lists))
