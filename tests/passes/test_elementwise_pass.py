"""Chains of functions of single numbers, batch norms of places, products from the left: fuse-mlp,
multiply-windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from passkit import calls, fired, same
from torch import Tensor, nn
from torch.nn import functional as F

import recast
from recast.passes.elementwise import LEAST
from recast.runtime import OPS, device
from recast.runtime.layers.pointwise_conv import left_product

PLACES, COLUMNS = 8, 16
Form = Callable[[Tensor], Tensor]
INF = float("inf")


def batch(rows: int, seed: int) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, PLACES, COLUMNS, generator=g, dtype=torch.float64),)


BATCHES = [batch(6, 0), batch(9, 1)]
FORMS: dict[str, tuple[Form, list[str]]] = {
    "AFN's": (
        lambda x: torch.log(torch.clamp(torch.abs(x), min=1e-7, max=INF)),
        ["abs", "clamp", "log"],
    ),
    "methods": (lambda x: x.abs().clamp(min=1e-3).log(), ["abs", "clamp", "log"]),
    "turned inside": (
        lambda x: torch.log(torch.transpose(x.abs().clamp(0.1, 2), 1, 2)),
        ["abs", "clamp", "log"],
    ),
    "turned behind": (
        lambda x: (torch.log1p(x.abs()) - 2).permute(0, 2, 1),
        ["abs", "log1p", "add"],
    ),
    "sums": (lambda x: torch.log1p(1e-7 + torch.abs(x) - 0.5e-7), ["abs", "add", "add", "log1p"]),
    "products": (lambda x: torch.exp(0.5 * x * 0.25), ["mul", "mul", "exp"]),
    "relu of expm1": (lambda x: F.relu(torch.expm1(x)), ["expm1", "relu"]),
    "an upper bound": (lambda x: torch.log1p(x.abs().clamp(max=0.5)), ["abs", "clamp", "log1p"]),
}
KEPT: dict[str, Form] = {
    "cheap alone": lambda x: (x.abs() + 1).clamp(min=2),
    "one alone": torch.exp,
    "few numbers": lambda x: (x.sum(-1).exp() + 1).log(),
    "a tensor added": lambda x: torch.exp(x.abs() + x),
    "read twice": lambda x: (lambda y: torch.log(y) + y)(torch.abs(x)),
    "what takes long to compute anew": lambda x: torch.tanh(x.clamp(max=0.5)),
    "an input that torch does not keep": lambda x: torch.log1p(torch.exp(x)),
    "quotients": lambda x: torch.exp(x / 3),
    "scaled sums": lambda x: torch.log(torch.add(x.abs(), 1, alpha=2)),
}


class Net(nn.Module):
    """A Linear, the functions, and a Linear."""

    def __init__(self, form: Form, turned: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(COLUMNS, COLUMNS)
        self.last = nn.Linear(PLACES if turned else COLUMNS, 3)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        x = self.form(self.first(x))
        x = x * x  # a chain of layers would take what can begin one
        out: Tensor = self.last(x if x.dim() == 3 else x.unsqueeze(-1).expand(-1, -1, COLUMNS))
        return out


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_one_call(form: str) -> None:
    torch.manual_seed(2)
    function, steps = FORMS[form]
    fast = same(Net(function, "turned" in form), BATCHES, steps=form == "AFN's")
    assert fired(fast)["fuse-mlp"] == 1
    assert [call.args[1] for call in calls(fast, "elementwise")] == [steps]


@pytest.mark.parametrize("form", KEPT)
def test_what_stays(form: str) -> None:
    torch.manual_seed(2)
    assert not calls(same(Net(KEPT[form]), BATCHES), "elementwise")
    assert LEAST > PLACES  # of "few numbers"


def test_a_turn_between_keeps_numbers_and_strides() -> None:
    function, _ = FORMS["turned inside"]
    model = Net(function, True).double()
    fast: Any = recast.optimize(model, example=BATCHES[0])
    seen = []
    for net in (model, fast):
        net.last.register_forward_pre_hook(lambda m, given: seen.append(given[0]))
        net(*BATCHES[0])
    assert len({t.stride() for t in seen}) == 1


# ---------------------------------------------------------------- batch norms of places


class Places(nn.Module):
    """A norm of (N, C, L), which begins a chain or is one, and a Linear."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.turned = nn.Sequential(*layers)
        self.last = nn.Linear(PLACES, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.turned(x.transpose(1, 2).exp())
        out: Tensor = self.last(x * x)
        return out


NORMS: dict[str, dict[str, Any]] = {
    "affine": {},
    "plain": {"affine": False},
    "cumulative": {"momentum": None},
    "no statistics": {"track_running_stats": False},
}


@pytest.mark.parametrize("how", NORMS)
def test_norms_of_places(how: str) -> None:
    torch.manual_seed(3)
    fast = same(Places(nn.BatchNorm1d(COLUMNS, **NORMS[how])), BATCHES, steps=how == "affine")
    assert [c.args[3] for c in calls(fast, "mlp")] == [["batch_norm"]]
    more = nn.BatchNorm1d(COLUMNS, **NORMS[how]), nn.ReLU(), nn.Dropout(0.4)
    fast = same(Places(*more), BATCHES)
    assert [c.args[3] for c in calls(fast, "mlp")] == [["batch_norm", "relu", "dropout"]]


def test_norms_of_rows_alone_stay() -> None:
    class Rows(Net):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.norm(x[:, 0]).square())
            return out

    model = Rows(torch.exp)
    model.norm = nn.BatchNorm1d(COLUMNS)
    assert not calls(same(model, BATCHES), "mlp")


# ---------------------------------------------------------------- products from the left


class Left(nn.Module):
    """AFN's: ``w @ x`` for each sample, functions of single numbers, and a copy."""

    def __init__(self, copied: bool, dropped: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, PLACES))
        self.copied, self.p = copied, 0.5 if dropped else 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.expm1(torch.matmul(self.weight, x))
        x = F.relu(F.dropout(x, self.p, self.training) if self.p else x)
        return x.contiguous().view(-1, 4 * COLUMNS) if self.copied else x + 1


@pytest.mark.parametrize(("copied", "dropped"), [(True, False), (False, False), (True, True)])
def test_products_from_the_left(copied: bool, dropped: bool) -> None:
    """Not where something could see how the result lies."""
    torch.manual_seed(4)
    fast = same(Left(copied, dropped), BATCHES, steps=copied)
    wanted = copied and not dropped
    assert fired(fast)["multiply-windows"] == wanted
    assert any(n.target is left_product for n in fast.graph.nodes) is wanted


@pytest.mark.parametrize(("channels", "length"), [(8, 10), (39, 16)])
def test_few_places_and_many_channels_stay(channels: int, length: int) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, channels))

        def forward(self, x: Tensor) -> Tensor:
            return torch.expm1(torch.matmul(self.weight, x)).contiguous()

    batches = [(torch.randn(n, channels, length, dtype=torch.float64),) for n in (3, 5)]
    assert "multiply-windows" not in fired(same(Product(), batches))


@pytest.mark.parametrize("shape", [(5, PLACES, COLUMNS), (1, PLACES, 3), (40, PLACES, 1)])
@pytest.mark.parametrize("turned", [False, True])
def test_numbers_of_products_from_the_left(shape: tuple[int, ...], turned: bool) -> None:
    torch.manual_seed(5)
    x = torch.randn(shape[0], *shape[:0:-1]).transpose(1, 2) if turned else torch.randn(shape)
    weight = torch.randn(4, PLACES)
    up = torch.randn(shape[0], 4, shape[2])
    ours, truth = (
        [t.to(dtype).requires_grad_() for t in (weight, x)]
        for dtype in (torch.float32, torch.float64)
    )
    out, wanted = left_product(*ours), torch.matmul(*truth)
    assert out.is_contiguous()
    got = torch.autograd.grad(out, ours, up)
    expected = torch.autograd.grad(wanted, truth, up.double())
    for a, e in zip((out, *got), (wanted, *expected), strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-5, atol=1e-5)


def test_bad_shapes_raise_as_torch_does() -> None:
    with pytest.raises(RuntimeError, match="size"):
        left_product(torch.randn(3, 5), torch.randn(2, 4, 3))


SPECIAL = (0.0, -0.0, INF, -INF, float("nan"), 1e-40, -1e-7, 0.5, 1.0, 2.0, 100.0, -200.0)
AT_EDGES: dict[str, tuple[list[str], list[float]]] = {
    "bounded log": (["abs", "clamp", "log"], [1e-7, INF]),
    "at both bounds": (["clamp", "log"], [0.5, 1.0]),
    "crossed bounds": (["clamp", "log"], [1.0, 0.5]),
    "logs": (["log", "mul"], [-1.0]),
    "log1p": (["abs", "log1p"], []),
    "relu of expm1": (["expm1", "relu"], []),
    "relu of tanh": (["mul", "tanh", "relu"], [2.0]),
    "relu of sigmoid": (["sigmoid", "relu"], []),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", AT_EDGES)
def test_values_outside_of_domains_and_at_bounds(name: str, create_graph: bool) -> None:
    """Infinities, NaN, zeros, bounds: torch's results and gradients, also differentiated ones."""
    op, given = OPS["elementwise"], AT_EDGES[name]
    up = torch.randn(2, len(SPECIAL), generator=torch.Generator().manual_seed(6))
    found = []
    for function in (op.target, op.reference):
        x = torch.tensor([SPECIAL, SPECIAL[::-1]], requires_grad=True)
        with device.use("fused"):
            out = function(x, *given)
            (grad,) = torch.autograd.grad(out, x, up, create_graph=create_graph)
        found.append((out.detach(), grad.detach()))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
