"""What people do to gradients by hand: take sparse ones apart, share their memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.runtime.rows.grad import RowGrad


class Rows(nn.Module):
    """A table looked up with duplicates, and one in bags."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.a = nn.Embedding(20, 4, sparse=sparse)
        self.b = nn.EmbeddingBag(15, 4, mode="mean", sparse=sparse)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.a(ids).sum(1) * self.b(ids)
        return out


def ids(k: int) -> Tensor:
    return torch.randint(0, 15, (7, 3), generator=torch.Generator().manual_seed(k))


def clipped(grad: Any) -> None:
    grad._values().clamp_(-0.02, 0.02)
    grad._values().mul_(0.5)


def measured(grad: Any) -> Tensor:
    whole = grad.coalesce()
    assert whole.is_coalesced() and not grad.is_coalesced()
    whole.values().zero_()  # a copy
    return torch.stack(
        [grad.coalesce().values().norm(), grad._values().norm(), grad._values()[2].sum()]
    )


def counted(grad: Any) -> Tensor:
    assert grad._values().shape == (grad._nnz(), 4)
    return grad._indices().sort().values


def scaled(grad: Any) -> Tensor:
    grad.mul_(0.25)
    grad._values().mul_(2)
    grad.mul_(3.0)
    return grad.coalesce().to_dense()


@pytest.mark.parametrize("touch", [clipped, measured, counted, scaled])
def test_sparse_gradients_taken_apart(touch: Callable[[Any], Tensor | None]) -> None:
    torch.manual_seed(0)
    model = Rows(sparse=True)
    plain = copy.deepcopy(model)
    fast, opt = recast.optimize(model, torch.optim.SGD(model.parameters(), 0.1), example=ids(0))
    twin = torch.optim.SGD(plain.parameters(), 0.1)
    for k in range(3):
        for one, by in ((plain, twin), (fast, opt)):
            by.zero_grad()
            one(ids(k)).square().mean().backward()
        assert all(type(p.grad) is RowGrad for p in fast.parameters())
        for p, q in zip(plain.parameters(), fast.parameters(), strict=True):
            found = touch(q.grad), touch(p.grad)
            if found[1] is not None:
                torch.testing.assert_close(*found)
        twin.step(), opt.step()
        for p, q in zip(plain.parameters(), fast.parameters(), strict=True):
            torch.testing.assert_close(q, p)


def rebuilt(grad: Any) -> Tensor:
    return torch.sparse_coo_tensor(grad._indices(), grad._values().sign(), grad.shape)


@pytest.mark.parametrize("hook", [rebuilt, lambda grad: grad.coalesce(), lambda grad: grad * 2])
def test_hooks_that_return_sparse_gradients(hook: Callable[[Any], Tensor]) -> None:
    torch.manual_seed(0)
    model = Rows(sparse=True)
    plain = copy.deepcopy(model)
    fast, opt = recast.optimize(model, torch.optim.SGD(model.parameters(), 0.1), example=ids(0))
    twin = torch.optim.SGD(plain.parameters(), 0.1)
    handles = [one.a.weight.register_hook(hook) for one in (plain, fast)]
    for k in range(4):
        if k == 2:
            for handle in handles:
                handle.remove()
        for one, by in ((plain, twin), (fast, opt)):
            by.zero_grad()
            one(ids(k)).square().mean().backward()
            by.step()
        assert (type(fast.a.weight.grad) is RowGrad) == (k >= 2)
        assert type(fast.b.weight.grad) is RowGrad
        for p, q in zip(plain.parameters(), fast.parameters(), strict=True):
            torch.testing.assert_close(q, p)


def test_others_are_no_sparse_tensors() -> None:
    model = Rows(sparse=False)
    recast.optimize(model, example=ids(0))(ids(1)).sum().backward()
    for ask in ("coalesce", "_values", "_indices"):
        with pytest.raises((RuntimeError, NotImplementedError)):
            getattr(model.a.weight.grad, ask)()


def test_shared_memory_between_backward_and_step() -> None:
    """``module.share_memory()`` asks gradients too."""
    torch.manual_seed(0)
    model = Rows(sparse=False)
    plain = copy.deepcopy(model)
    fast, opt = recast.optimize(model, torch.optim.Adagrad(model.parameters(), 0.1), example=ids(0))
    twin = torch.optim.Adagrad(plain.parameters(), 0.1)
    for one, by in ((plain, twin), (fast, opt)):
        one(ids(1)).square().mean().backward()
        one.share_memory()
        assert all(p.is_shared() and p.grad.is_shared() for p in one.parameters())
        by.step()
    for p, q in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(q, p)
