"""Under a profiler, and in a script that another program runs, what forward reads is seen too."""

from __future__ import annotations

import cProfile
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.errors import RecastWarning

IDS = torch.arange(12).view(3, 4)
settings = SimpleNamespace(scale=2.0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(12, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids) * settings.scale


def changed(monkeypatch: pytest.MonkeyPatch, model: nn.Module, fast: Any) -> None:
    """A change of what forward reads is seen."""
    monkeypatch.setattr(settings, "scale", 3.0)
    with pytest.warns(RecastWarning, match=r"settings.scale was 2.0 and is now 3.0"):
        torch.testing.assert_close(fast(IDS), model(IDS))


@contextmanager
def profiled(by: Any) -> Iterator[None]:
    sys.setprofile(by)
    try:
        yield
        assert sys.getprofile() is by
    finally:
        sys.setprofile(None)


def test_cprofile(monkeypatch: pytest.MonkeyPatch) -> None:
    model, profile = Net(), cProfile.Profile()
    with profile:
        fast = recast.optimize(model, example=IDS)
        model.extra_repr()  # it goes on
    changed(monkeypatch, model, fast)
    called = {entry.code.co_name for entry in profile.getstats() if hasattr(entry.code, "co_name")}
    assert "extra_repr" in called


def test_a_profile_function(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = Net(), []
    with profiled(lambda *event: seen.append(event)):
        fast = recast.optimize(model, example=IDS)
    changed(monkeypatch, model, fast)
    assert seen


class Unknown:
    def __call__(self, *event: Any) -> None: ...


def test_a_profiler_that_cannot_be_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    with profiled(Unknown()):
        fast = recast.optimize(model, example=IDS)
    assert fast.report.captured != "whole" and "cannot be paused" in str(fast.report.why)
    monkeypatch.setattr(settings, "scale", 3.0)
    torch.testing.assert_close(fast(IDS), model(IDS))


def _run(scope: dict[str, Any]) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    source = "scale = 2.0\ndef forward(self, ids):\n    return self.rows(ids) * scale\n"
    exec(compile(source, "script.py", "exec"), scope)
    kind = type("Script", (Net,), {"forward": scope["forward"], "__module__": scope["__name__"]})
    model = kind()
    return model, recast.optimize(model, example=IDS)


@pytest.mark.parametrize("name", ["__main__", "script"])
def test_a_script_that_another_program_runs(name: str) -> None:
    """Its globals are not those of the module of its name: that is another, or none."""
    scope: dict[str, Any] = {"__name__": name, "__file__": "script.py"}
    model, fast = _run(scope)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fast(IDS), model(IDS))
    scope["scale"] = 3.0
    with pytest.warns(RecastWarning, match=rf"{name}.scale was 2.0 and is now 3.0"):
        torch.testing.assert_close(fast(IDS), model(IDS))
