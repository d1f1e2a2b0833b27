"""Settings that forward reads from globals or closures: no change of them is silent."""

from __future__ import annotations

import argparse
import copy
import gc
import io
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast

args = argparse.Namespace(scale=2.0, relu=True, steps=0)
settings = types.ModuleType("settings_of_the_user")
IDS = torch.randint(9, (6, 2), generator=torch.Generator().manual_seed(0))


class Config:
    shift = 1.0


class Net(nn.Module):
    def __init__(self, held: tuple[dict[str, float], ...]) -> None:
        super().__init__()
        self.emb = nn.EmbeddingBag(9, 4)
        self.out = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
        self.ends = [scaled(by) for by in held]

    def forward(self, ids: Tensor) -> Tensor:
        y = self.out(self.emb(ids) * args.scale)
        y = y.relu() if args.relu else y
        for end in self.ends:
            y = end(y)
        return y * settings.WEIGHT + Config.shift


def scaled(by: dict[str, float]) -> Callable[[Tensor], Tensor]:
    return lambda x: x * by["factor"]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    sys.modules[settings.__name__] = settings
    settings.WEIGHT = 3.0  # type: ignore[attr-defined]
    yield
    del sys.modules[settings.__name__]
    args.scale, args.relu, Config.shift = 2.0, True, 1.0


def pair() -> tuple[Net, Any, tuple[dict[str, float], ...]]:
    held = {"factor": 1.0}, {"factor": -2.0}
    torch.manual_seed(0)
    plain = Net(held)
    fast = recast.optimize(plain, example=IDS)
    assert fast.report.captured == "whole"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        args.steps += 1  # nothing that forward names
        torch.testing.assert_close(fast(IDS), plain(IDS))
    return plain, fast, held


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "number": (lambda h: setattr(args, "scale", 5.0), r"args\.scale was 2.0 and is now 5.0"),
    "flag": (lambda h: setattr(args, "relu", False), r"args\.relu was True and is now False"),
    "module": (lambda h: setattr(settings, "WEIGHT", 9.0), r"settings\.WEIGHT was 3.0"),
    "class": (lambda h: setattr(Config, "shift", 4.0), r"Config\.shift was 1.0 and is now 4.0"),
    "closure": (lambda h: h[0].update(factor=7.0), r"<lambda>\.by was changed"),
    "second closure": (lambda h: h[1].update(factor=7.0), r"<lambda>\.by was changed"),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("copied", [False, True])
def test_a_change_is_seen(what: str, copied: bool) -> None:
    plain, fast, held = pair()
    if copied:
        fast = copy.deepcopy(fast)
    change, says = CHANGES[what]
    change(held)
    with pytest.warns(recast.RecastWarning, match=says):
        torch.testing.assert_close(fast(IDS), plain(IDS))


def test_a_global_object_that_forward_writes_to() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.EmbeddingBag(9, 4)

        def forward(self, ids: Tensor) -> Tensor:
            args.steps += 1
            return self.emb(ids)  # type: ignore[no-any-return]

    fast = recast.optimize(Counting(), example=IDS)
    before = args.steps
    fast(IDS)
    fast(IDS)
    assert args.steps == before + 2
    assert "forward changes args" in str(fast.report)


class Closed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.EmbeddingBag(9, 4)

    def forward(self, ids: Tensor) -> Tensor:
        by = {"factor": 2.0}

        def scale(x: Tensor) -> Tensor:
            return x * by["factor"]

        return scale(self.emb(ids))


def test_a_model_with_a_closure_is_saved() -> None:
    plain = Closed()
    fast = recast.optimize(plain, example=IDS)
    file = io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(loaded(IDS), plain(IDS))


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.ModuleList(nn.EmbeddingBag(9, 4) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        return sum(emb(ids) for emb in [self.emb[k] for k in (0, 1) if ids.dim() == 2])


def test_functions_of_comprehensions_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """None outlives its call, and finding one takes a search of all objects of the process."""

    def look(*of: object) -> list[object]:
        raise AssertionError(of)

    monkeypatch.setattr(gc, "get_referrers", look)
    assert recast.optimize(Listed(), example=IDS).report.captured == "whole"
