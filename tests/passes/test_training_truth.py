"""Effects of training that no rewrite may change: one model for each, with all passes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from passkit import calls, fired, optimized, same
from torch import Tensor, nn
from torch.nn import functional as F

import recast

ROWS, DIM = 9, 4


def batch(rows: int, seed: int) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randint(0, ROWS, (rows, 3), generator=g),)


BATCHES = [batch(6, 0), batch(11, 1)]


class SharedDropout(nn.Module):
    """One Dropout for three branches and for what lies between them; its p is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM)
        self.branches = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.dropout = nn.Dropout(0.4)
        self.top = nn.Linear(3 * DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.table(ids[:, 0]))
        hs = [self.dropout(torch.relu(branch(x))) for branch in self.branches]
        return self.top(self.dropout(torch.cat(hs, 1)))


class ListedGates(nn.Module):
    """The gates are kept in a Python list: they are no parameters, so they are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM)
        self.experts = nn.Parameter(torch.randn(DIM, 3, DIM))
        self.gates = [nn.Parameter(torch.randn(DIM, 3).double()) for _ in range(2)]

    def forward(self, ids: Tensor) -> list[Tensor]:
        x = self.table(ids[:, 0])
        hs = torch.einsum("bi,ied->bed", x, self.experts)
        weights = [(x @ gate).softmax(1) for gate in self.gates]
        return [torch.einsum("be,bed->bd", w, hs) for w in weights]


class RepeatedTable(nn.Module):
    """One table for single ids, for a pooled sequence and for a product with all of its rows."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM, padding_idx=0, sparse=sparse)
        self.top = nn.Linear(3 * DIM, 1)
        nn.init.normal_(self.table.weight)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids)
        pooled = (rows * (ids != 0).unsqueeze(2)).sum(1)
        first, last = self.table(ids[:, 0]), self.table(ids[:, -1])
        return self.top(torch.cat([pooled, first, last * first], 1))


class Losses(nn.Module):
    """Takes the labels, returns its loss and an auxiliary one in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM)
        self.norm, self.top = nn.BatchNorm1d(DIM), nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> dict[str, Any]:
        x = self.norm(self.table(ids[:, 0]))
        label = (ids[:, 1:2] % 2).to(x.dtype)
        logit = self.top(F.dropout(torch.relu(x), 0.3, self.training))
        loss = F.binary_cross_entropy_with_logits(logit, label)
        return {"loss": loss, "auxiliary": [x.pow(2).mean()], "score": torch.sigmoid(logit)}


class Noisy(nn.Module):
    """Draws numbers of its own between dropouts, in train and in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM)
        self.one = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Dropout(0.3))
        self.two = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Dropout(0.3), nn.Linear(DIM, 1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids[:, 0])
        h = self.one(x)
        noise = torch.randn(h.shape[0], DIM, dtype=h.dtype)
        kept = torch.rand_like(x) < 0.8
        return self.two(x * kept) + self.one(h + 0.1 * noise).sum(1, keepdim=True)


class FixedDice(nn.Module):
    """An alpha that is a plain tensor: it is used and never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(ROWS, DIM), nn.BatchNorm1d(DIM)
        self.alpha = torch.full((DIM,), 0.25, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids[:, 0])
        p = torch.sigmoid(self.norm(x))
        return self.alpha * (1 - p) * x + p * x


HABITS = [SharedDropout, ListedGates, RepeatedTable, Losses, Noisy, FixedDice]


@pytest.mark.parametrize("make", HABITS)
def test_numbers_gradients_buffers_and_steps(make: type[nn.Module]) -> None:
    torch.manual_seed(11)
    same(make(), BATCHES)


def test_parameters_in_a_list_get_their_gradients_and_stay_where_they_are() -> None:
    torch.manual_seed(11)
    model = ListedGates().double()
    plain = copy.deepcopy(model)
    fast = optimized(model, BATCHES)
    assert fired(fast)["merge-gated-sums"] == 1
    (ids,) = BATCHES[0]
    for m in (fast, plain):
        sum((o * k).sum() for k, o in enumerate(m(ids), 1)).backward()
    for ours, theirs in zip(model.gates, plain.gates, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert [n for n, _ in fast.named_parameters()] == [n for n, _ in plain.named_parameters()]


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam]
)
def test_a_sparse_table_read_three_times(optimizer: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(11)
    model = RepeatedTable(sparse=True).double()
    plain = copy.deepcopy(model)
    fast = optimized(model, BATCHES)
    for m in (fast, plain):
        steps = optimizer([m.get_parameter("table.weight")], lr=0.1)
        for _ in range(3):
            steps.zero_grad()
            m(*BATCHES[0]).pow(2).sum().backward()
            steps.step()
    ours, theirs = fast.get_parameter("table.weight"), plain.table.weight
    torch.testing.assert_close(ours.detach(), theirs.detach())


def test_the_padding_row_stays_what_it_was() -> None:
    torch.manual_seed(11)
    model = RepeatedTable()
    before = model.table.weight.detach()[0].clone()
    fast, steps = recast.optimize(
        model, torch.optim.Adagrad(model.parameters(), lr=0.1), example=BATCHES
    )
    for _ in range(2):
        steps.zero_grad()
        fast(*BATCHES[0]).pow(2).sum().backward()
        steps.step()
    assert torch.equal(fast.get_parameter("table.weight").detach()[0], before)
    assert len(calls(fast, "embedding_bags")[0].args[0]) == 1


class Tasks(nn.Module):
    """Own and shared experts, a tower per task, and a layer whose result is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 4 * DIM)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4 * DIM, DIM), nn.ReLU(), nn.Dropout(0.2)) for _ in range(4)
        )
        self.gates = nn.ModuleList(nn.Linear(4 * DIM, 2) for _ in range(2))

    def forward(self, ids: Tensor) -> list[Tensor]:
        x = self.table(ids[:, 0]).repeat(100, 1)
        own, other, shared, _forgotten = (expert(x) for expert in self.experts)
        outs = []
        for gate, first in zip(self.gates, (own, other), strict=True):
            weights = gate(x).softmax(1).unsqueeze(1)
            outs.append(torch.bmm(weights, torch.stack([first, shared], 1)).squeeze(1))
        return outs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_a_loss_does_not_reach_gets_no_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(11)
    model = Tasks().to(dtype)
    plain = copy.deepcopy(model)
    fast = optimized(model, BATCHES)
    assert fired(fast)["join-linears"] == fired(fast)["merge-gated-sums"] == 1
    for m in (fast, plain):
        m.eval()
        m(*BATCHES[0])[0].pow(2).sum().backward()
    for (name, ours), (_, theirs) in zip(
        fast.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert (ours.grad is None) == (theirs.grad is None), (name, fast.training)
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad + 0, theirs.grad, rtol=1e-4, atol=1e-4)
