"""Parameters and buffers replaced in the user's model, or in the result, are replaced in both."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import recast
from recast.errors import RecastWarning, UsageError


class Small(nn.Module):
    """Tables, a chain with running statistics, a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.EmbeddingBag(30, 8), nn.Embedding(20, 8)
        self.top = nn.Sequential(
            nn.Linear(16, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)
        )
        self.register_buffer("shift", torch.full((1,), 0.5))

    def forward(self, ids: Tensor) -> Tensor:
        rows = torch.cat([self.a(ids), self.b(ids[:, 0])], 1)
        out: Tensor = self.top(rows) + self.shift
        return out


def ids(n: int = 9) -> Tensor:
    return torch.randint(0, 20, (n, 3), generator=torch.Generator().manual_seed(n))


def pair() -> tuple[Small, recast.Compiled]:
    torch.manual_seed(0)
    model = Small()
    return model, recast.optimize(model, example=ids())


def halved(model: nn.Module) -> dict[str, Tensor]:
    held = model.state_dict().items()
    return {k: v * 0.5 if v.is_floating_point() else v.clone() for k, v in held}


def resized(model: nn.Module) -> None:
    model.a.weight = nn.Parameter(torch.cat([model.a.weight.detach(), torch.ones(4, 8)]))


def other_buffer(model: nn.Module) -> None:
    model.shift = torch.full((1,), -2.0)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "assign": lambda m: m.load_state_dict(halved(m), assign=True),
    "double": lambda m: m.double(),
    "resized": resized,
    "buffer": other_buffer,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("where", ["original", "result"])
def test_what_is_replaced_in_one_is_in_both(
    change: Callable[[nn.Module], object], where: str
) -> None:
    model, fast = pair()
    before = model.eval()(ids()).detach().double()
    change(model if where == "original" else fast)
    for training in (False, True):
        plain = copy.deepcopy(model).train(training)
        wanted = plain(ids(7))
        found = fast.train(training)(ids(7))
        assert found.dtype is wanted.dtype
        torch.testing.assert_close(found, wanted)
        wanted.square().mean().backward(), found.square().mean().backward()
        for (name, p), (_, q) in zip(
            plain.named_parameters(), fast.named_parameters(), strict=True
        ):
            ours = q.grad + 0.0  # of a table, the dense one
            torch.testing.assert_close(ours, p.grad, msg=name)
            q.grad = None
        for (name, b), (_, c) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
            torch.testing.assert_close(c, b, msg=name)
    if change not in (CHANGES["double"], CHANGES["resized"]):
        assert (model.eval()(ids()).double() - before).abs().max() > 1e-2
    assert all(p is q for p, q in zip(model.parameters(), fast.parameters(), strict=True))


def test_training_goes_on_over_what_was_assigned() -> None:
    model, fast = pair()
    model.load_state_dict(halved(model), assign=True)
    plain = copy.deepcopy(model)
    trained = []
    for one, held in ((plain, plain), (fast, model)):
        opt = torch.optim.Adagrad(held.parameters(), 0.1)
        for k in range(3):
            opt.zero_grad()
            one(ids(5 + k)).square().mean().backward()
            opt.step()
        trained.append({k: v.clone() for k, v in held.state_dict().items()})
    torch.testing.assert_close(trained[1], trained[0])


@pytest.mark.parametrize(
    "take",
    [
        lambda m: prune.l1_unstructured(m.top[0], "weight", 0.5),
        lambda m: parametrizations.weight_norm(m.top[0]),
        lambda m: delattr(m.top[0], "weight"),
    ],
    ids=["pruned", "parametrized", "deleted"],
)
def test_a_parameter_taken_from_the_model_is_an_error(take: Callable[[nn.Module], object]) -> None:
    model, fast = pair()
    take(model)
    with (
        pytest.warns(
            RecastWarning, match="the parameter top.0.weight that the graph reads is gone"
        ),
        pytest.raises(UsageError, match="cannot run: 'Linear' object has no attribute 'weight'"),
    ):
        fast(ids())


def test_a_table_taken_from_a_model_with_constants_is_named() -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.items = nn.Embedding(9, 4), nn.Embedding(9, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return (self.places(torch.arange(ids.shape[1])) + self.items(ids)).sum(1)

    model = Placed()
    fast = recast.optimize(model, example=torch.randint(9, (6, 3)))
    prune.l1_unstructured(model.items, "weight", 0.5)
    with (
        pytest.warns(
            RecastWarning, match="the parameter items.weight that the graph reads is gone"
        ),
        pytest.raises(UsageError, match="cannot run"),
    ):
        fast(torch.randint(9, (6, 3)))


def test_copies_and_stored_tables_are_apart() -> None:
    model, fast = pair()
    twin = copy.deepcopy(fast)
    small = recast.optimize(model.eval(), example=ids(), precision="int8")
    wanted = twin.eval()(ids())
    stored = small(ids())
    before = model.a.weight
    model.load_state_dict(halved(model), assign=True)
    torch.testing.assert_close(twin(ids()), wanted)
    torch.testing.assert_close(small(ids()), stored)
    assert type(model.a.weight) is nn.Parameter
    assert before is not model.a.weight
    again = copy.deepcopy((model, fast))  # together they stay together
    again[0].load_state_dict(halved(again[0]), assign=True)
    assert again[1].a.weight is again[0].a.weight
