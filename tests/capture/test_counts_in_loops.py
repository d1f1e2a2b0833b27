"""``int(index[k])`` in a loop: one index may be the same in both examples, and the next one not."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import recast


class Delays(nn.Module):
    """Sums of its rows, moved by the most likely delays, as FEARec's autocorrelation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        # rows of 2 numbers, since a delay may be 2 too
        values = self.linear(x).unflatten(1, (3, 2)).transpose(1, 2)
        index = torch.topk(values.mean((0, 1)), 2)[1]
        total = torch.zeros_like(values)
        for k in range(2):
            total = total + torch.roll(values, -int(index[k]), -1) * (k + 1)
        return total.reshape(*total.size()[:-2], 6)


class Delayed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.delays = nn.Embedding(50, 6), Delays()
        self.last = nn.Linear(6, 1)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.last(self.delays(self.table(ids)))
        return out


def _orders(model: Delayed, batches: list[Tensor]) -> list[list[int]]:
    """The delays of each batch."""
    found = []
    for ids in batches:
        values = model.delays.linear(model.table(ids)).view(-1, 3, 2)
        found.append(values.mean((0, 2)).topk(2)[1].tolist())
    return found


def test_the_moves_of_a_loop_are_numbers_of_the_graph_although_the_first_is_shared() -> None:
    model = Delayed()
    ids = torch.arange(50)
    pool = [(ids * step + shift) % 50 for step in (1, 3, 7) for shift in range(0, 50, 5)]
    parts = [order[:rows] for rows in (1, 2, 3, 5) for order in pool]
    orders = _orders(model, parts)
    pairs = [
        (a, b)
        for a, one in zip(parts, orders, strict=True)
        for b, two in zip(parts, orders, strict=True)
        if len(a) > len(b) > 1 and one[0] == two[0] and one[1] != two[1]
    ]
    first, second = pairs[0]
    plain, fast = copy.deepcopy(model), recast.optimize(model, example=[first, second])
    report = fast.report.to_dict()
    assert report["captured"] == "whole", report["why"]
    assert not any("asked again" in note for note in report["notes"]), report["notes"]
    others = [p for p, order in zip(parts, orders, strict=True) if order[0] != orders[0][0]]
    for batch in (first, second, *others[:4]):  # without a warning: no plain forward runs
        torch.testing.assert_close(fast(batch), plain(batch))
