"""Changes of code, of what objects hold and of settings, after which the plain forward runs: each
in a model that reads just that.
"""

from __future__ import annotations

import enum
import functools
import math
import operator
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import astuple, dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import recast

IDS = torch.randint(9, (6, 2), generator=torch.Generator().manual_seed(0))
End = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, end: End, held: Any) -> None:
        super().__init__()
        self.rows, self.held, self.end = nn.EmbeddingBag(9, 4), held, end
        self.act, self.by_name = nn.ReLU(), nn.ModuleDict({"a": nn.ReLU(), "b": nn.Tanh()})
        self.register_buffer("sized", torch.ones(2))

    def forward(self, ids: Tensor) -> Tensor:
        return self.end(self, self.rows(ids))


class Case(NamedTuple):
    end: End
    change: Callable[[pytest.MonkeyPatch, Any], object]  # of the models
    says: str
    held: Callable[[], Any] = lambda: None  # by all models


class Kind:
    k = 2.0


class Scale:
    def __init__(self) -> None:
        self.k = 2.0

    def __getitem__(self, key: int) -> float:
        return 2.0

    def of(self, x: Tensor) -> Tensor:
        return x * self.k


class Private:
    """Hands on what another object has."""

    __slots__ = ("__of",)

    def __init__(self, of: Any) -> None:
        self.__of = of

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__of, name)


class Numbers(list[float]):
    k = 2.0


@dataclass
class Config:
    k: float = 2.0


class Choice(enum.Enum):
    ONE = Config()


def by_keyword(x: Tensor, *, k: float = 2.0) -> Tensor:
    return x * k


def by_place(x: Tensor, k: float = 2.0) -> Tensor:
    return x * k


def twice(x: Tensor) -> Tensor:
    return x * 2


def thrice(x: Tensor) -> Tensor:
    return x * 3


class Above(nn.Module):
    k = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.k


class Below(Above):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Other(Below):
    def forward(self, x: Tensor) -> Tensor:
        return x * 9


SCALE = Scale()
METHOD = SCALE.of
LISTED = nn.LeakyReLU(0.1)


def put(name: str, value: Any, of: Any = None) -> Callable[[pytest.MonkeyPatch, Any], None]:
    """Set an attribute of ``of``, or of what the models hold."""
    return lambda patch, m: patch.setattr(m.held if of is None else of, name, value, raising=False)


def held(**fields: Any) -> Callable[[], Any]:
    return lambda: SimpleNamespace(**fields)


CASES = {
    "class of an object": Case(
        lambda m, x: x * m.held.kind.k, put("k", 3.0, Kind), "held.kind.k was 2.0 and is now 3.0",
        held(kind=Kind),
    ),
    "class in a dict": Case(
        lambda m, x: x * m.held["kind"].k, put("k", 3.0, Kind), "held was changed",
        lambda: {"kind": Kind},
    ),
    "Python module of an object": Case(
        lambda m, x: x * m.held.settings.k,
        lambda patch, m: patch.setattr(m.held.settings, "k", 3.0), "held.settings.k was 2.0",
        lambda: SimpleNamespace(settings=settings()),
    ),
    "Enum of an object": Case(
        lambda m, x: x * m.held.value.k, put("k", 3.0, Choice.ONE.value), "held._value_.k was 2.0",
        lambda: Choice.ONE,
    ),
    "weak reference": Case(
        lambda m, x: x * m.held().k, put("k", 3.0, SCALE), "held was changed",
        lambda: weakref.ref(SCALE),
    ),
    "private slot": Case(
        lambda m, x: x * m.held.k, put("k", 3.0, Kind), "held._Private__of.k was 2.0",
        lambda: Private(Kind()),
    ),
    "keyword defaults": Case(
        lambda m, x: by_keyword(x), put("__kwdefaults__", {"k": 3.0}, by_keyword),
        "by_keyword was changed",
    ),
    "keyword defaults in place": Case(
        lambda m, x: by_keyword(x),
        lambda patch, m: patch.setitem(cast(Any, by_keyword).__kwdefaults__, "k", 3.0),
        "by_keyword was changed",
    ),
    "defaults": Case(
        lambda m, x: by_place(x), put("__defaults__", (3.0,), by_place), "by_place was changed",
    ),
    "defaults of a held function": Case(
        lambda m, x: m.held.act(x), put("__defaults__", (3.0,), by_place), "held.act was changed",
        held(act=by_place),
    ),
    "code": Case(lambda m, x: twice(x), put("__code__", thrice.__code__, twice), "twice was"),
    "code of a held function": Case(
        lambda m, x: m.held[0](x), put("__code__", thrice.__code__, twice), "held was changed",
        lambda: [twice],
    ),
    "object of a method": Case(
        lambda m, x: m.held(x), put("k", 3.0, SCALE), "held.k was 2.0 and is now 3.0",
        lambda: METHOD,
    ),
    "object of a global method": Case(
        lambda m, x: METHOD(x), put("k", 3.0, SCALE), "METHOD.k was 2.0 and is now 3.0",
    ),
    "operator of a class": Case(
        lambda m, x: x * m.held[1], put("__getitem__", lambda s, k: 3.0, Scale),
        "held.__getitem__ was changed", Scale,
    ),
    "all fields in a tuple": Case(
        lambda m, x: x * astuple(m.held)[0], put("k", 3.0), "held.k was 2.0", Config,
    ),
    "a field by a getter": Case(
        lambda m, x: x * operator.attrgetter(chr(107))(m.held), put("k", 3.0), "held.k was",
        held(k=2.0),
    ),
    "a field that was lacking": Case(
        lambda m, x: x * getattr(m.held, "more", 2.0), put("more", 3.0), "held was changed",
        held(k=2.0),
    ),
    "class of a list": Case(
        lambda m, x: x * m.held.k, put("k", 3.0, Numbers), "held.k was 2.0", Numbers,
    ),
    "constant taken over by a class below": Case(
        lambda m, x: m.held(x), put("k", 3.0, Below), "Above.k was 2.0 and is now 3.0", Below,
    ),
    "method found by super": Case(
        lambda m, x: m.held(x), put("forward", lambda s, x: x * 3, Above), "Above.forward was",
        Below,
    ),
    "class of a module": Case(
        lambda m, x: m.held(x), put("__class__", Other), "'held' was given another class", Below,
    ),
    "class of a layer": Case(
        lambda m, x: m.act(x), lambda patch, m: setattr(m.act, "__class__", nn.Tanh),
        "the module 'act' was given another class",
    ),
    "in place": Case(
        lambda m, x: m.act(x) + x, lambda patch, m: setattr(m.act, "inplace", True),
        "a setting of act was False and is now True",
    ),
    "order of modules": Case(
        lambda m, x: functools.reduce(lambda y, one: one(y) + 1, m.by_name.values(), x),
        lambda patch, m: m.by_name.update({"a": m.by_name.pop("a")}), "the keys of by_name was",
    ),
    "setting of another module": Case(
        lambda m, x: LISTED(x), put("negative_slope", 3.0, LISTED), "LISTED was changed",
    ),
    "hook of another module": Case(
        lambda m, x: m.held[0](x), lambda patch, m: m.held[0].register_forward_hook(
            lambda m, i, o: o * 3), "held was changed", lambda: [nn.Tanh()],
    ),
    "shape of a buffer": Case(
        lambda m, x: x * m.sized.shape[0], lambda patch, m: setattr(m, "sized", torch.ones(3)),
        r"sized.shape was changed",
    ),
    "dimensions of a table": Case(
        lambda m, x: x * m.rows.weight.numel(),
        lambda patch, m: setattr(m.rows, "weight", nn.Parameter(torch.ones(12, 4))),
        r"rows.weight.shape was changed",
    ),
    "dtype of a buffer": Case(
        lambda m, x: x * (2.0 if m.sized.dtype == torch.float32 else 3.0),
        lambda patch, m: setattr(m, "sized", torch.ones(2).double()), "sized.dtype was changed",
    ),
    "default dtype": Case(
        lambda m, x: x * torch.ones(4), lambda patch, m: torch.set_default_dtype(torch.float64),
        r"torch.get_default_dtype\(\) was changed",
    ),
    "setting of torch": Case(
        lambda m, x: x * (2.0 if torch.backends.cudnn.benchmark else 3.0),
        lambda patch, m: setattr(torch.backends.cudnn, "benchmark", True),
        "torch.backends.cudnn.benchmark was False and is now True",
    ),
    "function of torch": Case(
        lambda m, x: F.relu(x), put("relu", torch.tanh, F), "torch.nn.functional.relu was changed",
    ),
    "function that a layer of torch calls": Case(
        lambda m, x: m.act(x), put("relu", lambda x, inplace: torch.tanh(x), F),
        "torch.nn.functional.relu was changed",
    ),
    "function of Python": Case(
        lambda m, x: x * math.sqrt(4.0), put("sqrt", lambda x: 3.0, math), "math.sqrt was changed",
    ),
    "group of processes": Case(
        lambda m, x: x * (3.0 if torch.distributed.is_initialized() else 2.0),
        put("is_initialized", lambda: True, torch.distributed), "is_initialized",
    ),
    "a new environment variable": Case(
        lambda m, x: x * (1 + dict(os.environ).get("RECAST_TEST_NEW", "").count("x")),
        lambda patch, m: patch.setenv("RECAST_TEST_NEW", "xx"), "os.environ was changed",
    ),
}  # fmt: skip


def settings() -> ModuleType:
    sys.modules["recast_test_settings"] = made = ModuleType("recast_test_settings")
    made.k = 2.0  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    plain = Net(case.end, case.held())
    fast: Any = recast.optimize(plain, example=IDS)
    assert fast.report.captured == "whole"
    before = fast(IDS)
    try:
        for model in (plain, fast):
            case.change(monkeypatch, model)
        with pytest.warns(recast.RecastWarning, match=case.says):
            now = fast(IDS)
        torch.testing.assert_close(now, plain(IDS))
        assert now.dtype != before.dtype or not torch.equal(now, before)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.backends.cudnn.benchmark = False


def test_globals_by_any_name_are_refused() -> None:
    plain = Net(lambda m, x: x * globals()["".join(["LI", "STED"])].negative_slope, None)
    fast = recast.optimize(plain, example=IDS)
    assert fast.report.captured != "whole"
    assert "globals(), in which any name can be looked up" in str(fast.report.to_dict()["why"])
