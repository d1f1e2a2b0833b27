"""Backward passes that reach only some of the dense parameters: right, or an error in time."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import run
from torch import Tensor, nn

import recast
from recast.errors import UsageError


class Heads(nn.Module):
    """Two outputs, each with layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(9, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.table(ids)
        return self.first(rows), self.second(rows)


MODEL, IDS = Heads(), torch.arange(8) % 9


def spread(rank: int) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    model: nn.Module = copy.deepcopy(MODEL)
    optimizer: torch.optim.Optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    own = IDS[4 * rank : 4 * rank + 4]
    fast, optimizer = recast.optimize(model, optimizer, example=own, sharding="row_wise")
    return fast, optimizer, own


def test_a_step_by_gradients_that_are_one_ranks_own_is_refused() -> None:
    """Torch would only say so in the next forward, after the replicas have diverged."""

    def one(rank: int) -> None:
        fast, optimizer, ids = spread(rank)
        before = [p.detach().clone() for p in fast.parameters()]
        fast(ids)[0].square().mean().backward()
        with pytest.raises(UsageError, match=r"no backward pass came to second\.bias, second"):
            optimizer.step()
        assert all(map(torch.equal, before, fast.parameters()))
        with pytest.raises(UsageError, match=r"no backward pass came to second\.bias"):
            fast(ids)

    run(2, one)


def test_a_pass_that_comes_to_some_a_second_time_is_refused() -> None:
    def one(rank: int) -> None:
        fast, _, ids = spread(rank)
        first, second = fast(ids)
        first.square().mean().backward(retain_graph=True)
        with pytest.raises(UsageError, match=r"no backward pass came to second\.bias"):
            (first + second).square().mean().backward()

    run(2, one)


def test_passes_that_come_to_all_together_are_right() -> None:
    """And parameters that one step freezes, on every rank, are not waited for."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> list[Tensor]:
        for _ in range(2):
            optimizer.zero_grad()
            first, second = model(ids)
            first.square().mean().backward(retain_graph=True)
            second.square().mean().backward()
            optimizer.step()
        model.get_submodule("second").requires_grad_(False)
        optimizer.zero_grad()
        model(ids)[0].square().mean().backward()
        optimizer.step()
        return [p.detach() for p in model.get_submodule("first").parameters()]

    def one(rank: int) -> None:
        fast, optimizer, ids = spread(rank)
        torch.testing.assert_close(train(fast, optimizer, ids), wanted)

    plain = copy.deepcopy(MODEL)
    wanted = train(plain, torch.optim.Adagrad(plain.parameters(), lr=0.1), IDS)
    run(2, one)


def test_only_tables_are_stepped_inside_of_a_backward_pass() -> None:
    """Gradients of dense parameters are averaged at its end; those of rows are complete."""

    def train(model: nn.Module, ids: Tensor) -> list[Tensor]:
        held = dict(model.named_parameters())
        rows = torch.optim.SGD([held.pop("table.weight")], lr=0.1)
        dense = torch.optim.SGD(held.values(), lr=0.1)

        def inside(_: Tensor) -> None:
            rows.step()
            rows.zero_grad()

        rows.param_groups[0]["params"][0].register_post_accumulate_grad_hook(inside)
        for _ in range(3):
            dense.zero_grad()
            sum(out.square().mean() for out in model(ids)).backward()
            dense.step()
        return [p.detach() for p in held.values()]

    plain = train(copy.deepcopy(MODEL), IDS)

    def one(rank: int) -> None:
        fast, optimizer, ids = spread(rank)
        for found, expected in zip(train(fast, ids), plain, strict=True):
            torch.testing.assert_close(found, expected)
        fast.first.bias.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        with pytest.raises(UsageError, match="would be stepped inside of the backward pass"):
            sum(out.square().mean() for out in fast(ids)).backward()

    run(2, one)
