"""What forward makes at its first call and keeps: a graph would make it anew at each call."""

from __future__ import annotations

import copy
import warnings
from functools import cached_property, lru_cache

import pytest
import torch
from torch import Tensor, nn

import recast
from tests.capture.guarded import ids


class Base(nn.Module):
    """``forward`` adds 1 to what is made of a centre ``c``, which a class below keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def centre(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(x) * self.centre(self.a(x).mean(0).detach())
        return y + 1


class Has(Base):
    def centre(self, x: Tensor) -> Tensor:
        if not hasattr(self, "c"):
            self.c = torch.randn(4)
        return self.c


class Get(Base):
    def centre(self, x: Tensor) -> Tensor:
        c = getattr(self, "c", None)
        if c is None:
            c = self.c = x
        return c


class Tried(Base):
    def centre(self, x: Tensor) -> Tensor:
        try:
            return self.c
        except AttributeError:
            self.c = x
        return self.c


class InDict(Base):
    def centre(self, x: Tensor) -> Tensor:
        if "c" not in self.__dict__:
            self.c = x
        return self.c


class InDir(Base):
    def centre(self, x: Tensor) -> Tensor:
        if "c" not in dir(self):
            self.c = x
        return self.c


class OfClass(Base):
    c: Tensor | None = None

    def centre(self, x: Tensor) -> Tensor:
        if self.c is None:
            self.c = x
        return self.c


class OfLayer(Base):
    def centre(self, x: Tensor) -> Tensor:
        if not hasattr(self.a, "c"):
            self.a.c = x
        c: Tensor = self.a.c
        return c


class ByProperty(Base):
    @property
    def c(self) -> Tensor:
        if not hasattr(self, "_c"):
            self._c = torch.randn(4)
        return self._c

    def centre(self, x: Tensor) -> Tensor:
        return self.c


class Cached(Base):
    @cached_property
    def c(self) -> Tensor:
        return torch.randn(4)

    def centre(self, x: Tensor) -> Tensor:
        return self.c


class OfMethod(Base):
    @lru_cache  # noqa: B019 - as users write it
    def c(self) -> Tensor:
        return torch.randn(4)

    def centre(self, x: Tensor) -> Tensor:
        return self.c()


class Registered(Base):
    def centre(self, x: Tensor) -> Tensor:
        if "c" not in self._buffers:
            self.register_buffer("c", x)
        return self.c


class Average(Base):
    c: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("c", None)

    def centre(self, x: Tensor) -> Tensor:
        self.c = x if self.c is None else 0.9 * self.c + 0.1 * x
        return self.c


class AverageOfDefault(Base):
    def centre(self, x: Tensor) -> Tensor:
        self.c: Tensor = 0.9 * getattr(self, "c", x) + 0.1 * x
        return self.c


class Counts(Base):  # from a constant, but not a constant
    def centre(self, x: Tensor) -> Tensor:
        self.c: Tensor = getattr(self, "c", torch.zeros(())) + 1
        return self.c


class Before(Base):
    c: Tensor | None = None

    def centre(self, x: Tensor) -> Tensor:
        before, self.c = self.c, x
        return x if before is None else before


class Listed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.c = [torch.ones(4)]

    def centre(self, x: Tensor) -> Tensor:
        self.c = [self.c[0] * 0.5 + x]
        return self.c[0]


class InLayers(nn.Module):
    """One that has a submodule which keeps an average."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Embedding(10, 4), nn.Embedding(10, 4)
        self.kept, self.out = Average(), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.out(self.kept(self.one(ids[:, 0]) + self.two(ids[:, 1])))
        return y


KINDS = [
    Has, Get, Tried, InDict, InDir, OfClass, OfLayer, ByProperty, Cached, OfMethod, Registered,
    Average, AverageOfDefault, Counts, Before, Listed,
]  # fmt: skip


def calls_agree(plain: nn.Module, fast: nn.Module, ids_of: bool = False) -> None:
    """Several calls, in train and eval mode, with batches of several sizes."""
    for k, rows in enumerate((6, 3, 6, 4)):
        for mode in (True, False):
            x = ids(rows, seed=k) if ids_of else torch.randn(rows, 4)
            found = []
            for model in (plain, fast):
                torch.manual_seed(k)
                out = model.train(mode)(x)
                model.zero_grad()
                out.backward(torch.linspace(-1, 2, out.numel()).view_as(out))
                found.append([out, *(p.grad for p in model.parameters() if p.grad is not None)])
            torch.testing.assert_close(found[1], found[0], msg=f"call {k}, train {mode}")
    torch.testing.assert_close(dict(fast.state_dict()), dict(plain.state_dict()))
    assert [*fast.state_dict()] == [*plain.state_dict()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("example", [True, False])
def test_it_is_made_once(kind: type[Base], example: bool) -> None:
    torch.manual_seed(0)
    model = kind()
    plain = copy.deepcopy(model)
    had = {**vars(model), **model._buffers}.keys()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it runs as it is from the start, and the report says so
        fast = recast.optimize(model, example=torch.randn(6, 4) if example else None)
        assert {**vars(model), **model._buffers}.keys() == had
        calls_agree(plain, fast)


def test_the_report_names_it_and_what_to_do() -> None:
    fast = recast.optimize(Average(), example=torch.randn(6, 4))
    assert "forward makes self.c at its first call" in str(fast.report)
    assert "model(*example) before optimize()" in str(fast.report)
    assert "what c() keeps" in str(recast.optimize(OfMethod(), example=torch.randn(6, 4)).report)


def test_after_a_first_call_the_graph_goes_on_with_it() -> None:
    torch.manual_seed(0)
    model = Average()
    model(torch.randn(6, 4))
    plain = copy.deepcopy(model)
    fast = recast.optimize(model, example=torch.randn(6, 4))
    assert fast.report.to_dict()["captured"] == "whole"
    calls_agree(plain, fast)


def test_around_a_module_that_makes_it_all_else_is_rewritten() -> None:
    torch.manual_seed(0)
    model = InLayers()
    plain = copy.deepcopy(model)
    fast = recast.optimize(model, example=ids(6))
    assert fast.report.to_dict()["captured"] == "partial"
    assert any(e.rule == "group-embeddings" for e in fast.report.journal.fired)
    calls_agree(plain, fast, ids_of=True)


class Constants(Base):
    """What is made once is a constant: each call may make it."""

    @cached_property
    def scale(self) -> float:
        return 4**-0.5

    @lru_cache  # noqa: B019 - as users write it
    def places(self) -> Tensor:
        return torch.arange(4.0)

    def centre(self, x: Tensor) -> Tensor:
        if getattr(self, "mask", None) is None:
            self.mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
        return (x + self.places()) * self.scale * self.mask


class Blind(Base):
    """Set at every call, whatever it was."""

    c: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("c", None)

    def centre(self, x: Tensor) -> Tensor:
        self.c = x
        self.both = (x, self.c * 2)
        return self.c + self.both[1]


@pytest.mark.parametrize("kind", [Constants, Blind])
def test_what_each_call_makes_alike_is_captured(kind: type[Base]) -> None:
    torch.manual_seed(0)
    model = kind()
    plain = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = recast.optimize(model, example=torch.randn(6, 4))
        assert fast.report.to_dict()["captured"] == "whole"
        calls_agree(plain, fast)


class MadeAndMoved(Base):
    def centre(self, x: Tensor) -> Tensor:
        if not hasattr(self, "head"):
            self.head = nn.Linear(4, 4).to(x.device)
        centre: Tensor = self.head(x)
        return centre


def test_a_layer_that_is_made_and_moved() -> None:
    fast = recast.optimize(MadeAndMoved(), example=torch.randn(8, 4))
    report = fast.report.to_dict()
    assert report["captured"] == "none"  # lone layers are no graph
    assert report["why"].startswith("makes a layer and moves it, as at its first call")
    model = MadeAndMoved()
    model(torch.randn(8, 4))
    assert recast.optimize(model, example=torch.randn(8, 4)).report.captured == "whole"


class Criterion(Base):
    """Layers without parameters of their own, made and moved at each call."""

    def forward(self, x: Tensor) -> Tensor:
        y = nn.Softplus().to(x.device)(self.a(x))
        weighted = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0])).to(x.device)
        loss: Tensor = weighted(self.b(y), (x > 0).float())
        return loss


def test_a_loss_that_is_made_at_each_call() -> None:
    plain = Criterion()
    fast = recast.optimize(plain, example=torch.randn(8, 4))
    assert fast.report.captured == "whole"
    x = torch.randn(5, 4)
    torch.testing.assert_close(fast(x), plain(x))
    assert fast.to("meta")(x.to("meta")).is_meta
