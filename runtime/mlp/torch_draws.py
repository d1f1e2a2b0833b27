"""Dropout masks on a CPU from torch's own random stream, drawn some ten times as fast.

torch's CPU generator is a Mersenne Twister. Where MKL does not draw for it (it does on Intel's
processors), a Bernoulli number is two of its words, drawn one element at a time: 11 ns each on an
AMD EPYC core, more than a hidden layer's products take. The kernel draws the same numbers in
registers in 1.1 ns and leaves the generator where torch would. So masks are bit for bit torch's own
for the same seed. Whether that holds is checked against torch itself, once, on a separate
generator.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch import Tensor

from recast.runtime import device

_DTYPES = (torch.float32, torch.float64)
_WORTH = 512  # elements from which the kernel is faster: reading the generator's state costs 7 us


def noise_like(x: Tensor, p: float) -> Tensor:
    """What torch's CPU dropout multiplies ``x`` by: 0 with probability ``p``, else 1 / (1 - p)."""
    if p == 1:
        return torch.zeros_like(x)
    if not _takes(x):
        return torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)
    noise = torch.empty_like(x)
    _draw(noise, None, p)
    return noise


def drop_(x: Tensor, p: float) -> Tensor:
    """``x`` multiplied by that noise, in place; for p of 1 by 0."""
    if p < 1 and _takes(x):
        _draw(None, x, p)
        return x
    return x.mul_(noise_like(x, p))


def pays(x: Tensor) -> bool:
    """Whether dropout of ``x`` is enough faster here than in torch to be worth a call."""
    return x.numel() >= 8 * _WORTH and _takes(x)


def why_not() -> str | None:
    """Why masks are drawn by torch itself; None where the kernel draws them."""
    return device.why_missing() or _differs()


def _takes(x: Tensor) -> bool:
    return (
        x.numel() >= (1 if device.held() == "fused" else _WORTH)
        and x.dtype in _DTYPES
        and x.is_cpu
        and x.is_contiguous()
        and why_not() is None
    )


def _draw(noise: Tensor | None, x: Tensor | None, p: float) -> None:
    kept = _kept((x if noise is None else noise).dtype, p)  # type: ignore[union-attr]
    # The GIL is held from here to the end, so no other Python thread draws in between.
    state = torch.default_generator.get_state()
    device.extension().bernoulli(state, 1 - p, kept, noise, x)
    torch.default_generator.set_state(state)


@lru_cache(maxsize=64)
def _kept(dtype: torch.dtype, p: float) -> float:
    """1 / (1 - p), rounded as torch's dropout rounds it."""
    return float(torch.ones(1, dtype=dtype).div_(1 - p))


@cache
def _differs() -> str | None:
    """Why the kernel's numbers are not torch's; None where they are."""
    generator = torch.Generator().manual_seed(7)
    state = generator.get_state()
    for dtype in _DTYPES:
        drawn = torch.empty(701, dtype=dtype).bernoulli_(0.3, generator=generator)
        ours = torch.empty_like(drawn)
        try:
            device.extension().bernoulli(state, 0.3, 1.0, ours, None)
        except ValueError as error:
            return str(error)
        if not torch.equal(drawn, ours) or not torch.equal(state, generator.get_state()):
            return "this torch draws its masks in another way (by MKL on Intel's processors)"
    return None
