"""Batch norm in train mode on W ranks equals one process with the global batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import processes, run
from torch import Tensor, nn

from recast.errors import InputError, NotBuiltError
from recast.runtime import tolerances

SPLITS = [(4, 4), (5, 2, 9), (3, 0, 1, 7), (0, 6), (1, 1), (2, 0, 0, 3, 1, 4, 1, 5)]
NORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cumulative": {"momentum": None},
    "momentum": {"momentum": 0.4, "eps": 1e-2},
    "no statistics": {"track_running_stats": False},
    "no affine": {"affine": False},
}


def call(norm: Any, x: Tensor) -> Tensor:
    return torch.ops.recast.batch_norm_global(
        x,
        [norm.weight, norm.bias],
        [norm.running_mean, norm.running_var, norm.num_batches_tracked],
        norm.training,
        norm.momentum,
        norm.eps,
    )


def _batches(split: tuple[int, ...], shape: tuple[int, ...], seed: int) -> list[list[Tensor]]:
    """[(inputs, upstream gradients) of each rank], with distant means and different scales."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(split), *shape, generator=g)
    x = x * torch.logspace(-1, 1, shape[0]).view(-1, *[1] * (len(shape) - 1)) + 20.0
    grad = torch.randn(sum(split), *shape, generator=g)
    return [list(pair) for pair in zip(x.split(split), grad.split(split), strict=True)]


def _train(norm: Any, batches: list[list[Tensor]], function: Any) -> list[Tensor]:
    """Outputs and all gradients of some batches, then the buffers, then an output in eval mode."""
    found: list[Tensor] = []
    for x, grad in batches:
        x = x.clone().requires_grad_()
        for p in norm.parameters():
            p.grad = None
        out = function(norm, x)
        out.backward(grad)
        found += [out.detach(), x.grad, *(p.grad for p in norm.parameters())]
    norm.eval()
    return [*found, *norm.buffers(), function(norm, batches[0][0]).detach()]


def _compare(split: tuple[int, ...], kind: str, shape: tuple[int, ...], how: Any = run) -> None:
    torch.manual_seed(1)
    norm = nn.BatchNorm1d(shape[0], **NORMS[kind])
    for p in norm.parameters():
        nn.init.normal_(p)
    steps = [_batches(split, shape, seed) for seed in (1, 2)]
    copies = [copy.deepcopy(norm) for _ in split]
    answers = how(len(split), lambda r: _train(copies[r], [s[r] for s in steps], call))
    whole = [[torch.cat(parts) for parts in zip(*step, strict=True)] for step in steps]
    wide = [[t.double() for t in step] for step in whole]
    plain = _train(copy.deepcopy(norm), whole, lambda m, x: m(x))
    truth = _train(copy.deepcopy(norm).double(), wide, lambda m, x: m(x))
    held = len(list(norm.parameters()))
    for k in range(len(plain)):
        parts = [answer[k] for answer in answers]
        per_step = k % (2 + held) if k < 2 * (2 + held) else None
        if per_step in (0, 1) or k == len(plain) - 1:
            ours = torch.cat(parts)  # of the batch
        elif per_step is not None:
            ours = torch.stack(parts).sum(0)  # of the parameters
        else:
            ours = parts[0]
            assert all(torch.equal(part, ours) for part in parts)  # buffers: to the bit
        sizes = [t.abs().max().item() for step in wide for t in step]
        # A gradient of dx is a small difference of sums of dy: these took part.
        scale = sizes[1] * 8 if per_step == 1 else max(sizes[0], truth[k].abs().max().item())
        assert tolerances.excess(ours, plain[k], truth[k], scale=scale) <= 1, (k, per_step)


@pytest.mark.parametrize("split", SPLITS)
def test_of_one_process(split: tuple[int, ...]) -> None:
    _compare(split, "plain", (6,))


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("shape", [(6,), (5, 3)])
def test_every_kind(kind: str, shape: tuple[int, ...]) -> None:
    _compare((5, 2, 9), kind, shape)


def test_over_gloo() -> None:
    _compare((5, 2), "plain", (6,), processes)


def test_one_row_in_all_is_refused_everywhere() -> None:
    norms = [nn.BatchNorm1d(3) for _ in range(3)]

    def rank(r: int) -> str:
        with pytest.raises(InputError, match="more than 1 value") as caught:
            call(norms[r], torch.randn(int(r == 1), 3))
        return str(caught.value)

    assert len(run(3, rank)) == 3


def test_second_derivatives_are_refused() -> None:
    norms = [nn.BatchNorm1d(3) for _ in range(2)]

    def rank(r: int) -> None:
        x = torch.randn(4, 3, requires_grad=True)
        with pytest.raises(NotBuiltError, match="create_graph"):
            torch.autograd.grad(call(norms[r], x).square().sum(), x, create_graph=True)

    run(2, rank)


def test_far_from_zero_nothing_cancels() -> None:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(5)) + 3000.0
    norms = [nn.BatchNorm1d(4, momentum=1.0) for _ in range(4)]
    run(4, lambda r: call(norms[r], x[16 * r : 16 * r + 16]))
    plain = nn.BatchNorm1d(4, momentum=1.0)
    plain(x)
    ours, theirs = norms[0].running_var, plain.running_var
    assert ours is not None
    assert theirs is not None
    # Of squares, 3000^2 in fp32, nothing would be right to a half.
    assert tolerances.excess(ours, theirs, x.double().var(0), scale=3000.0) <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    x, grad = torch.randn(12, 5), torch.randn(12, 5)
    norm = nn.BatchNorm1d(5).to(dtype if dtype is torch.float64 else torch.float32)
    x, grad = x.to(dtype), grad.to(dtype)
    copies = [copy.deepcopy(norm) for _ in range(3)]

    def rank(r: int) -> tuple[Tensor, Tensor]:
        own = x[4 * r : 4 * r + 4].clone().requires_grad_()
        out = call(copies[r], own)
        out.backward(grad[4 * r : 4 * r + 4])
        assert own.grad is not None
        return out.detach(), own.grad

    answers = run(3, rank)
    own = x.clone().requires_grad_()
    out = norm(own)
    out.backward(grad)
    torch.testing.assert_close(torch.cat([a[0] for a in answers]), out)
    torch.testing.assert_close(torch.cat([a[1] for a in answers]), own.grad)
