"""A batch of upstream gradients at once gives the same gradients as one after the other."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from op_checks import TRAINED, as_list, cast, dense, floats
from torch import Tensor, nn

import recast
from recast.runtime.op import Op, Sample

CASES = [
    pytest.param(op, sample, id=f"{op.name}-{sample.label}")
    for op in TRAINED
    for sample in islice(op.samples(), 3)
]


@pytest.mark.parametrize(("op", "sample"), CASES)
def test_a_batch_of_gradients_is_each_of_them(op: Op, sample: Sample) -> None:
    args = cast(sample.args, torch.float32)
    leaves = [t.requires_grad_() for t in floats(op, args)]
    torch.manual_seed(5)
    outs = [o for o in as_list(op.target(*args)) if o.requires_grad]
    g = torch.Generator().manual_seed(3)
    up = [torch.randn(3, *o.shape, generator=g) for o in outs]

    def alone(k: int) -> list[Tensor]:
        found = torch.autograd.grad(
            outs, leaves, [u[k] for u in up], allow_unused=True, retain_graph=True
        )
        return [dense(grad, t) for grad, t in zip(found, leaves, strict=True)]

    want = [torch.stack(grads) for grads in zip(*map(alone, range(3)), strict=True)]
    got = torch.autograd.grad(outs, leaves, up, allow_unused=True, is_grads_batched=True)
    assert any(grad is not None for grad in got)
    for ours, theirs, leaf in zip(got, want, leaves, strict=True):
        none = torch.zeros(3, *leaf.shape) if ours is None else ours
        torch.testing.assert_close(none, theirs)


@pytest.mark.parametrize(("op", "sample"), CASES)
def test_gradients_that_torch_negates_as_it_reads(op: Op, sample: Sample) -> None:
    """Views of the imaginary part of a conjugate are such; here they are dense, too."""
    args = cast(sample.args, torch.float32)
    leaves = [t.requires_grad_() for t in floats(op, args)]
    torch.manual_seed(5)
    outs = [o for o in as_list(op.target(*args)) if o.requires_grad]
    g = torch.Generator().manual_seed(3)
    up = [torch.randn(o.shape, generator=g) for o in outs]
    both = []
    for given in (up, [torch._neg_view(-u) for u in up]):
        found = torch.autograd.grad(outs, leaves, given, allow_unused=True, retain_graph=True)
        both.append([dense(grad, t) for grad, t in zip(found, leaves, strict=True)])
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(40, 8, mode="mean")
        self.rows = nn.Embedding(30, 8, padding_idx=0)
        self.top = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        some = torch.cat([self.bags(ids), self.rows(ids % 30).sum(1), x], 1)
        out: Tensor = self.top(some).squeeze(1)
        return out


def made() -> tuple[Net, Any, Tensor, Tensor]:
    torch.manual_seed(3)
    net, ids, x = Net(), torch.randint(40, (7, 3)), torch.randn(7, 8)
    return net, recast.optimize(net, example=(ids, x)), ids, x


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of the plain model
def test_jacobians_of_a_model() -> None:
    net, fast, ids, x = made()
    eye = torch.eye(7)

    def rows(model: nn.Module, how: str) -> list[Tensor]:
        out, params = model(ids, x), list(net.parameters())
        if how == "batched":
            return list(torch.autograd.grad(out, params, eye, is_grads_batched=True))
        return list(torch.vmap(lambda v: torch.autograd.grad(out, params, v))(eye))

    for how in ("batched", "vmap"):
        for ours, theirs in zip(rows(fast, how), rows(net, how), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("vectorize", [False, True])
def test_jacobian_and_hessian_of_an_input(vectorize: bool) -> None:
    net, fast, ids, x = made()
    functional = torch.autograd.functional

    def both(model: nn.Module) -> tuple[Any, Any]:
        return (
            functional.jacobian(lambda v: model(ids, v), x, vectorize=vectorize),
            functional.hessian(lambda v: model(ids, v).square().sum(), x, vectorize=vectorize),
        )

    for ours, theirs in zip(both(fast), both(net), strict=True):
        torch.testing.assert_close(ours, theirs)
