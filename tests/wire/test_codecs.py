"""Rows on the wire: exact formulas, equal bits on every instruction set, nothing hidden."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recast.errors import InputError, UsageError
from recast.runtime import device
from recast.runtime.ranks import wire

ISAS = [isa for isa in device.ISAS if device.why_not(isa)() is None]
KERNELS = [*ISAS, "torch"]
INF, NAN = math.inf, math.nan
INT8 = wire.Codec("int8")


def _random(count: int, dim: int, seed: int = 0) -> Tensor:
    """Rows of all magnitudes, with zeros, ties, the extremes and subnormal numbers among them."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, dim, generator=g)
    rows *= 10.0 ** torch.randint(-44, 38, (count, 1), generator=g)
    rows[torch.rand(count, dim, generator=g) < 0.2] = 0.0
    rows[::5] = 0.0
    rows[1::7] = torch.randint(-254, 255, (count, dim), generator=g)[1::7] / 2  # ties
    rows[2::9] *= 3e38
    return rows.nan_to_num(posinf=3.4028234663852886e38, neginf=-3.4028234663852886e38)


def _spoilt(count: int, dim: int) -> Tensor:
    rows = _random(count, dim, 1)
    g = torch.Generator().manual_seed(2)
    for value in (INF, -INF, NAN):
        rows[torch.rand(count, dim, generator=g) < 0.05] = value
    return rows


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dim", [0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 64, 130, 1025])
def test_kernels_give_the_bits_of_the_definition(kernel: str, dim: int) -> None:
    for rows in (_random(97, dim), _spoilt(97, dim), _random(0, dim)):
        flat = INT8.encode(rows) if kernel == "torch" else None
        with device.use(kernel):
            flat = INT8.encode(rows)
            back = INT8.decode(flat, len(rows), dim, torch.float32)
        table = wire.encode_int8(rows)
        assert torch.equal(flat.view(table.shape), table)
        torch.testing.assert_close(
            back, wire.decode_int8(table), rtol=0, atol=0, equal_nan=True, check_stride=False
        )


@pytest.mark.parametrize("kernel", KERNELS)
def test_strides_and_places(kernel: str) -> None:
    whole = _spoilt(40, 90)
    buffer = torch.zeros(5 + INT8.elements(20, 30), dtype=torch.uint8)
    with device.use(kernel):
        for rows in (whole[::2, 13:43], whole.t()[:20, :30], whole[:1, :30].expand(20, 30)):
            INT8.encode(rows, buffer[5:])  # at an odd byte
            assert torch.equal(buffer[5:].view(20, 34), wire.encode_int8(rows.contiguous()))
            found = INT8.decode(buffer[5:], 20, 30, torch.float64)
            assert found.dtype is torch.float64
            torch.testing.assert_close(
                found.float(), wire.decode_int8(buffer[5:].view(20, 34)), equal_nan=True
            )


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=300, deadline=None)
@given(st.lists(finite, min_size=1, max_size=20))
def test_the_nearest_integer_by_exact_arithmetic(values: list[float]) -> None:
    rows = torch.tensor([values])
    flat = INT8.encode(rows)
    amax = max(map(abs, values))
    for value, code in zip(values, flat[:-4].view(torch.int8).tolist(), strict=True):
        exact = Fraction(value) * 127 / Fraction(amax) if amax else Fraction(0)
        nearest = math.floor(abs(exact) + Fraction(1, 2))  # halves away from zero
        assert code == (nearest if exact >= 0 else -nearest)
    back = INT8.decode(flat, 1, len(values), torch.float32)
    assert torch.equal(INT8.encode(back), flat)  # what was decoded is sent without any loss
    assert back.abs().max() == amax


def test_halves_go_away_from_zero_and_zero_rows_stay() -> None:
    rows = torch.tensor([[127.0, 0.5, -0.5, 1.5, -2.5, 0.49999997], [0.0, -0.0, 0, 0, 0, 0]])
    back = INT8.decode(INT8.encode(rows), 2, 6, torch.float32)
    assert back.tolist() == [[127.0, 1.0, -1.0, 2.0, -3.0, 0.0], [0.0] * 6]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", wire.NAMES)
def test_what_is_not_finite_stays_in_its_place(kernel: str, name: str) -> None:
    codec, rows = wire.Codec(name), torch.randn(50, 37)
    g = torch.Generator().manual_seed(3)
    for value in (INF, -INF, NAN):
        rows[torch.rand(50, 37, generator=g) < 0.02] = value
    rows[3] = NAN
    rows[4] = INF
    rows[5], rows[5, 6] = 0.0, NAN
    with device.use(kernel):
        back = codec.decode(codec.encode(rows), 50, 37, torch.float32)
    for ask in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(ask(back), ask(rows))
    kept = rows.isfinite()
    amax = rows.masked_fill(~kept, 0).abs().amax(1, keepdim=True).expand_as(rows)
    limit = {"fp32": 0.0, "fp16": 2**-11, "bf16": 2**-8, "int8": 1 / 252 + 1e-6}[name]
    assert ((back - rows).abs()[kept] <= limit * amax[kept]).all()


@pytest.mark.parametrize("name", wire.NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_any_dtype(name: str, dtype: torch.dtype) -> None:
    codec, rows = wire.Codec(name), torch.randn(6, 5).to(dtype)
    flat = codec.encode(rows)
    assert flat.dtype is (codec.dtype or dtype)
    assert flat.nbytes == 6 * codec.bytes_per_row(5, dtype)
    back = codec.decode(flat, 6, 5, dtype)
    assert back.dtype is dtype
    if name == "fp32":
        assert torch.equal(back, rows)
    elif codec.dtype is not torch.uint8:
        assert torch.equal(back, rows.to(codec.dtype).to(dtype))
    else:
        assert torch.equal(back, wire.decode_int8(wire.encode_int8(rows.float())).to(dtype))


def test_int8_is_a_quarter_of_fp32() -> None:
    assert wire.Codec().bytes_per_row(128) == 512
    assert INT8.bytes_per_row(128) == 132
    assert wire.Codec("bf16").bytes_per_row(128) == 256


@pytest.mark.parametrize("rows", [torch.randn(3), torch.zeros(3, 2, dtype=torch.int64)])
def test_what_is_no_rows(rows: Tensor) -> None:
    with pytest.raises(InputError, match="on the wire"):
        INT8.encode(rows)


def test_a_buffer_that_does_not_fit() -> None:
    with pytest.raises(InputError, match=r"3 rows of 4 as int8 .* \(24,\)|take \(24,\)"):
        INT8.encode(torch.randn(3, 4), torch.empty(23, dtype=torch.uint8))
    with pytest.raises(InputError, match="as fp16"):
        wire.Codec("fp16").decode(torch.empty(12), 3, 4, torch.float32)


@pytest.mark.parametrize(
    ("given", "forward", "backward"),
    [
        ("int8", "int8", "int8"),
        ("fp16/int8", "fp16", "int8"),
        (" fp32 / bf16 ", "fp32", "bf16"),
        ({"forward": "fp16"}, "fp16", "fp32"),
        ({"backward": "int8", "forward": "bf16"}, "bf16", "int8"),
        ({}, "fp32", "fp32"),
    ],
)
def test_what_users_write(given: object, forward: str, backward: str) -> None:
    assert wire.parse(given) == (wire.Codec(forward), wire.Codec(backward))


@pytest.mark.parametrize(
    "given", ["fp8", "fp16/", "fp16/int8/fp32", 8, None, {"forward": None}, {"back": "int8"}]
)
def test_what_nobody_can_mean(given: object) -> None:
    with pytest.raises(UsageError) as caught:
        wire.parse(given)
    assert "wire" in str(caught.value)
    assert caught.value.tries
