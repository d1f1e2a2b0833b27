"""``recast.diff`` on several ranks: each judges its part, and all have the same report."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from every import COLUMNS, Every, batch, planned
from harness import processes
from torch import nn

import recast
from recast.errors import DiffError, UsageError

SIZES = [5, 3]  # unequal: the mean of both losses is the loss


def made(rank: int) -> tuple[Every, Every, Any, torch.optim.Optimizer, Any, Any]:
    """The plain model, that whose tables were taken, the one on ranks, its optimizer; a batch of
    this rank, and a loss.
    """
    torch.manual_seed(0)
    model = Every()
    before = copy.deepcopy(model)
    given, label = batch(SIZES, rank)
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.1)
    fast, optimizer = recast.optimize(
        model, optimizer, example=batch(SIZES, 0)[0], plan=planned(model, 2, COLUMNS)
    )
    return before, model, fast, optimizer, given, lambda out: (out - label).square().mean()


def scaled(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(1.01)


def test_it_is_the_plain_model() -> None:
    def rank_of(rank: int) -> list[tuple[str, bool, list[str]]]:
        before, model, fast, optimizer, given, loss = made(rank)
        found = [recast.diff(before, fast, given, loss=loss)]
        loss(fast(*given)).backward()
        optimizer.step()  # what it holds of parts from here on is the start of both
        # The user's own model, whose tables were taken, is made whole for the comparison.
        found.append(recast.diff(model, fast, [given, given], optimizer=optimizer))
        return [(str(report), report.ok, [row.tensor for row in report.rows]) for report in found]

    ours, theirs = processes(2, rank_of)
    assert ours == theirs, "all ranks say the same"
    (first, ok, rows), (again, also_ok, _) = ours
    assert ok and also_ok and "different values" not in first + again
    assert "judge: the plain model in float64" in first and "after 3 steps" in first
    assert {"eval output", "train output", "raw", "fixed.weight [sum]", "top.0.bias"} <= {*rows}


def test_what_one_rank_has_otherwise_is_told_on_all() -> None:
    def rank_of(rank: int) -> list[Any]:
        before, _, fast, _, given, _ = made(rank)
        part, dense = fast.get_parameter("ragged.weight"), fast.get_parameter("top.0.weight")
        if rank == 1:
            hook = dense.register_post_accumulate_grad_hook(scaled)
        found = [recast.diff(before, fast, given, steps=0)]
        if rank == 1:
            hook.remove()
            with torch.no_grad():
                part[0, 0] += 0.1
        found.append(recast.diff(before, fast, given, steps=0))
        with pytest.raises(DiffError) as caught:
            found[-1].check()
        if rank == 1:  # a way of its own without gradients, with the parameters after the steps
            with torch.no_grad():
                part[0, 0] -= 0.1
            fast.register_forward_hook(lambda m, a, out: out if torch.is_grad_enabled() else -out)
        found.append(recast.diff(before, fast, given, steps=1))
        wrong = [[(r.tensor, r.when) for r in report.rows if not r.ok] for report in found]
        return [*wrong, found[1].notes, str(caught.value)]

    ours, theirs = processes(2, rank_of)
    assert ours == theirs
    gradient, value, alone, notes, error = ours
    assert [name for name, _ in gradient] == ["top.0.weight"]
    assert {when.rpartition(", ")[2] for _, when in value} == {"rank 0", "rank 1"}
    assert alone == [("eval output", "eval mode without gradients, new parameters, rank 1")]
    assert notes == ["the two models start from different values of ragged.weight"]
    assert "is off by" in error and "no node is looked for on several ranks" in error


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(40, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.rows(ids))
        return out


class Averaged(nn.Module):
    """Means and sums over the batch that are of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.layer = nn.Embedding(40, 4), nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.rows(ids))
        shares = x.softmax(1)
        loss = nn.functional.cross_entropy(x, torch.where(ids % 3 > 0, ids % 3, -100))
        return loss + shares.mean(0).square().sum() + x[ids > 9].square().mean() / x.square().sum()


def test_means_over_the_batch_are_compared_as_each_ranks_own() -> None:
    model = Averaged()

    def rank_of(rank: int) -> tuple[bool, str]:
        ids = torch.arange(6) + 7 * rank
        fast = recast.optimize(copy.deepcopy(model), example=ids, sharding="row_wise")
        report = recast.diff(copy.deepcopy(model), fast, ids, training=False, steps=0)
        return report.ok, fast.report.graph_text

    for ok, graph in processes(2, rank_of):
        assert ok
        assert "mean_of_all" in graph and "sum_of_all" in graph and "counted_of_all" in graph


def test_what_it_cannot_compare_is_refused() -> None:
    def rank_of(rank: int) -> list[Any]:
        torch.manual_seed(0)
        model, ids = Normed(), torch.arange(6) + 5 * rank
        before = copy.deepcopy(model)
        fast = recast.optimize(model, example=ids, sharding="row_wise")
        said: list[Any] = [recast.diff(before, fast, ids, training=False, steps=0).ok]
        for asked in (
            {}, {"dtype": torch.float64}, {"train": lambda m, b: None}, {"steps": -1},
            {"training": False, "steps": 0, "seed": rank},
        ):  # fmt: skip
            with pytest.raises(UsageError) as caught:
                recast.diff(before, fast, ids, **asked)
            said.append(caught.value.what)
        with pytest.raises(UsageError) as caught:
            recast.diff(fast, fast, ids)
        return [*said, caught.value.what]

    ours, theirs = processes(2, rank_of)
    assert ours == theirs
    assert ours[0] is True
    for what, said in zip(
        ours[1:],
        (
            "norm computes on the batches of all ranks", "dtype of a model that is spread",
            "train of a model that is spread", "steps=-1", "differ", "first model is spread",
        ),
        strict=True,
    ):  # fmt: skip
        assert said in what
