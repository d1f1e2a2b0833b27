"""Random numbers that forward draws, on W ranks as in one process with the global batch."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from generators import own_generator
from harness import processes, run
from test_synchronised_models import PASSES, SPLITS, _compare
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Normal

import recast
from recast.errors import UsageError

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "randn_like": lambda h: torch.randn_like(h),
    "randn_like of a float64": lambda h: torch.randn_like(h, dtype=torch.float64).to(h.dtype),
    "of a transposed": lambda h: torch.rand_like(h.t().contiguous().t()),
    "randn": lambda h: torch.randn(h.shape[0], 4, dtype=h.dtype),
    "randn of a shape": lambda h: torch.randn(h.shape, device=h.device, dtype=h.dtype),
    "rand": lambda h: torch.rand(size=(h.shape[0], 1), dtype=h.dtype),
    "rows in the second dimension": lambda h: torch.randn(2, h.shape[0], 4).sum(0),
    "randint": lambda h: torch.randint(0, 30, (h.size(0), 3)).sum(1, True),
    "randint with one bound": lambda h: torch.randint(30, (h.size(0), 4)),
    "randint with a bound by name": lambda h: torch.randint(high=30, size=(h.size(0), 4)),
    "randint all by name": lambda h: torch.randint(low=5, high=30, size=(h.size(0), 4)),
    "randint_like": lambda h: torch.randint_like(h, 7),
    "randint_like by name": lambda h: torch.randint_like(h, low=3, high=7),
    "normal": lambda h: torch.normal(0.5, 2.0, size=h.shape),
    "normal_": lambda h: torch.empty_like(h).normal_(0, 0.1),
    "normal_ by name": lambda h: torch.zeros_like(h).normal_(std=0.1),
    "without a gradient": lambda h: torch.randn(h.shape[0], 4, requires_grad=False),
    "of no generator": lambda h: torch.rand(h.shape[0], 4, generator=None),
    "normal_ of a transposed": lambda h: torch.zeros(4, h.size(0)).t().normal_(),
    "uniform_ of many": lambda h: torch.zeros(h.size(0), 900).uniform_(-1, 1).sum(1, True),
    "exponential_": lambda h: h.new_empty(h.shape).exponential_(),
    "bernoulli": lambda h: torch.bernoulli(torch.sigmoid(h)),
    "bernoulli of a number": lambda h: torch.bernoulli(h.detach(), p=0.3),
    "method bernoulli": lambda h: h.detach().bernoulli(0.6),
    "bernoulli_": lambda h: torch.full_like(h, 0.3).bernoulli_(0.3),
    "gumbel_softmax": lambda h: F.gumbel_softmax(h, tau=0.5),
    "hard gumbel_softmax": lambda h: F.gumbel_softmax(h, hard=True, dim=1),
    "bernoulli_ of a tensor": lambda h: torch.empty_like(h).bernoulli_(torch.sigmoid(h)),
    "normal of tensors": lambda h: torch.normal(h.detach(), h.detach().exp()),
    "normal of a mean": lambda h: torch.normal(h.detach(), 0.1),
    "normal without a gradient": lambda h: torch.normal(h, h.exp()),
    "normal of a deviation": lambda h: torch.normal(0.5, h.detach().exp()),
    "multinomial": lambda h: torch.multinomial(h.softmax(1), 1).to(h.dtype),
    "multinomial of several": lambda h: h.softmax(1).multinomial(4).to(h.dtype),
    "multinomial with replacement": lambda h: h.exp().multinomial(4, replacement=True).to(h.dtype),
    "multinomial of one": lambda h: torch.multinomial(torch.ones(9), 4).to(h.dtype),
    "a distribution": lambda h: Normal(h, h.exp()).rsample(),
    "a sample of one": lambda h: Normal(h, h.exp()).sample(),
    "a sample of a category": lambda h: (
        Categorical(logits=h, validate_args=False).sample()[:, None].to(h.dtype)
    ),
    "a Bernoulli distribution": lambda h: Bernoulli(logits=h).sample(),
    "not of the batch": lambda h: torch.randn(4, dtype=h.dtype),
    "beside dropout": lambda h: F.dropout(h, 0.3) + torch.randn_like(h),
    "after dropout": lambda h: torch.rand_like(F.dropout(h, 0.3)),
}


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.front, self.out = nn.Linear(6, 4), nn.Linear(4, 2)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        h = self.front(x)
        out: Tensor = self.out(h + self.draw(h))
        return out


@pytest.mark.parametrize("name", DRAWS)
def test_the_numbers_of_one_process(name: str) -> None:
    kind: Any = lambda: Drawing(DRAWS[name])  # noqa: E731
    fast = recast.optimize(kind(), example=torch.ones(8, 6), passes=PASSES)
    assert "draw_global_" in (text := fast.report.graph_text) or "multinomial_global" in text
    assert not [m for m in fast.report.journal.missed if m.rule == "synchronise-draws"]
    for split in SPLITS[:3]:
        _compare(kind, split, run)


def test_over_gloo() -> None:
    kind: Any = lambda: Drawing(DRAWS["beside dropout"])  # noqa: E731
    _compare(kind, (5, 2), processes)


class Reparametrised(nn.Module):
    """A variational autoencoder: noise in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(40, 8)
        self.mean, self.spread, self.back = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 40)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.items(ids)
        mean, spread = self.mean(h), torch.exp(0.5 * self.spread(h))
        z = mean + spread * torch.randn_like(spread) if self.training else mean
        out: Tensor = self.back(z)
        return out


def test_a_model_with_noise_trains_on_ranks() -> None:
    def ids(rank: int, step: int) -> Tensor:
        g = torch.Generator().manual_seed(10 * rank + step)
        return torch.randint(40, (5, 3), generator=g)

    def trained(model: Any, opt: Any, batches: Any) -> list[Tensor]:
        torch.manual_seed(7)
        for step in range(3):
            opt.zero_grad()
            model.train()(batches(step)).log_softmax(1)[:, 0].mean().backward()
            opt.step()
        return [p.detach() for n, p in model.named_parameters() if "items" not in n]

    def made() -> nn.Module:
        torch.manual_seed(0)
        return Reparametrised()

    one = made()
    opt = torch.optim.SGD(one.parameters(), lr=0.5)
    wanted = trained(one, opt, lambda step: torch.cat([ids(r, step) for r in range(2)]))

    def rank_of(rank: int) -> list[Tensor]:
        model = made()
        fast, own = recast.optimize(
            model, torch.optim.SGD(model.parameters(), lr=0.5), example=ids(0, 0),
            sharding="row_wise",
        )  # fmt: skip
        fired = [e.what for e in fast.report.journal.fired if e.rule == "synchronise-draws"]
        assert fired == ["random numbers of the global batch"]
        return trained(fast, own, lambda step: ids(rank, step))

    for found in processes(2, rank_of):
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class OfSecond(nn.Module):
    """The first input reaches no output."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.draw = nn.Linear(4, 4), draw

    def forward(self, unused: Tensor, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h + self.draw(h)


def test_an_input_that_is_not_used_counts_no_rows() -> None:
    example = torch.ones(8, 2), torch.ones(8, 4)
    fast = recast.optimize(OfSecond(torch.randn_like), example=example, passes=PASSES)
    (counted,) = [line for line in str(fast).splitlines() if "global_rows(" in line]
    assert "global_rows(x," in counted


def test_as_many_samples_of_one_row_as_the_batch_has_are_told() -> None:
    def negatives(h: Tensor) -> Tensor:
        return torch.multinomial(torch.ones(9), h.size(0), replacement=True)[:, None]

    example = torch.ones(8, 2), torch.ones(8, 4)
    fast = recast.optimize(OfSecond(negatives), example=example, passes=PASSES)
    assert any("draw numbers of their own" in m.why for m in fast.report.journal.missed)
    copies = [copy.deepcopy(fast) for _ in range(2)]
    parts = [(torch.ones(n, 2), torch.ones(n, 4)) for n in (3, 5)]
    found = run(2, lambda r: copies[r](*parts[r]))
    assert [out.shape for out in found] == [(3, 4), (5, 4)]


def test_an_unknown_order_of_rows_is_told() -> None:
    class Rows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn(2 * len(x), 6).view(2, -1, 6).sum(0)

    fast = [recast.optimize(Rows(), example=torch.ones(8, 6), passes=PASSES) for _ in range(2)]
    assert any("draw numbers of their own" in m.why for m in fast[0].report.journal.missed)

    def rank(r: int) -> Tensor:
        own_generator(1)
        out: Tensor = fast[r](torch.ones(8, 6))
        return out

    first, second = run(2, rank)
    assert not torch.equal(first, second)


def test_unlike_seeds_are_refused() -> None:
    fast = [
        recast.optimize(Drawing(DRAWS["rand"]), example=torch.ones(8, 6), passes=PASSES)
        for _ in range(2)
    ]

    def rank(r: int) -> None:
        own_generator(r)
        with pytest.raises(UsageError, match="different states"):
            fast[r](torch.ones(4, 6))

    run(2, rank)


def counted(x: Tensor) -> Tensor:
    return torch.from_numpy(np.array([float(sum(row)) for row in x.detach().numpy()]))[:, None]


def shuffled(x: Tensor) -> Tensor:
    return counted(x) * (1 + 0 * np.random.rand())


def chosen(x: Tensor) -> Tensor:
    return counted(x) * (1 + 0 * random.randint(0, 5))


def drawn(kind: type[nn.Module], x: Tensor) -> Tensor | str:
    fast = recast.optimize(kind(), example=x, world_size=2)
    assert fast.report.captured == ("partial" if hasattr(fast, "kept") else "whole")
    try:
        out: Tensor = fast(x)
    except UsageError as error:
        return error.what
    return out.detach()


class OutOfTorch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.front(x) * counted(x).float()
        return out


class OfNumpy(OutOfTorch):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.front(x) * shuffled(x).float()
        return out


class OfPython(OutOfTorch):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.front(x) * chosen(x).float()
        return out


class Kept(nn.Module):
    """Runs as it is, since it opens a file."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.own, self.draw = nn.Linear(4, 4), draw

    def forward(self, x: Tensor) -> Tensor:
        with open(os.devnull):
            h: Tensor = self.own(x)
        return h + self.draw(h)


class InALayer(OutOfTorch):
    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept(torch.randn_like)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.kept(self.front(x))
        return out


class InALayerByNumpy(InALayer):
    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept(lambda x: x * np.random.rand())


class InALayerNothing(InALayer):
    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept(torch.ones_like)


@pytest.mark.parametrize("kind", [OfNumpy, OfPython, InALayer, InALayerByNumpy])
def test_a_function_of_the_user_that_draws_is_refused(kind: type[nn.Module]) -> None:
    for told in processes(2, lambda r: drawn(kind, torch.ones(4, 6))):
        assert isinstance(told, str)
        assert "draws random numbers in forward, on several ranks" in told


@pytest.mark.parametrize("kind", [OutOfTorch, InALayerNothing])
def test_one_that_draws_nothing_runs(kind: type[nn.Module]) -> None:
    def rank(r: int) -> Tensor | str:
        torch.manual_seed(0)
        return drawn(kind, torch.full((4, 6), 1.0 + r))

    torch.manual_seed(0)
    plain = kind()
    for r, out in enumerate(processes(2, rank)):
        torch.testing.assert_close(out, plain(torch.full((4, 6), 1.0 + r)).detach())


def test_what_is_not_captured_is_told_to_draw_for_itself() -> None:
    class Opening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            with open("/dev/null"):
                out: Tensor = self.front(x)
            return out + torch.randn_like(out)

    def rank(r: int) -> str:
        return recast.optimize(Opening(), example=torch.ones(4, 6), world_size=2).report.text()

    for told in map(str.split, run(2, rank)):
        assert "the same on all ranks" in (text := " ".join(told))
        assert "what pairs rows of the batch" in text and "as the mean of some" in text
