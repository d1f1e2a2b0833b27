"""Sizes of intermediate values are checked without computing these values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from guarded import Net, both, check, ids
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import recast
from recast.rewriter.capture import guards


class ScoresBySize(Net):
    """Reads only the number of rows of a product of lookups."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(x)
        scores = (rows @ self.a(rows[:, 0]).unsqueeze(-1)).sum(-1).softmax(-1)
        bias = x.float().sum(1)
        if scores.shape[0] != bias.shape[0]:
            scores = scores.flatten()
        return scores * bias[:, None]


def test_the_shape_of_a_product_is_asked_without_its_lookups() -> None:
    plain, fast, it = both(ScoresBySize(), ids(8))
    assert it.kind == "whole"
    (case,) = it.traced.values()
    assert case.asks is not None
    assert not [n for n in case.asks.nodes if n.op == "call_module"]
    for rows in (8, 5, 1):
        check(plain, fast, ids(rows))


class Splines(nn.Module):
    """Asserts the size of what it computed, by sums and comparisons, as layers of splines do."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.register_buffer("knots", torch.linspace(-1, 1, 6).expand(wide, -1).contiguous())
        self.weight = nn.Parameter(torch.randn(4, wide * 4))

    def forward(self, x: Tensor) -> Tensor:
        low, high = self.knots[:, :-1], self.knots[:, 1:]
        inside = ((x.unsqueeze(-1) >= low) & (x.unsqueeze(-1) < high)).to(x.dtype)
        part = (x.unsqueeze(-1) - low[:, :-1]) / (high - low)[:, :-1]
        bases = part * inside[:, :, :-1] + (1 - part) * inside[:, :, 1:]
        assert bases.size() == (x.size(0), x.size(1), 4)
        return nn.functional.linear(bases.contiguous().view(x.size(0), -1), self.weight)


class Calls(TorchDispatchMode):
    """Counts the calls that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.of = dict.fromkeys(("embedding", "tanh", "div", "mm"), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in self.of and args[0].device.type != "meta":
            self.of[name] += 1
        return func(*args, **(kwargs or {}))


class Stacked(Net):
    """Two of them; the second asserts on the result of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Splines(12), Splines(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(torch.tanh(self.table(x).flatten(1)))))


def test_sizes_are_asked_without_computing_what_has_them() -> None:
    plain, fast, it = both(Stacked(), ids(8))
    assert it.kind == "whole" and not it.parts
    for rows in (5, 9):
        check(plain, fast, ids(rows))
    count = Calls()
    with count, torch.no_grad():
        fast(ids(5))
    assert count.of == {"embedding": 1, "tanh": 2, "div": 2, "mm": 2}


TOWERS: dict[str, Any] = {
    "normalised": lambda u: F.normalize(u, dim=1),
    "divided by its norm": lambda u: u / u.norm(dim=1, keepdim=True),
    "layer norm": lambda u: F.layer_norm(u, (4,)),
    "the largest": lambda u: u.topk(3, dim=1).values,
    "sorted": lambda u: torch.sort(u, 1)[0],
    "bounded": lambda u: u.clamp(-1, 1).cumsum(1),
    "chosen": lambda u: torch.where(u > 0, u, torch.zeros_like(u)),
    "products of all": lambda u: u @ u.T,
    "of columns": lambda u: u.t().max(dim=0).values,
    "repeated": lambda u: u.repeat(1, 2).nan_to_num(),
    "in parts": lambda u: torch.stack(u.chunk(2, 1), 1),
}


@pytest.mark.parametrize("form", TOWERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tower_whose_size_is_checked_runs_once(form: str, dtype: torch.dtype) -> None:
    class Tower(Net):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            u = TOWERS[form](torch.tanh(self.a(self.table(x).sum(1))))
            if u.shape[0] != w.shape[0] or len(u) == 3:
                raise ValueError("a weight for each row")
            return u * w.reshape(-1, *[1] * (u.dim() - 1))

    weights = lambda rows: torch.rand(rows, dtype=dtype)  # noqa: E731
    plain, fast, it = both(Tower(), ids(8), torch.rand(8))
    assert it.kind == "whole"
    plain, fast = plain.to(dtype), fast.to(dtype)
    for rows in (8, 5, 4):
        check(plain, fast, ids(rows), weights(rows))
    count = Calls()
    with count, torch.no_grad():
        fast(ids(5), weights(5))
    assert count.of["embedding"] == count.of["tanh"] == 1
    with pytest.raises(ValueError, match="a weight for each row"), pytest.warns():
        fast(ids(5), weights(6))


def test_a_size_that_a_tensor_says_is_computed() -> None:
    class Cut(Net):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            rows = self.a(self.table(x)).narrow(1, 0, lengths.max())
            return rows.sum(1) * (2 if rows.shape[1] > 2 else 1)

    plain, fast, it = both(Cut(), ids(8), torch.tensor([1, 3] * 4))
    assert it.kind == "whole"
    check(plain, fast, ids(6), torch.tensor([3, 2] * 3))
    check(plain, fast, ids(6), torch.tensor([2, 1] * 3), warns="another way")


class Drops(nn.Module):
    """A branch on a size after a dropout, whose mask is not drawn for the check."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.out = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        weights = F.dropout(torch.softmax(self.emb(ids).sum(-1), -1), 0.2, self.training)
        found = torch.bmm(weights.unsqueeze(1), self.emb(ids)).squeeze(1)
        if found.shape[0] > 2:
            found = found - found.mean(0)
        answer: Tensor = self.out(found)
        return answer


def test_a_size_behind_a_dropout() -> None:
    model, ids = Drops().eval(), torch.randint(9, (5, 3))
    fast = recast.optimize(model, example=(ids,))
    assert fast.report.captured == "whole"
    for rows in (5, 4):
        torch.testing.assert_close(fast(ids[:rows]), model(ids[:rows]))


def test_how_many_numbers_there_are_behind_a_dropout() -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = F.dropout(self.a(self.table(x).sum(1)), 0.2, self.training)
            return y * 2 if y.numel() else x.float()

    plain, fast, it = both(Model().eval(), ids(8))
    assert it.kind == "whole"
    for rows in (8, 5):
        check(plain, fast, ids(rows))


class Positions(nn.Module):
    """Adds a row for each position, for sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(9, 4), nn.Embedding(12, 4)

    def forward(self, ids: Tensor) -> Tensor:
        answer: Tensor = (self.items(ids) + self.places(torch.arange(ids.shape[1]))).sum(1)
        return answer


def test_a_length_that_varies_is_told_once_and_two_batches_cover_it() -> None:
    model = Positions().eval()
    draw = torch.Generator().manual_seed(0)
    sizes = [(5, 3), (5, 6), (7, 8), (2, 12), (4, 1)]
    batches = [torch.randint(9, size, generator=draw) for size in sizes]
    fast = recast.optimize(model, example=batches[0])
    with pytest.warns(recast.RecastWarning) as caught:
        for ids in batches:
            torch.testing.assert_close(fast(ids), model(ids))
    (told,) = caught
    assert "ids had 3 in dimension 1 in the example" in str(told.message)
    assert "example=[a, b]" in str(told.message)
    fast = recast.optimize(model, example=[batches[0], batches[2]])
    for ids in batches:  # warnings are errors
        torch.testing.assert_close(fast(ids), model(ids))


class Heads(nn.Module):
    """Merges heads by as many pieces as there are: a size of what an attention gave."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.key = nn.Embedding(10, 8, padding_idx=0), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(x)
        q, k = (torch.cat(torch.split(y, 4, dim=2)) for y in (rows, self.key(rows)))
        later = ~torch.tril(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool))
        scores = torch.matmul(q, torch.transpose(k, 1, 2)).masked_fill(later, -1e9)
        return torch.cat(torch.split(torch.softmax(scores, -1) @ q, rows.shape[0]), dim=2)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What shapes were asked of, on the meta device."""
    found: list[Any] = []
    real = guards.by_meta

    def by_meta(target: Any, args: Any, kwargs: Any) -> Any:
        found.append(target)
        return real(target, args, kwargs)

    monkeypatch.setattr(guards, "by_meta", by_meta)
    return found


def test_sizes_that_were_asked_are_not_asked_again(asked: list[Any]) -> None:
    plain, fast, it = both(Heads(), ids(8))
    assert it.kind == "whole"
    for rows in (8, 5):
        asked.clear()
        check(plain, fast, ids(rows))
        assert asked
        asked.clear()
        for seed in range(3):
            check(plain, fast, ids(rows, seed=seed))
        assert not asked


class Both(nn.Module):
    """Asks how many pieces there are, and also about values."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = Heads()

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        merged: Tensor = self.heads(x)
        return merged.relu() if bool((weights > 1).any()) else merged


def test_values_are_asked_again_in_a_batch_of_the_same_sizes() -> None:
    low, high = torch.full((8, 1, 1), 0.5), torch.full((8, 1, 1), 2.0)
    plain, fast, _ = both(Both(), ids(8), low)
    check(plain, fast, ids(8), low)
    check(plain, fast, ids(8), high, warns="another way")
    check(plain, fast, ids(8, seed=1), low)


class ByWeight(Net):
    """Asks about a parameter, which training changes."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.a(self.table(x).sum(1))
        return rows.relu() if float(self.a.bias.detach().sum()) > 0 else rows


def test_values_of_parameters_are_asked_again() -> None:
    model = ByWeight()
    model.a.bias.data.fill_(1.0)
    plain, fast, _ = both(model, ids(8))
    check(plain, fast, ids(8))
    for m in (plain, fast):
        m.a.bias.data.fill_(-1.0)
    check(plain, fast, ids(8), warns="another way")


def test_more_sizes_than_are_kept() -> None:
    plain, fast, _ = both(Heads(), ids(8))
    for rows in (*range(1, 80), 3, 1):
        check(plain, fast, ids(rows))


class After(Net):
    """Asks how many rows there are behind an operation."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        y = self.op(self.table(x), x)
        return self.a(self.table(x)).sum(1) * (2 if y.shape[0] == x.shape[0] else 1)


@pytest.mark.parametrize(
    "op",
    [
        lambda rows, x: ~(x == 0),
        lambda rows, x: (x % 3 // 2) ^ 1,
        lambda rows, x: abs(rows),
        lambda rows, x: F.glu(rows).sign(),
        lambda rows, x: x.float().view_as(x).isnan(),
        lambda rows, x: torch.hstack([rows, rows]).unflatten(1, (2, -1)),
        lambda rows, x: F.pairwise_distance(rows, rows),
        lambda rows, x: torch.transpose(rows, 1, 2).unfold(2, 2, 1),
    ],
)
def test_a_size_behind_any_operation_is_decided_by_sizes(op: Any) -> None:
    plain, fast, it = both(After(op), ids(8))
    assert it.kind == "whole"
    assert all(t.by_size for t in it.traced.values())
    for rows in (8, 5, 5, 1):
        check(plain, fast, ids(rows))
