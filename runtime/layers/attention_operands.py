"""The operands of an attention as its CPU kernels read them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def ready(t: Tensor) -> Tensor:
    """``t`` with its last dimension contiguous."""
    return t if t.stride(-1) == 1 else t.contiguous()


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a tensor of ``shape`` broadcasts to one of shape ``to``."""
    fits = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(a in (1, b) for a, b in fits)


def spread(plane: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """``plane``, which broadcasts to the scores of ``q`` (N, H, Q, d) and ``k`` (N, H, K, d), as
    (N, H, Q, K) with contiguous rows; other dimensions are not copied.
    """
    if plane is None:
        return None
    plane = plane.detach()
    keys = k.shape[2]
    if plane.dim() == 0 or plane.shape[-1] != keys or (plane.stride(-1) != 1 and keys > 1):
        plane = plane.expand(*plane.shape[:-1], keys).contiguous()
    return plane.expand(*q.shape[:3], keys)
