"""The emulator's version of each PTX instruction does the same as the device's."""

from __future__ import annotations

import pytest
import torch
from simt_build import Kernels


@pytest.mark.parametrize("valid", [32, 20, 0])
def test_a_copy_arrives_when_awaited(collectives: Kernels, valid: int) -> None:
    values = torch.randn(3, 32, 4)
    early, out = torch.zeros(2, 32), torch.zeros(3, 32, 4)
    collectives.launch("async_copies", 1, 32, values.numel() * 4, values, early, out, valid)
    expected = values.clone()
    expected[:, valid:] = 0
    assert torch.equal(early[0], expected[0, :, 0])
    assert early[1].isnan().all(), "the second group was not awaited yet"
    assert torch.equal(out, expected)


def tf32(x: torch.Tensor) -> torch.Tensor:
    """The nearest number with 10 fraction bits, ties away from zero."""
    fraction, exponent = torch.frexp(x.double())
    scaled = fraction * 2**11
    return torch.ldexp((scaled.abs() + 0.5).floor() * scaled.sign() / 2**11, exponent)


def test_tiles_of_shared_memory(collectives: Kernels) -> None:
    rows = torch.randint(-(2**15), 2**15, (4, 8, 8), dtype=torch.int16)
    out = torch.zeros(2, 32, 4, dtype=torch.int32)
    words = rows.view(torch.int32)
    collectives.launch("tiles", 1, 32, 0, words.view(torch.uint32), out.view(torch.uint32))
    # (tile, row, word) and (tile, column, pair of rows), as lanes hold them
    turned = rows.transpose(1, 2).contiguous().view(torch.int32)
    for got, tiles in zip(out, (words, turned), strict=True):
        assert torch.equal(got, tiles.reshape(4, 32).t())


@pytest.mark.parametrize("depth", [16, 48])
@pytest.mark.parametrize(
    "kernel, dtype",
    [
        ("multiply_bf16", torch.bfloat16),
        ("multiply_fp16", torch.float16),
        ("multiply_tf32", torch.float32),
    ],
)
@pytest.mark.parametrize("seed", [0, 4])
def test_matrix_product_of_a_warp(
    collectives: Kernels, kernel: str, dtype: torch.dtype, depth: int, seed: int
) -> None:
    a, b = torch.randn(16, depth).to(dtype), torch.randn(depth, 8).to(dtype)
    start, out = torch.randn(16, 8), torch.zeros(16, 8)
    collectives.launch(kernel, 1, 32, 0, a, b, start, out, depth, seed=seed)
    exact = tf32 if dtype == torch.float32 else torch.Tensor.double
    expected = start.double() + exact(a) @ exact(b)
    # Products are exact in float32; `depth` additions round, each by half a unit of the sum so far.
    bound = depth * 2**-24 * (start.abs().double() + exact(a).abs() @ exact(b).abs())
    assert ((out - expected).abs() <= bound).all()
    assert (expected - (start.double() + a.double() @ b.double())).abs().max() < 0.1
