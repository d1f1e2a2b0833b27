"""Forwards that do what no graph does: left to torch, with the reason, or asked again."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import pickle
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import recast
from recast.errors import RecastWarning

IDS = torch.randint(9, (6, 4), generator=torch.Generator().manual_seed(0))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.out = nn.Embedding(9, 4), nn.Linear(4, 2)
        self.reset()

    def reset(self) -> None: ...

    def rows(self, ids: Tensor) -> Tensor:
        return F.relu(self.out(self.emb(ids).sum(1)))


def pair(kind: type[Base], *example: Any) -> tuple[Any, Any]:
    plain = kind()
    return plain, recast.optimize(copy.deepcopy(plain), example=example or IDS)


def why(fast: recast.Compiled) -> str:
    return str(fast.report.to_dict().get("why"))


# ---------------------------------------------------------------- gradients


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class NewFunction(Base):
    def forward(self, ids: Tensor) -> Tensor:
        return Reversed.apply(self.rows(ids))  # type: ignore[no-any-return, no-untyped-call]


class ExactType(Base):
    def forward(self, ids: Tensor) -> Tensor:
        e = self.emb(ids).sum(1)
        return self.out(e.detach() if type(e) is torch.Tensor else e)  # type: ignore[no-any-return]


class History(Base):
    def forward(self, ids: Tensor) -> Tensor:
        e = self.emb(ids).sum(1)
        return self.out(e.detach() if e.grad_fn is not None else e)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [NewFunction, ExactType, History])
def test_gradients_are_the_models(kind: type[Base]) -> None:
    plain, fast = pair(kind)
    for model in (plain, fast):
        (model(IDS) * torch.linspace(-1, 1, 12).view(6, 2)).sum().backward()
    for p, q in zip(plain.parameters(), fast.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(q.grad + 0, p.grad)
    if kind is ExactType:
        assert fast.report.to_dict()["captured"] == "whole"


# ---------------------------------------------------------------- arguments


class Adds(Base):
    def forward(self, batch: dict[str, Any]) -> Tensor:
        batch["rows"] = self.rows(batch["ids"])
        return batch["rows"] * 2  # type: ignore[no-any-return]


def test_what_forward_puts_into_its_argument_is_there() -> None:
    _, fast = pair(Adds, {"ids": IDS})
    assert "forward changes what is in batch, a dict" in why(fast)
    batch = {"ids": IDS[:3]}
    torch.testing.assert_close(fast(batch), batch["rows"] * 2)


class Given(Base):
    def forward(self, ids: Tensor, given: Any) -> Tensor:
        factor = given.factor if hasattr(given, "factor") else float(sum(given))
        return self.rows(ids) * factor


@pytest.mark.parametrize("name", ["object", "array", "set"])
def test_an_argument_that_was_changed_in_place(name: str) -> None:
    given: Any = {
        "object": types.SimpleNamespace(factor=2.0), "array": np.array([1.0, 2.0]), "set": {1, 2},
    }[name]  # fmt: skip
    plain, fast = pair(Given, IDS, given)
    torch.testing.assert_close(fast(IDS, given), plain(IDS, given))
    if name == "object":
        given.factor = 5.0
    elif name == "array":
        given[0] = 7.0
    else:
        given.add(9)
    with pytest.warns(RecastWarning, match="given is another"):
        torch.testing.assert_close(fast(IDS, given), plain(IDS, given))


class Proxied(Base):
    def forward(self, batch: Any) -> Tensor:
        return self.rows(batch["ids"])


def test_a_mapping_that_cannot_be_written() -> None:
    plain, fast = pair(Proxied, types.MappingProxyType({"ids": IDS}))
    batch = types.MappingProxyType({"ids": IDS[:2]})
    torch.testing.assert_close(fast(batch), plain(batch))


# ---------------------------------------------------------------- other shapes, dtypes, errors


class MeanOfRows(Base):
    def forward(self, ids: Tensor) -> Tensor:
        return self.emb(ids).mean(-2)  # type: ignore[no-any-return]


def test_another_number_of_dimensions() -> None:
    plain, fast = pair(MeanOfRows)
    for ids in (IDS.view(2, 3, 4), IDS[0]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecastWarning)
            torch.testing.assert_close(fast(ids), plain(ids))
    torch.testing.assert_close(fast(IDS), plain(IDS))


class ByDtype(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.mean(1) if x.is_floating_point() else x.sum(1)
        return x if x.is_contiguous() else x * 2


class ByLayout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1) if x.is_contiguous() else x.mean(1)


@pytest.mark.parametrize("kind", [ByDtype, ByLayout])
def test_dtype_and_layout_that_forward_asks_for(kind: type[nn.Module]) -> None:
    x = torch.randn(6, 5)
    fast = recast.optimize(kind(), example=x)
    for given in (x, x[:4].long(), torch.randn(5, 7).t()[:, ::1]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecastWarning)
            torch.testing.assert_close(fast(given), kind()(given))


class Unknown(Base):
    def forward(self, ids: Tensor) -> Tensor:
        try:
            e = self.emb(ids)
        except IndexError:
            e = self.emb(ids.clamp(0, 8)) * 0.5
        return e.sum(1)  # type: ignore[no-any-return]


class Views(Base):
    def forward(self, ids: Tensor) -> Tensor:
        e = self.emb(ids)
        with contextlib.suppress(RuntimeError):
            e = e.view(ids.shape[0], -1, 3, 4).sum(1)
        return e.sum(1)  # type: ignore[no-any-return]


def test_errors_that_forward_catches() -> None:
    plain, fast = pair(Unknown)
    with pytest.warns(RecastWarning, match="forward catches errors"):
        torch.testing.assert_close(fast(IDS + 3), plain(IDS + 3))
    plain, fast = pair(Views)
    assert "goes on after an error" in why(fast)
    ids = IDS.view(4, 6)
    torch.testing.assert_close(fast(ids), plain(ids))


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


@torch.compile(backend="eager", fullgraph=True)
def _wave(x: Tensor) -> Tensor:
    return torch.sin(x) * 2


class Compiles(Base):
    def forward(self, ids: Tensor) -> Tensor:
        return _wave(self.rows(ids))


class Branches(Base):
    def forward(self, ids: Tensor) -> Tensor:
        rows = self.rows(ids)
        found: Tensor = torch.cond(rows.sum() > 0, torch.sin, torch.cos, (rows,))
        return found


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch's compiler looks at
@pytest.mark.parametrize("kind", [Compiles, Branches])
def test_what_compiles_inside_forward(kind: type[Base]) -> None:
    plain, fast = pair(kind)
    torch.testing.assert_close(fast(IDS), plain(IDS))


class Lengths:
    """Values beside lengths, whose offsets come to be when somebody asks."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._offsets: Tensor | None = None

    def offsets(self) -> Tensor:
        if self._offsets is None:
            self._offsets = torch.arange(0, self.values.numel(), self.values.shape[1])
        return self._offsets


class OfLengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.out = nn.EmbeddingBag(9, 4), nn.Linear(4, 2)

    def forward(self, given: Lengths) -> Tensor:
        found: Tensor = self.out(self.emb(given.values.reshape(-1), given.offsets()))
        return found


def test_what_an_argument_keeps_for_itself() -> None:
    plain = OfLengths()
    fast = recast.optimize(copy.deepcopy(plain), example=(Lengths(IDS),))
    assert fast.report.captured == "whole"
    torch.testing.assert_close(fast(Lengths(IDS[:2])), plain(Lengths(IDS[:2])))


class Chosen(Base):
    """A loop over rows that a mask chooses, of products of a mask of floats."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = torch.bmm((ids > 0).float().unsqueeze(1), self.emb(ids)).squeeze(1)
        total = torch.zeros(4)
        for row in h[mask]:
            total = total + row
        return self.out(h + total)


def test_sizes_of_products_of_masks_are_asked() -> None:
    plain, fast = pair(Chosen, IDS, torch.arange(6) < 2)
    for ids in (IDS, IDS.flip(0)):  # a warning would be an error
        mask = torch.arange(6) < 2
        torch.testing.assert_close(fast(ids, mask), plain(ids, mask))


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
