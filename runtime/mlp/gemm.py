"""The products of linear layers on the CPU: torch's BLAS, or the oneDNN that torch brings.

torch multiplies fp32 matrices on the CPU with MKL, which uses AVX-512 on Intel's processors only;
oneDNN uses it wherever the processor has it. On an AMD EPYC (Zen 5) oneDNN is 1.8 to 2.3 times as
fast, so it is used on processors with AVX-512 that are not Intel's. A call costs some 12 us, so
small products stay with MKL. On a Zen 4, which runs AVX-512 in halves, oneDNN is 1.1 to 1.2 times
as fast at large products, and slower at gradients of weights. Both sum in fp32.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Flops from which oneDNN is faster: 2 to 6 million on that processor, by shape.
WORTH_ONEDNN = 5e6
# The same where AVX-512 runs in halves.
WORTH_IN_HALVES = 5e7
# oneDNN is slow at the gradient of a weight with few columns, but not at that of its transpose.
_FEW = 32
_ZEN_5 = 26  # the family of its processors


@cache
def why_not_onednn() -> str | None:
    """Why torch's BLAS is faster on this machine, or the only choice; None if oneDNN is faster."""
    if not torch.backends.mkldnn.is_available():
        return "this torch was built without oneDNN"
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this torch has no fused linear of oneDNN"
    if not torch.backends.mkl.is_available():
        return "torch's BLAS is not MKL"
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "this processor has no AVX-512"
    info = Path("/proc/cpuinfo")
    if not info.exists() or "GenuineIntel" in info.read_text():
        return "MKL takes AVX-512 on this processor"
    return None


@cache
def in_halves() -> bool:
    """Whether the processor runs AVX-512 in two halves, no faster than AVX2: AMD's before Zen 5."""
    info = Path("/proc/cpuinfo")
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not info.exists():
        return False
    text = info.read_text()
    family = re.search(r"^cpu family\s*:\s*(\d+)", text, re.MULTILINE)
    return "AuthenticAMD" in text and family is not None and int(family[1]) < _ZEN_5


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool = False) -> Tensor:
    """``x Wᵀ + b``, or its relu. ``x``: (..., in), ``weight``: (out, in), ``bias``: (out,)."""
    if _takes(x, weight, x.numel() * weight.shape[0]):
        return _onednn(x, weight, bias, "relu" if relu else "none")
    out = F.linear(x, weight, bias)
    return out.relu_() if relu else out


def of_input(grad: Tensor, weight: Tensor) -> Tensor:
    """``g W``: the gradient of a linear's input. ``grad``: (N, out), ``weight``: (out, in)."""
    if _takes(grad, weight, grad.numel() * weight.shape[1]):
        return _onednn(grad, weight.t(), None)
    return grad.mm(weight)


def of_weight(grad: Tensor, x: Tensor) -> Tensor:
    """``gᵀ x``: the gradient of a linear's weight. ``grad``: (N, out), ``x``: (N, in)."""
    if in_halves() or not _takes(grad, x, grad.numel() * x.shape[1]):
        return grad.t().mm(x)
    if x.shape[1] < _FEW:
        return _onednn(x.t(), grad.t(), None).t().contiguous()
    return _onednn(grad.t(), x.t(), None)


def _takes(a: Tensor, b: Tensor, products: int) -> bool:
    least = WORTH_IN_HALVES if in_halves() else WORTH_ONEDNN
    if 2 * products < least or why_not_onednn() is not None:
        return False
    return (
        a.dtype is torch.float32 is b.dtype
        and a.is_cpu
        and b.is_cpu
        and _dense(a)
        and _dense(b)
        and bool(torch.backends.mkldnn.enabled)
    )


def _dense(matrix: Tensor) -> bool:
    """Whether its numbers lie side by side: of parts of wider rows oneDNN takes products in plain
    loops, a hundred times as slow.
    """
    return matrix.is_contiguous() or (matrix.dim() == 2 and matrix.t().is_contiguous())


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None, then: str = "none") -> Any:
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, then, [], "")
