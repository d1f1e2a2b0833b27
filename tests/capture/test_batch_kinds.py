"""Batches of other kinds than strided tensors in containers: classes with slots, sparse and nested
tensors.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast


@dataclass(slots=True)
class Slots:
    ids: Tensor
    dense: Tensor
    kind: str = "click"


class Bare:
    __slots__ = ("dense", "ids", "kind", "unset")

    def __init__(self, ids: Tensor, dense: Tensor, kind: str = "click") -> None:
        self.ids, self.dense, self.kind = ids, dense, kind


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 4)
        self.top = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 1))

    def score(self, ids: Tensor, dense: Tensor) -> Tensor:
        out: Tensor = self.top(torch.cat([self.table(ids), dense], 1))
        return out


class OfObject(Model):
    def forward(self, batch: Any) -> Tensor:
        out = self.score(batch.ids, batch.dense)
        return out * 2 if batch.kind == "click" else out


class OfTensors(Model):
    def forward(self, ids: Tensor, given: Tensor) -> Tensor:
        dense = given.values()[:, None].expand(-1, 3) if given.is_nested else given.to_dense()
        return self.score(ids, dense)


def _tensors(rows: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows)
    return torch.randint(20, (rows,), generator=draw), torch.randn(rows, 3, generator=draw)


def _same(fast: Any, plain: nn.Module, *batch: Any) -> None:
    torch.testing.assert_close(fast(*batch), plain(*batch))


@pytest.mark.parametrize("kind", [Slots, Bare])
def test_a_class_with_slots(kind: Any) -> None:
    plain = OfObject()
    fast = recast.optimize(plain, example=kind(*_tensors(6)))
    assert fast.report.to_dict()["captured"] == "whole"
    assert "batch_ids: i64[B]" in str(fast)
    for rows in (6, 9):
        _same(fast, plain, kind(*_tensors(rows)))
    with pytest.warns(recast.RecastWarning, match="batch.kind is another str"):
        _same(fast, plain, kind(*_tensors(6), "buy"))


class Keeps(OfObject):
    def forward(self, batch: Any) -> Tensor:
        batch.kind = batch.kind.upper()
        return self.score(batch.ids, batch.dense)


@pytest.mark.parametrize("kind", [Slots, Bare])
def test_a_forward_that_writes_to_slots_stays(kind: Any) -> None:
    fast = recast.optimize(Keeps(), example=kind(*_tensors(6)))
    batch = kind(*_tensors(6))
    fast(batch)
    assert batch.kind == "CLICK"


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("sparse", [Tensor.to_sparse, Tensor.to_sparse_csr])
def test_a_sparse_input(sparse: Any) -> None:
    plain = OfTensors()

    def batch(rows: int) -> tuple[Tensor, Tensor]:
        ids, dense = _tensors(rows)
        return ids, sparse(dense)

    alone = recast.optimize(plain, example=batch(6))
    given = recast.optimize(plain, example=[batch(6), batch(9)])
    assert given.report.to_dict()["captured"] == "whole"
    for rows in (6, 7):
        _same(alone, plain, *batch(rows))
        _same(given, plain, *batch(rows))


def test_a_nested_input_is_left_to_the_plain_model() -> None:
    ids, _ = _tensors(6)
    nested = torch.nested.nested_tensor([torch.ones(1)] * 6, layout=torch.jagged)
    plain = OfTensors()
    fast = recast.optimize(plain, example=(ids, nested))
    assert "nested tensor" in str(fast.report)
    _same(fast, plain, ids, nested)


def test_an_example_without_tensors_is_told() -> None:
    class OfNumbers(Model):
        def forward(self, rows: int) -> Tensor:
            return self.score(*_tensors(rows))

    fast = recast.optimize(OfNumbers(), example=(6,))
    assert "there is no tensor in the example" in str(fast.report)


class Counted:
    """A batch that tells how many rows it has."""

    def __init__(self, ids: Tensor, dense: Tensor, of: str) -> None:
        self.ids, self.dense, self.of = ids, dense, of

    def __len__(self) -> int:
        return len(self.dense) if self.of == "rows" else self.ids.shape[0]


class OfCounted(Model):
    def forward(self, batch: Counted) -> Tensor:
        return self.score(batch.ids, batch.dense).view(len(batch), -1) / len(batch)


@pytest.mark.parametrize("of", ["rows", "shape"])
def test_the_length_of_a_batch_object(of: str) -> None:
    model = OfCounted()

    def batch(rows: int) -> Counted:
        return Counted(torch.randint(20, (rows,)), torch.randn(rows, 3), of)

    fast = recast.optimize(model, example=batch(8))
    assert fast.report.to_dict()["captured"] == "whole", fast.report.why
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no plain forward
        for rows in (5, 1, 8, 13):
            one = batch(rows)
            torch.testing.assert_close(fast(one), model(one))
