"""Write your own op, in one file: definition, fast forward, proof and cost, known to torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from recast.runtime import OPS, Cost, Op, Sample, register


def reference(x: Tensor) -> Tensor:
    """Σ <vi, vj> over all pairs i < j of the rows of x (B, F, D): the definition, and the truth."""
    z = torch.bmm(x, x.transpose(1, 2))
    return z.triu(1).sum((1, 2))


def forward(x: Tensor) -> Tensor:
    """½(|Σv|² − Σ|v|²): F·D operations where the definition takes F²·D (Rendle 2010, lemma 3.1)."""
    return 0.5 * (x.sum(1).square().sum(1) - x.square().sum((1, 2)))


class Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return forward(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad[:, None, None] * (x.sum(1, keepdim=True) - x)


def samples() -> Iterator[Sample]:
    for b, f, d in ((4, 3, 8), (1, 1, 1), (2, 27, 5)):
        yield Sample(f"{b}x{f}x{d}", (torch.randn(b, f, d),))


FM = register(
    Op(
        name="pairwise_sum",
        schema="(Tensor x) -> Tensor",
        reference=reference,
        fake=lambda x: x.new_empty(x.shape[0]),
        samples=samples,
        cost=lambda x: Cost(flops=4.0 * x.numel(), bytes=x.numel() * x.element_size()),
        forward=forward,
        differentiable=Differentiable.apply,
    )
)

for sample in OPS["pairwise_sum"].samples():
    (x,) = (t.double().requires_grad_() for t in sample.args)
    torch.testing.assert_close(FM.target(x), reference(x))
    torch.library.opcheck(FM.target, (x,))
    assert torch.autograd.gradcheck(FM.target, (x,))
    print(f"{sample.label}: same as its definition, gradient checked, {FM.cost(x)}")
