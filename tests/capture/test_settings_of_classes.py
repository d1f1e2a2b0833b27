"""Settings that forward reads through an object of its class or base, of a function, of a module
that it imports, or of torch: checked at each call.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
import torch
from strange import IDS, Base, why
from torch import Tensor

import recast
from recast.errors import RecastWarning


class Defaults:
    scale = 2.0


class Config(Defaults):
    inner = types.SimpleNamespace(scale=2.0)
    _kept = 2.0

    @property
    def kept(self) -> float:
        return self._kept

    def factor(self) -> float:
        return 2.0


class Holder:
    class Inner:
        scale = 2.0


CONFIG = Config()


def scaled(x: Tensor) -> Tensor:
    factor: float = scaled.scale  # type: ignore[attr-defined]
    return x * factor


class OfObject(Base):
    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids) * CONFIG.scale


class OfItsProperty(Base):
    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids) * CONFIG.kept * CONFIG.inner.scale


class OfBase(Base):
    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids) * Config.scale


class OfFunction(Base):
    def forward(self, ids: Tensor) -> Tensor:
        return scaled(self.rows(ids))


class OfImport(Base):
    def forward(self, ids: Tensor) -> Tensor:
        import recast_settings  # type: ignore[import-not-found]

        factor: float = recast_settings.scale
        return self.rows(ids) * factor


class OfMethod(Base):
    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids) * CONFIG.factor()


class OfInnerClass(Base):
    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids) * Holder.Inner.scale


class OfOwnClass(Base):
    def reset(self) -> None:
        self.kind = Holder.Inner

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids) * self.kind.scale


class OfSubmodule(Base):
    def forward(self, ids: Tensor) -> Tensor:
        from recast_settings import inner as settings

        factor: float = settings.scale
        return self.rows(ids) * factor


CHANGES: dict[str, tuple[type[Base], Callable[[pytest.MonkeyPatch], None]]] = {
    "of the object now": (OfObject, lambda m: m.setattr(CONFIG, "scale", 3.0)),
    "of its class's base": (OfObject, lambda m: m.setattr(Defaults, "scale", 3.0)),
    "of its class now": (OfObject, lambda m: m.setattr(Config, "scale", 3.0, raising=False)),
    "behind a property": (OfItsProperty, lambda m: m.setattr(CONFIG, "_kept", 3.0)),
    "of an object of the class": (OfItsProperty, lambda m: m.setattr(Config.inner, "scale", 3.0)),
    "of a base of the class": (OfBase, lambda m: m.setattr(Defaults, "scale", 3.0)),
    "of a function": (OfFunction, lambda m: m.setattr(scaled, "scale", 3.0)),
    "of an imported module": (
        OfImport, lambda m: m.setattr(sys.modules["recast_settings"], "scale", 3.0)
    ),
    "of a method": (OfMethod, lambda m: m.setattr(Config, "factor", lambda _: 3.0)),
    "of a method of its own": (
        OfMethod, lambda m: m.setattr(CONFIG, "factor", lambda: 3.0, raising=False)
    ),
    "of a class in a class": (OfInnerClass, lambda m: m.setattr(Holder.Inner, "scale", 3.0)),
    "of a class that the model holds": (
        OfOwnClass, lambda m: m.setattr(Holder.Inner, "scale", 3.0)
    ),
    "of a module in a module": (
        OfSubmodule, lambda m: m.setattr(sys.modules["recast_settings"].inner, "scale", 3.0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_setting_that_is_changed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("recast_settings")
    module.scale, module.inner = 2.0, types.ModuleType("recast_settings.inner")
    module.inner.scale = 2.0
    monkeypatch.setitem(sys.modules, "recast_settings", module)
    monkeypatch.setattr(scaled, "scale", 2.0, raising=False)
    kind, apply = CHANGES[change]
    model = kind()
    fast = recast.optimize(model, example=IDS)
    assert fast.report.to_dict()["captured"] == "whole"
    torch.testing.assert_close(fast(IDS), model(IDS))
    apply(monkeypatch)
    with pytest.warns(RecastWarning, match="runs its plain forward"):
        torch.testing.assert_close(fast(IDS), model(IDS))


class AsksAutocast(Base):
    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids).float() * (3.0 if torch.is_autocast_enabled("cpu") else 2.0)


class AsksSeed(Base):
    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids) * (3.0 if torch.initial_seed() == 5 else 2.0)


def test_flags_of_torch() -> None:
    for kind in (AsksAutocast, AsksSeed):
        torch.manual_seed(1)
        model = kind()
        fast = recast.optimize(model, example=IDS)
        torch.testing.assert_close(fast(IDS), model(IDS))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind is AsksAutocast):
            torch.manual_seed(5)
            with pytest.warns(RecastWarning, match=r"torch\.(is_autocast|initial_seed)"):
                torch.testing.assert_close(fast(IDS), model(IDS))


class AsksGradient(Base):
    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids) * (2.0 if self.emb.weight.grad is None else 3.0)


def test_gradients_are_not_read() -> None:
    model = AsksGradient()
    fast = recast.optimize(model, example=IDS)
    assert fast.report.to_dict()["why"] == "reads the gradient of a tensor"
    fast(IDS).sum().backward()
    torch.testing.assert_close(fast(IDS), model(IDS))


class Printed:
    """A mixin with names that nn.Module has too, and one of its own."""

    scale = 2.0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()

    def __repr__(self) -> str:
        return "printed"

    def extra_repr(self) -> str:
        return "printed"


T = TypeVar("T")


class BehindModule(Base, Printed):
    def forward(self, ids: Tensor) -> Tensor:
        assert isinstance(self, BehindModule)
        return self.rows(ids) * self.scale


class OfAnyKind(Base, Printed, Generic[T]):
    def forward(self, ids: Tensor) -> Tensor:
        assert isinstance(self, OfAnyKind)
        return self.rows(ids) * self.scale


@pytest.mark.parametrize("kind", [BehindModule, OfAnyKind])
def test_a_mixin_behind_the_module(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = kind()
    fast = recast.optimize(model, example=IDS)
    assert fast.report.to_dict()["captured"] == "whole", why(fast)
    torch.testing.assert_close(fast(IDS), model(IDS))
    monkeypatch.setattr(Printed, "scale", 3.0)
    with pytest.warns(RecastWarning, match="scale"):
        torch.testing.assert_close(fast(IDS), model(IDS))


class ImportsNothing(Base):
    def forward(self, ids: Tensor) -> Tensor:
        try:
            from . import faster  # type: ignore[attr-defined]
        except ImportError:
            faster = None
        return self.rows(ids) if faster is None else faster(ids)


@pytest.mark.filterwarnings("ignore:can't resolve package:ImportWarning")
def test_an_import_that_fails_is_no_setting() -> None:
    model = ImportsNothing()
    fast = recast.optimize(model, example=IDS)
    assert fast.report.to_dict()["captured"] == "whole"
    torch.testing.assert_close(fast(IDS), model(IDS))


def test_what_nobody_reads_of_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled, "scale", 2.0, raising=False)
    monkeypatch.setattr(scaled, "numbers", itertools.count(), raising=False)
    model = OfFunction()
    fast = recast.optimize(model, example=IDS)
    assert fast.report.to_dict()["captured"] == "whole"
    torch.testing.assert_close(fast(IDS), model(IDS))


def test_saved_with_a_setting_of_a_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module: Any = types.ModuleType("recast_settings")
    module.scale = 2.0
    monkeypatch.setitem(sys.modules, "recast_settings", module)
    fast = recast.optimize(OfImport(), example=IDS)
    torch.save(fast, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    torch.testing.assert_close(loaded(IDS), fast(IDS))
    module.scale = 3.0
    with pytest.warns(RecastWarning, match="recast_settings.scale was 2.0 and is now 3.0"):
        torch.testing.assert_close(loaded(IDS), loaded._root(IDS))
