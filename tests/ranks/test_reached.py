"""Which dense parameters ranks average: those that get gradients, by whatever way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import run
from torch import Tensor, nn

import recast
from recast.errors import UsageError
from recast.rewriter.capture.capture_model import capture
from recast.rewriter.spread.reached import reached


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(30, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("kept", torch.zeros(4))
        g = torch.Generator().manual_seed(0)  # ranks that are threads share the other one
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.rand(p.shape, generator=g) - 0.5)


class ByMask(Base):
    """As recurrent cells of packed sequences store their states."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.rows(ids)
        out = torch.zeros_like(x)
        out[ids % 2 == 0] = self.first(x)[ids % 2 == 0]
        out[:, 1:] = out[:, 1:] + self.second(x)[:, 1:]
        return out.tanh()


class ThroughViews(Base):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.rows(ids)
        out = torch.zeros(len(x), 8)
        left, right = out[:, :4], out[:, 4:]
        left.copy_(self.first(x))
        right.view(-1, 2, 2)[:, 0].add_(self.second(x)[:, :2])
        return out.square()


class InTwoSteps(Base):
    """What is written reaches what is written to what is returned."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.rows(ids)
        inner, outer = torch.zeros_like(x), torch.zeros_like(x)
        inner += self.first(x)
        inner.mul_(self.second(x))
        outer.index_copy_(0, torch.arange(len(x)), inner)
        return outer + 1


class IntoDetached(Base):
    """What is detached is written into later."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.rows(ids)
        out = torch.zeros_like(x).detach()
        out[:, :2] = self.first(x)[:, :2]
        return out + self.second(x)


WAYS = (ByMask, ThroughViews, InTwoSteps, IntoDetached)


def batch(rank: int, step: int) -> Tensor:
    g = torch.Generator().manual_seed(10 * rank + step)
    return torch.randint(30, (6,), generator=g)


def trained(model: Any, optimizer: Any, batches: Any) -> dict[str, Tensor]:
    for step in range(3):
        optimizer.zero_grad()
        model(batches(step)).square().mean().backward()
        optimizer.step()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)


@pytest.mark.parametrize("kind", WAYS)
def test_what_is_written_in_place(kind: type[Base]) -> None:
    one = kind()
    wanted = trained(one, sgd(one), lambda step: torch.cat([batch(r, step) for r in range(2)]))

    def rank_of(rank: int) -> dict[str, Tensor]:
        model = kind()
        fast, opt = recast.optimize(model, sgd(model), example=batch(0, 0), sharding="row_wise")
        assert fast.report.captured == "whole"
        return trained(fast, opt, lambda step: batch(rank, step))

    for found in run(2, rank_of):
        for name in ("first.weight", "first.bias", "second.weight", "second.bias"):
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-6, msg=name)


class Detached(Base):
    """Its second layer gets no gradient: it teaches, and is remembered."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.rows(ids)
        with torch.no_grad():
            taught = self.second(x)
            self.kept.mul_(0.9).add_(taught.mean(0))
        return self.first(x) - taught.detach() + self.kept


class ByData(Detached):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.rows(ids)
        return self.first(x) - self.second(x).data * self.second.weight.data.sum()


class DetachedInPlace(Detached):
    """It has been written into before that, not since."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.rows(ids)
        taught = torch.zeros_like(x)
        taught[:, 1:] = self.second(x)[:, 1:]
        return self.first(x) - taught.detach_()


class ByNumber(Detached):
    """The nearest row, and a mask."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.rows(ids)
        taught = self.second(x)
        return self.first(x) + self.rows(taught.argmax(1)) * (taught > 0).float()


class ByShape(Detached):
    """The two greatest, in a tensor of this shape."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.rows(ids)
        taught = self.second(x)
        chosen = torch.zeros_like(taught).scatter_(1, taught.topk(2, 1).indices, 1.0)
        return self.first(x) * chosen * torch.ones(taught.shape)


@pytest.mark.parametrize("kind", [Detached, ByData, DetachedInPlace, ByNumber, ByShape])
def test_what_is_detached_is_not_waited_for(kind: type[Base]) -> None:
    captured = capture(kind(), batch(0, 0))
    assert captured.kind == "whole"
    for graph in captured.graphs.values():
        names = reached(graph, captured.root)
        assert names == {"rows.weight", "first.weight", "first.bias"}

    def rank_of(rank: int) -> dict[str, Tensor]:
        model = kind()
        fast, opt = recast.optimize(model, sgd(model), example=batch(0, 0), sharding="row_wise")
        return trained(fast, opt, lambda step: batch(rank, step))

    first, second = run(2, rank_of)
    for name in ("first.weight", "second.weight"):
        assert torch.equal(first[name], second[name])
    assert torch.equal(first["second.weight"], kind().second.weight)


class OfThatName(nn.Module):
    """A layer with the name of a method through which no gradient goes."""

    def __init__(self) -> None:
        super().__init__()
        self.size = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.size(x)
        return out


def test_a_layer_with_the_name_of_a_method() -> None:
    captured = capture(OfThatName(), torch.ones(5, 4))
    for graph in captured.graphs.values():
        assert reached(graph, captured.root) == {"size.weight", "size.bias"}


class Beside(Base):
    def forward(self, ids: Tensor) -> Tensor:
        return self.first(self.rows(ids))


def test_a_layer_that_is_used_beside_the_model_is_refused() -> None:
    def rank_of(rank: int) -> None:
        model = Beside()
        plain = copy.deepcopy(model)
        fast, _ = recast.optimize(model, sgd(model), example=batch(0, 0), sharding="row_wise")
        out = fast(batch(rank, 0))
        with pytest.raises(UsageError, match=r"second\.weight and 1 more would be this rank's own"):
            fast.second(out).sum().backward()
        for p in fast.second.parameters():
            p.requires_grad_(False)
        fast.second(fast(batch(rank, 0))).sum().backward()
        torch.testing.assert_close(fast(batch(rank, 0)), plain(batch(rank, 0)))

    run(2, rank_of)


class Storing(Base):
    """Keeps a loss of its own."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.rows(ids)
        self.loss = self.second(x).square().mean()
        return self.first(x)


class StoringEntries(Storing):
    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[str, Tensor] = {}

    @property
    def loss(self) -> Tensor:
        return self.losses["second"]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.rows(ids)
        self.losses["second"] = self.second(x).square().mean()
        return self.first(x)


@pytest.mark.parametrize("kind", [Storing, StoringEntries])
def test_a_loss_that_is_stored_in_the_model(kind: type[Storing]) -> None:
    def steps(model: Any, optimizer: Any, batches: Any) -> dict[str, Tensor]:
        for step in range(3):
            optimizer.zero_grad()
            out = model(batches(step))
            model.loss.backward(retain_graph=True)
            out.square().mean().backward()
            optimizer.step()
        return {n: p.detach().clone() for n, p in model.named_parameters()}

    one = kind()
    wanted = steps(one, sgd(one), lambda step: torch.cat([batch(r, step) for r in range(2)]))

    def rank_of(rank: int) -> dict[str, Tensor]:
        model = kind()
        fast, opt = recast.optimize(model, sgd(model), example=batch(0, 0), sharding="row_wise")
        found = steps(fast, opt, lambda step: batch(rank, step))
        fast(batch(rank, 3))
        fast.loss.backward()
        with pytest.raises(UsageError, match=r"no backward pass came to first\.bias"):
            opt.step()
        return found

    for found in run(2, rank_of):
        for name in ("first.weight", "first.bias", "second.weight", "second.bias"):
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-6, msg=name)


class Factors(nn.Module):
    """No dense parameter in training; in eval mode, one."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.scale = nn.Embedding(30, 4), nn.Parameter(torch.ones(4))

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.rows(ids)
        return rows if self.training else rows * self.scale


def test_where_nothing_is_averaged_a_gradient_of_its_own_is_refused_too() -> None:
    def rank_of(rank: int) -> None:
        fast = recast.optimize(Factors(), example=batch(0, 0), sharding="row_wise")
        fast(batch(rank, 0)).sum().backward()
        with pytest.raises(UsageError, match="the gradient of scale would be this rank's own"):
            fast.eval()(batch(rank, 0)).sum().backward()
        with torch.no_grad():
            fast(batch(rank, 0))

    run(2, rank_of)
