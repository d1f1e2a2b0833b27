"""A configuration that stays is not compared anew at each call, and every change of it is seen."""

from __future__ import annotations

import array
import enum
import functools
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from guarded import Net, both, check, ids
from torch import Tensor

from recast.rewriter.compiled.snapshots import Settled


class Base:
    shared = 2.0

    def scale(self) -> float:
        return self.factor * self.shared  # type: ignore[attr-defined, no-any-return]


class Part(Base):
    def __init__(self, factor: float = 3.0) -> None:
        self.factor = factor
        self.sizes = [1.0, 2.0]


class Slotted:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 3.0


class Kind(enum.Enum):
    ONE = "one"
    THREE = "three"


Column = namedtuple("Column", ["name", "factor"])  # noqa: PYI024


def helper(x: float, by: float = 2.0, *, plus: float = 1.0) -> float:
    return x * by + plus


def other(x: float, by: float = 5.0, *, plus: float = 4.0) -> float:
    return x * by * 2 + plus


def _replace_bases(parts: list[Part]) -> None:
    kind = type(parts[0])
    kind.__bases__ = (type("Above", (), {"shared": 9.0, "scale": Base.scale}),)


def _own(cls: type) -> Any:
    """An object of a class of its own, which a test may change."""
    return type(cls.__name__, (cls,), {})()


# a configuration, what a model reads of it, and a change of it
Case = tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], Any]]
CASES: dict[str, Case] = {
    "an entry of a list": (lambda: [1.0, 2.0], lambda c: c[1], lambda c: c.__setitem__(1, 5.0)),
    "a longer list": (lambda: [1.0, 2.0], lambda c: sum(c), lambda c: c.append(5.0)),
    "an entry of a dict": (lambda: {"a": 2.0}, lambda c: c["a"], lambda c: c.update(a=5.0)),
    "the order of a dict": (
        lambda: OrderedDict(a=2.0, b=3.0), lambda c: next(iter(c.values())),
        lambda c: c.move_to_end("a"),
    ),
    "a list in a tuple in a dict": (
        lambda: {"a": ([2.0],)}, lambda c: c["a"][0][0], lambda c: c["a"][0].__setitem__(0, 5.0)
    ),
    "a set": (lambda: {1.0, 2.0}, lambda c: sum(c), lambda c: c.add(5.0)),
    "an array": (
        lambda: array.array("d", [2.0]), lambda c: c[0], lambda c: c.__setitem__(0, 5.0)
    ),
    "an array of numpy": (
        lambda: [np.array([2.0])], lambda c: float(c[0][0]), lambda c: c[0].__setitem__(0, 5.0)
    ),
    "an attribute": (
        lambda: [Part()], lambda c: c[0].factor, lambda c: setattr(c[0], "factor", 5.0)
    ),
    "a list of an object": (
        lambda: [Part()], lambda c: c[0].sizes[0], lambda c: c[0].sizes.__setitem__(0, 5.0)
    ),
    "an attribute of its class": (
        lambda: [_own(Part)], lambda c: c[0].scale(), lambda c: setattr(type(c[0]), "shared", 5.0)
    ),
    "one that hides that of the class": (
        lambda: [Part()], lambda c: c[0].scale(), lambda c: setattr(c[0], "shared", 5.0)
    ),
    "a method of its class": (
        lambda: [_own(Part)], lambda c: c[0].scale(),
        lambda c: setattr(type(c[0]), "scale", lambda self: 7.0),
    ),
    "the classes above": (lambda: [_own(Part)], lambda c: c[0].scale(), _replace_bases),
    "its class": (
        lambda: [Part()], lambda c: c[0].scale(),
        lambda c: setattr(c[0], "__class__", type("Part", (Part,), {"shared": 9.0})),
    ),
    "all attributes": (
        lambda: [Part()], lambda c: c[0].factor,
        lambda c: setattr(c[0], "__dict__", {**vars(c[0]), "factor": 5.0}),
    ),
    "an attribute that was asked for": (
        lambda: [Part()], lambda c: getattr(c[0], "more", 2.0), lambda c: setattr(c[0], "more", 5.0)
    ),
    "a slot": (
        lambda: [Slotted()], lambda c: c[0].factor, lambda c: setattr(c[0], "factor", 5.0)
    ),
    "a named tuple": (
        lambda: [Column("a", 2.0)], lambda c: c[0].factor,
        lambda c: c.__setitem__(0, Column("a", 5.0)),
    ),
    "an entry of an object that is a dict": (
        lambda: [type("Config", (dict,), {})(a=2.0)], lambda c: c[0]["a"],
        lambda c: c[0].update(a=5.0),
    ),
    "an argument of a partial": (
        lambda: [functools.partial(helper, 2.0)], lambda c: c[0](),
        lambda c: c[0].__setstate__((helper, (5.0,), {}, {})),
    ),
    "a function": (lambda: [helper], lambda c: c[0](2.0), lambda c: c.__setitem__(0, other)),
    "an enum": (
        lambda: [Kind.ONE], lambda c: len(c[0].value), lambda c: c.__setitem__(0, Kind.THREE)
    ),
    "a bound method": (
        lambda: [Part().scale], lambda c: c[0](),
        lambda c: setattr(c[0].__self__, "factor", 5.0),
    ),
}  # fmt: skip


class Model(Net):
    def __init__(self, config: Any, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.config = config
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.table(x).sum(1)) * self.read(self.config)


def _settled(fast: Any) -> Settled:
    state = fast._runner.assumptions.state
    assert isinstance(state, Settled)
    return state


@pytest.mark.parametrize("case", CASES)
def test_a_change_after_some_calls_is_seen(case: str) -> None:
    make, read, change = CASES[case]
    model = Model(make(), read)
    _, fast, it = both(model, ids(8))
    assert it.kind == "whole", it.why
    for _ in range(3):
        check(model, fast, ids(5))
    known = _settled(fast)._known
    assert known is not None and known.stands()
    before = fast(ids(5))
    for config in (fast.config, model.config):  # containers of the result are its own
        change(config)
    assert not known.stands()
    with pytest.warns(UserWarning, match="runs its plain forward"):
        after = fast(ids(5))
    torch.testing.assert_close(after, model(ids(5)))
    assert not torch.equal(before, after)


@pytest.mark.parametrize("what", ["__code__", "__defaults__", "__kwdefaults__", "entry"])
def test_another_code_or_default_of_a_function_is_seen(what: str) -> None:
    def own(x: float, by: float = 2.0, *, plus: float = 1.0) -> float:
        return x * by + plus

    model = Model([own], lambda c: c[0](2.0))
    _, fast, _ = both(model, ids(8))
    for _ in range(3):
        check(model, fast, ids(5))
    assert _settled(fast)._known is not None
    if what == "entry":
        assert own.__kwdefaults__ is not None
        own.__kwdefaults__["plus"] = 6.0
    else:
        setattr(own, what, getattr(other, what))
    check(model, fast, ids(5), warns="runs its plain forward")


def test_what_stays_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from recast.rewriter.compiled import value_checks

    model = Model([Part() for _ in range(20)], lambda c: sum(one.scale() for one in c))
    _, fast, _ = both(model, ids(8))
    for _ in range(3):
        check(model, fast, ids(5))
    asked: list[object] = []
    for kind in (value_checks.Fields, value_checks.Entries, value_checks.Every):
        monkeypatch.setattr(kind, "same", lambda self, now: bool(asked.append(self)) or True)
    check(model, fast, ids(5))
    assert not asked
    model.config[3].factor = float(str(3.0))  # another object, and equal
    check(model, fast, ids(5))
    assert asked


def test_an_attribute_of_a_module_that_was_asked_for_is_seen() -> None:
    class Asks(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a(self.table(x).sum(1))
            return y * 2 if hasattr(self.a, "twice") else y

    model = Asks()
    _, fast, it = both(model, ids(8))
    assert it.kind == "whole"
    for _ in range(3):
        check(model, fast, ids(5))
    known = _settled(fast)._known
    assert known is not None and known.stands()
    for one in (model, fast):
        one.a.register_buffer("twice", torch.ones(1))
    assert not known.stands()
    check(model, fast, ids(5), warns="runs its plain forward")


@pytest.mark.usefixtures("known_calls")
def test_what_changes_at_each_call_is_not_noted_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from recast.rewriter.compiled import snapshots

    taken: list[object] = []
    plain = snapshots.Snapshot
    monkeypatch.setattr(snapshots, "Snapshot", lambda checks: taken.append(checks) or plain(checks))
    model = Model([Part()], lambda c: c[0].factor)
    _, fast, _ = both(model, ids(8))
    for k in range(40):
        model.config[0].factor = float(str(3.0))  # equal
        check(model, fast, ids(5, seed=k))
    assert 4 <= len(taken) <= 7


def test_a_closure_reaches_a_model_that_holds_its_own_methods() -> None:
    class Holds(Net):
        def __init__(self) -> None:
            super().__init__()
            self.by_name = {"a": self.tower}

        def tower(self, h: Tensor) -> Tensor:
            return self.a(h)

        def forward(self, x: Tensor) -> Tensor:
            h = self.table(x).sum(1)
            return sum(self.by_name[name](h) for name in ("a",))  # type: ignore[return-value]

    model = Holds()
    _, fast, it = both(model, ids(8))
    assert it.kind == "whole", it.why
    check(model, fast, ids(5))
