"""What a batch holds beside its features, and forward never reads, may be anything."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.errors import RecastWarning

IDS = torch.randint(9, (6, 3), generator=torch.Generator().manual_seed(0))
Read = Callable[[Any, Tensor], Any]


class Net(nn.Module):
    """Pools ``ids`` of a dict or an object; ``read`` reads more of it."""

    def __init__(self, read: Read = lambda batch, h: h) -> None:
        super().__init__()
        self.rows, self.top, self.read = nn.Embedding(9, 4), nn.Linear(4, 1), read

    def forward(self, batch: Any) -> Tensor:
        ids = batch["ids"] if isinstance(batch, dict) else batch.ids
        return self.top(self.read(batch, self.rows(ids).sum(1)))


@dataclasses.dataclass
class Batch:
    ids: Tensor
    name: str = "r0"
    at: float = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    ids: Tensor
    name: str = "r0"


def runs_graph(fast: Any, model: nn.Module, batch: Any) -> bool:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.testing.assert_close(fast(batch), model(batch))
    assert all(w.category is RecastWarning for w in told)
    return not told


def first(**more: Any) -> dict[str, Any]:
    return {"ids": IDS, "request": "r0", "at": 17, "users": ["a", "b"], "none": None, **more}


def test_any_value_of_what_is_not_read() -> None:
    model = Net()
    fast = recast.optimize(model, example=({**first()},))
    assert fast.report.captured == "whole"
    assert "request, at, users, none" in str(fast.report)
    other = first(ids=IDS[:4], request="r1", at=18.5, users=["c"] * 7, none=3)
    assert runs_graph(fast, model, other) and other["request"] == "r1"
    assert runs_graph(fast, model, {"ids": IDS, "request": None, "at": IDS, "users": 0, "none": ""})


def test_other_keys_and_orders() -> None:
    model = Net(lambda batch, h: h * batch.get("k", 1))
    fast = recast.optimize(model, example=({"ids": IDS, "request": "r0", "more": IDS},))
    for given in (
        {"more": IDS, "request": "r1", "ids": IDS[:4]},
        {"more": IDS, "ids": IDS, "another": IDS},
        {"ids": IDS, "more": IDS, 3: IDS},
    ):
        assert runs_graph(fast, model, given)
    assert not runs_graph(fast, model, {"ids": IDS})  # a tensor is an input of the graph
    assert not runs_graph(fast, model, {"ids": IDS, "more": IDS, "k": 3})  # it is asked for


def test_two_examples_with_other_constants() -> None:
    model = Net()
    fast = recast.optimize(model, example=[first(), first(ids=IDS[:4], request="r1", at=3)])
    assert fast.report.captured == "whole"
    assert runs_graph(fast, model, first(request="r2", at=4))


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda b, h: h * b["k"], "k"),
        (lambda b, h: h * 2 if b.get("k") == 1 else h, "k"),
        (lambda b, h: h * 2 if "k" in b else h, "k"),
        (lambda b, h: h * len(b), None),
        (lambda b, h: h * sum(v for v in b.values() if isinstance(v, int)), None),
        (lambda b, h: h * dict(**b)["k"], None),
        (lambda b, h: h * {**b}["k"], None),
        (lambda b, h: h * ({} | b)["k"], None),
        (lambda b, h: h * copy.copy(b)["k"], None),
        (lambda b, h: h * len([key for key in b]), None),
        (lambda b, h: h * b.copy().pop("k"), None),
        (lambda b, h: h * len("{k}".format_map(b)), "k"),
    ],
)
def test_what_is_read_is_compared(read: Read, name: str | None) -> None:
    model = Net(read)
    given = {"ids": IDS, "k": 1, "other": "a"}
    fast = recast.optimize(model, example=(given,))
    assert runs_graph(fast, model, given)
    assert not runs_graph(fast, model, {**given, "k": 3})
    assert runs_graph(fast, model, {**given, "other": "b"}) == (name is not None)


def test_what_only_one_mode_reads_is_read() -> None:
    model = Net()
    model.read = lambda b, h: h * b["k"] if model.training else h
    fast = recast.optimize(model, example=({"ids": IDS, "k": 1},))
    model.eval(), fast.eval()
    assert not runs_graph(fast, model, {"ids": IDS, "k": 2})


def test_attributes_of_objects() -> None:
    model = Net(lambda b, h: h * b.at)
    fast = recast.optimize(model, example=(Batch(IDS),))
    assert runs_graph(fast, model, Batch(IDS[:4], "r1"))
    given = Batch(IDS, "r2")
    assert runs_graph(fast, model, given) and given.name == "r2"
    assert not runs_graph(fast, model, Batch(IDS, at=2.0))
    fast = recast.optimize(Net(lambda b, h: h * vars(b)["at"]), example=(Batch(IDS),))
    assert "never reads" not in str(fast.report)


def test_frozen_objects_with_slots() -> None:
    model = Net()
    fast = recast.optimize(model, example=(Frozen(IDS),))
    assert runs_graph(fast, model, Frozen(IDS[:4], "r1"))


class Plain:
    """Reads no more; a file can hold it."""

    def __call__(self, batch: Any, h: Tensor) -> Tensor:
        return h


def test_copies_and_files() -> None:
    model = Net(Plain()).eval()
    fast = recast.optimize(model, example=(first(),))
    for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert runs_graph(again, model, first(request="r1"))


def test_a_batch_that_is_written_to() -> None:
    def write(batch: dict[str, Any], h: Tensor) -> Tensor:
        batch["hidden"] = h
        return h

    model = Net(write)
    fast = recast.optimize(model, example=({"ids": IDS, "request": "r0"},))
    given = {"ids": IDS, "request": "r0"}
    fast(given)
    assert given["hidden"].shape == (6, 4) and given["request"] == "r0"
