"""Arrays of numpy: as arguments of forward, and made in it with the sizes of the batch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import recast

ROWS = (6, 3, 9)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items = nn.Embedding(50, 8, padding_idx=0)
        self.positions = nn.Embedding(6, 8, padding_idx=0)
        self.top = nn.Linear(8, 1)


class Tiled(Model):
    """As SASRec counts its positions."""

    def forward(self, items: Any) -> Tensor:
        h = self.items(torch.LongTensor(items))
        places = np.tile(np.arange(1, items.shape[1] + 1), [items.shape[0], 1])
        places *= items != 0
        return self.top(h + self.positions(torch.LongTensor(places)))


class TiledForTensors(Model):
    def forward(self, items: Tensor) -> Tensor:
        places = np.tile(np.array(range(items.shape[1])), [items.shape[0], 1])
        return self.top(self.items(items) + self.positions(torch.from_numpy(places)))


class Zeros(Model):
    def forward(self, items: Any) -> Tensor:
        empty = np.zeros((items.shape[0], 2), dtype=np.int64)
        longer = np.concatenate((items, empty, np.full((len(items), 1), 7)), axis=1)
        return self.top(self.items(torch.tensor(longer))).sum(1)


class Masked(Model):
    def forward(self, items: Any, weights: Any) -> Tensor:
        lengths = (items != 0).sum(1)
        mask = np.arange(items.shape[1])[None, :] < lengths[:, None]
        weighed = np.where(mask, weights, np.repeat(weights[:, :1], 5, axis=1))
        rows = self.items(torch.tensor(items, dtype=torch.long))
        return self.top(
            rows * torch.FloatTensor(weighed).unsqueeze(-1) * torch.from_numpy(mask)[..., None]
        )


class Rounded(Model):
    def forward(self, items: Any) -> Tensor:
        few, more = int(np.ceil(items.shape[0] / 4)), int(np.floor(items.shape[0] / 2))
        half = np.floor(np.zeros((items.shape[0], 1)) + 2.5)
        rows = self.items(torch.from_numpy(items))[: few + more]
        return self.top(rows * torch.FloatTensor(half)[: few + more, :, None])


class Converted(Model):
    def forward(self, items: Any) -> Tensor:
        wide = np.expand_dims(items.astype(np.int64), 1)
        kept = np.stack([wide[:, 0], items.copy()], axis=1)
        twice = np.array([items, np.asarray(items)], dtype=np.int64)
        return self.top(
            self.items(torch.as_tensor(kept)).sum(1) + self.items(torch.tensor(twice[1]))
        )


class Written(Model):
    """``torch.LongTensor`` of an array shares its memory; ``torch.tensor`` does not."""

    def forward(self, items: Any) -> Tensor:
        apart, shared = torch.tensor(items), torch.LongTensor(items)
        apart[apart == 2] = 5
        shared[shared == 1] = 3
        items[:, 0] = 4
        return self.top(self.items(apart) + self.items(shared))


def ints(rows: int, dtype: Any = np.int64) -> Any:
    return np.random.default_rng(rows).integers(0, 6, (rows, 5)).astype(dtype)


def floats(rows: int) -> Any:
    return np.random.default_rng(rows).random((rows, 5), dtype=np.float32)


def backwards(rows: int) -> tuple[Any, ...]:
    return (ints(rows)[::-1],)


def frozen(rows: int) -> tuple[Any, ...]:
    items = ints(rows)
    items.flags.writeable = False
    return (items,)


CASES = [
    (Tiled, lambda rows: (ints(rows),)),
    (TiledForTensors, lambda rows: (torch.from_numpy(ints(rows)),)),
    (Zeros, lambda rows: (ints(rows),)),
    (Masked, lambda rows: (ints(rows), floats(rows))),
    (Masked, lambda rows: (ints(rows, np.int32), floats(rows))),
    (Rounded, lambda rows: (ints(rows),)),
    (Converted, lambda rows: (ints(rows),)),
    (Converted, backwards),
    (Converted, frozen),
    (Written, lambda rows: (ints(rows),)),
]


@pytest.mark.parametrize(("kind", "batch"), CASES, ids=lambda v: getattr(v, "__name__", ""))
def test_arrays_are_captured(kind: type[Model], batch: Any) -> None:
    plain = kind()
    fast = recast.optimize(plain, example=batch(6))
    assert fast.report.to_dict()["captured"] == "whole", str(fast.report)
    for rows in ROWS:
        ours, theirs = copy.deepcopy(batch(rows)), copy.deepcopy(batch(rows))
        torch.testing.assert_close(fast(*ours), plain(*theirs))
        for a, b in zip(ours, theirs, strict=True):  # what forward wrote to them
            np.testing.assert_array_equal(a, b)
    assert recast.diff(plain, fast, batch(9)).ok


def test_training_by_arrays() -> None:
    plain = Tiled()
    alone = copy.deepcopy(plain)
    opt, usual = (torch.optim.Adam(m.parameters(), lr=0.05) for m in (plain, alone))
    fast, opt = recast.optimize(plain, opt, example=(ints(6),))
    for rows in (6, 4, 6):
        for model, stepped in ((fast, opt), (alone, usual)):
            stepped.zero_grad()
            model(ints(rows)).square().sum().backward()
            stepped.step()
    for ours, theirs in zip(fast.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_another_length_runs_the_plain_forward() -> None:
    plain = Tiled()
    fast = recast.optimize(plain, example=(ints(6),))
    with pytest.warns(recast.RecastWarning, match="items had 5 in dimension 1"):
        torch.testing.assert_close(fast(ints(6)[:, :4]), plain(ints(6)[:, :4]))


def test_an_array_beside_tensors_may_change() -> None:
    class Beside(Model):
        def forward(self, items: Tensor, weights: Any) -> Tensor:
            return self.top(self.items(items) * torch.from_numpy(weights)[..., None])

    plain = Beside()
    fast = recast.optimize(plain, example=(torch.from_numpy(ints(6)), floats(6)))
    for rows in ROWS:
        batch = torch.from_numpy(ints(rows)), floats(rows) + 1
        torch.testing.assert_close(fast(*batch), plain(*batch))


def test_an_array_that_cannot_be_followed_is_a_constant_beside_tensors() -> None:
    class Fixed(Model):
        def forward(self, items: Tensor, order: Any) -> Tensor:
            return self.top(self.items(items[:, np.argsort(order).tolist()]))

    plain = Fixed()
    order = np.array([3, 1, 0, 2, 4])
    fast = recast.optimize(plain, example=(torch.from_numpy(ints(6)), order))
    assert fast.report.to_dict()["captured"] == "whole"
    items = torch.from_numpy(ints(9))
    torch.testing.assert_close(fast(items, order.copy()), plain(items, order))
    with pytest.warns(recast.RecastWarning, match="order is another ndarray"):
        torch.testing.assert_close(fast(items, order[::-1].copy()), plain(items, order[::-1]))


def test_what_cannot_be_followed_is_told_by_the_users_line() -> None:
    class Sorted(Model):
        def forward(self, items: Any) -> Tensor:
            return self.top(self.items(torch.tensor(np.sort(items, axis=1))))  # this line

    plain = Sorted()
    fast = recast.optimize(plain, example=(ints(6),))
    found = fast.report.to_dict()
    assert found["captured"] == "partial"
    assert "leaves torch for numpy" in str(fast.report)
    line = Sorted.forward.__code__.co_firstlineno + 1
    assert f"test_arrays.py:{line}" in str(fast.report)
    torch.testing.assert_close(fast(ints(9)), plain(ints(9)))


def test_the_diff_sees_which_arrays_are_written() -> None:
    class Left(Written):
        def forward(self, items: Any) -> Tensor:
            return super().forward(items.copy())

    found = recast.diff(Written(), Left(), (ints(9),), steps=0)
    assert not found.ok
    assert [row.tensor for row in found.rows if not row.ok] == [
        "eval output, input[0]", "train output, input[0]"
    ]  # fmt: skip
    assert "forward does not write it as the plain model does" in str(found)
