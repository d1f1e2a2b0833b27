"""A diff sees what a call does besides computing numbers, and what no call computes twice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recast

IDS, DENSE = torch.randint(50, (16,)), torch.randn(16, 8)


class Net(nn.Module):
    """``change`` says what its forward does in another way, or besides."""

    total: Tensor

    def __init__(self, change: Callable[[Net, Tensor], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.hidden, self.out = nn.Embedding(50, 8), nn.Linear(8, 4), nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros(()))
        self.change = change

    def score(self, ids: Tensor, dense: Tensor) -> Tensor:
        hidden: Tensor = torch.relu(self.hidden(self.emb(ids) * dense))
        return self.out(hidden)

    def forward(self, ids: Tensor, dense: Tensor) -> Any:
        found = self.score(ids, dense)
        return found if self.change is None else self.change(self, found)


class Clipped(Net):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        return self.score(ids, dense.clamp_(-1, 1) if self.inplace else dense.clamp(-1, 1))


class Folded(Net):
    """Keeps the weight of its first call in eval mode."""

    weight: Tensor | None = None

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        if self.training or torch.is_grad_enabled():
            return self.score(ids, dense)
        self.weight = self.out.weight.detach().clone() if self.weight is None else self.weight
        hidden = torch.relu(self.hidden(self.emb(ids) * dense))
        return F.linear(hidden, self.weight, self.out.bias)


def _counts(net: Net, found: Tensor) -> Tensor:
    net.get_buffer("calls").add_(1)
    return found


def _counts_in_training(net: Net, found: Tensor) -> Tensor:
    return _counts(net, found) if net.training else found


def _keeps(net: Net, found: Tensor) -> Tensor:
    net.mean = found.mean()
    return found


def _keeps_another(net: Net, found: Tensor) -> Tensor:
    net.mean = found.mean() * 1.01
    return found


def _draws(net: Net, found: Tensor) -> Tensor:
    torch.rand(3)
    return found


PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = {
    "containers": (
        lambda: Net(lambda _, y: [y, {"a": (y,)}]),
        lambda: Net(lambda _, y: (y, {"a": [y]})),
        r"the output is tuple\(Tensor, dict\(a: list\(Tensor\)\)\) instead of list",
    ),
    "detached": (
        lambda: Net(lambda _, y: {"a": y, "b": 2 * y}),
        lambda: Net(lambda _, y: {"a": y, "b": 2 * y.detach()}),
        "requires_grad is False instead of True",
    ),
    "random numbers": (Net, lambda: Net(_draws), "another number of random numbers"),
    "inputs": (lambda: Clipped(True), lambda: Clipped(False), "does not write it"),
    "inputs too": (lambda: Clipped(False), lambda: Clipped(True), "forward writes to it"),
    "an attribute": (lambda: Net(_keeps), Net, "does not write it"),
    "its value": (lambda: Net(_keeps), lambda: Net(_keeps_another), r"mean .*is off by"),
    "a buffer in eval mode": (
        lambda: Net(_counts), lambda: Net(_counts_in_training), r"calls .*is off by",
    ),
    "no_grad": (
        Net, lambda: Net(lambda _, y: y if torch.is_grad_enabled() else 2 * y),
        "eval mode without gradients",
    ),
    "an old weight": (Net, Folded, "without gradients, new parameters"),
    "complex": (
        lambda: Net(lambda _, y: torch.fft.rfft(y, dim=0)),
        lambda: Net(lambda _, y: torch.fft.rfft(y, dim=0) * 1.001),
        "is off by",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PAIRS)
def test_what_differs_besides_numbers(what: str) -> None:
    plain, fast, words = PAIRS[what]
    asked: Any = {"loss": lambda output: output["a"].sum()} if what == "detached" else {}
    with pytest.raises(recast.DiffError, match=words):
        recast.diff(plain(), fast(), (IDS, DENSE), steps=1, **asked).check()
    recast.diff(plain(), plain(), (IDS, DENSE), steps=1, **asked).check()


def test_other_strides_are_told() -> None:
    """The numbers are equal, but ``view`` may refuse the output."""
    plain = Net(lambda _, y: y.expand(-1, 3).contiguous())
    found = recast.diff(plain, Net(lambda _, y: y.expand(-1, 3)), (IDS, DENSE), steps=1)
    assert found.ok
    assert [n for n in found.notes if "not contiguous" in n]
    assert not recast.diff(plain, plain, (IDS, DENSE), steps=1).notes


def _counts_as_attribute(net: Net, found: Tensor) -> Tensor:
    net.total = net.total + found.mean()
    return found


@pytest.mark.parametrize("change", [_keeps, _counts_as_attribute])
def test_attributes_of_what_optimize_returned_are_seen(
    change: Callable[[Net, Tensor], Any],
) -> None:
    """Those of the model inside it; one that depends on the calls before is not compared."""
    net = Net(change)
    net.total = torch.zeros(())
    fast = recast.optimize(net, example=(IDS, DENSE))
    report = recast.diff(net, fast, (IDS, DENSE), steps=1).check()
    assert any(row.tensor.endswith(", mean") for row in report.rows) is (change is _keeps)


class Centred(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 1)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, dense: Tensor) -> Tensor:
        if self.training:
            self.mean = self.mean * 0.9 + dense.mean(0) * 0.1
        centred: Tensor = self.out(dense - self.mean)
        return centred


def test_a_buffer_that_forward_replaces_is_put_back() -> None:
    net = Centred()
    before = net.mean
    recast.diff(net, recast.optimize(net, example=(DENSE,)), (DENSE,), steps=1).check()
    assert net.mean is before and not before.any()


_TICKS = itertools.count()


def _clock(_: Net, found: Tensor) -> Tensor:
    return found + 0.01 * next(_TICKS)


def test_a_model_that_is_no_function_is_not_proved() -> None:
    """Else its own error would widen the limits for any other."""
    with pytest.raises(recast.DiffError, match="differs from itself"):
        recast.diff(Net(_clock), Net(_clock), (IDS, DENSE)).check()


def _any_generator(_: Net, found: Tensor) -> Tensor:
    return found * random.random() + np.random.rand() + torch.rand(())


def test_draws_of_python_and_numpy_are_repeated_and_leave_no_trace() -> None:
    random.seed(3)
    np.random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    assert recast.diff(Net(_any_generator), Net(_any_generator), (IDS, DENSE), steps=1).ok
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]


def test_numbers_that_python_made_are_rounded_too() -> None:
    plain = Net(lambda _, y: (y, float(y.detach().double().sum()), y.detach().numpy().copy()))
    near = Net(lambda _, y: (y, float(y.detach().double().sum()) * (1 + 1e-15), y.detach().numpy()))
    far = Net(lambda _, y: (y, float(y.detach().double().sum()) * 1.001, y.detach().numpy()))
    assert recast.diff(plain, near, (IDS, DENSE), steps=0).ok
    assert not recast.diff(plain, far, (IDS, DENSE), steps=0).ok


def test_labels_in_float32_meet_the_judge() -> None:
    """Of a loss that torch computes in one dtype only."""
    labels = (torch.rand(16, 1) < 0.5).float()
    net = Net(lambda _, y: torch.sigmoid(y))
    report = recast.diff(
        net, net, (IDS, DENSE), steps=1, loss=lambda out: F.binary_cross_entropy(out, labels)
    )
    assert report.ok and report.judge == "float64"


def test_what_proves_little_is_said() -> None:
    dead = Net(lambda _, y: torch.relu(y - 100))
    notes = recast.diff(dead, dead, (IDS, DENSE), steps=0).notes
    assert notes == [
        f"in {mode} mode gradients of the plain model are 0 or NaN, which proves little"
        for mode in ("eval", "train")
    ]
    nan = Net(lambda _, y: y * float("nan"))
    notes = recast.diff(nan, nan, (IDS, DENSE), steps=0, training=False).notes
    assert notes == [
        "in eval mode gradients of the plain model are 0 or NaN, which proves little",
        "in eval mode no output of the plain model is finite, which proves little",
    ]
