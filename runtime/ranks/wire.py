"""The format of rows on the wire between ranks: unchanged, in 16 bits, or in 8 bits per number.

``int8`` sends D bytes and the largest magnitude of a row, so 3.9 times less than fp32 at D = 128::

    amax = max |x|                                   q = round(127 x / amax), halves away from zero
    x'   = q amax / 127                              |x' - x| <= amax / 254 and one rounding

Both formulas are exact up to the one rounding shown, as products are computed in float64. So a row
of zeros stays zero, ``amax`` itself is preserved, subnormal rows keep their shape, and encoding
decoded rows again gives the same bytes. Values that are not finite are not hidden: a row with any
NaN or infinity is marked (by the sign bit of ``amax``, which is then that of the finite elements),
its codes are -128 NaN, 127 Inf, -127 -Inf, and its finite elements have 126 steps; all are decoded
as what they were. (Other implementations of the scheme lose NaN and divide by zero.)

``fp16`` turns magnitudes from 65520 on into infinities, which loss scaling notices; ``bf16`` has
the range of fp32. For both, torch's own conversion is as fast as a copy. ``fp32`` means unchanged:
rows in float64 or 16 bits travel in their own dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recast.errors import InputError, UsageError
from recast.runtime import device

NAMES = ("fp32", "fp16", "bf16", "int8")
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.uint8}
_DIRECTIONS = ("forward", "backward")
_SCALE = 4  # bytes of amax, after the codes of an int8 row


@dataclass(frozen=True, slots=True)
class Codec:
    """One format of rows; ``name`` is one of :data:`NAMES`, else it raises UsageError."""

    name: str = "fp32"

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise _unknown(self.name)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype on the wire; None: the dtype of the rows."""
        return _DTYPES.get(self.name)

    def elements(self, count: int, dim: int) -> int:
        """How many elements of :attr:`dtype` ``count`` rows of ``dim`` columns take."""
        return count * (dim + _SCALE if self.name == "int8" else dim)

    def bytes_per_row(self, dim: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes on the wire of one row of ``dim`` columns whose own dtype is ``dtype``."""
        return self.elements(1, dim) * (self.dtype or dtype).itemsize

    def encode(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """(n, D) floating-point rows, with any strides -> (``elements(n, D)``,) of :attr:`dtype`.

        ``out``: a contiguous tensor of that kind to write to. Raises InputError for a wrong shape.
        """
        count, dim = _shape(rows)
        if out is None:
            out = rows.new_empty(self.elements(count, dim), dtype=self.dtype)
        _check_flat(out, self, count, dim)
        rows = rows.detach()
        if self.name != "int8":
            out.view(count, dim).copy_(rows)
            return out
        rows, table = rows.to(torch.float32), out.view(count, dim + _SCALE)
        extension = device.extension() if rows.is_cpu and rows.numel() else None
        if extension is None or not extension.wire_encode(rows, table, device.threads()):
            table.copy_(encode_int8(rows))
        return out

    def decode(self, flat: Tensor, count: int, dim: int, dtype: torch.dtype) -> Tensor:
        """(``elements(count, dim)``,) as encoded, contiguous -> (count, dim) rows of ``dtype``.

        Raises InputError for a wrong size.
        """
        _check_flat(flat, self, count, dim)
        if self.name != "int8":
            return flat.view(count, dim).to(dtype)
        table = flat.view(count, dim + _SCALE)
        rows = torch.empty(count, dim, dtype=torch.float32, device=flat.device)
        extension = device.extension() if flat.is_cpu and rows.numel() else None
        if extension is None or not extension.wire_decode(table, rows, device.threads()):
            rows = decode_int8(table)
        return rows.to(dtype)


# ---------------------------------------------------------------- the definition of int8


def encode_int8(rows: Tensor) -> Tensor:
    """(n, D) float32 -> (n, D + 4) uint8, in plain torch: the reference for the kernels."""
    finite = rows.isfinite()
    marked = ~finite.all(1, keepdim=True)
    sizes = rows.abs().masked_fill(~finite, 0.0)
    amax = sizes.amax(1, keepdim=True) if rows.shape[1] else rows.new_zeros(len(rows), 1)
    # In float64 the product is exact, and no quotient is rounded to a half by accident.
    steps = torch.where(marked, 126.0, 127.0).double()
    q = (rows.double() * steps / amax.double()).masked_fill(amax == 0, 0.0)
    q = (q + torch.full_like(q, 0.5).copysign(q)).trunc()
    q = torch.where(rows.isposinf(), 127.0, torch.where(rows.isneginf(), -127.0, q))
    q = q.masked_fill(rows.isnan(), -128.0).to(torch.int8)
    amax = torch.where(marked, -amax, amax)
    return torch.cat([q.view(torch.uint8), amax.contiguous().view(torch.uint8)], 1)


def decode_int8(table: Tensor) -> Tensor:
    """(n, D + 4) uint8 as encoded -> (n, D) float32, in plain torch."""
    q = table[:, :-_SCALE].contiguous().view(torch.int8)
    amax = table[:, -_SCALE:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    marked = amax.signbit()
    scale = amax.abs().double() / torch.where(marked, 126.0, 127.0).double()
    rows = (q.double() * scale).to(torch.float32)
    rows = rows.masked_fill(marked & (q == 127), float("inf"))
    rows = rows.masked_fill(marked & (q == -127), float("-inf"))
    return rows.masked_fill(marked & (q == -128), float("nan"))


# ---------------------------------------------------------------- what users write


def parse(value: object) -> tuple[Codec, Codec]:
    """``wire=`` as (forward, backward): ``"int8"``, ``"fp16/int8"`` or ``{"forward": "fp16"}``.

    A direction that is not named is fp32. Raises UsageError for anything else.
    """
    if isinstance(value, str):
        names: list[Any] = value.split("/")
        if len(names) > 2:
            raise _unknown(value)
        return Codec(names[0].strip()), Codec(names[-1].strip())
    if not isinstance(value, Mapping):
        raise _unknown(value)
    unknown = [key for key in value if key not in _DIRECTIONS]
    if unknown:
        raise UsageError(
            f"wire has no direction {unknown[0]!r}",
            why="rows travel forward and their gradients backward",
            tries=('wire={"forward": "fp16", "backward": "int8"}',),
        )
    forward, backward = (Codec(value.get(key, "fp32")) for key in _DIRECTIONS)
    return forward, backward


def _unknown(value: object) -> UsageError:
    return UsageError(
        f"wire={value!r}",
        why=f"rows are sent as {', '.join(NAMES)}, forward and backward alike or each on its own",
        tries=('wire="bf16"', 'wire="fp16/int8"', 'wire={"forward": "fp16", "backward": "int8"}'),
    )


def _shape(rows: Tensor) -> tuple[int, int]:
    if rows.dim() != 2 or not rows.is_floating_point():
        raise InputError(f"rows of shape {tuple(rows.shape)} and {rows.dtype} on the wire")
    return rows.shape[0], rows.shape[1]


def _check_flat(flat: Tensor, codec: Codec, count: int, dim: int) -> None:
    wanted = codec.elements(count, dim)
    right = codec.dtype in (None, flat.dtype) and flat.is_contiguous()
    if flat.dim() != 1 or len(flat) != wanted or not right:
        raise InputError(
            f"{count} rows of {dim} as {codec.name} in {tuple(flat.shape)} of {flat.dtype}",
            why=f"they take ({wanted},) of {codec.dtype or 'their own dtype'}, contiguous",
        )
