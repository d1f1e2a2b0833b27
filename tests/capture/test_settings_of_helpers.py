"""Settings that code run by forward reads, wherever it is, and reads that cannot be checked."""

from __future__ import annotations

import copy
import dataclasses
import enum
import gc
import io
import itertools
import os
import random
import re
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import recast

IDS = torch.randint(9, (6, 2), generator=torch.Generator().manual_seed(0))
NUMBER = 2.0
FACTOR = torch.tensor(2.0)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"first": F.relu}
MANY = dict.fromkeys(range(5000), 2.0)
VARIABLE = "RECAST_TEST_FACTOR"


class Mode(enum.Enum):
    PLAIN = 2
    OTHER = 3


@dataclasses.dataclass(slots=True)
class Slots:
    factor: float = 2.0


class Schedule:
    current = SimpleNamespace(factor=2.0)

    def factor(self) -> float:
        return 2.0


def by_default(x: Tensor, held: dict[str, float] = {"factor": 2.0}) -> Tensor:  # noqa: B006
    return x * held["factor"]


def act(x: Tensor) -> Tensor:
    return torch.tanh(x)


def number() -> float:
    return NUMBER


def closed(
    factor: float = 2.0,
) -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    def scale(x: Tensor) -> Tensor:
        return x * factor

    def change(to: float) -> None:
        nonlocal factor
        factor = to

    return scale, change


class Net(nn.Module):
    shift = 2.0

    def head(self, x: Tensor) -> Tensor:
        return x * 2

    def __init__(self, end: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.emb, self.end = nn.EmbeddingBag(9, 4), end
        self.many = [2.0] * 5000
        self.mode, self.slots, self.array = Mode.PLAIN, Slots(), np.array([2.0, 3.0])
        self.deep = SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(c=SimpleNamespace(d=2.0))))
        self.listed = [SimpleNamespace(factor=2.0), SimpleNamespace(factor=3.0)]
        self.config, self.key = SimpleNamespace(weight_a=2.0), "a"

    def forward(self, ids: Tensor) -> Tensor:
        return self.end(self, self.emb(ids))


SCALE, CHANGE = closed()


HIDDEN = SimpleNamespace(scale=closed(3.0)[0])


def put(name: str, value: Any) -> Callable[[Any], None]:
    return lambda m: globals().__setitem__(name, value)


CHANGES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any], Any], str]] = {
    "number that a helper reads": (
        lambda m, x: x * number(), put("NUMBER", 5.0), r"NUMBER was 2.0 and is now 5.0",
    ),
    "tensor": (lambda m, x: x * FACTOR, put("FACTOR", torch.tensor(3.0)), "FACTOR was changed"),
    "function": (lambda m, x: act(x), put("act", torch.sigmoid), "act was changed"),
    "dict of functions": (
        lambda m, x: ACTIVATIONS["first"](x),
        lambda m: ACTIVATIONS.update(first=torch.tanh), "ACTIVATIONS was changed",
    ),
    "large dict": (lambda m, x: x * MANY[7], lambda m: MANY.update({7: 3.0}), "MANY was changed"),
    "large list": (
        lambda m, x: x * m.many[7], lambda m: m.many.__setitem__(7, 3.0), "many was changed",
    ),
    "nonlocal": (lambda m, x: SCALE(x), lambda m: CHANGE(5.0), r"scale.factor was 2.0 and is now"),
    "Enum": (
        lambda m, x: x * m.mode.value, lambda m: setattr(m, "mode", Mode.OTHER), "mode was changed",
    ),
    "slots": (
        lambda m, x: x * m.slots.factor,
        lambda m: setattr(m.slots, "factor", 3.0), "slots.factor was 2.0 and is now 3.0",
    ),
    "array": (
        lambda m, x: x * float(m.array[0]),
        lambda m: m.array.__setitem__(0, 5.0), "array was changed",
    ),
    "deep": (
        lambda m, x: x * m.deep.a.b.c.d,
        lambda m: setattr(m.deep.a.b.c, "d", 3.0), "deep.a.b.c.d was 2.0 and is now 3.0",
    ),
    "list of objects": (
        lambda m, x: x * sum(one.factor for one in m.listed),
        lambda m: setattr(m.listed[1], "factor", 5.0), "listed was changed",
    ),
    "fields by vars": (
        lambda m, x: x * sum(vars(m.config).values()),
        lambda m: setattr(m.config, "weight_a", 3.0), "config.weight_a was 2.0 and is now 3.0",
    ),
    "a field by a name put together": (
        lambda m, x: x * getattr(m.config, f"weight_{m.key}"),
        lambda m: setattr(m.config, "weight_a", 3.0), "config.weight_a was 2.0 and is now 3.0",
    ),
    "object on a class": (
        lambda m, x: x * Schedule.current.factor,
        lambda m: setattr(Schedule.current, "factor", 3.0), "current.factor was 2.0 and is now 3.0",
    ),
    "method of a class": (
        lambda m, x: x * Schedule().factor(),
        lambda m: setattr(Schedule, "factor", lambda s: 3.0), "Schedule.factor was changed",
    ),
    "method of the model": (
        lambda m, x: m.head(x), lambda m: setattr(Net, "head", lambda m, x: x * 9), "Net.head was",
    ),
    "constant by the class": (
        lambda m, x: x * type(m).shift, lambda m: setattr(Net, "shift", 3.0), "Net.shift was 2.0",
    ),
    "default of an argument": (
        lambda m, x: by_default(x),
        lambda m: by_default.__defaults__[0].update(factor=3.0),  # type: ignore[index]
        "by_default was changed",
    ),
    "environment": (
        lambda m, x: x * float(os.environ.get(VARIABLE, "2")),
        lambda m: os.environ.update({VARIABLE: "3"}), f"os.environ.{VARIABLE} was changed",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    held = dict(globals())
    yield
    globals().update({k: held[k] for k in ("NUMBER", "FACTOR", "act")})
    ACTIVATIONS["first"], MANY[7] = F.relu, 2.0
    os.environ.pop(VARIABLE, None)
    CHANGE(2.0)
    Schedule.current.factor, Net.shift = 2.0, 2.0
    Schedule.factor, Net.head = METHODS  # type: ignore[method-assign]
    by_default.__defaults__[0]["factor"] = 2.0  # type: ignore[index]


METHODS = Schedule.factor, Net.head


def test_nothing_of_the_trace_is_kept() -> None:
    class Listed(Net):
        def forward(self, ids: Tensor) -> Tensor:
            held = {"rows": self.emb(ids)}
            return torch.stack([held["rows"] * k for k in range(3)]).sum(0)

    fast = recast.optimize(Listed(late), example=IDS)
    assert [c[3] for c in fast._runner.assumptions.checks] == ["Listed.forward"]


COPIED = ("number that a helper reads", "nonlocal", "function", "list of objects")


@pytest.mark.parametrize(
    ("name", "copied"), [(n, False) for n in CHANGES] + [(n, True) for n in COPIED]
)
def test_a_change_is_seen(name: str, copied: bool) -> None:
    end, change, says = CHANGES[name]
    plain = Net(end)
    fast: Any = recast.optimize(plain, example=IDS)
    assert fast.report.captured == "whole"
    fast = copy.deepcopy(fast) if copied else fast
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fast(IDS), plain(IDS))
    for model in (plain, fast):
        change(model)
    with pytest.warns(recast.RecastWarning, match=says):
        torch.testing.assert_close(fast(IDS), plain(IDS))


def test_a_frozen_closure_is_looked_for() -> None:
    """Servers freeze what they share between processes, which hides it from the collector. What
    modules and globals hold is found all the same.
    """
    gc.freeze()  # as all that is collected was; it stays so
    try:
        test_a_change_is_seen("nonlocal", False)
        fast = recast.optimize(Net(lambda m, x: HIDDEN.scale(x)), example=IDS)
    finally:
        CHANGE(2.0)
    assert fast.report.captured != "whole"
    hidden = "factor, a variable around closed.<locals>.scale, which gc.freeze() hides"
    assert hidden in str(fast.report)


def late(m: Any, x: Tensor) -> Tensor:
    return SCALE(act(x)) * FACTOR * NUMBER


def test_what_only_a_process_has_is_not_saved() -> None:
    plain = Net(late)
    fast = recast.optimize(plain, example=IDS)
    file = io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(loaded(IDS), plain(IDS))


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "time": (lambda m, x: x * (time.time() // 1e6), r"asks for the time: time\.time\(\)"),
    "day": (lambda m, x: x * datetime.now().day, r"asks for the time: datetime\.now\(\)"),
    "random": (lambda m, x: x + random.random(), "draws from Python's random numbers"),
    "choice": (lambda m, x: x * random.choice([1, 1]), "draws from Python's random numbers"),
    "own random": (lambda m, x: x + m.draws.random(), "draws from Python's random numbers"),
    "numpy branch": (
        lambda m, x: x * 2 if np.random.rand() < 2 else x,
        "draws from numpy's random numbers",
    ),
    "numpy number": (
        lambda m, x: x * float(np.random.choice([1, 1])),
        "draws from numpy's random numbers",
    ),
    "numpy pairs": (lambda m, x: x * 2 if np.random.randn() < 99 else x, "draws from numpy's"),
    "unseeded": (
        lambda m, x: x + float(np.random.default_rng().integers(0, 1)),
        "makes a generator of random numbers, which nobody has seeded",
    ),
    "own numpy": (lambda m, x: x + m.numpy.random(), r"self\.numpy, which draws random numbers"),
    "iterator": (lambda m, x: x * next(m.steps), r"self\.steps, an iterator"),
    "file": (lambda m, x: x * len(open(__file__).read(1)), "it opens a file"),  # noqa: SIM115
    "too many": (lambda m, x: x * m.many[0], r"self\.many, a list of 70,000 entries: too many"),
}


TRIED = {
    "time": "what the clock says as an argument of forward",
    "day": "what the clock says as an argument of forward",
    "random": "torch.rand or its like",
    "own random": "torch.rand or its like",
    "file": "what is in the file as an argument",
    "numpy": "torch's own operation in place of numpy's",
    "list": "operations on the whole tensor",
}
_OTHERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "numpy": lambda m, x: x + torch.from_numpy(np.sort(x.detach().numpy())),
    "list": lambda m, x: x * sum(x.flatten().tolist()),
}


@pytest.mark.filterwarnings("ignore:unclosed file")
@pytest.mark.parametrize("name", TRIED)
def test_what_helps_is_of_the_kind_of_the_reason(name: str) -> None:
    plain = Net(_OTHERS[name] if name in _OTHERS else REFUSED[name][0])
    plain.draws = random.Random(0)
    tries = recast.optimize(plain, example=IDS).report.tries
    assert tries[0].startswith(TRIED[name])
    assert tries[-1].startswith("keep this part in a submodule of its own")
    assert not any("torch.where" in t or "example=" in t for t in tries)


@pytest.mark.filterwarnings("ignore:unclosed file")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    end, why = REFUSED[name]
    plain = Net(end)
    plain.many = [2.0] * 70_000
    plain.draws, plain.numpy = random.Random(0), np.random.default_rng(0)
    plain.steps = itertools.repeat(2)
    np.random.randn()  # which leaves another one for the next call
    fast = recast.optimize(plain, example=IDS)
    assert fast.report.captured != "whole"
    assert re.search(why, str(fast.report.to_dict()["why"]))
    plain.many[0] = fast.many[0] = 3.0
    assert plain.draws.getstate() == random.Random(0).getstate(), "none was drawn by the capture"
    for model in (plain, fast):
        model.draws, model.numpy = random.Random(0), np.random.default_rng(0)
    random.seed(1)
    want = plain(IDS)
    random.seed(1)
    for model in (plain, fast):
        model.draws, model.numpy = random.Random(0), np.random.default_rng(0)
    torch.testing.assert_close(fast(IDS), want)


def test_capture_leaves_the_random_numbers_of_all_libraries() -> None:
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[2]
    recast.optimize(Net(lambda m, x: x + random.random() + np.random.rand()), example=IDS)
    assert (random.getstate(), np.random.get_state()[2]) == before


def test_code_that_was_edited_since_it_was_saved() -> None:
    plain = Net(late)
    file = io.BytesIO()
    torch.save(recast.optimize(plain, example=IDS), file)
    file.seek(0)
    kept, Net.forward = Net.forward, lambda m, ids: m.emb(ids) * 7  # type: ignore[method-assign]
    try:
        loaded = torch.load(file, weights_only=False)
        with pytest.warns(recast.RecastWarning, match=r"Net\.forward was changed"):
            torch.testing.assert_close(loaded(IDS), plain.emb(IDS) * 7)
    finally:
        Net.forward = kept  # type: ignore[method-assign]


def test_a_large_tuple_cannot_change() -> None:
    plain = Net(lambda m, x: x * m.fixed[7])
    plain.fixed = (2.0,) * 70_000
    fast = recast.optimize(plain, example=IDS)
    assert fast.report.captured == "whole"
    fast.fixed = (3.0,) * 70_000
    with pytest.warns(recast.RecastWarning, match="fixed was changed"):
        torch.testing.assert_close(fast(IDS), plain(IDS) * 1.5)


class Collects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(9, 4)

    def forward(self, ids: Tensor) -> Tensor:
        gc.collect(0)  # the youngest alone: quick, and all callbacks are called
        return self.rows(ids).sum(1) * NUMBER


def test_what_a_collection_calls_is_not_the_models() -> None:
    """Profilers and test tools read the clock, and count, whenever garbage is collected."""
    seen: list[float] = []

    def timed(phase: str, info: dict[str, int]) -> None:
        seen.append(time.perf_counter())

    gc.callbacks.append(timed)
    try:
        plain = Collects().eval()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fast = recast.optimize(plain, example=(IDS,))
            assert torch.equal(fast(IDS), plain(IDS))
        assert seen and fast.report.captured == "whole"
    finally:
        gc.callbacks.remove(timed)


_SCALE = attrgetter("scale")
_SETTINGS = SimpleNamespace(scale=2.0)


class Gets(nn.Module):
    """Reads settings through an ``attrgetter``, which alone knows the name."""

    def __init__(self, of_global: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding(9, 4)
        self.settings = SimpleNamespace(inner=SimpleNamespace(size=2.0))
        self.get = None if of_global else attrgetter("inner.size")

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids) * (_SCALE(_SETTINGS) if self.get is None else self.get(self.settings))


@pytest.mark.parametrize("of_global", [True, False])
def test_settings_read_by_a_getter(of_global: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Gets(of_global)
    fast = recast.optimize(plain, example=(IDS,))
    torch.testing.assert_close(fast(IDS), plain(IDS))
    if of_global:
        monkeypatch.setattr(_SETTINGS, "scale", 3.0)
    else:
        plain.settings.inner.size = 3.0
    with pytest.warns(recast.RecastWarning, match=r"(scale|size) was 2\.0 and is now 3\.0"):
        got = fast(IDS)
    torch.testing.assert_close(got, plain(IDS))
