"""Pairwise dot products, one warp per sample, on the emulator: the numbers of plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest
import simt_build
import torch
from test_dot_kernels import PAIRS, TF32, Class, Given, random, reference, rounded, rows
from torch import Tensor

from recast.runtime import aligned
from recast.runtime.gpu.cuda_launch import Kernel
from recast.runtime.interactions import dot_cuda
from recast.runtime.interactions.dot_interaction import dot_interaction
from recast.runtime.tolerances import excess

F16, BF16 = torch.float16, torch.bfloat16
CLASSES = {
    "lower": Class(27, 128, of=BF16, out=BF16, element=2),
    "lower with self": Class(16, 48, "lower with self", of=F16, out=F16, element=1),
    "upper": Class(17, 16, "upper", of=BF16, out=BF16, element=2),
    "as many as there can be": Class(32, 32, "lower with self", of=BF16, out=BF16, element=2),
    "two long rows": Class(2, 512, of=F16, out=F16, element=1),
    "tf32": Class(27, 32, element=TF32),
    "tf32 with self": Class(18, 48, "lower with self", element=TF32),
    "nine": Class(9, 64, "upper", of=F16, out=F16, element=1),
}
BLOCK = 64
WARPS = BLOCK // 32


def kernels(of: Class) -> simt_build.Kernels:
    defines = {
        "RECAST_FEATURES": of.features, "RECAST_DIM": of.dim, "RECAST_BLOCK": BLOCK,
        "RECAST_PAIRS": PAIRS.index(of.pairs), "RECAST_ELEMENT": of.element,
    }  # fmt: skip
    return simt_build.kernels(simt_build.CUDA / "dot_warps.cu", defines=defines)


def up(bytes_: int) -> int:
    return -(-bytes_ // 16) * 16


def size(of: Class) -> int:
    return of.of.itemsize


def example(of: Class, batch: int, dense: str) -> Given:
    """Rows that start at multiples of 16 bytes, apart in memory."""
    g = torch.Generator().manual_seed(1)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(of.of)

    first, stack = rand(batch, of.dim + 8)[:, : of.dim], rand(2 * batch, of.features - 1, of.dim)
    features = [first, stack[::2]]
    beside = {"none": None, "same": first, "other": rand(batch, 24)[:, 8:16]}[dense]
    return Given(features, beside, 3)


def forward(of: Class, given: Given, blocks: int, spare: int = 8, **how: int) -> Tensor:
    """``spare``: elements before each row of the result, and behind it at least as many."""
    n = len(of.list()[0])
    width = given.width + n + given.pad
    stride = width + 2 * spare if spare % 8 else up(size(of) * width) // size(of) + 2 * spare
    around = torch.full((given.batch, stride), -7.0, dtype=of.out)
    row = size(of) * of.dim + 16
    shared = up(8 * of.features) + 2 * of.features * row + 2 * up(size(of) * width)
    kernels(of).launch(
        "dot_forward", blocks, BLOCK, WARPS * shared, rows(given.features), given.dense,
        0 if given.dense is None else given.dense.stride(0), given.width, given.pad, given.batch,
        around[:, spare:], stride, **how,
    )  # fmt: skip
    assert (around[:, :spare] == -7).all() and (around[:, spare + width :] == -7).all()
    return around[:, spare : spare + width]


def backward(
    of: Class, given: Given, grad: Tensor, blocks: int, left_out: int = -1, **how: int
) -> list[Tensor]:
    grads = [torch.full(f.shape, -7.0, dtype=of.of) for f in given.features]
    told = rows(grads)
    if left_out >= 0:
        told[left_out] = 0
    line = up(size(of) * (given.width + len(of.list()[0]) + 1))
    shared = 16 * of.features + 2 * (of.features + 1) * (size(of) * of.dim + 16) + 2 * line
    kernels(of).launch(
        "dot_backward", blocks, BLOCK, WARPS * shared, rows(given.features), grad, grad.stride(0),
        given.width, given.batch, 0 if given.dense is given.features[0] else -1, told, **how,
    )  # fmt: skip
    return grads


def upstream(of: Class, out: Tensor) -> Tensor:
    """A gradient whose rows start at multiples of 16 bytes, with what means nothing behind them."""
    stride = up(size(of) * out.shape[1]) // size(of)
    wide = random(out.shape[0], stride).to(of.out)
    wide[:, out.shape[1] :] = float("nan")
    return wide[:, : out.shape[1]]


@pytest.mark.parametrize("dense", ["none", "same", "other"])
@pytest.mark.parametrize("name", CLASSES)
def test_forward_and_backward(name: str, dense: str) -> None:
    of = CLASSES[name]
    given = example(of, 9, dense)
    for spare in (8, 1):  # whole packs of a row are written at once, or single elements
        out = forward(of, given, 2, spare)
        grad = upstream(of, out)
        truth = reference(of, given, torch.float64, grad)
        plain = reference(of, given, rounded(of), grad)
        assert excess(out, plain[0].to(of.out), truth[0]) <= 1
    for ours, near, true in zip(backward(of, given, grad, 2), plain[1], truth[1], strict=True):
        assert excess(ours, near.to(of.of), true) <= 1


@pytest.mark.parametrize("name", ["lower", "tf32"])
def test_results_do_not_depend_on_the_grid_or_on_the_order_of_threads(name: str) -> None:
    of = CLASSES[name]
    given = example(of, 7, "same")
    out = forward(of, given, 1)
    grad = upstream(of, out)
    grads = backward(of, given, grad, 1)
    for blocks in (3, 9):  # of the last some have nothing to do
        assert torch.equal(out, forward(of, given, blocks, seed=blocks, workers=2))
        again = backward(of, given, grad, blocks, seed=blocks, workers=2)
        assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


def test_rows_without_gradient_are_left_alone() -> None:
    of = CLASSES["nine"]
    given = example(of, 3, "none")
    grad = upstream(of, forward(of, given, 1))
    whole, part = backward(of, given, grad, 1), backward(of, given, grad, 1, left_out=3)
    assert (part[1][:, 2] == -7).all() and torch.equal(part[0], whole[0])
    assert torch.equal(part[1][:, 3:], whole[1][:, 3:])


def test_infinite_rows_spoil_their_own_sample_only() -> None:
    of = CLASSES["lower"]
    given = example(of, 5, "same")
    clean = forward(of, given, 1)
    grad = upstream(of, clean)
    grads = backward(of, given, grad, 1)
    given.features[1][2, 25] = float("inf")
    spoilt, others = forward(of, given, 1), [0, 1, 3, 4]
    assert torch.equal(spoilt[others], clean[others]) and not spoilt[2].isfinite().all()
    assert spoilt[2, :128].isfinite().all() and spoilt[2, -3:].eq(0).all()
    for a, b in zip(backward(of, given, grad, 1), grads, strict=True):
        assert torch.equal(a[others], b[others])


# ---------------------------------------------------------------- host


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The sources of the kernels that are launched."""
    found: list[str] = []
    with emulated_gpu.serve() as gpu:
        launch = gpu.launch

        def noted(kernel: Kernel, *rest: Any) -> None:
            found.append(Path(kernel.program.source).name)
            launch(kernel, *rest)

        monkeypatch.setattr(gpu, "launch", noted)
        yield found


KINDS = {"bf16": (BF16, False), "fp32": (torch.float32, False), "tf32": (torch.float32, True)}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_who_launches_it(
    sources: list[str], kind: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On tensor cores, rows of whole 16 bytes; backward where those of the gradient are so too."""
    dtype, allowed = KINDS[kind]
    monkeypatch.setattr(dot_cuda, "allows_tf32", lambda: allowed)
    many = [random(5, k + 16)[:, k:].clone().to(dtype).requires_grad_() for k in range(7)]
    li, lj = torch.tril_indices(7, 7, -1)
    out = dot_interaction.target(many, many[0], li, lj, 0, whole)
    plain = dot_interaction.reference(many, many[0], li, lj, 0)
    torch.testing.assert_close(out, plain, rtol=0.02, atol=0.02)
    grad = aligned.empty(*out.shape, dtype, out.device).copy_(random(*out.shape))
    grad = grad if whole else grad.contiguous()
    ours, theirs = (torch.autograd.grad(o, many, grad) for o in (out, plain))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)
    blocks, warps = "dot_interaction.cu", "dot_warps.cu"
    one = kind != "fp32"
    assert sources == [warps if one else blocks, warps if one and whole else blocks]


def test_a_dense_part_that_starts_elsewhere_is_left_to_blocks(sources: list[str]) -> None:
    many, beside = random(5, 6, 16).to(BF16), random(5, 9).to(BF16)[:, 1:]
    li, lj = torch.tril_indices(6, 6, -1)
    out = dot_interaction.target([many], beside, li, lj, 0)
    plain = dot_interaction.reference([many], beside, li, lj, 0)
    torch.testing.assert_close(out, plain, rtol=0.02, atol=0.02)
    assert sources == ["dot_interaction.cu"]
