"""join-linears: layers with one input, alone and at the head of chains; what prevents it."""

from __future__ import annotations

import torch
from passkit import calls, fired, journal, misses, optimized, same
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 24


def batch(rows: int, seed: int) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, WIDTH, generator=g, dtype=torch.float64),)


BATCHES = [batch(6, 0), batch(9, 1)]


def tower(*ends: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU(inplace=True), nn.Dropout(0.3), *ends)


class Mixed(nn.Module):
    """Experts that end in a dropout, one that goes on, a gate and a bare weight: all of x."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList((tower(), tower(), tower(nn.Linear(5, 5), nn.Tanh())))
        self.gate = nn.Linear(WIDTH, 3, bias=False)
        self.wide = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hs = torch.stack([expert(x) for expert in self.experts], 1)
        mixed = (self.gate(x).softmax(1).unsqueeze(2) * hs).sum(1)
        return F.dropout(mixed, 0.2, self.training) + F.linear(x, self.wide)


def test_experts_gates_and_weights_are_one_product() -> None:
    torch.manual_seed(2)
    fast = same(Mixed(), BATCHES)
    assert fired(fast)["join-linears"] == 1
    (call,) = calls(fast, "linears")
    assert len(call.args[1]) == 10
    steps = [call.args[3] for call in calls(fast, "mlp")]
    assert steps == [["relu", "dropout"]] * 2 + [["relu", "dropout", "linear", "tanh"]]


def test_many_rows_take_the_one_product() -> None:
    torch.manual_seed(2)
    fast = same(Mixed(), [batch(300, 0), batch(513, 1)])
    assert fired(fast)["join-linears"] == 1


class Normed(nn.Module):
    """Batch norms behind the joined layers, and dropout in each branch, in the order of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 4 + k), nn.BatchNorm1d(4 + k), nn.ReLU(), nn.Dropout(0.4),
                nn.Linear(4 + k, 1),
            )
            for k in range(3)
        )  # fmt: skip

    def forward(self, x: Tensor) -> list[Tensor]:
        return [branch(x) for branch in self.branches]


def test_batch_norms_keep_their_statistics() -> None:
    torch.manual_seed(3)
    fast = same(Normed(), BATCHES)
    assert fired(fast)["join-linears"] == 1


class Tied(nn.Module):
    """One layer called twice on the same value, another tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.a(x)) * self.b(x) + self.a(torch.tanh(x))


def test_tied_weights_get_the_sum_of_their_gradients() -> None:
    fast = same(Tied(), BATCHES)
    assert fired(fast)["join-linears"] == 1


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)
        self.a.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.b(x)


def test_a_frozen_layer_gets_no_gradient() -> None:
    same(Frozen(), BATCHES, steps=False)
    same(Frozen(), [batch(300, 0), batch(513, 1)], steps=False)


class Written(nn.Module):
    """A view of the input is written in place between the two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = (x * 2).detach()
        first = self.a(h).detach()
        h[:, :2].mul_(3)
        return first + self.b(h)


def test_what_writes_between_them_keeps_them_apart() -> None:
    model = Written().double()
    fast = optimized(model, BATCHES)
    (x,) = BATCHES[0]
    torch.testing.assert_close(fast(x), model(x))
    assert not calls(fast, "linears")
    assert any("writes in place" in why for why in misses(fast, "join-linears"))


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_a_layer_of_its_own_kind_is_read_to_its_product() -> None:
    model = Frozen()
    model.a = Scaled(WIDTH, 3)
    fast = same(model, BATCHES)
    assert len(calls(fast, "linears")) == 1


def test_the_report_says_what_it_is_worth() -> None:
    fast = optimized(Mixed().double(), BATCHES)
    (entry,) = (e for e in journal(fast).fired if e.rule == "join-linears")
    told = "5 layers of one input, to 5, 5, 5, 3, 5, as one product in batches of 256 rows or more"
    assert entry.what == told
    assert entry.saves == "4 launches, 4 sums of the gradient of its input a step"


class Wide(nn.Module):
    """Results wide beside the input: at run time they would be computed one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.b(x)


def test_what_would_run_one_by_one_is_not_told_as_one_product() -> None:
    fast = same(Wide(), BATCHES, steps=False)
    assert not calls(fast, "linears")
    (why,) = misses(fast, "join-linears")
    assert f"2 layers read the {WIDTH} numbers of x and give {6 * WIDTH}" in why
    assert why.endswith(
        ": one product would read the input once, but has to write its results side by side, which"
        " costs more where they are so wide"
    )
