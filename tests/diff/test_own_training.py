"""``recast.diff(train=...)``: parameters, state and buffers after the user's own training loop."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import recast

BATCHES = [(torch.randint(9, (n, 2), generator=torch.Generator().manual_seed(n)),) for n in (6, 4)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.out = nn.EmbeddingBag(9, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.emb(ids))


def clipped(model: nn.Module, batches: list[Any], by: float = 0.5) -> Any:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=0.1)
    for batch in batches * 2:
        optimizer.zero_grad()
        model(*batch).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), by)
        optimizer.step()
        model, optimizer = copy.deepcopy((model, optimizer))
    return model, optimizer


def test_the_state_after_it_is_compared() -> None:
    plain = Net()
    report = recast.diff(plain, recast.optimize(plain, example=BATCHES), BATCHES, train=clipped)
    assert report.ok
    names = {row.tensor for row in report.rows if row.when == "after training"}
    assert {"emb.weight", "out.bias", "emb.weight [exp_avg]", "out.weight [step]"} <= names


def test_a_loop_that_goes_wrong_is_seen() -> None:
    plain = Net()
    fast = recast.optimize(plain, example=BATCHES)
    wrong = lambda m, batches: clipped(m, batches, 0.5 if m is not fast else 0.499)  # noqa: E731
    report = recast.diff(plain, fast, BATCHES, train=wrong)
    assert not report.ok
    assert {row.when for row in report.rows if not row.ok} == {"after training"}
