"""A user's function that leaves torch is one call of the graph, and runs every time."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import recast
from recast.rewriter.capture.capture_model import Captured, capture
from recast.rewriter.compiled.module import Compiled


def ids(rows: int, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(rows + seed)
    return (torch.randint(1, 30, (rows, 5), generator=generator),)


def reverse(x: Tensor) -> Tensor:
    return torch.tensor([row[::-1] for row in x.tolist()])


class Augmenter:
    def __init__(self) -> None:
        self.share = 0.5

    def draw(self, rows: Tensor) -> Tensor:
        rows = rows.clone()
        for k, row in enumerate(rows):
            if torch.rand(1) > self.share:
                rows[k] = row[torch.randperm(len(row))]
        return rows


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(31, 4)
        self.top = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 1))
        self.shift, self.seen, self.augmenter = 1, 0, Augmenter()

    def score(self, x: Tensor) -> Tensor:
        return self.top(self.table(x).flatten(1))


class Method(Model):
    def sort(self, x: Tensor, lengths: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        rows = np.sort(x.numpy() % 30 + self.shift, axis=1)
        return torch.from_numpy(rows), lengths["n"] + torch.tensor(rows.max(1))

    def forward(self, x: Tensor) -> Any:
        rows, most = self.sort(x, {"n": (x > 3).sum(1)})
        return self.score(rows), most


class Function(Model):
    def forward(self, x: Tensor) -> Any:
        return self.score(reverse(x)), self.score(x)


class Static(Model):
    @staticmethod
    def _firsts(x: Tensor, count: int) -> list[Tensor]:
        return [torch.tensor([row[k].item() for row in x]) for k in range(count)]

    def forward(self, x: Tensor) -> Any:
        return self.score(torch.stack(self._firsts(x, 5), 1))


class Object(Model):
    def forward(self, x: Tensor) -> Any:
        return self.score(self.augmenter.draw(x)), torch.rand(2)


class Gradient(Model):
    def best(self, rows: Tensor) -> Tensor:
        best = torch.zeros(len(rows), 4)
        for k in range(len(rows)):
            best[k] = rows[k, rows[k].sum(1).argmax()]
        return best

    def forward(self, x: Tensor) -> Any:
        return self.best(self.table(x)) * self.score(x)


class Writes(Model):
    def mask(self, x: Tensor, seen: Tensor) -> None:
        for k, row in enumerate(x.tolist()):
            if row[0] > 15:
                seen[k] = row[1]

    def forward(self, x: Tensor) -> Any:
        seen = torch.zeros(x.shape[0])
        zeros = torch.zeros(1)
        self.mask(x, seen)
        before = seen * 2
        self.mask(x.flip(1), seen)
        self.mask(x[:1].clamp(min=20), zeros)
        return before, seen + zeros, self.score(x)


WHOLE = (Method, Function, Static, Object, Gradient, Writes)


def compare(plain: nn.Module, fast: nn.Module, *args: Any) -> None:
    results = []
    for model in (plain, fast):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        out = model(*copy.deepcopy(args))
        leaves = out if isinstance(out, tuple) else (out,)
        up = [torch.randn(t.shape, generator=torch.Generator().manual_seed(2)) for t in leaves]
        kept = [(t, g) for t, g in zip(leaves, up, strict=True) if t.requires_grad]
        torch.autograd.backward([t for t, _ in kept], [g for _, g in kept])
        results.append((leaves, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("kind", WHOLE, ids=lambda kind: kind.__name__)
def test_what_leaves_torch_in_a_function_is_captured_whole(kind: Callable[[], Model]) -> None:
    model = kind()
    plain = copy.deepcopy(model)
    fast = recast.optimize(model, example=ids(8))
    report = fast.report.to_dict()
    assert report["captured"] == "whole"
    assert report["lookups"]["fused"] == report["lookups"]["found"] > 0
    assert any("leaves torch" in text for text in report["notes"])
    for rows in (8, 5, 1, 13):
        compare(plain, fast, *ids(rows, seed=7))


def test_it_reads_what_the_model_holds_at_the_time() -> None:
    model = Method()
    plain, fast = copy.deepcopy(model), recast.optimize(model, example=ids(8))
    for one in (plain, fast):
        one.shift = 0
    compare(plain, fast, *ids(6))
    drawn = Object()
    plain, fast = copy.deepcopy(drawn), recast.optimize(drawn, example=ids(8))
    for one in (plain, fast):
        one.augmenter.share = -1.0
    compare(plain, fast, *ids(6))


def test_a_pickled_model_calls_it_too() -> None:
    model = Method()
    plain = copy.deepcopy(model)
    fast = pickle.loads(pickle.dumps(recast.optimize(model, example=ids(8))))
    compare(plain, fast, *ids(6))


class Weighted(Model):
    """Its loop uses a layer, so rewriting it is worth more."""

    def loop(self, x: Tensor) -> Tensor:
        return torch.stack([self.score(row[None])[0] for row in x])

    def forward(self, x: Tensor) -> Any:
        return self.loop(x)


class Remembers(Model):
    def count(self, x: Tensor) -> Tensor:
        self.seen = self.seen + len(x.tolist())
        return x

    def forward(self, x: Tensor) -> Any:
        return self.score(self.count(x)) + self.seen


class Appends(Model):
    def add(self, x: Tensor, found: list[Tensor]) -> None:
        found.append(torch.from_numpy(x.numpy().copy()))

    def forward(self, x: Tensor) -> Any:
        found = [x]
        self.add(x, found)
        return sum(self.score(y) for y in found)


class Itself(Model):
    def read(self, x: Tensor, model: Any) -> Tensor:
        return torch.from_numpy(x.numpy() % 30 + model.shift)

    def forward(self, x: Tensor) -> Any:
        return self.score(self.read(x, self))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Weighted, "a parameter"),
        (Remembers, "changes what a module holds"),
        (Appends, "changes a list"),
        (Itself, "a part of the model"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_more_than_a_call_of_tensors_is_not_taken(kind: Any, why: str) -> None:
    model = kind()
    plain = copy.deepcopy(model)
    it: Captured = capture(model, ids(8))
    assert it.kind != "whole"
    assert why in str(it.why)
    fast = Compiled(it)
    for rows in (8, 5):
        compare(plain, fast, *ids(rows, seed=3))


def test_what_is_in_the_way_inside_a_method_is_named() -> None:
    """And its line, not that of the call."""
    it: Captured = capture(Weighted(), ids(8))
    assert str(it.why).startswith("len() or a loop of the batch size: 8 for one example")
    assert str(it.why).endswith("; loop() leaves torch, and it uses a parameter of the model")
    line = Weighted.loop.__code__.co_firstlineno + 1
    assert it.where == f"test_opaque_calls.py:{line}"


class Newest(Model):
    """Asks for a shape that depends on what the function returns."""

    def reverse(self, x: Tensor) -> Tensor:
        rows = x.numpy()
        wide = bool(rows.max() > 30)  # then of another width
        np.random.random()
        return torch.tensor([[*row[::-1]][self.shift - 1 : 4 if wide else 5] for row in rows])

    def forward(self, x: Tensor) -> Any:
        drawn = torch.rand(2)
        rows = self.table(self.reverse(x) % 31)
        return torch.cat([rows[:, -2:].flatten(1), rows[:, 0]], 1).sum(1), rows.size(1) * drawn


def test_a_question_about_the_shape_of_its_result_is_no_hindrance() -> None:
    model = Newest()
    plain, fast = copy.deepcopy(model), recast.optimize(model, example=ids(8))
    assert fast.report.to_dict()["captured"] == "whole"
    for rows in (8, 5, 1, 13):
        compare(plain, fast, *ids(rows, seed=7))


def test_a_result_of_another_shape_runs_the_plain_forward_as_if_nothing_was_done() -> None:
    model = Newest()
    plain, fast = copy.deepcopy(model), recast.optimize(model, example=ids(8))
    (x,) = ids(6)
    x[2, 3] = 40
    after = []
    for one in (plain, fast):
        torch.manual_seed(3)
        np.random.seed(3)
        given = x.clone()
        if one is fast:
            with pytest.warns(recast.RecastWarning, match="reverse does not keep the shape"):
                out = one(given)
        else:
            out = one(given)
        after.append((*out, torch.rand(1), torch.tensor(np.random.random())))
    torch.testing.assert_close(after[1], after[0], rtol=0, atol=0)
    compare(plain, fast, *ids(6))  # and the graph goes on


class Marking(Newest):
    """Writes to what it is given, which nobody could undo."""

    def reverse(self, x: Tensor) -> Tensor:
        x[:, 0] = 1
        return super().reverse(x)


def test_a_shape_is_not_taken_for_granted_of_one_that_writes_to_its_arguments() -> None:
    model = Marking()
    plain, fast = copy.deepcopy(model), recast.optimize(model, example=ids(8))
    report = fast.report.to_dict()
    assert report["captured"] == "partial"
    assert "control flow" in report["why"] and report["where"].startswith("test_opaque_calls.py:")
    for rows in (8, 5):
        compare(plain, fast, *ids(rows, seed=7))


class Behind(Newest):
    """Writes to its input before that."""

    def forward(self, x: Tensor) -> Any:
        x.add_(1)
        return super().forward(x)


def test_nor_behind_what_cannot_be_undone() -> None:
    model = Behind()
    plain, fast = copy.deepcopy(model), recast.optimize(model, example=ids(8))
    report = fast.report.to_dict()
    assert report["captured"] == "partial"
    assert report["why"], report
    compare(plain, fast, *ids(5, seed=7))


def test_one_that_is_held_to_a_shape_is_copied_with_its_model() -> None:
    model = Newest()
    fast = recast.optimize(model, example=ids(8))
    again = copy.deepcopy(fast)
    assert isinstance(again, Compiled)
    again.get_parameter("table.weight").data.mul_(2)
    twice = copy.deepcopy(model)
    twice.table.weight.data.mul_(2)
    compare(twice, again, *ids(6))
    with_own = pickle.loads(pickle.dumps(fast))
    compare(model, with_own, *ids(6))


def test_why_is_told_of_the_users_code_where_keeping_it_whole_fails_too() -> None:
    """A loop over the batch in a method that reads what forward has just set on the model."""

    class Scored(Model):
        def over_all(self, rows: Tensor) -> Tensor:
            return torch.stack([torch.mv(self.all, row) for row in rows])

        def forward(self, x: Tensor) -> Tensor:
            self.all = self.table(torch.arange(31))
            return self.over_all(self.table(x[:, 0]))

    fast = recast.optimize(Scored(), example=ids(6))
    assert "len() or a loop of the batch size: 6 for one example" in str(fast.report)
