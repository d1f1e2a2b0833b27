"""The emulator does what the CUDA C++ Programming Guide says, whatever the order of threads."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
from simt_build import Kernels
from torch import Tensor

INT = torch.int32
SEEDS = (0, 1, 2)


def lanes(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=INT)


def signed(word: int) -> int:
    return (word & 0xFFFFFFFF) - (1 << 32 if word >> 31 & 1 else 0)


@pytest.mark.parametrize("grid, block", [((2, 3, 4), (4, 3, 2)), (5, 1), ((1, 2), (70,))])
def test_built_in_variables(
    collectives: Kernels, grid: int | tuple[int, ...], block: int | tuple[int, ...]
) -> None:
    gx, gy, gz = (*(grid if isinstance(grid, tuple) else (grid,)), 1, 1)[:3]
    bx, by, bz = (*(block if isinstance(block, tuple) else (block,)), 1, 1)[:3]
    out = torch.zeros(gz, gy, gx, bz, by, bx, 6, dtype=INT)
    collectives.launch("who_am_i", grid, block, 0, out)
    axes = [torch.arange(n, dtype=INT) for n in (gz, gy, gx, bz, by, bx)]
    z, y, x, tz, ty, tx = torch.meshgrid(*axes, indexing="ij")
    assert torch.equal(out, torch.stack([tx, ty, tz, x, y, z], -1))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("width", [32, 16, 8, 2, 1])
def test_shuffles(collectives: Kernels, width: int, seed: int) -> None:
    values = [10 * t + 1 for t in range(32)]
    out = torch.zeros(4, 32, dtype=INT)
    collectives.launch("shuffles", 1, 32, 0, lanes(values), out, width, seed=seed)

    def group(t: int) -> int:
        return t // width * width

    def xor(t: int) -> int:  # an earlier group of lanes may be read, a later one not
        return t ^ 5 if t ^ 5 < group(t) + width else t

    sources = [
        [group(t) + (t * 7 + 3) % width for t in range(32)],
        [t - 3 if t - 3 >= group(t) else t for t in range(32)],
        [t + 3 if t + 3 < group(t) + width else t for t in range(32)],
        [xor(t) for t in range(32)],
    ]
    assert out.tolist() == [[values[s] for s in source] for source in sources]


def test_shuffle_of_2_and_8_bytes(collectives: Kernels) -> None:
    wide, narrow = torch.randn(32, dtype=torch.float64), torch.randn(32).half()
    out, narrow_out = torch.zeros_like(wide), torch.zeros_like(narrow)
    collectives.launch("shuffle_types", 1, 32, 0, wide, narrow, out, narrow_out)
    swapped = torch.arange(32) ^ 1
    assert torch.equal(out, wide[swapped])
    assert torch.equal(narrow_out, narrow[swapped])


@pytest.mark.parametrize("seed", SEEDS)
def test_divergent_lanes_meet_under_their_own_masks(collectives: Kernels, seed: int) -> None:
    values = torch.randint(-100, 100, (96,), dtype=INT)
    out = torch.zeros_like(values)
    collectives.launch("divergent_sums", 1, 96, 0, values, out, seed=seed)
    warps = values.view(3, 16, 2).sum(1)
    difference = (warps[:, 0] - warps[:, 1]).int()
    expected = torch.stack([difference, -difference], -1)[:, None].expand(3, 16, 2)
    assert torch.equal(out, expected.reshape(96))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["mixed", "all", "none"])
def test_votes(collectives: Kernels, kind: str, seed: int) -> None:
    values = {"mixed": [t * t % 3 for t in range(32)], "all": [2] * 32, "none": [0] * 32}[kind]
    out = torch.zeros(6, 32, dtype=torch.uint32)
    collectives.launch("votes", 1, 32, 0, lanes(values), out, seed=seed)

    def of(t: int) -> list[int]:
        group = range(20) if t < 20 else range(20, 32)
        mask = sum(1 << s for s in group)
        ballot = sum(1 << s for s in group if values[s])
        alike = sum(1 << s for s in group if values[s] == values[t])
        return [ballot, ballot != 0, ballot == mask, alike, mask * (alike == mask), alike == mask]

    assert out.T.tolist() == [of(t) for t in range(32)]


@pytest.mark.parametrize("seed", SEEDS)
def test_returned_lanes_are_excused(collectives: Kernels, seed: int) -> None:
    out = torch.zeros(32, dtype=torch.uint32)
    collectives.launch("votes_of_staying", 1, 32, 0, out, seed=seed)
    staying = sum(1 << t for t in range(32) if t % 3)
    assert out.tolist() == [staying if t % 3 else 0 for t in range(32)]


def test_reductions(collectives: Kernels) -> None:
    values = torch.randint(-(2**31), 2**31 - 1, (32,), dtype=INT)
    out = torch.zeros(6, 32, dtype=INT)
    collectives.launch("reductions", 1, 32, 0, values, out)
    words = values.tolist()
    for group in (range(20), range(20, 32)):
        mine = [words[t] for t in group]
        expected = [
            *(signed(sum(mine)), min(mine), max(mine)),
            *(functools.reduce(f, mine) for f in (operator.and_, operator.or_, operator.xor)),
        ]
        assert all(out[:, t].tolist() == expected for t in group)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("threads", [1, 33, 256])
def test_block_votes(collectives: Kernels, threads: int, seed: int) -> None:
    for values in (torch.arange(threads) % 3, torch.ones(threads), torch.zeros(threads)):
        out = torch.zeros(3, threads, dtype=INT)
        collectives.launch("block_votes", 1, threads, 0, values.int(), out, seed=seed)
        count = int((values != 0).sum())
        expected = lanes([count, count == threads, count > 0])
        assert torch.equal(out, expected[:, None].expand(3, threads))


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("threads", [32, 64])
def test_shared_memory(collectives: Kernels, threads: int, workers: int) -> None:
    out = torch.zeros(6, 4, threads)
    collectives.launch("shared_memory", 6, threads, threads * 4, out, threads, workers=workers)
    assert out[:, :2].isnan().all(), "a block finds what another left in shared memory"
    other = torch.arange(threads).flip(0)
    assert torch.equal(out[:, 2], (100.0 + 2 * other).expand(6, threads))
    assert torch.equal(out[:, 3], torch.full((6, threads), float(threads)))


def order(kernels: Kernels, seed: int, workers: int = 1) -> list[int]:
    out = torch.zeros(64, dtype=INT)
    kernels.launch(
        "order_of_coming", 4, 16, 0, torch.zeros(1, dtype=INT), out, seed=seed, workers=workers
    )
    return out.tolist()


def test_the_seed_shuffles_threads_and_blocks(collectives: Kernels) -> None:
    assert order(collectives, 0) == list(range(64))
    first, second = order(collectives, 1), order(collectives, 2)
    assert first == order(collectives, 1), "the same seed gives the same order"
    assert len({tuple(range(64)), tuple(first), tuple(second)}) == 3
    for found in (first, second):
        assert sorted(found) == list(range(64))
    blocks = [[min(found[16 * b : 16 * b + 16]) for b in range(4)] for found in (first, second)]
    assert any(of != sorted(of) for of in blocks), "blocks change their order"
    assert first[:16] != sorted(first[:16]), "threads change their order"


@pytest.mark.parametrize("workers", [2, 8])
def test_workers_run_every_block_once(collectives: Kernels, workers: int) -> None:
    assert sorted(order(collectives, 0, workers)) == list(range(64))
    assert sorted(order(collectives, 5, workers)) == list(range(64))


def test_bit_functions(collectives: Kernels) -> None:
    values = [0, 1, -1, 2**31 - 1, -(2**31), 0x1234, -77, 1 << 20]
    out = torch.zeros(7, len(values), dtype=INT)
    collectives.launch("bit_functions", 1, len(values), 0, lanes(values), out, len(values))

    def of(x: int) -> list[int]:
        u = x & 0xFFFFFFFF
        return [
            u.bit_count(),
            32 - u.bit_length(),
            (u & -u).bit_length(),
            signed(int(f"{u:032b}"[::-1], 2)),
            signed(u * 0x9E3779B9 >> 32),
            signed((~u << 5 | u >> 27) & 0xFFFFFFFF),
            x,
        ]

    assert out.T.tolist() == [of(x) for x in values]
