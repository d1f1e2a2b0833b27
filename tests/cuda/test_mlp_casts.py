"""Weights and inputs of chains cast and widened in one launch: cast_rows.cu and its host code."""

from __future__ import annotations

from collections.abc import Iterator

import emulated_gpu
import pytest
import torch
from emulated_chains import BF16, F16, F32, MLP, chain, leaves
from emulated_gpu import Emulated
from torch import Tensor

from recast.runtime import aligned, device
from recast.runtime.mlp import casts

DTYPES = {"fp32": F32, "fp16": F16, "bf16": BF16}


@pytest.fixture
def gpu() -> Iterator[Emulated]:
    with emulated_gpu.serve() as emulated:
        yield emulated


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("of", DTYPES)
def test_every_tensor_in_one_launch(gpu: Emulated, of: str, to: str) -> None:
    """Of one block and of several, of rows that lie apart, that begin anywhere, of one number."""
    dtype = DTYPES[to]
    tensors = [
        rand(64, 128), rand(7), rand(33, 13), rand(1), rand(1, 1), rand(5, 300)[:, 3:20],
        rand(40, 60).t(), rand(4097)[1:], rand(70, 37), rand(4096),
    ]  # fmt: skip
    tensors = [t.to(DTYPES[of]) for t in tensors]
    found = casts.every(gpu, tensors, dtype, tensors[8])
    assert gpu.launched == ["cast_rows"]
    for t, made in zip(tensors, found, strict=True):
        assert made.dtype == dtype and torch.equal(made, t.to(dtype))
        assert made.is_contiguous() or t is tensors[8]
    assert aligned.is_marked(found[8]) and not any(map(aligned.is_marked, found[:8]))
    whole = aligned.whole(found[8])
    assert whole.is_contiguous() and whole.shape == (70, aligned.stride(37, dtype))
    assert not whole[:, 37:].any()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 13), (300, 13), (70, 479), (9, 16)], ids=str)
def test_zeros_behind_rows(gpu: Emulated, shape: tuple[int, int], dtype: torch.dtype) -> None:
    for matrix in (rand(*shape), rand(*shape[::-1]).t(), rand(shape[0], shape[1] + 3)[:, 1:-2]):
        made = casts.widened(gpu, matrix, dtype)
        assert made.is_contiguous() and made.shape == (shape[0], aligned.stride(shape[1], dtype))
        assert torch.equal(made[:, : shape[1]], matrix.to(dtype)) and not made[:, shape[1] :].any()
    assert gpu.launched == ["cast_one"] * 3


@pytest.mark.skipif(device.extension() is None, reason=f"the extension: {device.why_missing()}")
def test_a_chain_is_cast_by_two_launches(gpu: Emulated) -> None:
    """All weights, the first with zeros behind its rows, and the input with them: no more."""
    args = chain(70, [13, 24, 16, 1], 0.0)
    wanted = [t.requires_grad_() for t in leaves(args)]
    with torch.autocast("cpu", BF16):
        out = MLP.target(*args)
    assert [name for name in gpu.launched if "cast" in name] == ["cast_rows", "cast_one"]
    grads = torch.autograd.grad(out, wanted, torch.ones_like(out))
    assert all(g.dtype == F32 and g.shape == t.shape for g, t in zip(grads, wanted, strict=True))
