"""What forward reads from Python besides its arguments: no change of it is silent."""

from __future__ import annotations

import copy
import io
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import recast

SCALE = 2.0
COUNT = {"calls": 0}


class Settings:
    def __init__(self) -> None:
        self.t, self.inner, self.unread = 1.5, types.SimpleNamespace(t=2.0), 0


class Net(nn.Module):
    shift = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 4)
        self.out = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
        self.weights, self.by_name = [1.0, 2.0], {"a": 3.0, "deep": {"b": 4.0}}
        self.settings, self.act = Settings(), F.relu
        self.kept = {"scale": 5.0}

    def __getattr__(self, name: str) -> Any:
        return vars(self)["kept"][name] if name == "scale" else super().__getattr__(name)

    def head(self, x: Tensor) -> Tensor:
        return self.act(self.out(x)) * self.weights[0] + self.by_name["deep"]["b"]

    def forward(self, ids: Tensor) -> Tensor:
        y = self.head(self.emb(ids)) * self.settings.t + self.settings.inner.t * SCALE
        y = y * 2.0 if torch.is_grad_enabled() else y
        y = y + 1.0 if self.emb.weight.requires_grad else y
        return y + self.shift * self.scale


IDS = torch.randint(9, (6,), generator=torch.Generator().manual_seed(0))
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "list": (lambda m: m.weights.__setitem__(0, 3.0), "weights was changed"),
    "nested dict": (lambda m: m.by_name["deep"].update(b=1.0), "by_name was changed"),
    "object": (lambda m: setattr(m.settings, "t", 3.0), "settings.t was 1.5 and is now 3.0"),
    "object within": (lambda m: setattr(m.settings.inner, "t", 3.0), "inner.t was 2.0 and is now"),
    "function": (lambda m: setattr(m, "act", torch.tanh), "act was changed"),
    "method": (lambda m: setattr(m, "head", m.out.forward), "head was changed"),
    "attribute of the class": (lambda m: setattr(m, "shift", 4.0), "shift was changed"),
    "__getattr__": (lambda m: m.kept.update(scale=1.0), "scale was 5.0 and is now 1.0"),
    "appended": (lambda m: m.out.append(nn.Tanh()), r"len\(out\) was 3 and is now 4"),
    "forward": (lambda m: setattr(m.out[1], "forward", torch.tanh), r"out\.1\.forward was changed"),
    "max_norm": (lambda m: setattr(m.emb, "max_norm", 0.1), "a setting of emb was"),
    "frozen": (lambda m: m.emb.requires_grad_(False), "requires_grad was True and is now False"),
}


def pair(model: Callable[[], nn.Module] = Net) -> tuple[Any, Any]:
    """A plain model and an optimised one, with nothing in common."""
    torch.manual_seed(0)
    plain = model()
    return plain, recast.optimize(copy.deepcopy(plain), example=IDS)


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    plain, fast = pair()
    change, says = CHANGES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fast(IDS), plain(IDS))
        fast.settings.unread = 1  # nothing that forward names
        fast(IDS)
    for model in (plain, fast):
        torch.manual_seed(1)
        change(model)
    with pytest.warns(recast.RecastWarning, match=says):
        torch.testing.assert_close(fast(IDS), plain(IDS))


@pytest.mark.parametrize("copied", [copy.deepcopy, saved])
def test_a_copy_watches_its_own(copied: Callable[[nn.Module], Any]) -> None:
    plain, fast = pair()
    other = copied(fast)
    for model in (plain, other):
        model.weights[0] = 7.0
    with pytest.warns(recast.RecastWarning, match="weights was changed"):
        torch.testing.assert_close(other(IDS), plain(IDS))
    plain.weights[0] = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fast(IDS), plain(IDS))


def test_a_global_and_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fast = pair()
    monkeypatch.setattr(f"{__name__}.SCALE", 5.0)
    with pytest.warns(recast.RecastWarning, match=r"SCALE was 2.0 and is now 5.0"):
        torch.testing.assert_close(fast(IDS), plain(IDS))
    monkeypatch.undo()
    monkeypatch.setattr(Net, "shift", 3.0)
    with pytest.warns(recast.RecastWarning, match=r"Net.shift was 1.0 and is now 3.0"):
        torch.testing.assert_close(fast(IDS), plain(IDS))


def test_whether_gradients_are_recorded() -> None:
    plain, fast = pair()
    with torch.no_grad(), pytest.warns(recast.RecastWarning, match="is_grad_enabled"):
        torch.testing.assert_close(fast(IDS), plain(IDS))


def test_without_an_example() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out, self.weights = nn.Linear(4, 1), [2.0]

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x) * self.weights[0]

    plain = Weighted()
    fast, x = recast.optimize(copy.deepcopy(plain)), torch.randn(3, 4)
    torch.testing.assert_close(fast(x), plain(x))
    plain.weights[0] = fast.weights[0] = 3.0
    with pytest.warns(recast.RecastWarning, match="weights was changed"):
        torch.testing.assert_close(fast(x), plain(x))


class Writes(nn.Module):
    """Leaves a Python value behind, in one of several places."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.emb, self.where = nn.Embedding(9, 4), where
        self.log: dict[str, Any] = {"n": 0}
        self.seen: set[int] = set()
        self.stats = types.SimpleNamespace(n=0)
        self.masks: OrderedDict[int, Tensor] = OrderedDict()

    def forward(self, ids: Tensor) -> Tensor:
        y = self.emb(ids).sum(1)
        if self.where == "dict":
            self.log["n"] += 1
        elif self.where == "new entry":
            self.log["mean"] = y.mean()
        elif self.where == "set":
            self.seen.add(len(self.seen))
        elif self.where == "object":
            self.stats.n += 1
        elif self.where == "global":
            COUNT["calls"] += 1
        elif self.where == "cache" and 4 not in self.masks:
            self.masks[4] = torch.ones(())
        return y * self.masks[4] if self.where == "cache" else y


@pytest.mark.parametrize("where", ["dict", "new entry", "set", "object", "global"])
def test_what_forward_leaves_behind_is_left_at_each_call(where: str) -> None:
    plain = Writes(where)
    fast = recast.optimize(copy.deepcopy(plain), example=IDS)
    assert fast.stats.n == 0, "not by the capture"
    assert "forward changes" in str(fast.report)
    COUNT["calls"] = 0
    for _ in range(3):
        torch.testing.assert_close(fast(IDS), plain(IDS))
    assert fast.stats.n == plain.stats.n and fast.seen == plain.seen
    assert COUNT["calls"] == (6 if where == "global" else 0)
    torch.testing.assert_close(dict(fast.log), dict(plain.log))


def test_a_cache_of_constants_is_captured() -> None:
    fast = recast.optimize(Writes("cache"), example=IDS)
    assert fast.report.captured == "whole"
