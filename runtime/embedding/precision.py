"""The formats in which tables are stored in fewer bits than float32, for serving.

=====  =====================================================================  ==============
       a row                                                                  bytes, D columns
=====  =====================================================================  ==============
fp16   float16                                                                2 D
bf16   bfloat16                                                               2 D
int8   one byte q a column, then float32 scale and bias                       D + 8
int4   half a byte q a column, the even one low, then float16 scale and bias  ⌈D / 2⌉ + 4
=====  =====================================================================  ==============

The last two are the fused row-wise formats of FBGEMM (``QuantUtils.cc``,
``FloatOrHalfToFused8BitRowwiseQuantizedSBFloat`` and
``FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf``), which ``torch.ops.quantized`` packs and reads
too. For a row x, with n = 255 or 15 (in int4, first bias and then scale are rounded to float16)::

    bias = min x    scale = (max x - bias) / n    q = round((x - bias) / scale)
    x ≈ q scale + bias
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

PRECISIONS = ("fp16", "bf16", "int8", "int4")
_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
NOT_FINITE, BEYOND = "that are not finite", "beyond float16, which {} is made of"
OF_FLOAT16 = ("fp16", "int4")
APART = "further apart than float32 reaches, in which int8 counts the steps between them"
_PART = 1 << 20  # elements packed at a time, which bounds the temporary memory


class Loss(NamedTuple):
    """How far the stored rows of a table are from the original ones."""

    most: float  # the largest |x - stored x|
    mean: float  # the mean |x - stored x|


def row_bytes(precision: str, dim: int) -> int:
    """Bytes of one stored row of ``dim`` columns."""
    if precision in _HALVES:
        return 2 * dim
    return dim + 8 if precision == "int8" else (dim + 1) // 2 + 4


def unfit(table: Tensor, precision: str) -> str | None:
    """Which numbers of a float32 ``table`` cannot be stored in ``precision``; None: it has none."""
    if not table.numel() or not table.is_cpu:
        return None
    if not bool(torch.isfinite(table).all()):
        return NOT_FINITE
    low, high = map(float, torch.aminmax(table.detach()))
    if precision == "int8" and high - low > torch.finfo(torch.float32).max:
        return APART
    beyond = precision in OF_FLOAT16 and max(-low, high) > 65504
    return BEYOND.format(precision) if beyond else None


def pack(weight: Tensor, precision: str) -> Tensor:
    """The stored form of ``weight`` (rows, dim): (rows, dim) of a half, or (rows, bytes) uint8."""
    weight = weight.detach()
    rows, dim = weight.shape
    if precision in _HALVES:
        return weight.to(_HALVES[precision])
    packed = weight.new_empty((rows, row_bytes(precision, dim)), dtype=torch.uint8)
    for start, part in _parts(weight):
        fill = _bytes if precision == "int8" else _nibbles
        fill(part.float(), packed[start : start + len(part)])
    return packed


def unpack(packed: Tensor, precision: str, dim: int) -> Tensor:
    """The rows of ``packed`` as lookups read them: (rows, dim) float32."""
    if precision in _HALVES:
        return packed.float()
    if precision == "int8":
        numbers = _own(packed[:, dim:]).view(torch.float32)
        q = packed[:, :dim].float()
    else:
        half = (dim + 1) // 2
        numbers = _own(packed[:, half:]).view(torch.float16).float()
        pairs = packed[:, :half]
        q = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)[:, :dim]
        q = q.float()
    return q * numbers[:, :1] + numbers[:, 1:]


def _own(part: Tensor) -> Tensor:
    """A contiguous copy, which may be viewed as a wider dtype."""
    return part.clone(memory_format=torch.contiguous_format)


def loss(weight: Tensor, packed: Tensor, precision: str) -> Loss:
    """What storing ``weight`` as ``packed`` loses."""
    most = total = 0.0
    for start, part in _parts(weight.detach()):
        stored = unpack(packed[start : start + len(part)], precision, weight.shape[1])
        error = (part.double() - stored.double()).abs()
        most = max(most, float(error.max()))
        total += float(error.sum())
    return Loss(most, total / max(weight.numel(), 1))


def _parts(weight: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Some rows at a time, each time with the index of the first."""
    if not weight.numel():
        return
    step = max(_PART // weight.shape[1], 1)
    for start in range(0, len(weight), step):
        yield start, weight[start : start + step]


def _bytes(x: Tensor, out: Tensor) -> None:
    bias = x.amin(1, keepdim=True)
    scale = (x.amax(1, keepdim=True) - bias) / 255
    out[:, : x.shape[1]] = _steps(x, bias, scale, 255)
    out[:, x.shape[1] :] = torch.cat((scale, bias), 1).view(torch.uint8)


def _nibbles(x: Tensor, out: Tensor) -> None:
    half = (x.shape[1] + 1) // 2
    bias = x.amin(1, keepdim=True).half()
    scale = ((x.amax(1, keepdim=True) - bias.float()) / 15).half()
    q = torch.nn.functional.pad(
        _steps(x, bias.float(), scale.float(), 15), (0, 2 * half - x.shape[1])
    )
    out[:, :half] = q[:, 0::2] | (q[:, 1::2] << 4)
    out[:, half:] = torch.cat((scale, bias), 1).view(torch.uint8)


def _steps(x: Tensor, bias: Tensor, scale: Tensor, most: int) -> Tensor:
    """The number of steps from ``bias`` to each column; a row of equal numbers has none."""
    steps = torch.where(scale > 0, (x - bias) / scale, torch.zeros_like(x))
    return steps.round().clamp(0, most).to(torch.uint8)
