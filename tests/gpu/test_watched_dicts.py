"""Dicts that are watched in place of being compared: every way to write to one is noticed."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from recast.rewriter.compiled.entries import EmptyDicts, Entries
from recast.runtime import device
from recast.runtime.recorded.state.model import ModelState
from recast.runtime.recorded.state.optimizer import OptimizerState
from recast.runtime.recorded.state.same import WatchedDicts
from recast.runtime.rows.step_counts import StepCounts

Ways = dict[str, Callable[[dict[Any, Any]], object]]


@pytest.fixture(params=["extension", "torch"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "extension":
        kind: Any = getattr(device.extension(), "WatchedDicts", None)
        if kind is None:
            pytest.skip(device.why_missing() or "an extension of before")
        if not kind([]).usable:
            pytest.skip("this Python does not tell of every write")
        yield request.param
    else:
        with device.use("torch"):
            yield request.param


WRITES: Ways = {
    "another value": lambda d: d.__setitem__("a", 2),
    "a new key": lambda d: d.__setitem__("new", 1),
    "update": lambda d: d.update(b=3),
    "merge": lambda d: d.__ior__({"a": 5}),
    "setdefault": lambda d: d.setdefault("new", 4),
    "del": lambda d: d.__delitem__("a"),
    "pop": lambda d: d.pop("b"),
    "popitem": lambda d: d.popitem(),
    "clear": lambda d: d.clear(),
}
MAKES: dict[str, Callable[[], dict[Any, Any]]] = {
    "dict": lambda: {"a": 1, "b": object()},
    "OrderedDict": lambda: OrderedDict(a=1, b=object()),
    "defaultdict": lambda: defaultdict(dict, a=1, b=object()),
    "attributes": lambda: vars(_thing()),
}


class _Thing:
    def __init__(self) -> None:
        self.a, self.b = 1, object()


_things: list[_Thing] = []


def _thing() -> _Thing:
    _things.append(_Thing())
    return _things[-1]


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("kind", MAKES)
def test_every_write_is_noticed(way: str, kind: str, how: str) -> None:
    one, other = MAKES[kind](), MAKES[kind]()
    watched, both, beside = WatchedDicts([one]), WatchedDicts([other, one]), WatchedDicts([other])
    here = way == "extension"
    for each in (watched, both, beside):
        assert each.unwritten() == here, "without the extension nothing is known"
    reads = one.get("a"), [*one.items()], copy.copy(one), "b" in one
    assert reads and watched.unwritten() == here
    WRITES[how](one)
    assert not watched.unwritten() and not both.unwritten() and beside.unwritten() == here
    both.renew()
    assert both.unwritten() == here and not watched.unwritten()
    one["last"] = object()
    assert not both.unwritten()


def test_attributes_of_objects_are_noticed(way: str) -> None:
    """Python has instructions of its own for these, once they have run a few times."""
    thing, layer = _Thing(), nn.Linear(2, 2)

    def write(k: int) -> None:
        thing.a = k

    def write_module(k: int) -> None:
        layer.in_features = k

    for k in range(30):
        write(k)
        write_module(k)
    watched, of_layer = WatchedDicts([vars(thing)]), WatchedDicts([vars(layer)])
    for k in range(30):
        assert watched.unwritten() == of_layer.unwritten() == (way == "extension")
        write(k + 100)
        write_module(k + 100)
        assert not watched.unwritten() and not of_layer.unwritten()
        watched.renew()
        of_layer.renew()
    object.__setattr__(layer, "training", False)
    assert not of_layer.unwritten()


def test_a_watch_keeps_nothing_alive(way: str) -> None:
    """A model that holds the watch of its own dict is collected."""
    model = nn.Linear(2, 2)
    vars(model)["watch"] = WatchedDicts([])  # so that the next write is one to a watched dict
    vars(model)["watch"] = WatchedDicts([vars(model), vars(model), model._parameters])
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    later = [WatchedDicts([{"a": k}]) for k in range(200)]  # at addresses of before
    assert all(each.unwritten() == (way == "extension") for each in later)


def test_only_dicts_are_watched(way: str) -> None:
    if way == "extension":
        held: dict[str, int] = {}
        for k in range(20):
            with pytest.raises(TypeError):
                WatchedDicts([held, []])  # type: ignore[list-item]
            beside = WatchedDicts([{}])  # in the memory of what failed
            held["a"] = k
            assert beside.unwritten()


def test_unwatched_where_python_does_not_tell() -> None:
    """An attribute is set in the object, whose dict changes: 3.13.0 tells nobody."""
    kind: Any = getattr(device.extension(), "WatchedDicts", None)
    if kind is None:
        pytest.skip(device.why_missing() or "an extension of before")
    thing = _Thing()
    own = vars(thing)
    watched = kind([own])
    thing.a = 2
    assert own["a"] == 2 and not watched.unwritten([own])


def test_a_model_is_compared_anew_after_a_write(way: str) -> None:
    model: Any = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1))
    modules = list(model.modules())
    state = ModelState("cpu")
    before = state.of(modules)
    vars(model[0])["passing"] = 1
    del vars(model[0])["passing"]
    assert state.of(modules) is before
    for _ in range(2):  # the second is noticed as well
        dropout = model[1]
        dropout.p = 0.25
        changed = state.of(modules)
        assert changed != before
        dropout.p = 0.5
        assert state.of(modules) == before
    kept = model[0].weight
    model[0].weight = nn.Parameter(kept.detach().clone())
    assert state.of(modules) != before
    model[0].weight = kept
    assert state.of(modules) == before
    handle = model[2].register_forward_hook(lambda *_: None)
    state.of(modules)
    assert state.why is not None
    handle.remove()
    state.of(modules)
    assert state.why is None


def test_a_failed_comparison_leaves_nothing_known(way: str) -> None:
    model: Any = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    modules, asked = list(model.modules()), [0]

    def own() -> list[nn.Module]:
        asked[0] += 1
        if asked[0] == 3:
            raise ValueError("just now")
        return []

    state = ModelState("cpu", uncaptured=own)
    before = state.of(modules)
    model[0].in_features = 7
    with pytest.raises(ValueError):
        state.of(modules)
    assert state.of(modules) != before


def test_an_optimizer_is_compared_anew_after_a_write(way: str) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adagrad([weight])
    held = OptimizerState(optimizer)
    own = optimizer.state[weight]
    assert held.is_of(optimizer)
    kept = own["sum"]
    for _ in range(2):
        own["sum"] = kept.clone()
        assert not held.is_of(optimizer) and not held.is_of(optimizer)
        own["sum"] = kept
        assert held.is_of(optimizer) and held.is_of(optimizer)
    optimizer.state[weight] = dict(own)
    assert not held.is_of(optimizer)
    optimizer.state[weight] = own
    assert held.is_of(optimizer)


def test_entries_are_compared_anew_after_a_write(way: str) -> None:
    held = {"a": object(), "other": 1}
    entries, kept = Entries([(held, "a"), (held, "none")]), held["a"]
    for _ in range(2):
        assert entries.stand() and entries.stand()
        held["other"] = object()
        assert entries.stand()
        held["a"] = object()
        assert not entries.stand() and not entries.stand()
        held["a"] = kept
        assert entries.stand()
    held["none"] = None
    assert not entries.stand()
    entries.renew()
    assert entries.stand()
    held["a"] = object()
    assert not entries.stand()


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_dicts_that_are_no_longer_empty(way: str, kind: type[dict[Any, Any]]) -> None:
    """As those of hooks: filled later, emptied again, filled before the first look."""
    hooks = [kind() for _ in range(3)]
    empty = EmptyDicts(hooks)
    assert empty.are_empty() and empty.are_empty()
    for held in hooks:
        held["a"] = print
        assert not empty.are_empty() and not empty.are_empty()
        held["a"] = len
        assert not empty.are_empty()
        del held["a"]
        assert empty.are_empty() and empty.are_empty()
        held.update(b=print)
        assert not empty.are_empty()
        held.clear()
        assert empty.are_empty()
    hooks[1]["a"] = print
    assert not EmptyDicts(hooks).are_empty()


def test_step_counts_that_are_replaced(way: str) -> None:
    states: list[dict[str, Any]] = [{"step": torch.tensor(1.0)} for _ in range(3)]
    counts = StepCounts(states)
    for k in range(8):
        if k in (3, 4):
            states[1]["step"] = torch.tensor(9.0)
        if k == 6:
            states[2]["sum"] = torch.zeros(2)  # another entry
        expected = [held["step"] + 1 for held in states]
        assert counts.add() == []
        assert [held["step"] for held in states] == expected, k
