"""torch.distributions in forward: captured whole, with the plain model's numbers and errors."""

from __future__ import annotations

import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributions as D
from torch import Tensor, nn
from torch.distributions import kl_divergence

import recast


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process: torch.compile leaves it off for good."""
    monkeypatch.setattr(D.Distribution, "_validate_args", True)


class Latent(nn.Module):
    def __init__(self, of: Callable[[Latent, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items = nn.EmbeddingBag(40, 8, mode="sum")
        self.mean, self.spread, self.out = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 1)
        self.prior = D.Normal(torch.zeros(4), torch.ones(4))
        self.of = of

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        h = self.items(ids)
        z, other = self.of(self, self.mean(h), torch.exp(0.5 * self.spread(h)))
        return self.out(z), other


def drawn(kind: Callable[[Tensor, Tensor], Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A sample with gradients, and its logarithmic probability."""

    def of(model: Latent, m: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        q = kind(m, s)
        z = q.rsample()
        return z, q.log_prob(z)

    return of


def sampled(kind: Callable[[Tensor, Tensor], Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A sample without gradients, and its logarithmic probability."""

    def of(model: Latent, m: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        q = kind(m, s)
        action = q.sample()
        return m * s, q.log_prob(action)

    return of


FORMS: dict[str, Callable[[Latent, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "Normal": drawn(D.Normal),
    "LogNormal": drawn(D.LogNormal),
    "Independent": drawn(lambda m, s: D.Independent(D.Normal(m, s), 1)),
    "Laplace": drawn(D.Laplace),
    "Gumbel": drawn(D.Gumbel),
    "Gamma": drawn(lambda m, s: D.Gamma(s, s)),
    "StudentT": drawn(lambda m, s: D.StudentT(s + 2, m, s)),
    "Dirichlet": drawn(lambda m, s: D.Dirichlet(s)),
    "MultivariateNormal": drawn(lambda m, s: D.MultivariateNormal(m, torch.diag_embed(s))),
    "LowRank": drawn(lambda m, s: D.LowRankMultivariateNormal(m, m.unsqueeze(-1), s)),
    "RelaxedOneHotCategorical": drawn(
        lambda m, s: D.RelaxedOneHotCategorical(torch.tensor(0.5), logits=m)
    ),
    "transformed": drawn(
        lambda m, s: D.TransformedDistribution(D.Normal(m, s), D.TanhTransform(cache_size=1))
    ),
    "unchecked": drawn(lambda m, s: D.Normal(m, s, validate_args=False)),
    "a sample of Normal": sampled(D.Normal),
    "Bernoulli": sampled(lambda m, s: D.Bernoulli(logits=m)),
    "Categorical": sampled(lambda m, s: D.Categorical(logits=m)),
    "OneHotCategorical": sampled(lambda m, s: D.OneHotCategorical(logits=m)),
    "Multinomial": sampled(lambda m, s: D.Multinomial(5, logits=m)),
    "Poisson": sampled(lambda m, s: D.Poisson(s)),
    "divergence": lambda f, m, s: (m, kl_divergence(D.Normal(m, s), D.Normal(0.0, 1.0))),
    "a prior that the model holds": lambda f, m, s: (m, kl_divergence(D.Normal(m, s), f.prior)),
    "samples of the prior": lambda f, m, s: (m * f.prior.sample((m.size(0),)), s),
    "several samples": lambda f, m, s: (D.Normal(m, s).rsample((3,)).mean(0), s),
    "expanded": lambda f, m, s: (D.Normal(0.0, 1.0).expand(m.shape).rsample() * s + m, s),
    "a mixture": lambda f, m, s: (
        m, D.MixtureSameFamily(D.Categorical(logits=m), D.Normal(m, s)).log_prob(s.mean(-1))
    ),
    "its batch_shape": lambda f, m, s: (m / D.Normal(m, s).batch_shape[0], s),
}  # fmt: skip


def ids(rows: int) -> Tensor:
    return torch.randint(40, (rows, 3), generator=torch.Generator().manual_seed(rows))


def outcome(model: nn.Module, given: Tensor) -> list[Tensor] | str:
    """What a call gives, the gradients of its sum, and a number that is drawn after it."""
    torch.manual_seed(1)
    model.zero_grad()
    try:
        out, other = model(given)
    except (
        ArithmeticError,
        RuntimeError,
        ValueError,
    ) as error:  # of no rows, as for the plain model
        return type(error).__name__
    (out.sum() + other.sum()).backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [out.detach(), other.detach(), *grads, torch.rand(1)]


@pytest.mark.parametrize("form", FORMS)
def test_captured_whole_with_the_numbers_of_the_plain_model(form: str) -> None:
    plain = Latent(FORMS[form])
    fast = recast.optimize(Latent(FORMS[form]), example=ids(16))
    assert fast.report.captured == "whole", str(fast.report)
    for rows in (16, 7, 1, 0):
        with warnings.catch_warnings():
            if rows == 0:  # of no rows some raise, as the plain model does
                warnings.simplefilter("ignore", recast.RecastWarning)
            wanted, found = outcome(plain, ids(rows)), outcome(fast, ids(rows))
        if isinstance(wanted, str) or isinstance(found, str):
            assert wanted == found
            continue
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Spread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 4)

    def forward(self, ids: Tensor, spread: Tensor) -> Tensor:
        return D.Normal(self.table(ids), spread).rsample()


class Caught(Spread):
    def forward(self, ids: Tensor, spread: Tensor) -> Tensor:
        try:
            return D.Normal(self.table(ids), spread).rsample()
        except ValueError:
            return self.table(ids)


def spread_of(rows: int, value: float = 1.0) -> tuple[Tensor, Tensor]:
    return ids(rows)[:, 0], torch.full((rows, 4), value)


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_arguments_out_of_range_raise_as_in_the_plain_model(value: float) -> None:
    model = Spread()
    fast = recast.optimize(model, example=spread_of(8))
    assert fast.report.captured == "whole"
    for one in (model, fast):
        with pytest.raises(ValueError, match=r"Expected parameter scale .* GreaterThan"):
            one(*spread_of(5, value))
    assert fast(*spread_of(5)).shape == (5, 4)


def test_the_default_is_asked_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = recast.optimize(Spread(), example=spread_of(8))
    monkeypatch.setattr(D.Distribution, "_validate_args", False)
    assert fast(*spread_of(5, -1.0)).shape == (5, 4)


def test_an_error_that_forward_catches_is_a_question() -> None:
    model = Caught()
    fast = recast.optimize(model, example=spread_of(8))
    with pytest.warns(recast.RecastWarning, match="goes another way"):
        found = fast(*spread_of(5, -1.0))
    torch.testing.assert_close(found, model(*spread_of(5, -1.0)))


def test_a_check_is_not_replayed() -> None:
    fast = recast.optimize(Spread(), example=spread_of(8))
    why = fast.why_not_recordable()
    assert why is not None and "parameter loc of Normal()" in why and "validate_args" in why
    unchecked = Latent(FORMS["unchecked"])
    assert recast.optimize(unchecked, example=ids(8)).why_not_recordable() is None


def test_the_graph_is_pickled_with_its_checks() -> None:
    fast = recast.optimize(Spread(), example=spread_of(8))
    again = pickle.loads(pickle.dumps(fast))
    with pytest.raises(ValueError, match="parameter scale"):
        again(*spread_of(5, -1.0))


def test_torch_is_as_before_and_as_ever_in_other_threads() -> None:
    seen: list[Any] = []

    def look() -> None:
        q = D.Normal(torch.zeros(2), torch.ones(2)).expand([3, 2])
        seen.extend((type(q.batch_shape), q.sample().shape, D.Dirichlet(torch.ones(3)).sample()))

    class Looking(Spread):
        def forward(self, ids: Tensor, spread: Tensor) -> Tensor:
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
            return super().forward(ids, spread)

    recast.optimize(Looking(), example=spread_of(8))
    assert {*map(str, seen[::3])} == {"<class 'torch.Size'>"}
    assert {*seen[1::3]} == {torch.Size([3, 2])}
    assert D.normal.torch is torch  # type: ignore[attr-defined]
    assert D.dirichlet._Dirichlet.__module__ == "torch.distributions.dirichlet"
