"""ZeRO by hand: each rank steps some dense parameters, and gets the others from their owners."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run
from test_unlike_steps import Net, batch

import recast
from recast.errors import UsageError

RANKS, STEPS = 3, 5


def owner(k: int) -> int:
    """The rank that steps the dense parameter ``k``: the first has fewer than the last, or none."""
    return RANKS - 1 - k % RANKS


def divided(rank: int, sharding: str, forgets: int = -1, skips: int = -1) -> tuple[Any, str | None]:
    """Train with an optimizer for each parameter. From step ``forgets`` on no rank gets what the
    last one has stepped; at step ``skips`` the last one does not step its part of the tables.
    """
    fast = recast.optimize(Net(), example=batch(0, 0), sharding=sharding)
    spread = sharding != "data_parallel"
    held = dict(fast.named_parameters())
    dense = [p for n, p in held.items() if not (spread and "weight" in n and "top" not in n)]
    mine = [p for k, p in enumerate(dense) if owner(k) == rank]
    kinds = torch.optim.Adagrad, torch.optim.SGD  # with other settings, too
    own: list[Any] = [kinds[rank % 2]([p], lr=0.05 * (1 + k)) for k, p in enumerate(mine)]
    tables = [p for p in held.values() if not any(p is d for d in dense)]
    rows = torch.optim.SGD(tables, lr=0.1) if tables else None
    try:
        for step in range(STEPS):
            for p in held.values():
                p.grad = None
            (fast(batch(rank, step)) - 1).square().mean().backward()
            last = rank == RANKS - 1
            for optimizer in own:
                optimizer.step()
            if rows is not None and not (step == skips and last):
                rows.step()
            for k, p in enumerate(dense):
                if not (step >= forgets >= 0 and owner(k) == RANKS - 1):
                    dist.broadcast(p.detach(), owner(k))
    except UsageError as error:
        return None, str(error)
    return [p.detach().clone() for p in dense], None


def plain() -> list[torch.Tensor]:
    """One process, with all batches; the same optimizer for each parameter."""
    net = Net()
    dense = list(net.top.parameters())
    own: list[Any] = []
    for k, p in enumerate(dense):
        rank = owner(k)
        place = [j for j in range(len(dense)) if owner(j) == rank].index(k)
        kinds = torch.optim.Adagrad, torch.optim.SGD
        own.append(kinds[rank % 2]([p], lr=0.05 * (1 + place)))
    own.append(torch.optim.SGD([net.bags.weight, net.other.weight], lr=0.1))
    for step in range(STEPS):
        net.zero_grad()
        ids = torch.cat([batch(rank, step) for rank in range(RANKS)])
        (net(ids) - 1).square().mean().backward()
        for optimizer in own:
            optimizer.step()
    return [p.detach() for p in dense]


@pytest.mark.parametrize("sharding", ["row_wise", "data_parallel"])
def test_it_is_no_fault(sharding: str) -> None:
    results = run(RANKS, divided, sharding)
    assert [error for _, error in results] == [None] * RANKS
    if sharding == "row_wise":
        for found, _ in results:
            torch.testing.assert_close(found, plain())


@pytest.mark.parametrize("sharding", ["row_wise", "data_parallel"])
def test_ranks_that_part_are_told(sharding: str) -> None:
    results = run(RANKS, divided, sharding, 1)
    assert len({error for _, error in results}) == 1
    assert "in: values of dense parameters" in str(results[0][1])


@pytest.mark.parametrize("skips", [0, 2])  # when the ranks do not know yet, and when they do
def test_the_tables_are_stepped_by_all(skips: int) -> None:
    results = run(RANKS, divided, "row_wise", -1, skips)
    assert len({error for _, error in results}) == 1
    assert "rank 2 of 3 differs from the others in: optimizer steps" in str(results[0][1])


def test_a_rank_that_steps_another_is_compared_again() -> None:
    """As ranks do that draw, each for itself, which of two optimizers to step."""

    def one(rank: int) -> tuple[int, str]:
        fast = recast.optimize(Net(), example=batch(0, 0), sharding="row_wise")
        dense = fast.get_parameter("top.weight"), fast.get_parameter("top.bias")
        # lr=0 lets the values stay the same.
        own = [torch.optim.SGD([p], lr=0.0, momentum=0.5 * k) for k, p in enumerate(dense)]
        try:
            for step in range(STEPS):
                fast(batch(rank, step)).sum().backward()
                own[rank if step < 2 else 0].step()
        except UsageError as error:
            return step, str(error)
        return STEPS, ""

    for step, error in run(2, one):
        assert step == 3 and "differs from the others in: optimizer steps" in error
