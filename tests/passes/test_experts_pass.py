"""fuse-gated-sums: every form of a mixture of experts, gates that share experts, each Miss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from passkit import calls, fired, journal, misses, optimized, same
from torch import Tensor, nn
from torch.nn import functional as F

from recast.runtime import device

GATED = torch.ops.recast.gated_sums.default
WIDTH, EXPERTS, TASKS, HIDDEN = 6, 3, 2, 5


def batch(rows: int, seed: int) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, WIDTH, generator=g, dtype=torch.float64),)


BATCHES = [batch(6, 0), batch(9, 1)]
Mix = Callable[[list[Tensor], Tensor], Tensor]  # experts (B, D), logits (B, E) -> (B, D)


def matmul_of_stack(hs: list[Tensor], logits: Tensor) -> Tensor:
    return torch.matmul(logits.softmax(1).unsqueeze(1), torch.stack(hs, 1)).squeeze(1)


def bmm_of_cat(hs: list[Tensor], logits: Tensor) -> Tensor:
    stacked = torch.cat([h[:, None] for h in hs], dim=1)
    return torch.bmm(F.softmax(logits, dim=-1)[:, None, :], stacked).view(-1, hs[0].shape[1])


def turned_product(hs: list[Tensor], logits: Tensor) -> Tensor:
    weights = torch.softmax(logits, 1).unsqueeze(-1)
    return (torch.stack(hs, 1).transpose(1, 2) @ weights).squeeze(2)


def product_of_last(hs: list[Tensor], logits: Tensor) -> Tensor:
    weights = torch.softmax(logits, 1).unsqueeze(2)
    return torch.bmm(torch.stack(hs, dim=-1), weights).squeeze(-1)


def sum_of_product(hs: list[Tensor], logits: Tensor) -> Tensor:
    return torch.sum(torch.mul(logits.softmax(-1).unsqueeze(-1), torch.stack(hs, 1)), dim=1)


def sum_of_expanded(hs: list[Tensor], logits: Tensor) -> Tensor:
    stacked = torch.stack(hs, dim=1)
    return (stacked * logits.softmax(1).unsqueeze(2).expand_as(stacked)).sum(1)


def sum_over_last(hs: list[Tensor], logits: Tensor) -> Tensor:
    return (torch.stack(hs, 2) * logits.softmax(1).unsqueeze(1)).sum(2)


def einsum(hs: list[Tensor], logits: Tensor) -> Tensor:
    return torch.einsum("be,bed->bd", logits.softmax(1), torch.stack(hs, 1))


def einsum_turned(hs: list[Tensor], logits: Tensor) -> Tensor:
    return torch.einsum("ijk, ik -> ij", torch.stack(hs, 2), logits.softmax(1))


def kept_sizes(hs: list[Tensor], logits: Tensor) -> Tensor:
    kept = (torch.stack(hs, 1) * logits.softmax(1).unsqueeze(2)).sum(1, keepdim=True)
    return torch.cat([kept, kept * 2], 1).sum(1)


def given_weights(hs: list[Tensor], logits: Tensor) -> Tensor:
    return (torch.stack(hs, 1) * torch.sigmoid(logits).unsqueeze(2)).sum(1)


def weights_of_three(hs: list[Tensor], logits: Tensor) -> Tensor:
    return (torch.sigmoid(logits.unsqueeze(2)) * torch.stack(hs, 1)).sum(1)


def softmax_of_three(hs: list[Tensor], logits: Tensor) -> Tensor:
    return (torch.stack(hs, 1) * F.softmax(logits.unsqueeze(2) * 2, dim=1)).sum(1)


def row_of_three(hs: list[Tensor], logits: Tensor) -> Tensor:
    return ((logits.unsqueeze(1) * 2).softmax(-1) @ torch.stack(hs, 1)).squeeze(1)


def column_of_three(hs: list[Tensor], logits: Tensor) -> Tensor:
    return torch.bmm(torch.stack(hs, -1), torch.softmax(logits.unsqueeze(2) * 2, 1)).squeeze(2)


def added(hs: list[Tensor], logits: Tensor) -> Tensor:
    w = logits.softmax(1)
    return sum(w[:, k : k + 1] * h for k, h in enumerate(hs))  # type: ignore[return-value]


def added_of_columns(hs: list[Tensor], logits: Tensor) -> Tensor:
    w = torch.softmax(logits, -1)
    total = hs[2] * w[:, -1].unsqueeze(1)
    total = total + w[:, 0, None] * hs[0]
    return total + w.select(1, 1).view(-1, 1) * hs[1]


def added_of_a_stack(hs: list[Tensor], logits: Tensor) -> Tensor:
    w, stacked = logits.softmax(1), torch.stack(hs, 1)
    return sum(w[..., k : k + 1] * stacked[:, k] for k in range(EXPERTS))  # type: ignore[return-value]


def added_of_parts(hs: list[Tensor], logits: Tensor) -> Tensor:
    parts = logits.sigmoid().chunk(EXPERTS, dim=1)
    return torch.stack([p * h for p, h in zip(parts, hs, strict=True)]).sum(0)


def added_of_split(hs: list[Tensor], logits: Tensor) -> Tensor:
    parts = logits.unsqueeze(-1).softmax(1).unbind(1)
    return sum(h * p for p, h in zip(parts, hs, strict=True))  # type: ignore[return-value]


FORMS: list[tuple[Mix, bool]] = [
    (matmul_of_stack, True), (bmm_of_cat, True), (turned_product, True), (product_of_last, True),
    (sum_of_product, True), (sum_of_expanded, True), (sum_over_last, True), (einsum, True),
    (einsum_turned, True), (kept_sizes, True), (given_weights, False),
    (weights_of_three, False), (softmax_of_three, True), (row_of_three, True),
    (column_of_three, True), (added, True), (added_of_columns, True), (added_of_a_stack, True),
    (added_of_parts, False), (added_of_split, True),
]  # fmt: skip


class Mixture(nn.Module):
    """Experts that all tasks share, a gate and a tower a task."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU()) for _ in range(EXPERTS)
        )
        self.gates = nn.ModuleList(nn.Linear(WIDTH, EXPERTS, bias=False) for _ in range(TASKS))
        self.towers = nn.ModuleList(nn.Linear(HIDDEN, 1) for _ in range(TASKS))
        self.mix = mix

    def forward(self, x: Tensor) -> list[Tensor]:
        hs = [expert(x) for expert in self.experts]
        mixed = [self.mix(hs, gate(x)) for gate in self.gates]
        return [tower(h) for tower, h in zip(self.towers, mixed, strict=True)]


@pytest.mark.parametrize(("mix", "softmax"), FORMS, ids=lambda f: getattr(f, "__name__", ""))
def test_every_form_is_one_call(mix: Mix, softmax: bool) -> None:
    torch.manual_seed(3)
    fast = same(Mixture(mix), BATCHES, steps=mix is matmul_of_stack)
    (call,) = calls(fast, "gated_sums")
    assert fired(fast)["fuse-gated-sums"] == TASKS and fired(fast)["merge-gated-sums"] == 1
    assert len(call.args[0]) == EXPERTS and len(call.args[1]) == TASKS
    assert call.args[2] == [0, 1, 2, 0, 1, 2] and call.args[3] is softmax


class Extracted(nn.Module):
    """Two levels: experts of each task and shared ones, a gate that weighs them all (PLE)."""

    def __init__(self) -> None:
        super().__init__()
        one = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.2))  # noqa: E731
        self.own = nn.ModuleList(one() for _ in range(4 * TASKS))
        self.shared = nn.ModuleList(one() for _ in range(2))
        self.gates = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(2 * TASKS))
        self.all = nn.Linear(WIDTH, 5)

    def level(self, k: int, xs: list[Tensor]) -> list[Tensor]:
        own = [
            [self.own[4 * k + 2 * t + e](xs[t]).unsqueeze(1) for e in range(2)]
            for t in range(TASKS)
        ]
        shared = [self.shared[k](xs[-1]).unsqueeze(1)]
        outs = []
        for t in range(TASKS):
            gate = self.gates[TASKS * k + t](xs[t]).softmax(1).unsqueeze(-1)
            outs.append(torch.sum(gate * torch.cat(own[t] + shared, 1), dim=1))
        if k == 0:
            gate = self.all(xs[-1]).softmax(1).unsqueeze(-1)
            outs.append(torch.sum(gate * torch.cat(own[0] + own[1] + shared, 1), dim=1))
        return outs

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.level(1, self.level(0, [x, x, x]))


def test_two_levels_of_own_and_shared_experts() -> None:
    torch.manual_seed(4)
    fast = same(Extracted(), BATCHES)
    first, second = calls(fast, "gated_sums")
    assert (len(first.args[0]), len(first.args[1])) == (5, 3)
    assert (len(second.args[0]), len(second.args[1])) == (5, 2)
    assert first.args[2] == [0, 1, 2, 3, 4, 2, 0, 1, 3, 4, 2]


class Stacked(nn.Module):
    """The experts are one three-dimensional parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(WIDTH, EXPERTS, HIDDEN))
        self.gate = nn.Linear(WIDTH, EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        hs = torch.relu(torch.einsum("bi,ied->bed", x, self.experts))
        return torch.einsum("bed,be->bd", hs, torch.softmax(self.gate(x), dim=1))


def test_experts_of_one_parameter() -> None:
    fast = same(Stacked(), BATCHES)
    (call,) = calls(fast, "gated_sums")
    assert len(call.args[0]) == 1 and call.args[2] == [0, 1, 2]


class Elsewhere(nn.Module):
    """The stack and the weights are returned too."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, HIDDEN) for _ in range(EXPERTS))
        self.gate = nn.Linear(WIDTH, EXPERTS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        stacked = torch.stack([expert(x) for expert in self.experts], 1)
        weights = self.gate(x).softmax(1)
        return (weights.unsqueeze(2) * stacked).sum(1), stacked, weights


def test_what_is_used_elsewhere_stays() -> None:
    fast = same(Elsewhere(), BATCHES)
    (call,) = calls(fast, "gated_sums")
    assert call.args[3] is False
    assert any(n.target is torch.stack for n in fast.graph.nodes)


class Chained(nn.Module):
    """The second gate is computed from the first mixture, over the same experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.gate = nn.Linear(WIDTH, EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        hs = [expert(x) for expert in self.experts]
        first = matmul_of_stack(hs, self.gate(x))
        return matmul_of_stack(hs, self.gate(first))


def test_gates_that_need_each_other_stay_apart() -> None:
    fast = same(Chained(), BATCHES)
    assert len(calls(fast, "gated_sums")) == 2
    assert fired(fast)["merge-gated-sums"] == 0


class Other(nn.Module):
    """Nearly a gated sum."""

    def __init__(self, form: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.hidden, self.gate = nn.Linear(WIDTH, 3 * 4), nn.Linear(WIDTH, 3)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self.hidden(x).view(-1, 4, 3), self.gate(x).softmax(1))


def test_vectors_along_the_last_dimension_are_a_named_miss() -> None:
    fast = same(Other(lambda t, w: (t * w.unsqueeze(1)).sum(2)), BATCHES, steps=False)
    assert not calls(fast, "gated_sums")
    assert any("lie along dimension 2" in why for why in misses(fast, "fuse-gated-sums"))


def test_gates_left_over_are_a_named_miss() -> None:
    form = lambda t, w: w[:, :1] * t[:, 0] + w[:, 2:] * t[:, 1]  # noqa: E731
    fast = same(Other(form), BATCHES, steps=False)
    assert not calls(fast, "gated_sums")
    (why,) = misses(fast, "fuse-gated-sums")
    assert why.startswith("it weighs 2 vectors by 3 gates")


def _two_of_each(t: Tensor, w: Tensor) -> Tensor:
    """Gate 1 twice: no gated sum."""
    return w[:, :1] * t[:, 0] + w[:, 1:2] * t[:, 1] + w[:, 1:2] * t[:, 2]


def _read_again(t: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A gate that is returned, too: the softmax stays torch's."""
    gates = w.split(1, dim=1)
    return sum(g * t[:, k] for k, g in enumerate(gates)), gates[0]  # type: ignore[return-value]


def test_a_gate_that_is_read_elsewhere_keeps_its_softmax() -> None:
    (call,) = calls(same(Other(_read_again), BATCHES), "gated_sums")
    assert call.args[3] is False and call.args[2] == [0, 1, 2]


OTHERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "no sum": lambda t, w: t * w.unsqueeze(1),
    "another dimension": lambda t, w: (t * w.unsqueeze(1)).sum(1),
    "softmax over the batch": lambda t, w: torch.bmm(
        w.softmax(0).unsqueeze(1), t.transpose(1, 2)
    ).squeeze(1),
    "a gate twice": _two_of_each,
    "another tensor's gate": lambda t, w: (
        w[:, :1] * t[:, 0] + w[:, 1:2] * t[:, 1] + (w + 1)[:, 2:] * t[:, 2]
    ),
    "a term without a gate": lambda t, w: w[:, :1] * t[:, 0] + w[:, 1:2] * t[:, 1] + t[:, 2],
    "einsum that keeps the vectors": lambda t, w: torch.einsum("bde,be->bde", t, w),
}


@pytest.mark.parametrize("form", OTHERS)
def test_what_only_looks_like_it_keeps_its_numbers(form: str) -> None:
    fast = same(Other(OTHERS[form]), BATCHES, steps=False)
    found = calls(fast, "gated_sums")
    assert not found or (form == "softmax over the batch" and found[0].args[3] is False)


def test_the_report_says_what_it_is_worth() -> None:
    fast = optimized(Mixture(sum_of_product).double(), BATCHES)
    first, *_ = (e for e in journal(fast).fired if e.rule == "fuse-gated-sums")
    assert first.what == "3 vectors under the softmax of a gate in one call"
    assert first.saves == "3 launches, 480 B of traffic a sample"
    (merged,) = (e for e in journal(fast).fired if e.rule == "merge-gated-sums")
    assert merged.what == "2 gates over the same experts in one call"


@pytest.mark.parametrize(
    ("shape", "softmax", "product", "ours"),
    [
        ((64, 10, 16), False, False, False),
        ((4000, 10, 16), False, False, True),  # beyond the caches
        ((64, 4, 64), False, False, True),
        ((64, 10, 16), True, False, True),
        ((64, 26, 16), False, True, False),
        ((64, 26, 16), True, True, False),
        ((64, 20, 16), True, True, True),  # below what torch leaves to its BLAS
        ((64, 8, 64), True, True, True),
        ((64, 16, 1), False, True, False),  # an inner product
    ],
)
def test_torch_trains_stacks_that_it_is_faster_at(
    shape: tuple[int, int, int], softmax: bool, product: bool, ours: bool
) -> None:
    if device.extension() is None:
        pytest.skip("no kernels")
    g = torch.Generator().manual_seed(1)
    leaves = torch.randn(shape, generator=g), torch.randn(shape[:2], generator=g)
    upstream = torch.randn(shape[0], shape[2], generator=g)

    def train(dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        stack, gate = (t.to(dtype, copy=True).requires_grad_() for t in leaves)
        (out,) = GATED([stack], [gate], list(range(shape[1])), softmax, product)
        return out, [out, *torch.autograd.grad(out, (stack, gate), upstream.to(dtype))]

    out, found = train(torch.float32)
    assert (type(out.grad_fn).__name__ == "GatedSumsBackward") == ours
    for one, truth in zip(found, train(torch.float64)[1], strict=True):
        torch.testing.assert_close(one.double(), truth, rtol=1e-5, atol=1e-5)
    with device.use("portable"):
        assert type(train(torch.float32)[0].grad_fn).__name__ == "GatedSumsBackward"
