"""What trainers and libraries do to a model: wrap its forward, call its methods, swap modules."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.errors import UsageError
from recast.runtime.rows.grad import RowGrad

IDS = torch.randint(9, (6,), generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 4)
        self.out = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))

    def forward(
        self, ids: Tensor, scale: float = 1.0, more: dict[str, Tensor] | None = None
    ) -> Any:
        return self.out(self.emb(ids)) * scale

    def training_step(self, ids: Tensor) -> Tensor:
        loss: Tensor = self(ids).square().mean()
        return loss


def pair() -> tuple[Net, Any]:
    torch.manual_seed(0)
    plain = Net()
    return plain, recast.optimize(copy.deepcopy(plain), example=IDS)


def again(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy, again])
def test_methods_of_the_users_run_the_graph(copied: Callable[[Any], Any]) -> None:
    plain, fast = pair()
    plain.training_step(IDS).backward()
    fast.training_step  # noqa: B018  (it is copied with what was looked up on it)
    fast = copied(fast)
    fast.training_step(IDS).backward()
    grad = fast.emb.weight.grad
    assert type(grad) is RowGrad
    torch.testing.assert_close(grad.to_dense(), plain.emb.weight.grad)
    torch.testing.assert_close(fast(IDS), plain(IDS))


@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy])
def test_a_forward_given_to_the_instance_is_called(copied: Callable[[Any], Any]) -> None:
    plain, fast = pair()
    inner = fast.forward
    fast.forward = lambda *args: inner(*args) + 1.0
    torch.testing.assert_close(copied(fast)(IDS), plain(IDS) + 1.0)
    del fast.forward
    torch.testing.assert_close(fast(IDS), plain(IDS))


def test_attributes_of_the_users_can_be_deleted() -> None:
    _, fast = pair()
    fast.note = "x"
    del fast.note
    assert not hasattr(fast, "note")
    with pytest.raises(AttributeError):
        del fast.note


@pytest.mark.parametrize("copied", [copy.deepcopy, again])
def test_a_module_swapped_in_a_copy_that_never_ran(copied: Callable[[Any], Any]) -> None:
    plain, fast = pair()
    fast = copied(fast)
    for model in (plain, fast):
        model.out[1] = nn.Tanh()
    with pytest.warns(recast.RecastWarning, match="'out.1' was replaced"):
        torch.testing.assert_close(fast(IDS), plain(IDS))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(9, 4, mode="sum"), nn.Linear(4, 2)
        self.last = nn.Sequential(nn.GELU())

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.out(self.bag(ids.repeat(3, 1).T)))


def _reset(model: Any) -> None:
    model.bag.mode = "mean"


def _replace(model: Any) -> None:
    weight, model.bag = model.bag.weight, nn.EmbeddingBag(9, 4, mode="max")
    model.bag.weight = weight


def _append(model: Any) -> None:
    model.last.append(nn.Tanh())


def _renorm(model: Any) -> None:
    model.bag.max_norm = 0.5


def _give_forward(model: Any) -> None:
    model.out.forward = torch.neg


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("copied", [copy.deepcopy, again])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_reset, r"bag\.mode was sum and is now mean"),
        (_replace, r"bag\.mode was sum and is now max"),
        (_append, r"len\(last\) was 1 and is now 2"),
        (_renorm, r"bag\.max_norm was changed"),
        (_give_forward, r"out\.forward was changed"),
    ],
)
def test_a_layer_changed_before_a_copy_ran(
    change: Callable[[Any], Any], says: str, copied: Callable[[Any], Any], before: bool
) -> None:
    plain = Layers()
    fast = recast.optimize(copy.deepcopy(plain), example=IDS)
    for model in (plain, fast) if before else (plain,):
        change(model)
    fast = copied(fast)
    if not before:
        change(fast)
    with pytest.warns(recast.RecastWarning, match=says):
        torch.testing.assert_close(fast(IDS), plain(IDS))
    assert re.fullmatch(says, fast.why_stale())


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"scale": 2.0}, "scale is another float"),
        ({"scale": IDS[0]}, "scale is a Tensor, not a float"),
        ({"more": {"a": IDS}}, "more is a dict, not None"),
    ],
)
def test_another_form_of_call_names_the_argument(more: dict[str, Any], says: str) -> None:
    plain, fast = pair()
    with pytest.warns(recast.RecastWarning, match=says):
        torch.testing.assert_close(fast(IDS, **more), plain(IDS, **more))


def test_a_dict_with_other_keys_names_them() -> None:
    class Dicts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(9, 4)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.emb(batch["ids"]).sum(1)

    fast = recast.optimize(Dicts(), example=({"ids": IDS, "label": IDS},))
    with pytest.warns(recast.RecastWarning, match="batch has also x and lacks label"):
        fast({"ids": IDS, "x": IDS})


class Batch:
    """Keeps what is made of its ids."""

    def __init__(self, *ids: Tensor, name: str = "a") -> None:
        self.ids, self.name, self.kept = list(ids), name, None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kept": IDS}, "batch.kept is a Tensor, not None"),
        ({"name": "b"}, "batch.name is another str"),
        ({"ids": [IDS]}, "batch.ids has 1 entries, not 2"),
        ({"ids": [IDS, 3.0]}, r"batch.ids\[1\] is a float, not a Tensor"),
    ],
)
def test_what_differs_inside_an_object_is_named(change: dict[str, Any], says: str) -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(9, 4)

        def forward(self, batch: Batch) -> Tensor:
            first = batch.name == "a" and batch.kept is None  # reads both
            return self.emb(batch.ids[0 if first else -1]).sum(1)

    fast = recast.optimize(First(), example=(Batch(IDS, IDS),))
    other = Batch(IDS, IDS)
    vars(other).update(change)
    with pytest.warns(recast.RecastWarning, match=says):
        fast(other)


def test_a_value_that_changes_at_each_call_is_told_once() -> None:
    class Annealed(Net):
        alpha = 1.0

        def forward(self, ids: Tensor) -> Any:  # type: ignore[override]
            return super().forward(ids) * self.alpha

    model = Annealed()
    model.alpha = 2.0
    fast = recast.optimize(model, example=IDS)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(5):
            fast.alpha = 0.1 * step
            fast(IDS)
    assert len(seen) == 1


def test_models_that_cannot_be_taken_say_what_to_do() -> None:
    with pytest.raises(UsageError, match="already"):
        recast.optimize(torch.compile(Net(), backend="eager"), example=IDS)
    with pytest.raises(UsageError, match="weight has no size yet"):
        recast.optimize(nn.Sequential(nn.Embedding(9, 4), nn.LazyLinear(1)), example=IDS)
    with torch.inference_mode():
        made = Net()
    with pytest.raises(UsageError, match="was made under"):
        recast.optimize(made, example=IDS)
    model = Net()
    with pytest.raises(UsageError, match="of several optimizers give none"):
        recast.optimize(model, [torch.optim.SGD(model.parameters())], example=IDS)  # type: ignore


def test_optimize_under_inference_mode() -> None:
    torch.manual_seed(0)
    plain = Net()
    with torch.inference_mode():
        fast = recast.optimize(plain, example=IDS)
    assert fast.report.captured == "whole"
    fast(IDS).sum().backward()
    assert type(plain.emb.weight.grad) is RowGrad
