"""Index tensors that a model keeps on the host, copied to the device of what they index.

Lists in a ``forward``, and index tensors that are no buffers, stay on the host when a model moves
to a GPU. Torch copies them at every call: that waits for the copy, and cannot be captured. Here
each copy is kept as long as its original, recognised by identity and version (of its base, if it is
a view).
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from recast.runtime.recorded import recording


class _Kept(NamedTuple):
    base: weakref.ref[Tensor]
    version: int
    copy: Tensor


_kept: dict[tuple[object, ...], _Kept] = {}


def on_device(index: Tensor, where: torch.device) -> Tensor | None:
    """``index`` on ``where``: itself, or a kept copy of a CPU tensor.

    None: it is on another device, its changes are not counted (inference mode), or it is not known
    yet while the stream is captured.
    """
    if index.device == where:
        return index
    if not index.is_cpu or index.is_inference():
        return None
    own = index._base if index._is_view() else None
    base = index if own is None else own
    key = (where, id(base), index.data_ptr(), index.dtype, index.shape, index.stride())
    kept = _kept.get(key)
    if kept is not None and kept.base() is base and kept.version == base._version:
        recorded = recording.current()
        if recorded is not None:
            recorded.keep(kept.copy)
        return kept.copy
    if where.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None

    def forget(_: object) -> None:
        _kept.pop(key, None)

    copy = index.detach().to(where)
    _kept[key] = _Kept(weakref.ref(base, forget), base._version, copy)
    return copy
