"""Python state that a forward keeps or writes, and a class with a call or signature of its own."""

from __future__ import annotations

import contextvars
import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from strange import IDS, Base, pair, why
from torch import Tensor, nn
from torch.nn import functional as F

import recast

# ---------------------------------------------------------------- what Python keeps


class Classwide(Base):
    calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        type(self).calls += 1
        return self.rows(ids) * type(self).calls


class Around(Base):
    def reset(self) -> None:
        count = 0

        def tick() -> int:
            nonlocal count
            count += 1
            return count

        self.tick = tick

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids) * self.tick()


class Texts(Base):
    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids) * {"2": 3.0}.get(f"{ids.shape[0]}", 1.0)


class Marked(Base):
    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids) * getattr(ids, "factor", 1.0)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Classwide, "forward changes Classwide.calls"),
        (Around, "count, a variable around tick"),
        (Texts, "puts a number that depends on the batch into a text"),
    ],
)
def test_refused_by_name(kind: type[Base], text: str) -> None:
    assert text in why(pair(kind)[1])


def test_a_tensor_with_attributes() -> None:
    ids = IDS.clone()
    ids.factor = 2.0  # type: ignore[attr-defined]
    assert "carries factor" in why(pair(Marked, ids)[1])


@functools.cache
def noise(training: bool) -> Tensor:
    return torch.full((2,), 2.0 if training else 1.0)


class Cached(Base):
    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids) * noise(True) if self.training else self.rows(ids)


def test_a_cache_that_only_training_fills() -> None:
    noise.cache_clear()
    plain, fast = pair(Cached)
    torch.testing.assert_close(fast(IDS), plain(IDS))
    assert type(noise(True)) is Tensor


# ---------------------------------------------------------------- the model is not touched


class Writes(Base):
    def reset(self) -> None:
        self.generator, self.mean = torch.Generator().manual_seed(1), torch.zeros(2)

    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            self.out.weight.clamp_(-0.1, 0.1)
        self.emb.weight.data = F.normalize(self.emb.weight.data, dim=1)
        y = self.rows(ids) * torch.rand(2, generator=self.generator)
        self.mean.mul_(0.9).add_(y.detach().mean(0))
        return F.embedding(ids[:, 0], self.emb.weight, max_norm=0.5).sum(1, keepdim=True) + y


def test_optimize_writes_to_nothing_of_the_model() -> None:
    model = Writes()
    held = {k: v.clone() for k, v in model.state_dict().items()}
    memory = {k: v.data_ptr() for k, v in model.named_parameters()}
    state = model.generator.get_state()
    recast.optimize(model, example=IDS)
    for k, v in model.state_dict().items():
        assert torch.equal(v, held[k]), k
    assert {k: v.data_ptr() for k, v in model.named_parameters()} == memory
    assert torch.equal(model.generator.get_state(), state)
    assert torch.equal(model.mean, torch.zeros(2))


class Renorms(Base):
    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.emb.weight, max_norm=0.5).sum(1)


def test_optimize_renormalises_no_table() -> None:
    model = Renorms()
    before = model.emb.weight.detach().clone()
    fast = recast.optimize(model, example=IDS)
    assert torch.equal(model.emb.weight, before)
    torch.testing.assert_close(fast(IDS), Renorms()(IDS))


class Table(nn.Module):
    """A lookup of one's own, whose settings are called as those of nn.Embedding are."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.max_norm = nn.Parameter(torch.randn(9, 4)), 0.5

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.rows, max_norm=self.max_norm)


class Clip(nn.Module):
    max_norm = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(-self.max_norm, self.max_norm)


def _as_it_is() -> nn.Module:
    """Parametrized by nothing, so a write to the weight is one to the parameter behind it."""
    table = nn.Embedding(9, 4, max_norm=0.5)
    return nn.utils.parametrize.register_parametrization(table, "weight", nn.Identity())


RENORMED: dict[str, Callable[[], nn.Module]] = {
    "one's own": Table,
    "not a table": lambda: nn.Sequential(nn.Embedding(9, 4), Clip()),
    "max_norm": lambda: nn.Embedding(9, 4, max_norm=0.5),
    "parametrized": _as_it_is,
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Embedding(9, 4, max_norm=0.5)),
}


@pytest.mark.parametrize("table", RENORMED.values(), ids=RENORMED)
def test_modules_with_a_max_norm(table: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(table(), nn.Linear(4, 2))
    before = copy.deepcopy(model)
    fast = recast.optimize(model, example=IDS)
    assert fast.report.to_dict()["captured"] == "whole"
    for now, was in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(now, was)
    torch.testing.assert_close(fast(IDS), before(IDS))
    for now, was in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(now, was)  # both renormalised


class Draws(Base):
    def reset(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids) * torch.rand(2, generator=self.generator)


def test_a_generator_of_its_own() -> None:
    plain, model = Draws(), Draws()
    fast = recast.optimize(model, example=IDS)
    assert fast.report.to_dict()["captured"] == "whole"
    torch.testing.assert_close(fast(IDS), plain(IDS))


class Timed(Base):
    def forward(self, ids: Tensor) -> Tensor:
        with torch.profiler.record_function("lookup"):
            return self.rows(ids)


def test_labels_of_a_profiler_are_no_obstacle() -> None:
    assert pair(Timed)[1].report.to_dict()["captured"] == "whole"


# ---------------------------------------------------------------- what a class is asked


class Called(Base):
    def forward(self, ids: Tensor, scale: float = 1.0, *, flip: bool = False) -> Tensor:
        """Of rows."""
        return self.rows(ids.flip(0) if flip else ids) * scale

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 2


def test_a_call_of_ones_own() -> None:
    plain, fast = pair(Called)
    torch.testing.assert_close(fast(IDS), plain(IDS))
    torch.testing.assert_close(copy.deepcopy(fast)(IDS), plain(IDS))


COPIES: dict[str, Callable[[Any], Any]] = {"itself": lambda m: m, "copied": copy.deepcopy}


@pytest.mark.parametrize("how", COPIES)
def test_the_result_tells_what_forward_takes(how: str) -> None:
    import inspect

    plain, fast = pair(Called)
    fast = COPIES[how](fast)
    assert inspect.signature(fast.forward) == inspect.signature(plain.forward)
    assert fast.forward.__doc__ == "Of rows."
    assert isinstance(fast, recast.Compiled) and type(fast).__name__ == "Compiled"


def test_a_sequential_is_indexed() -> None:
    net = nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 2), nn.ReLU())
    fast: Any = recast.optimize(net, example=IDS)
    assert len(fast) == 3 and fast[1].weight is net[1].weight
    assert [type(m) for m in fast] == [nn.EmbeddingBag, nn.Linear, nn.ReLU]


def test_a_graph_module_is_a_model() -> None:
    net = torch.fx.symbolic_trace(nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 2)))
    torch.testing.assert_close(recast.optimize(net, example=IDS)(IDS), net(IDS))


SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("SCALE", default=1.0)


class Scaled(Base):
    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids) * SCALE.get()


@pytest.mark.filterwarnings("ignore::recast.errors.RecastWarning")
def test_a_context_variable_behind_a_file() -> None:
    plain, fast = pair(Scaled)
    loaded = pickle.loads(pickle.dumps(fast))
    token = SCALE.set(5.0)
    try:
        torch.testing.assert_close(loaded(IDS), plain(IDS))
    finally:
        SCALE.reset(token)


class GoesBack(Base):
    def forward(self, ids: Tensor) -> Tensor:
        rows = self.rows(ids)
        if self.training:
            rows.sum().backward(retain_graph=True)
        return rows


def test_optimize_leaves_no_gradients() -> None:
    plain = GoesBack()
    recast.optimize(plain, example=IDS)
    assert all(p.grad is None for p in plain.parameters())
