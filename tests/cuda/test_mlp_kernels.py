"""Relu, dropout and their mask: the kernels of mlp_epilogue.cu and their host code, emulated."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import emulated_gpu
import pytest
import torch
from emulated_gpu import Emulated
from torch import Tensor

from recast.runtime.mlp import cuda as mlp_cuda
from recast.runtime.mlp import mask as mlp_mask
from recast.runtime.mlp import one_output as mlp_one_output
from recast.runtime.mlp import relu_dropout
from recast.runtime.mlp.chain import chain_of
from recast.runtime.mlp.mask import Finish, Gate
from recast.runtime.mlp.one_output import Layer
from recast.runtime.tolerances import excess

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SHAPES = [(1, 1), (3, 7), (5, 8), (9, 20), (4, 130), (2, 600), (19, 256)]


@pytest.fixture
def gpu() -> Iterator[Emulated]:
    with emulated_gpu.serve() as emulated:
        yield emulated


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@cache
def philox(seed: int, a: int, b: int, c: int) -> list[int]:
    """Philox 4x32-7 by its paper; counter (a, b, c, 0)."""
    x, low = [a, b, c, 0], 0xFFFFFFFF
    k0, k1 = seed & low, seed >> 32
    for _ in range(7):
        p, q = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [q >> 32 ^ x[1] ^ k0, q & low, p >> 32 ^ x[3] ^ k1, p & low]
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    return x


def kept(seed: int, rows: int, n: int, p: float, layer: int) -> Tensor:
    """Which elements a dropout keeps."""
    numbers = [[number(seed, r, c, layer) for c in range(n)] for r in range(rows)]
    return torch.tensor(numbers) >= max(round(p * 2**32), 1)


def number(seed: int, row: int, column: int, layer: int) -> int:
    """The random number of an element: its upper half of one call, its lower of the next."""
    group, e = divmod(column, 8)
    upper, lower = (
        philox(seed, 2 * group + k, row, layer)[e // 2] >> 16 * (e % 2) & 0xFFFF for k in (0, 1)
    )
    return upper << 16 | lower


def test_the_generator_is_philox() -> None:
    """The known answers of Random123, kat_vectors."""
    assert philox(0, 0, 0, 0) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("relu", "p"), [(True, 0.0), (True, 0.3), (False, 0.3), (True, 1.0)])
def test_activation(
    gpu: Emulated, shape: tuple[int, int], dtype: torch.dtype, relu: bool, p: float
) -> None:
    rows, n = shape
    x = rand(rows, n).to(dtype)
    seed = torch.tensor([123 << 40 | 45]) if p else None
    bits = torch.full((rows, mlp_mask.row_bytes(n)), 0xAA, dtype=torch.uint8)
    out = torch.full_like(x, float("nan"))
    mlp_mask.activate(gpu, x, out, bits, relu=relu, p=p, seed=seed, layer=3)
    passes = torch.ones(rows, n, dtype=torch.bool)
    if p:
        passes = kept(123 << 40 | 45, rows, n, p, 3)
    if relu:
        passes &= x > 0
    assert torch.equal(mlp_mask.unpack(bits, n), passes)
    assert not mlp_mask.unpack(bits, 8 * bits.shape[1])[:, n:].any()
    wanted = torch.where(passes, x.float() * mlp_mask.scale_of(p), 0.0).to(dtype)
    assert torch.equal(out, wanted)
    again, alone = x.clone(), torch.zeros_like(bits)
    mlp_mask.activate(gpu, again, again, None, relu=relu, p=p, seed=seed, layer=3)
    assert torch.equal(again, wanted)
    mlp_mask.activate(gpu, x, None, alone, relu=relu, p=p, seed=seed, layer=3)
    assert torch.equal(alone, bits)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["fp32", "fp16", "bf16"])
def test_the_mask_is_torch_s_gradient_of_relu(gpu: Emulated, dtype: torch.dtype) -> None:
    """At 0, -0, the smallest numbers, and NaN."""
    tiny, inf = torch.finfo(dtype).smallest_normal, float("inf")
    x = torch.tensor([[0.0, -0.0, tiny, -tiny, inf, -inf, float("nan"), 1.0, -1.0]]).to(dtype)
    leaf = x.clone().requires_grad_()
    torch.relu(leaf).backward(torch.ones_like(x))
    assert leaf.grad is not None
    bits, out = mlp_mask.empty(1, x.shape[1], x), torch.empty_like(x)
    mlp_mask.activate(gpu, x, out, bits, relu=True)
    assert torch.equal(mlp_mask.unpack(bits, x.shape[1]), leaf.grad.bool())
    assert torch.equal(out.isnan(), x.isnan())
    assert torch.equal(out.nan_to_num(7.0), torch.relu(x).nan_to_num(7.0))


def drawn(gpu: Emulated, seed: int, p: float, layer: int = 0) -> Tensor:
    x = torch.ones(512, 256)
    bits = mlp_mask.empty(512, 256, x)
    word = torch.tensor([seed])
    mlp_mask.activate(gpu, x, None, bits, relu=False, p=p, seed=word, layer=layer)
    return mlp_mask.unpack(bits, 256)


@pytest.mark.parametrize("below", [0, 1])
def test_the_lower_half_decides_where_the_upper_is_the_limit(gpu: Emulated, below: int) -> None:
    """p is laid beside the number of each element in turn: it is dropped up to that, kept above."""
    for column in range(8):
        drawn = number(11, 3, column, 0)
        p = (drawn + 1 - below) / 2**32  # the last number that drops is drawn, or one less
        mask = laid_beside(gpu, 11, 4, p)
        assert mask[3, column] == bool(below)
        assert torch.equal(mask, kept(11, 4, 8, p, 0))


def laid_beside(gpu: Emulated, seed: int, rows: int, p: float) -> Tensor:
    x, bits = torch.ones(rows, 8), torch.empty(rows, 16, dtype=torch.uint8)
    mlp_mask.activate(gpu, x, None, bits, relu=False, p=p, seed=torch.tensor([seed]))
    return mlp_mask.unpack(bits, 8)


def test_the_lower_half_decides_at_both_ends_of_p(gpu: Emulated) -> None:
    """Where the upper half of p is the least there is, and the greatest: no half is beyond it."""
    rows = 20_000
    upper = torch.tensor([[number(5, r, c, 0) >> 16 for c in range(8)] for r in range(rows)])
    for half in (0, 0xFFFF):
        (row, column), *_ = (upper == half).nonzero().tolist()
        drawn = number(5, row, column, 0)
        for below in (0, 1):
            p = (drawn + 1 - below) / 2**32
            mask = laid_beside(gpu, 5, rows, p)
            assert bool(mask[row, column]) == bool(below)
            assert mask.sum() >= mask.numel() - 30 if not half else mask.sum() <= 30


@pytest.mark.parametrize("p", [0.01, 0.2, 0.5, 0.9])
def test_the_share_that_is_kept(gpu: Emulated, p: float) -> None:
    """Within five standard deviations, in all, in each row and in each column."""
    mask = drawn(gpu, 7, p).double()
    for part in (mask.flatten()[None], mask, mask.t()):
        sigma = (p * (1 - p) / part.shape[1]) ** 0.5
        assert ((part.mean(1) - (1 - p)).abs() < 5 * sigma + 1e-12).all()


def test_masks_are_independent(gpu: Emulated) -> None:
    """Of neighbours, other layers and other seeds: they agree as often as by chance."""
    p = 0.3
    mask = drawn(gpu, 7, p)
    others = {
        "column": (mask[:, 1:], mask[:, :-1]),
        "four columns": (mask[:, 4:], mask[:, :-4]),
        "row": (mask[1:], mask[:-1]),
        "layer": (mask, drawn(gpu, 7, p, layer=1)),
        "seed": (mask, drawn(gpu, 8, p)),
        "high bits of the seed": (mask, drawn(gpu, 7 | 1 << 40, p)),
    }
    chance = p**2 + (1 - p) ** 2
    for name, (a, b) in others.items():
        sigma = (chance * (1 - chance) / a.numel()) ** 0.5
        assert abs((a == b).double().mean().item() - chance) < 5 * sigma, name
    assert torch.equal(mask, drawn(gpu, 7, p))


def test_a_replay_reads_the_seed_anew(gpu: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same launch again, with only another number in the seed's memory."""
    calls: list[tuple[Any, ...]] = []
    launch = gpu.launch
    monkeypatch.setattr(gpu, "launch", lambda *call: calls.append(call))
    x, seed = torch.ones(8, 64), torch.tensor([5])
    bits, out = mlp_mask.empty(8, 64, x), torch.empty(8, 64)
    mlp_mask.activate(gpu, x, out, bits, relu=True, p=0.5, seed=seed)
    for number in (5, 6):
        seed.fill_(number)
        launch(*calls[0])
        assert torch.equal(mlp_mask.unpack(bits, 64), kept(number, 8, 64, 0.5, 0))
        assert torch.equal(out, mlp_mask.unpack(bits, 64) * 2.0)


def finished(finish: Finish | None) -> None:
    if finish is not None:
        finish()


def gated(gpu: Emulated, x: Tensor, by: str) -> Gate:
    """Of relu(x), and behind its bits a dropout's scale."""
    if by == "output":
        return Gate(None, torch.relu(x))
    bits = mlp_mask.empty(*x.shape, x)
    mlp_mask.activate(gpu, x, None, bits, relu=True)
    return Gate(bits, scale=1.25)


@pytest.mark.parametrize("by", ["bits", "output"])
@pytest.mark.parametrize("sums", [None, F32, BF16], ids=["no sums", "fp32 sums", "bf16 sums"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [*SHAPES, (300, 20), (1200, 70), (33, 256)], ids=str)
def test_gradient(
    gpu: Emulated, shape: tuple[int, int], dtype: torch.dtype, sums: torch.dtype | None, by: str
) -> None:
    rows, n = shape
    x, dy = rand(rows, n, seed=1).to(dtype), rand(rows, n, seed=2).to(dtype)
    gate = gated(gpu, x, by)
    out = torch.full_like(dy, float("nan"))
    found = None if sums is None else torch.full((n,), float("nan"), dtype=sums)
    finished(mlp_mask.gradient(gpu, dy, gate, out, found))
    exact = torch.where(x > 0, dy.float() * gate.scale, 0.0)
    assert torch.equal(out, exact.to(dtype))
    if found is not None and sums is not None:
        assert excess(found, exact.sum(0).to(sums), exact.double().sum(0)) <= 1
    finished(mlp_mask.gradient(gpu, dy, gate, dy))
    assert torch.equal(dy, out)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["fp32", "fp16", "bf16"])
def test_a_gradient_by_the_output_is_torch_s(gpu: Emulated, dtype: torch.dtype) -> None:
    """Where the relu gave 0, -0, the least numbers or no number, and where the gradient is none."""
    tiny, inf, nan = torch.finfo(dtype).smallest_normal, float("inf"), float("nan")
    y = torch.tensor([[0.0, -0.0, tiny, inf, nan, 1.0, 2.0, 0.0, 3.0]]).to(dtype)
    for upstream in (1.0, nan, -inf):
        dy = torch.full_like(y, upstream)
        wanted = torch.ops.aten.threshold_backward(dy, y, 0)
        out, sums = torch.empty_like(y), torch.empty(9)
        finished(mlp_mask.gradient(gpu, dy, Gate(None, y), out, sums))
        assert torch.equal(out.nan_to_num(7.0), wanted.nan_to_num(7.0))
        assert torch.equal(sums.nan_to_num(7.0), wanted[0].float().nan_to_num(7.0))


def test_few_blocks_take_all_rows(gpu: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many rows each block takes several parts, from the last to the first."""
    monkeypatch.setattr(mlp_mask, "BLOCKS", dict.fromkeys(mlp_mask.BLOCKS, 1))
    monkeypatch.setattr(mlp_mask, "_MOST_BLOCKS", 3)
    mlp_mask._activation.cache_clear()
    mlp_mask._masking.cache_clear()
    x, dy = rand(1000, 264, seed=1), rand(1000, 264, seed=2)
    for by in ("bits", "output"):
        out, sums = torch.full_like(dy, float("nan")), torch.empty(264)
        gate = gated(gpu, x, by)
        finished(mlp_mask.gradient(gpu, dy, gate, out, sums))
        wanted = torch.where(x > 0, dy * gate.scale, 0.0)
        assert torch.equal(out, wanted)
        torch.testing.assert_close(sums, wanted.sum(0), rtol=1e-5, atol=1e-4)
    mlp_mask._activation.cache_clear()
    mlp_mask._masking.cache_clear()


def test_sums_do_not_depend_on_the_order_of_threads() -> None:
    x, dy = rand(700, 70, seed=1), rand(700, 70, seed=2)
    found = []
    for seed in (0, 1, 2):
        with emulated_gpu.serve(workers=2, seed=seed) as gpu:
            bits, sums = mlp_mask.empty(700, 70, x), torch.empty(70)
            mlp_mask.activate(gpu, x, None, bits, relu=True)
            finished(mlp_mask.gradient(gpu, dy, Gate(bits, scale=2.0), torch.empty_like(dy), sums))
            found.append(sums)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


FAR = 2**31  # more than 32 bits count; of a few bytes, which are all its elements


@pytest.mark.parametrize("shape", [(FAR, 2), (2, FAR), (FAR,), (2**16, 2**16, 1)], ids=str)
def test_sizes_beyond_32_bits_are_left_to_torch(gpu: Emulated, shape: tuple[int, ...]) -> None:
    """Of rows, or of columns; the kernels would do nothing with them, or too little."""
    x = torch.zeros(1).expand(shape)
    assert not mlp_mask.fits(x) and relu_dropout._gpu(x, 0.5, True) is None
    weight = torch.zeros(1).expand(1, shape[-1])
    one = chain_of([weight, None], [], ["linear"], [], [])
    assert not mlp_cuda.takes(one, x)
    if len(shape) == 2:
        g = torch.zeros(1).expand(shape[0], 1)
        assert not mlp_one_output.takes(Layer(g, weight, x, None, weight, False, None))


def test_as_many_elements_fit(gpu: Emulated) -> None:
    """Only rows and columns matter."""
    x = torch.zeros(1).expand(2**20, 2**20)
    assert mlp_mask.fits(x) and relu_dropout._gpu(x, 0.5, True) is gpu
    one = chain_of([torch.zeros(1).expand(3, 2**20), None], [], ["linear"], [], [])
    assert mlp_cuda.takes(one, x)
    high = chain_of([torch.zeros(1).expand(FAR, 2**20), None], [], ["linear"], [], [])
    assert not mlp_cuda.takes(high, x)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("n", [8, 16, 70])
def test_memory_may_begin_anywhere(gpu: Emulated, n: int, dtype: torch.dtype) -> None:
    """At any element: of inputs, outputs, masks."""

    def at(offset: int, *shape: int) -> Tensor:
        whole = torch.full((rows * n + 8,), float("nan"), dtype=dtype)
        return whole[offset : offset + rows * n].view(shape)

    rows = 5
    values, upstream = rand(rows, n, seed=1).to(dtype), rand(rows, n, seed=2).to(dtype)
    for offset in (1, 2, 3, 4):
        x, y, dy, out = (at(k, rows, n) for k in (offset, 0, 2 * offset % 5, offset))
        x.copy_(values)
        dy.copy_(upstream)
        bits = torch.empty(rows * mlp_mask.row_bytes(n) + 1, dtype=torch.uint8)[1:].view(rows, -1)
        mlp_mask.activate(gpu, x, y, bits, relu=True)
        assert torch.equal(y, values.relu())
        for gate in (Gate(bits), Gate(None, y)):
            finished(mlp_mask.gradient(gpu, dy, gate, out))
            assert torch.equal(out, torch.where(values > 0, upstream, 0.0))
