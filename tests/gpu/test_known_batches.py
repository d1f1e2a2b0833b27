"""A batch that is recognised by an earlier one gives the same as one that is taken apart anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from recast.runtime.recorded.batches import tensor_metadata
from recast.runtime.recorded.batches.batch import Batch
from recast.runtime.recorded.batches.known_batches import Batches

HERE = torch.device("cpu")


@pytest.fixture(params=["torch", "python"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With torch's own guards, if it has them, or with checks in Python."""
    if request.param == "python":
        monkeypatch.setattr(tensor_metadata, "guards_of_torch", lambda: None)
    elif tensor_metadata.guards_of_torch() is None:
        pytest.skip("this torch has no guards")
    yield request.param


def tree(size: int = 4, flag: Any = True) -> Any:
    """A batch with containers, constants and a tensor that occurs twice."""
    twice = torch.arange(size)
    ids = [torch.arange(size), twice, torch.ones(size, 2), twice]
    return ({"a": torch.rand(size, 3), "b": (ids, flag)}, torch.rand(size)), {"more": None}


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Other(Tensor):
    pass


def same(one: Batch, two: Batch) -> None:
    """Whether two batches of one tree are the same."""
    bounds = [None] * len(two.tensors)
    assert [*map(id, one.tensors)] == [*map(id, two.tensors)]
    assert one.structure == two.structure and one.parts == two.parts
    assert one.form(bounds) == two.form(bounds) and one.wants_grad() == two.wants_grad()


def test_the_next_one_is_known() -> None:
    batches = Batches(HERE)
    assert batches.of(tree()).learn([]) is not None
    first, second = tree(), tree()
    known = batches.of(first)
    assert known.known is not None
    same(known, Batch(first, HERE))
    bounds = [None] * len(known.tensors)
    assert batches.of(second).form(bounds) is known.form(bounds)
    again = batches.of(second).tree()
    assert again[0][0]["b"][0][1] is again[0][0]["b"][0][3] is second[0][0]["b"][0][1]
    assert again[1] == {"more": None} and again[0][0]["b"][1] is True


def changed() -> dict[str, Any]:
    """Batches that differ from another in one respect only."""

    def put(value: Any, at: int = 2, **options: Any) -> Any:
        made = tree(**options)
        made[0][0]["b"][0][at] = value
        return made

    found = {
        "size": tree(5),
        "constant": tree(flag=False),
        "class of a constant": tree(flag=1),
        "dtype": put(torch.ones(4, 2).double()),
        "strides": put(torch.ones(2, 4).t()),
        "negated": put(torch._neg_view(torch.ones(4, 2))),
        "device": put(torch.ones(4, 2, device="meta")),
        "layout": put(torch.ones(4, 2).to_sparse()),
        "subclass": put(torch.ones(4, 2).as_subclass(Other)),
        "gradient": put(torch.ones(4, 2, requires_grad=True)),
        "parameter": put(nn.Parameter(torch.ones(4, 2))),
        "no tensor": put(7),
        "None": put(None),
        "container": put([torch.ones(4, 2)]),
        "not twice": put(torch.arange(4), 3),
        "a class of tuples": put(Pair(torch.ones(1), torch.ones(1))),
    }
    made = tree()
    made[0][0]["b"][0][0] = made[0][0]["b"][0][1]
    found["thrice"] = made
    made = tree()
    made[0][0]["b"][0].append(torch.ones(2))
    found["one more"] = made
    made = tree()
    made[1]["other"] = torch.ones(2)
    found["another key"] = made
    parts, label = tree()[0]
    found["order of keys"] = (({"b": parts["b"], "a": parts["a"]}, label), {"more": None})
    found["a list"] = ([parts, label], {"more": None})
    return found


@pytest.mark.parametrize("what", changed())
def test_what_differs_is_taken_apart(what: str) -> None:
    batches = Batches(HERE)
    batches.of(tree()).learn([])
    other = changed()[what]
    found = batches.of(other)
    assert found.known is None
    if what not in ("layout",):
        same(found, Batch(other, HERE))
    assert batches.of(tree()).known is not None


def test_lengths_that_are_free() -> None:
    def made(n: int, m: int = 3) -> Any:
        return (torch.arange(n), torch.ones(m)), {}

    batches = Batches(HERE)
    assert batches.of(made(5)).learn([0]) is not None
    longer = batches.of(made(9))
    assert longer.known is not None
    assert longer.form([16, None]) == Batch(made(9), HERE).form([16, None])
    assert longer.form([16, None]) is batches.of(made(2)).form([16, None])
    assert longer.form([24, None]) == Batch(made(9), HERE).form([24, None])
    assert batches.of(made(5, 4)).known is None
    step = torch.arange(18)[::2]
    assert batches.of(((step, torch.ones(3)), {})).known is None


def test_settings_under_which_nothing_looks_as_it_did() -> None:
    batches = Batches(HERE)
    batches.of(tree()).learn([])
    with torch.inference_mode():
        other = tree()
        same(batches.of(other), Batch(other, HERE))
    with torch.no_grad():
        same(batches.of(other := tree()), Batch(other, HERE))


def test_batches_that_are_never_alike_are_not_learned_for_ever() -> None:
    batches = Batches(HERE)
    learned = [batches.of(tree(n)).learn([]) is not None for n in range(2, 50)]
    assert all(learned[:20]) and not any(learned[-10:])


def test_what_has_no_outline_is_not_learned() -> None:
    batches = Batches(HERE)
    for other in (
        Pair(torch.ones(2), torch.ones(2)),
        torch.ones(2),
        (),
        ([object()], torch.ones(2)),
    ):
        assert batches.of(other).learn([]) is None
    assert batches.of((torch.ones(2, requires_grad=True),)).learn([]) is None
