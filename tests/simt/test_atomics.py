"""Atomic operations: all dtypes, between threads, blocks and OS threads."""

from __future__ import annotations

import pytest
import torch
from simt_build import Kernels


@pytest.mark.parametrize("workers, seed", [(1, 0), (4, 0), (3, 9)])
def test_sums(collectives: Kernels, workers: int, seed: int) -> None:
    blocks, threads, bins = 12, 64, 7
    # Small whole numbers: their sums are exact in every dtype, in any order.
    values = torch.randint(0, 2, (blocks * threads,)).float()
    at = torch.arange(len(values)) % bins
    kinds = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32)
    sums = [torch.zeros(bins, dtype=kind) for kind in kinds]
    wide = torch.zeros(bins, dtype=torch.uint64)
    collectives.launch(
        "atomic_sums", blocks, threads, 0, values, *sums, wide, bins, workers=workers, seed=seed
    )
    expected = torch.zeros(bins).index_add_(0, at, values)
    assert expected.max() < 256, "exact in bfloat16"
    for found in sums:
        assert torch.equal(found.double(), expected.double()), found.dtype
    assert wide.tolist() == [int(n) << 40 for n in at.bincount().tolist()]


def test_a_sum_rounds_to_its_dtype(collectives: Kernels) -> None:
    """256 + 1 is 256 in bfloat16, so that adding 1 to 256 stays where it is; 2048 in float16."""
    values = torch.ones(64)
    sums = [
        torch.tensor([start], dtype=kind)
        for start, kind in (
            (0.5, torch.float32),
            (0.5, torch.float64),
            (2048, torch.float16),
            (256, torch.bfloat16),
            (1, torch.int32),
        )
    ]
    wide = torch.zeros(1, dtype=torch.uint64)
    collectives.launch("atomic_sums", 1, 64, 0, values, *sums, wide, 1)
    assert [float(s) for s in sums] == [64.5, 64.5, 2048, 256, 65]


def test_pairs(collectives: Kernels) -> None:
    half, bfloat = torch.zeros(2).half(), torch.zeros(2).bfloat16()
    collectives.launch("atomic_pairs", 2, 32, 0, half, bfloat, workers=2)
    assert half.tolist() == bfloat.tolist() == [64.0, 128.0]


@pytest.mark.parametrize("workers, seed", [(1, 0), (4, 0), (1, 3)])
def test_words(collectives: Kernels, workers: int, seed: int) -> None:
    n = 4 * 25
    out = torch.tensor([0, 0, 0, -1, 0, 0, -5], dtype=torch.int32)
    wrap = torch.tensor([0, 0], dtype=torch.uint32)
    slots = torch.full((n,), -1, dtype=torch.int32)
    collectives.launch("atomic_words", 4, 25, 0, out, wrap, slots, workers=workers, seed=seed)
    xor = 0
    for i in range(n):
        xor ^= i
    assert out[:6].tolist() == [n - 1, 1 - n, 2**31 - 1, -(2**31), xor, -2 * n]
    assert 0 <= int(out[6]) < n
    assert wrap.tolist() == [n % 10, 0]  # up to 9 and to 0 again; down from 0 to 9: also 10 steps
    assert slots.sort().values.tolist() == list(range(n))
