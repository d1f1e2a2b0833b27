"""Values that forward writes in place behind what could be one call; lookups that nothing reads."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast

IDS = torch.randint(9, (6, 3), generator=torch.Generator().manual_seed(0))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.EmbeddingBag(9, 4) for _ in range(3))
        self.rows, self.gru = nn.Embedding(9, 4), nn.GRU(4, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 1, batch_first=True)


class Machine(Rows):
    def forward(self, ids: Tensor) -> Tensor:
        bags = [table(ids) for table in self.tables]
        stacked = torch.stack(bags, 1)
        y = (stacked.sum(1) ** 2 - (stacked**2).sum(1)).sum(1)
        for bag in bags:
            bag.add_(1.0)
        return y + bags[0].sum(1)


class Recurrent(Rows):
    def forward(self, ids: Tensor) -> Tensor:
        rows = self.rows(ids)
        hidden, _ = self.gru(rows)
        rows[:, 0] = 0.0
        return hidden.sum((1, 2)) + rows.sum((1, 2))


class Attentive(Rows):
    def forward(self, ids: Tensor) -> Tensor:
        rows = self.rows(ids)
        seen, _ = self.attention(rows, rows, rows)
        rows[:, 0] = 0.0
        return seen.sum((1, 2)) + rows.sum((1, 2))


class Scaled(Rows):
    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.gru(self.rows(ids))
        hidden.mul_(2.0)
        return hidden.sum((1, 2))


PASSES = {
    Machine: "fuse-fm-interaction", Recurrent: "fuse-recurrence", Scaled: "fuse-recurrence",
    Attentive: "fuse-field-attention",
}  # fmt: skip


def _step(model: Any) -> list[Tensor]:
    """The output, and the gradients of a random loss."""
    model.zero_grad()
    y = model(IDS)
    (y * torch.linspace(0.3, 1.7, len(y))).sum().backward()
    grads = [p.grad for p in model.parameters()]
    return [y.detach(), *(g.to_dense().clone() for g in grads if g is not None)]


@pytest.mark.parametrize("kind", PASSES)
def test_backward_works_when_what_it_needs_is_written_later(kind: type[Rows]) -> None:
    """``cat`` and ``stack`` keep nothing for their backward, and torch's GRU not its result; one
    call in their place would.
    """
    plain = kind()
    fast = recast.optimize(plain, example=IDS)
    missed = [m for m in fast.report.to_dict()["missed"] if m["rule"] == PASSES[kind]]
    assert any("writes in place to what the one call would read" in m["why"] for m in missed)
    want = _step(plain)
    torch.testing.assert_close(_step(fast), want)


class Unread(Rows):
    def forward(self, ids: Tensor) -> Tensor:
        first, second, third = (table(ids) for table in self.tables)
        nn.functional.dropout(third.relu(), 0.5)  # draws, so it stays
        return (first * second).sum(1)


def test_a_lookup_that_nothing_reads_is_no_hindrance() -> None:
    """A table that no output depends on has no gradient, so its lookup stays apart."""
    plain = Unread()
    fast = recast.optimize(plain, example=IDS)
    report = fast.report.to_dict()
    assert report["raised"] == []
    assert report["lookups"] == {"found": 3, "fused": 3}
    want = _step(plain)
    torch.testing.assert_close(_step(fast), want)
    assert plain.tables[2].weight.grad is None


class Aside(Rows):
    """What ``write`` does to a layer's result, nothing reads."""

    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.write = write
        self.aside, self.deep = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, ids: Tensor) -> Tensor:
        h = self.rows(ids).sum(1)
        self.write(self.aside(h))
        return self.deep(h).sum(1)


LOST: dict[str, Callable[[Tensor], object]] = {
    "a method": lambda h: h.relu_(),
    "one after the other": lambda h: h.mul_(2).clamp_(0),
    "a function": lambda h: nn.functional.leaky_relu(h, 0.1, True),
    "a view": lambda h: operator.setitem(h.flatten(), 0, 3.0),
    "read by what nothing reads": lambda h: h.tanh_().detach() + 1,
}


@pytest.mark.parametrize("write", LOST.values(), ids=list(LOST))
def test_a_write_that_nothing_reads_is_dropped(write: Callable[[Tensor], object]) -> None:
    plain = Aside(write)
    fast = recast.optimize(plain, example=IDS, strict=True)
    assert not {n.target for n in fast.graph.nodes if n.op == "call_module"} & {"aside"}
    assert any(entry.rule == "fuse-mlp" for entry in fast.report.journal.fired)
    want = _step(plain)
    torch.testing.assert_close(_step(fast), want)


def test_a_dropout_in_place_that_nothing_reads_draws_all_the_same() -> None:
    plain = Aside(lambda h: nn.functional.dropout(h, 0.3, True, inplace=True))
    fast = recast.optimize(plain, example=IDS, strict=True)
    assert any(entry.rule == "fuse-mlp" for entry in fast.report.journal.fired)
    drawn = []
    for model in (plain, fast):
        torch.manual_seed(1)
        model(IDS)
        drawn.append(torch.rand(1))
    torch.testing.assert_close(drawn[1], drawn[0])


class Saved(Rows):
    def forward(self, ids: Tensor) -> Tensor:
        h = self.rows(ids).sum(1).relu()
        y = (h * h).sum(1)  # keeps h for its gradient
        h.data.add_(1.0)
        return y


class SavedElsewhere(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.rows(ids).sum(1).detach() * 1.0
        y = self.deep(h).sum(1)  # keeps h for the gradient of its weight
        other = torch.zeros_like(h)
        other.set_(h)
        other.fill_(0.5)
        return y


class Keeps(torch.autograd.Function):
    """Keeps its input beside what torch watches."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.x * grad


class SavedByTheUser(Rows):
    def forward(self, ids: Tensor) -> Tensor:
        h = self.rows(ids).sum(1) * 1.0
        y: Tensor = Keeps.apply(h)
        h.mul_(2.0)
        return y.sum(1)


@pytest.mark.parametrize("kind", [Saved, SavedElsewhere, SavedByTheUser])
def test_a_write_past_autograd_that_only_gradients_see_stays(kind: type[Rows]) -> None:
    plain = kind()
    fast = recast.optimize(plain, example=IDS, strict=True)
    assert fast.report.captured == "whole"
    want = _step(plain)
    torch.testing.assert_close(_step(fast), want)
