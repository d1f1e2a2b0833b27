"""The gradients of ``prelu(x, w) = x where x > 0, else w x``, without torch's slow kernel.

    dx = g where x > 0, else w g            dw = sum of x g over x <= 0

torch computes both in one loop that is not vectorised: 0.7 ms for 2048 rows of 64 on one core of
an AMD EPYC, where the vectorised passes here take 0.08 ms with one slope and 0.15 ms with 64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recast.runtime.gpu import gpu

aten = torch.ops.aten


def gradients(g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """``dx`` and ``dw``. ``weight``: (C,) for ``g`` and ``x`` (N, C, ...), or (1,) for any shape.

    Numbers that are not finite count as torch counts them.
    """
    if x.is_cuda or gpu.serving(x) is not None:  # to read a number would wait for the device
        return _by_torch(g, x, weight)
    into, of_weight = (_of_one if weight.numel() == 1 else _of_many)(g, x, weight)
    # Where g, x or a slope is not finite, the passes have multiplied it by zeros: torch does not.
    if not math.isfinite((of_weight + weight).sum().item()):
        return _by_torch(g, x, weight)
    return into, of_weight


def _of_one(g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    into = aten.leaky_relu_backward(g, x, weight.item(), False)
    return into, x.clamp_max(0).mul_(g).sum().reshape(weight.shape)


def _of_many(g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    into = aten.threshold_backward(g, x, 0)
    below = g - into
    of_weight = (below * x).sum([k for k in range(x.dim()) if k != 1])
    slope = weight.reshape([1, -1, *[1] * (x.dim() - 2)])
    return into.addcmul_(below, slope), of_weight


def _by_torch(g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    shape = [1] * x.dim()
    if weight.numel() > 1:
        shape[1] = -1
    slope = weight.reshape(shape)
    into, elementwise = aten._prelu_kernel_backward(g, x, slope)
    return into, elementwise.sum_to_size(slope.shape).reshape(weight.shape)
