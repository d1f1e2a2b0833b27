"""Batches whose inputs differ in their number of rows, as one user beside many items."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.errors import InputError


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user, self.item, self.kind = (nn.Embedding(50, 8) for _ in range(3))


class Factorised(Towers):
    def forward(self, user: Tensor, item: Tensor, history: Tensor) -> Any:
        e = self.user(user), self.item(item), self.kind(history[:, 0])
        squares = e[0] ** 2 + e[1] ** 2 + e[2] ** 2
        return ((e[0] + e[1] + e[2]) ** 2 - squares).sum(-1)


class Attending(Towers):
    def forward(self, user: Tensor, item: Tensor, history: Tensor) -> Any:
        rows = self.item(history)
        weights = (self.item(item).unsqueeze(1) * rows).sum(-1).softmax(1)
        return (weights.unsqueeze(-1) * rows).sum(1) + self.user(user)


class Scored(Towers):
    def forward(self, user: Tensor, item: Tensor, history: Tensor) -> Any:
        scores = torch.matmul(self.item(history), self.item(item).unsqueeze(-1)).squeeze(-1)
        return scores.sum(1) + self.user(user).sum(1)


class Listed(Towers):
    def forward(self, user: Tensor, item: Tensor, history: Tensor) -> Any:
        e = torch.stack([self.user(user), self.item(item), self.kind(history[:, 0])], 1)
        return (e.sum(1) ** 2 - (e**2).sum(1)).sum(-1)


def batch(users: int, items: int, histories: int) -> tuple[Tensor, ...]:
    ids: Callable[..., Tensor] = lambda *n: torch.randint(50, n)  # noqa: E731
    return ids(users), ids(items), ids(histories, 5)


@pytest.mark.parametrize("kind", [Factorised, Attending, Scored])
def test_one_user_beside_many_items(kind: type[Towers]) -> None:
    plain = kind()
    fast = recast.optimize(deepcopy(plain), example=batch(12, 12, 12))
    given = batch(1, 6, 1)
    with pytest.warns(recast.RecastWarning, match="no longer equally many rows of user and item"):
        result = fast(*given)
    torch.testing.assert_close(result, plain(*given))
    result.sum().backward()
    plain(*given).sum().backward()
    for ours, theirs in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_what_torch_does_not_broadcast_is_told_as_before() -> None:
    fast = recast.optimize(Factorised(), example=batch(12, 12, 12))
    with pytest.raises(InputError, match="feature 1 has shape"):
        fast(*batch(5, 6, 6))
    with pytest.raises(Exception, match="size"):
        recast.optimize(Listed(), example=batch(12, 12, 12))(*batch(1, 6, 6))


def test_bags_of_wrong_offsets_are_still_refused() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(50, 8, mode="sum")

        def forward(self, ids: Tensor, offsets: Tensor) -> Any:
            return self.bag(ids, offsets)

    fast = recast.optimize(Bags(), example=(torch.arange(9), torch.tensor([0, 3, 6])))
    with pytest.raises(InputError, match="offsets"):
        fast(torch.arange(9), torch.tensor([0, 5, 3, 6]))
