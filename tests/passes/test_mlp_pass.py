"""fuse-mlp: every order of steps, modules and functions, what cuts a chain, each named Miss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from passkit import calls, fired, journal, misses, optimized, same
from torch import nn
from torch.nn import functional as F


def batch(rows: int, seed: int, *more: int) -> tuple[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, *more, 6, generator=g, dtype=torch.float64),)


FLAT = [batch(6, 0), batch(9, 1)]
CUBE = [batch(6, 0, 4), batch(9, 1, 4)]
MODULES: dict[str, Callable[[], nn.Module]] = {
    "L": lambda: nn.Linear(6, 6),
    "l": lambda: nn.Linear(6, 6, bias=False),
    "B": lambda: nn.BatchNorm1d(6),
    "R": lambda: nn.ReLU(),
    "r": lambda: nn.ReLU(inplace=True),
    "S": lambda: nn.Sigmoid(),
    "T": lambda: nn.Tanh(),
    "K": lambda: nn.LeakyReLU(0.2),
    "P": lambda: nn.PReLU(),
    "p": lambda: nn.PReLU(6),
    "E": lambda: nn.ELU(0.7),
    "G": lambda: nn.GELU(),
    "U": lambda: nn.SiLU(),
    "D": lambda: nn.Dropout(0.3),
    "d": lambda: nn.Dropout(0.3, inplace=True),
    "I": lambda: nn.Identity(),
}
ORDERS = [
    "LRD", "LBRD", "LR", "DLRD", "LBR", "DLR", "DLBRD", "LBD", "LBPD", "DL", "LD", "LBKD", "LB",
    "LRDLRDL", "LBRDLBRDL", "LBRLBRLS", "lRlRl", "LrLrL", "LdLdS", "DLDLRL", "RL", "BLRLS",
    "LTLT", "LpL", "LEL", "LGL", "LUL", "LKLP", "LIRIL", "LRBDLRBDL",
]  # fmt: skip


@pytest.mark.parametrize("steps", ORDERS)
def test_every_order_of_steps_is_one_call(steps: str) -> None:
    torch.manual_seed(4)
    fast = same(nn.Sequential(*(MODULES[k]() for k in steps)), FLAT)
    assert fired(fast) == {"fuse-mlp": 1}
    (call,) = calls(fast, "mlp")
    assert len(call.args[3]) == len(steps.replace("I", ""))


class _Added(nn.Module):
    """Adds to what its layers give, in place, where another view of it shows that."""

    def __init__(self, steps: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(MODULES[k]() for k in steps))

    def forward(self, x: torch.Tensor, shown: bool) -> tuple[torch.Tensor, ...]:
        out = self.layers(x)
        seen = (out[..., :2],) if shown else ()
        out += x
        return out, *seen


@pytest.mark.parametrize("steps", ["LRL", "LKLD", "LRlD", "LBD"])
@pytest.mark.parametrize("rows", [5, 600])
@pytest.mark.parametrize("shown", [True, False])
def test_a_result_that_is_written_to(steps: str, rows: int, shown: bool) -> None:
    more = () if "B" in steps else (4,)
    batches = [(*batch(n, seed, *more), shown) for seed, n in enumerate((rows, rows + 3))]
    fast = same(_Added(steps), batches)
    assert fired(fast)["fuse-mlp"] == 1


@pytest.mark.parametrize("steps", ["LRD", "LRDLS", "lTl", "LKL"])
def test_three_dimensions(steps: str) -> None:
    torch.manual_seed(4)
    fast = same(nn.Sequential(*(MODULES[k]() for k in steps)), CUBE)
    assert fired(fast) == {"fuse-mlp": 1}


def test_batch_norm_of_the_middle_dimension() -> None:
    fast = same(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(4), nn.ReLU()), CUBE)
    assert fired(fast) == {"fuse-mlp": 1}


@pytest.mark.parametrize(
    "options", [{"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.1}]
)
def test_options_of_batch_norm(options: dict[str, Any]) -> None:
    fast = same(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, **options), nn.ReLU()), FLAT)
    assert fired(fast) == {"fuse-mlp": 1}


class Looped(nn.Module):
    """ModuleLists run in a loop, one Dropout shared by all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.bn = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(3))
        self.acts = nn.ModuleList(nn.ReLU(inplace=True) for _ in range(3))
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear, bn, act in zip(self.linears, self.bn, self.acts, strict=True):
            x = self.dropout(act(bn(linear(x))))
        return x


class Functional(nn.Module):
    """Functional activations and dropout that follow the training flag."""

    def __init__(self, p: float = 0.4) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(6, 6) for _ in range(3))
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.relu(self.one(x)), p=self.p, training=self.training)
        x = F.dropout(F.leaky_relu(self.two(x), 0.1), self.p, self.training)
        return torch.sigmoid(self.three(x))


class Bare(nn.Module):
    """Parameters and functions only."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 6))
        self.b = nn.Parameter(torch.randn(5))
        self.v = nn.Parameter(torch.randn(3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.w, self.b).relu(), self.v).tanh()


class Towers(nn.Module):
    """Two towers on one input, whose last layers are called after both."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Dropout(0.3))
        self.b = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Dropout(0.3))
        self.end_a, self.end_b = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.a(x), self.b(x)
        return torch.sigmoid(self.end_a(a)) * torch.sigmoid(self.end_b(b))


class Recurrent(nn.Module):
    """One Linear and one BatchNorm called three times in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bn = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.bn(self.linear(x)))
        return x


class Tied(nn.Module):
    """The last layer multiplies with the table of the first lookup."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.mlp = nn.Sequential(nn.Linear(6, 6), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x[:, 0] * 0).long() + 3
        return F.linear(self.mlp(self.table(ids) * x), self.table.weight)


class Centred(nn.Linear):
    """Its weights are centred at each call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight - self.weight.mean(1, keepdim=True), self.bias)


class Shared(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def _subclasses() -> nn.Module:
    return nn.Sequential(Centred(6, 6), nn.ReLU(), Shared(6, 6), nn.ReLU())


CHAINS = [(Looped, 1), (Functional, 1), (Bare, 1), (Towers, 2), (Recurrent, 1), (Tied, 1)]
CHAINS += [(_subclasses, 1)]


@pytest.mark.parametrize(("make", "chains"), CHAINS)
def test_other_ways_to_write_a_chain(make: Callable[[], nn.Module], chains: int) -> None:
    torch.manual_seed(5)
    fast = same(make(), FLAT)
    assert fired(fast)["fuse-mlp"] == len(calls(fast, "mlp")) == chains


def test_flags_are_read_at_each_call() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 6)).double()
    fast = optimized(model, FLAT)
    fast.train()
    (x,) = FLAT[0]
    fast.get_submodule("2").p = 0.0
    torch.testing.assert_close(fast(x), model.eval()(x))
    fast.get_submodule("2").p = 1.0
    torch.testing.assert_close(fast(x), model[3](torch.zeros(6, 6).double()))
    fast.get_submodule("2").eval()
    torch.testing.assert_close(fast(x), model(x))
    assert model[2].p == 0.3


def test_batch_norm_alone_in_eval_while_dropout_trains() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3)).double()
    fast = optimized(model, FLAT)
    for m in (model, fast):
        m.train()
        m.get_submodule("1").eval()
    torch.manual_seed(0)
    want = model(*FLAT[0])
    torch.manual_seed(0)
    torch.testing.assert_close(fast(*FLAT[0]), want)


def test_a_value_used_elsewhere_cuts_the_chain() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.relu(self.a(x))
            return torch.relu(self.c(torch.relu(self.b(h)))) + h

    fast = same(Shared(), FLAT)
    assert [call.args[3] for call in calls(fast, "mlp")] == [
        ["linear", "relu"],
        ["linear", "relu", "linear", "relu"],
    ]


def test_in_place_on_a_value_of_others_stays_outside() -> None:
    class Inplace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.3)
            self.linear = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + 0
            z = y.view(-1, 6)
            return torch.tanh(self.linear(self.act(y))) + z

    fast = same(Inplace(), FLAT)
    assert [call.args[3] for call in calls(fast, "mlp")] == [["linear", "tanh"]]


@pytest.mark.parametrize(
    "act", [torch.relu_, partial(F.silu, inplace=True), partial(F.leaky_relu, inplace=True)]
)
def test_a_function_that_writes_in_place_joins_the_chain(
    act: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    class Inplace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.b(act(self.a(x)))
            return out

    assert len(calls(same(Inplace(), FLAT, steps=False), "mlp")) == 1


def test_max_layers_cuts_long_chains() -> None:
    model = nn.Sequential(*(m for _ in range(5) for m in (nn.Linear(6, 6), nn.ReLU())))
    fast = same(model, FLAT, passes="normalize,fuse-mlp{max-layers=2}", steps=False)
    assert [len(call.args[3]) for call in calls(fast, "mlp")] == [4, 4, 2]


def test_one_linear_alone_stays() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) * x

    fast = same(Alone(), FLAT)
    assert not calls(fast, "mlp") and not misses(fast, "fuse-mlp")


def _replaced() -> nn.Module:
    linear = nn.Linear(6, 6)
    linear.forward = MethodType(  # type: ignore[method-assign]
        lambda self, x: F.linear(x, self.weight) * 2, linear
    )
    return _chain(linear)


def _chain(linear: nn.Module) -> nn.Module:
    return nn.Sequential(linear, nn.ReLU())


def _hooked() -> nn.Module:
    linear = nn.Linear(6, 6)
    linear.register_forward_hook(lambda m, i, o: o + 1)
    return _chain(linear)


def _masked() -> nn.Module:
    """What pruning does: a hook that computes the weight before each call."""
    linear = nn.Linear(6, 6)
    linear.register_forward_pre_hook(lambda m, inputs: (inputs[0] * 0.5,))
    return _chain(linear)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return torch.relu(h) + h


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hook": (_hooked, "hooks"),
    "hook before": (_masked, "hooks"),
    "parametrization": (
        lambda: _chain(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))), "parametrization",
    ),
    "forward of its own": (_replaced, "Linear overrides the forward of nn.Linear"),
    "used twice": (Twice, "uses its value too"),
    "another module follows": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), "nn.LayerNorm after it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", REFUSED)
def test_every_miss_says_why_and_keeps_the_numbers(form: str) -> None:
    make, why = REFUSED[form]
    torch.manual_seed(3)
    fast = same(make(), FLAT, steps=False)
    assert not calls(fast, "mlp")
    assert any(why in text for text in misses(fast, "fuse-mlp")), misses(fast, "fuse-mlp")


def test_the_report_says_what_it_is_worth() -> None:
    fast = optimized(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)).double(), FLAT)
    (entry,) = (e for e in journal(fast).fired if e.rule == "fuse-mlp")
    assert entry.what == "2 linear, 1 relu in one call"
    assert entry.saves == "2 launches; small batches train on torch's own layers"


class _Written(nn.Module):
    """Activations and dropouts that write in place to what dropout, or another, hands on."""

    def __init__(self, form: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.form, self.drop = form, nn.Dropout(0.3)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.form(self, self.first(x)))


WRITTEN: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "after dropout": lambda m, h: F.relu(m.drop(h), inplace=True),
    "a method": lambda m, h: m.drop(h).relu_(),
    "two dropouts": lambda m, h: torch.sigmoid_(m.drop(m.drop(h))),
    "dropout itself": lambda m, h: F.relu(F.dropout(h, 0.3, m.training, True), True),
    "another function": lambda m, h: F.leaky_relu(F.dropout(h, 0.3, m.training), 0.1, True),
}


@pytest.mark.parametrize("form", WRITTEN.values(), ids=list(WRITTEN))
def test_in_place_steps(form: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(5)
    fast = same(_Written(form), FLAT)
    assert fired(fast)["fuse-mlp"] == 1
