"""``with torch.no_grad()`` inside forward: what a call returns as it is keeps its history."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import recast
from recast.rewriter.report import dump


class Model(nn.Module):
    def __init__(self, inside: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.drop, self.inside = nn.Linear(4, 4), nn.Dropout(0.3), inside
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        with torch.no_grad():
            a = self.inside(self, h)
        return a * h


RETURNED = {
    "dropout": lambda model, h: model.drop(h),
    "functional dropout": lambda model, h: F.dropout(h, 0.3, model.training),
    "float": lambda _, h: h.float(),
    "to": lambda _, h: h.to(torch.float32),
    "contiguous": lambda _, h: h.contiguous(),
    "one of several": lambda _, h: torch.broadcast_tensors(h, h * 2)[0],
    "a parameter": lambda model, _: model.layer.bias.contiguous(),
    "view": lambda _, h: h.view(-1, 4),
    "chain": lambda model, h: model.drop(torch.relu(h)).float(),
}


@pytest.mark.parametrize("captured", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("inside", RETURNED.values(), ids=list(RETURNED))
def test_gradients(inside: Callable[[Model, Tensor], Tensor], captured: bool) -> None:
    torch.manual_seed(0)
    model, x = Model(inside).train(captured), torch.randn(6, 4)
    fast = recast.optimize(model, example=x)
    assert fast.report.captured == "whole"
    for training in (True, False):
        model.train(training), fast.train(training)
        upstream, got = torch.randn(6, 4), []
        for forward in (model, fast):
            torch.manual_seed(1)
            got.append(torch.autograd.grad(forward(x), model.layer.weight, upstream)[0])
        torch.testing.assert_close(got[1], got[0])


@pytest.mark.parametrize(
    "inside",
    [
        lambda _, h: h.clamp_(-0.1, 0.1),
        lambda _, h: F.leaky_relu(h, 0.1, True),
        lambda model, h: model.act(h),
    ],
    ids=["a method", "a function", "a layer"],
)
def test_writing_to_what_learns_stays_with_torch(inside: Callable[..., Tensor]) -> None:
    """Such a write changes the numbers and leaves the gradients, which no new value could do."""
    torch.manual_seed(0)
    model, x = Model(inside), torch.randn(6, 4)
    fast = recast.optimize(model, example=x)
    assert "writes under torch.no_grad" in str(fast.report)
    upstream = torch.randn(6, 4)
    got = [torch.autograd.grad(m(x), model.layer.weight, upstream)[0] for m in (model, fast)]
    torch.testing.assert_close(got[1], got[0])


def _clamped(h: Tensor) -> Tensor:
    return h.clamp_(-0.1, 0.1)


def _added(h: Tensor) -> Tensor:
    h += 1
    h[:, 0] = 0.5
    return h


def _of_a_list(h: Tensor) -> Tensor:
    torch._foreach_mul_([h], 0.5)
    return h


@pytest.mark.parametrize("write", [_clamped, _added, _of_a_list])
@pytest.mark.parametrize("inner", [False, True], ids=["of a model", "of a part"])
def test_writing_to_what_comes_from_an_input_leaves_its_gradients(
    write: Callable[[Tensor], Tensor], inner: bool
) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.top = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = x * 2
            with torch.no_grad():
                h = write(h)
            return self.top(h) * h

    class Around(nn.Module):
        """Not captured itself: it draws from Python's random numbers."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.part = nn.Linear(4, 4), Writes()

        def forward(self, x: Tensor) -> Tensor:
            return self.part(self.layer(x)) * (random.random() >= 0)

    torch.manual_seed(0)
    model = Around() if inner else Writes()
    x = torch.randn(6, 4, requires_grad=True)
    fast = recast.optimize(model, example=x)
    assert fast.report.captured == ("partial" if inner else "whole")
    upstream = torch.randn(6, 4)
    got = [torch.autograd.grad(m(x), [x, *m.parameters()], upstream) for m in (model, fast)]
    torch.testing.assert_close(got[1], got[0])


WRITTEN: dict[str, tuple[Callable[[Model, Tensor], Tensor], str]] = {
    "what learns, in a list": (
        lambda _, h: [h, torch._foreach_mul_([h], 2)][0], "writes under torch.no_grad",
    ),
    "parameters, in a list": (
        lambda m, h: [h * 1, torch._foreach_mul_([*m.layer.parameters()], 0.9)][0],
        "writes in place to a parameter",
    ),
    "what learns, as a keyword": (
        lambda _, h: torch.zeros_like(h).lerp_(end=h * 2, weight=0.5), "",
    ),
    "by what learns, in a list": (
        lambda _, h: [z := h.new_zeros(6, 4), torch._foreach_add_([z], [h])][0], "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_writing_to_lists_and_by_keywords(name: str) -> None:
    torch.manual_seed(0)
    write, why = WRITTEN[name]
    model, x = Model(write), torch.randn(6, 4)
    fast, got = recast.optimize(copy.deepcopy(model), example=x), []
    assert why in str(fast.report)
    upstream = torch.randn(6, 4)
    for forward in (model, fast):
        learn = forward.get_parameter("layer.weight")
        out = [forward(x) for _ in range(2)][1]
        got.append((out.detach(), torch.autograd.grad(out, learn, upstream)[0]))
    torch.testing.assert_close(got[1], got[0])


def test_writing_to_what_has_no_history_is_captured() -> None:
    def inside(_: Model, h: Tensor) -> Tensor:
        return torch.zeros_like(h).add_(1) + h.detach().clone().clamp_(0)

    model, x = Model(inside), torch.randn(6, 4)
    assert recast.optimize(model, example=x).report.captured == "whole"


def _halved(h: Tensor) -> Tensor:
    """Writes, asks whether gradients are recorded, and records some; the list keeps it whole."""
    h.mul_(0.5 if torch.is_grad_enabled() else 0.25)
    with torch.enable_grad():
        again = h * float(len(h.tolist()) > 0)
    return again


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, h: Tensor) -> Tensor:
        return _halved(h) * self.scale


class Aside(nn.Module):
    """A part that runs as it is, under no_grad between calls that learn."""

    def __init__(self, part: nn.Module | None, clamps: bool = False) -> None:
        super().__init__()
        self.layer, self.part, self.top = nn.Linear(4, 4), part, nn.Linear(4, 1)
        self.clamps = clamps

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        with torch.no_grad():
            weight = _halved(h) if self.part is None else self.part(h)
            if self.clamps:
                weight.clamp_(min=0)
        return self.top(weight * h)


def _halves(_: nn.Module, given: tuple[Tensor]) -> Tensor:
    return _halved(given[0])


def _hooked(part: nn.Module) -> nn.Module:
    part.register_forward_pre_hook(_halves)
    return part


@pytest.mark.parametrize(
    ("part", "clamps"),
    [
        (None, False),
        (Halved(), False),
        (_hooked(nn.Identity()), False),
        (_hooked(Halved()), True),
    ],
    ids=["a function", "a module", "a hook of a layer", "a module whose result is written to"],
)
def test_what_is_kept_whole_runs_without_gradients_there(
    part: nn.Module | None, clamps: bool
) -> None:
    torch.manual_seed(0)
    model, x = Aside(part, clamps), torch.randn(6, 4)
    fast = recast.optimize(model, example=x)
    assert " no_grad test_no_grad_inside.py" in dump.text(fast.graph, fast)
    upstream, got = torch.randn(6, 1), []
    for forward in (model, fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        out = forward(x)
        learn = [p for n, p in forward.named_parameters() if "scale" not in n]
        got.append((out.detach(), *torch.autograd.grad(out, learn, upstream)))
    for other in got[1:]:
        torch.testing.assert_close(other, got[0])
    recast.diff(model, fast, x).check()


@pytest.mark.parametrize(
    "switched_on",
    [torch.enable_grad, lambda: torch.set_grad_enabled(True), lambda: torch.inference_mode(False)],
    ids=["enable_grad", "set_grad_enabled", "inference_mode"],
)
def test_gradients_that_forward_switches_on(switched_on: Callable[[], Any]) -> None:
    """They are on under ``torch.no_grad`` of the caller too, where no graph records any."""

    class Learns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with switched_on():
                return self.layer(x)

    model, x = Learns(), torch.randn(6, 4)
    fast = recast.optimize(model, example=x)
    assert fast.report.captured == "whole"
    torch.testing.assert_close(fast(x), model(x))
    with torch.no_grad(), pytest.warns(recast.RecastWarning, match="is_grad_enabled"):
        assert fast(x).requires_grad == model(x).requires_grad


def test_what_is_kept_whole_may_switch_them_on() -> None:
    """Under the ``torch.no_grad`` that it is called in: its result has a history all the same."""

    def inside(_: Model, h: Tensor) -> Tensor:
        with torch.enable_grad():
            return h * float(len(h.tolist()) > 0)

    torch.manual_seed(0)
    model, x = Model(inside), torch.randn(6, 4)
    fast = recast.optimize(model, example=x)
    assert fast.report.captured == "whole"
    upstream = torch.randn(6, 4)
    got = [torch.autograd.grad(m(x), model.layer.weight, upstream)[0] for m in (model, fast)]
    torch.testing.assert_close(got[1], got[0])


class SwitchedOff(nn.Module):
    """Leaves gradients off for its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        torch.set_grad_enabled(False)
        return out


class OtherDtype(SwitchedOff):
    """Makes a tensor in another dtype than the same call makes elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        rows = torch.linspace(0, 1, x.shape[0])
        torch.set_default_dtype(torch.float32)
        return self.layer(x) * rows.unsqueeze(1)


@pytest.mark.parametrize(
    ("kind", "why"), [(SwitchedOff, "leaves them so"), (OtherDtype, "default dtype inside")]
)
def test_what_forward_sets_in_torch(kind: type[SwitchedOff], why: str) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(6, 4)
    fast, on = recast.optimize(model, example=x), []
    assert why in str(fast.report)
    for forward in (model, fast):
        with torch.enable_grad():
            out = forward(x)
            on.append((torch.is_grad_enabled(), out.detach()))
    torch.testing.assert_close(on[1], on[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("change", [("unsqueeze_", 1), ("t_",), ("transpose_", 0, 1)])
def test_an_input_that_is_reshaped_in_place_is_so_for_the_caller(change: tuple[Any, ...]) -> None:
    class Reshapes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x * 1)
            with torch.no_grad():
                getattr(x, change[0])(*change[1:])
            return h

    model, x = Reshapes(), torch.randn(6, 4)
    fast = recast.optimize(model, example=x.clone())
    assert fast.report.captured == "whole"
    given = x.clone(), x.clone()
    got = [forward(one) for forward, one in zip((model, fast), given, strict=True)]
    assert given[1].shape == given[0].shape != x.shape
    torch.testing.assert_close(got[1], got[0])


def test_an_input_that_learns_may_be_written_by_out() -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                torch.mul(x, 2, out=x)
            return self.layer(x)

    model, x = Doubles(), torch.randn(6, 4)
    fast = recast.optimize(model, example=x.clone())
    upstream, got = torch.randn(6, 4), []
    for forward in (model, fast):
        one = x.clone().requires_grad_()
        out = forward(one)
        got.append((out, one.detach(), *torch.autograd.grad(out, [one], upstream)))
    torch.testing.assert_close(got[1], got[0])
