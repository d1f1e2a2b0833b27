"""Numbers that forward keeps in the model: counters, annealed weights, the last batch size."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from math import sqrt
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import recast
from recast.errors import RecastWarning
from recast.rewriter.capture.capture_model import capture

Form = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e, self.mlp = nn.EmbeddingBag(50, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.steps, self.rows = 0, 7
        self.heat, self.mean = 1.0, 0.0
        self.inner = Inner()
        self.drop, self.norm = nn.Dropout(0.1), nn.BatchNorm1d(8)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * min(1.0, self.calls / 10)


def annealed(m: Net, x: Tensor) -> Tensor:
    m.steps += 1
    weight = min(0.2, 1.0 * m.steps / 20)
    h = m.e(x)
    return m.mlp(h) + weight * h.square()


def trained_alone(m: Net, x: Tensor) -> Tensor:
    if m.training:
        m.steps += 1
    return m.mlp(m.e(x)) * (1 + m.steps)


def cooled(m: Net, x: Tensor) -> Tensor:
    m.heat = max(m.heat * 0.9, 0.3)
    return F.softmax(m.mlp(m.e(x)) / m.heat, -1)


def decayed(m: Net, x: Tensor) -> Tensor:
    h = m.mlp(m.e(x)) * math.exp(-m.steps / 5) + sqrt(float(m.steps))
    m.steps = m.steps + 1
    return h


def every_tenth(m: Net, x: Tensor) -> Tensor:
    m.steps += 1
    h = m.mlp(m.e(x))
    if m.steps % 10 == 0:
        h = h * 2
    return h


def warmed_up(m: Net, x: Tensor) -> Tensor:
    h = m.mlp(m.e(x))
    if m.steps < 4:
        h = h.detach() + m.e(x)
    m.steps += 1
    return h


def last_size(m: Net, x: Tensor) -> Tensor:
    n = x.size(0)
    if n != m.rows:
        m.rows = n
    return m.mlp(m.e(x)).view(m.rows, 2, 4).sum(1)


def largest_size(m: Net, x: Tensor) -> Tensor:
    m.rows = max(m.rows, len(x))
    return m.mlp(m.e(x)) / m.rows


def noisy(m: Net, x: Tensor) -> Tensor:
    m.steps += 1
    h = m.mlp(m.e(x))
    return m.drop(h) + torch.randn_like(h) / m.steps


def longer(m: Net, x: Tensor) -> Tensor:
    m.steps += 1
    return m.mlp(m.e(x[:, : 1 + m.steps]))


def nested(m: Net, x: Tensor) -> Tensor:
    return m.inner(m.mlp(m.e(x))) + m.inner.calls


def read_alone(m: Net, x: Tensor) -> Tensor:
    last = m.steps
    m.steps = last + x.size(0)
    return m.mlp(m.e(x)) + last


def smoothed(m: Net, x: Tensor) -> Tensor:
    h = m.mlp(m.e(x))
    m.mean = 0.9 * m.mean + 0.1 * h.mean().item()
    return h - m.mean


def overwritten(m: Net, x: Tensor) -> Tensor:
    if m.steps > 5:
        m.steps = 0
    m.steps += 1
    return m.mlp(m.e(x)) * m.steps


def set_in_a_layer(m: Net, x: Tensor) -> Tensor:
    m.steps += 1
    m.drop.p = min(0.9, 0.1 * m.steps)
    return m.drop(m.mlp(m.e(x)))


def constant_in_a_layer(m: Net, x: Tensor) -> Tensor:
    m.norm.momentum = 0.5
    return m.norm(m.mlp(m.e(x)))


def switches_a_layer(m: Net, x: Tensor) -> Tensor:
    m.drop.train()
    return m.drop(m.mlp(m.e(x)))


def indexed(m: Net, x: Tensor) -> Tensor:
    m.steps += 1
    return m.mlp(m.e(x)) * [0.5, 1.0, 2.0][m.steps % 3]


def of_a_kind(m: Net, x: Tensor) -> Tensor:
    m.steps += 1
    h = m.mlp(m.e(x))
    if isinstance(m.steps, int) and not isinstance(m.steps, Tensor) and m.steps > 4:
        h = h * 2
    if type(m.steps) is int and not hasattr(m.steps, "item") and not torch.is_tensor(m.steps):
        h = h + min(m.steps, 8)
    return h


def in_dict(m: Net, x: Tensor) -> Tensor:
    m.__dict__["steps"] += 1
    return m.mlp(m.e(x)) * m.steps


WHOLE = [annealed, trained_alone, cooled, decayed, every_tenth, warmed_up, last_size, largest_size,
         noisy, longer, nested, read_alone, smoothed, overwritten, of_a_kind, in_dict]  # fmt: skip


IN_PART = [indexed, set_in_a_layer, constant_in_a_layer, switches_a_layer]


def made(form: Form) -> Net:
    kind: Any = type(form.__name__, (Net,), {"forward": form, "__module__": __name__})
    made: Net = kind()
    return made


def ids(rows: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 50, (rows, 8), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, rows: list[int]) -> list[Tensor]:
    """Outputs, gradients and numbers of some steps in train mode, and a call in eval mode."""
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Tensor] = []
    for k, n in enumerate(rows):
        torch.manual_seed(k)
        out = model(ids(n, k))
        opt.zero_grad()
        out.square().mean().backward()
        seen += [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        opt.step()
        if k % 4 == 3:
            model.eval()
            with torch.no_grad():
                seen.append(model(ids(n, k)))
            model.train()
        seen += [b.clone() for b in model.buffers()]
        seen.append(torch.tensor([model.steps, model.rows, model.heat, model.mean,
                                  model.inner.calls]))  # fmt: skip
    return seen


@pytest.mark.parametrize("form", WHOLE + IN_PART)
def test_same_numbers(form: Form) -> None:
    plain, given = made(form), made(form)
    before = {k: v for k, v in vars(given).items() if type(v) in (int, float)}
    fast = recast.optimize(given, example=ids(16))
    assert {k: v for k, v in vars(given).items() if type(v) in (int, float)} == before
    whole = str(fast.report)
    assert ("captured whole" in whole) == (form in WHOLE)
    sizes = [16, 16, 9, 9, 16, 2, 16, 16, 5, 5, 5, 16]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecastWarning)
        got = train(fast, sizes)
    torch.testing.assert_close(got, train(plain, sizes))


@pytest.mark.parametrize(
    "form", [annealed, trained_alone, cooled, decayed, longer, nested, read_alone, smoothed]
)
def test_the_graph_runs(form: Form) -> None:
    """A counter makes no call run the plain forward: warnings are errors here."""
    plain, fast = made(form), recast.optimize(made(form), example=ids(16))
    sizes = [16, 16, 9, 16, 16, 16, 16, 16]
    torch.testing.assert_close(train(fast, sizes), train(plain, sizes))


@pytest.mark.parametrize("form", [every_tenth, last_size])
def test_the_graph_runs_again(form: Form) -> None:
    """A call that branches otherwise is the plain forward's, those after it are not."""
    fast = recast.optimize(made(form), example=ids(16))
    graph = fast._runner.cases["both"].program
    ran = []
    run = graph.run
    graph.run = lambda *args: ran.append(1) or run(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecastWarning)
        for _ in range(12):
            fast(ids(16))
    assert len(ran) == 11


def test_set_from_outside() -> None:
    plain, fast = made(annealed), recast.optimize(made(annealed), example=ids(16))
    train(plain, [16] * 3), train(fast, [16] * 3)
    plain.steps = fast.steps = 0
    torch.testing.assert_close(train(fast, [16]), train(plain, [16]))
    plain.steps = fast.steps = 2.5
    with pytest.warns(RecastWarning, match="the type of steps was changed"):
        got = train(fast, [16])
    torch.testing.assert_close(got, train(plain, [16]))


class Counted(Net):
    def forward(self, x: Tensor) -> Tensor:
        return annealed(self, x)


def test_copies_count_by_themselves() -> None:
    fast = recast.optimize(Counted(), example=ids(16))
    train(fast, [16] * 3)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        train(other, [16])
        assert (other.steps, fast.steps) == (4, 3)


def test_said() -> None:
    fast = recast.optimize(made(nested), example=ids(16))
    said = "numbers that forward changes, read and stored at each call: inner.calls"
    assert said in str(fast.report)
    assert fast.why_not_recordable() == "forward counts in Python, and a replay would not"


@pytest.mark.parametrize("form", [annealed, every_tenth])
def test_no_questions_where_nothing_takes_over(form: Form) -> None:
    """On ranks the plain forward cannot run: a branch that a later call takes would be an error."""
    captured = capture(made(form), ids(16), falls_back=False)
    assert captured.kind == ("whole" if form is annealed else "partial")
    if form is every_tenth:
        assert captured.why == "control flow depends on self.steps, which forward changes"


def test_a_diff_tells_of_other_counts() -> None:
    plain, fast = made(annealed), recast.optimize(made(annealed), example=ids(16))
    assert recast.diff(plain, fast, ids(16)).ok
    fast(ids(16))
    report = recast.diff(plain, fast, ids(16))
    assert not report.ok
    assert report.notes == [
        "before the comparison steps is 0 in the plain model and 1 in the other"
    ]


class Sized(Net):
    def forward(self, x: Tensor, n: int) -> Tensor:
        self.steps += 1
        return self.mlp(self.e(x)) * n + self.steps


def test_a_diff_looks_for_the_node_where_numbers_are_given() -> None:
    example = [(ids(16), 3), (ids(9), 4)]
    plain, fast = Sized(), recast.optimize(Sized(), example=example)
    assert fast.report.captured == "whole"
    assert recast.diff(plain, fast, example).ok
    with torch.no_grad():
        fast._root.mlp[0].weight = nn.Parameter(fast._root.mlp[0].weight + 1)
    report = recast.diff(plain, fast, example)
    assert not report.ok and "NOT equal" in str(report)


def fails_at_five(m: Net, x: Tensor) -> Tensor:
    m.steps += 1
    return m.norm(m.mlp(m.e(x))) / float(1 // (m.steps - 5) + 2)


def test_a_call_that_raises_has_counted() -> None:
    """One row is too few for batch normalization, and the fifth step divides by zero."""
    plain, fast = made(fails_at_five), recast.optimize(made(fails_at_five), example=ids(16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecastWarning)
        for rows in (16, 1, 16, 16, 16, 16, 1, 16):
            results = []
            for model in (plain, fast):
                try:
                    results.append(model(ids(rows)).detach())
                except (ValueError, ZeroDivisionError) as error:
                    results.append(type(error))
            if isinstance(results[0], Tensor):
                torch.testing.assert_close(results[1], results[0])
            else:
                assert issubclass(results[1], results[0])
            torch.testing.assert_close(list(fast.buffers()), list(plain.buffers()))
            assert fast.steps == plain.steps


class Recomputed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(
            self.inner, self.mlp(self.e(x)), use_reentrant=False
        )


def test_what_is_computed_twice_counts_twice() -> None:
    plain, fast = Recomputed(), recast.optimize(Recomputed(), example=ids(16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecastWarning)
        torch.testing.assert_close(train(fast, [16] * 3), train(plain, [16] * 3))


def test_random_numbers_are_left_alone() -> None:
    models = made(set_in_a_layer), made(noisy)
    before = torch.get_rng_state()
    for model in models:
        recast.optimize(model, example=ids(16))
    assert torch.equal(torch.get_rng_state(), before)


class OfTensors(nn.Module):
    """Asks for the kind of a number that it took out of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e = nn.EmbeddingBag(50, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.e(x)
        total = h.sum().item()
        return h * 2 if isinstance(total, float) and total > 0 else h


def test_a_number_out_of_a_tensor_is_a_number() -> None:
    batches = [ids(16, k) for k in range(8)]
    plain = OfTensors()
    assert len({bool(plain.e(x).sum() > 0) for x in batches}) == 2
    for example in batches:
        fast = recast.optimize(plain, example=example)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecastWarning)
            for x in batches:
                torch.testing.assert_close(fast(x), plain(x))


class Helped(nn.Module):
    """Its helper is kept in a list, as no submodule."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e = nn.EmbeddingBag(50, 8)
        self.helpers = [Inner(), nn.BatchNorm1d(8)]

    def forward(self, x: Tensor) -> Tensor:
        h = self.e(x)
        for helper in self.helpers:
            h = helper(h)
        return h


def test_modules_in_a_list() -> None:
    plain = Helped()
    given = copy.deepcopy(plain)
    fast = recast.optimize(given, example=ids(16))
    assert fast.report.captured != "whole"
    inner, norm = given.helpers
    assert inner.calls == 0 and norm.num_batches_tracked == 0 and not norm.running_mean.any()
    for k in range(3):
        torch.testing.assert_close(fast(ids(16, k)), plain(ids(16, k)))
    torch.testing.assert_close(fast.helpers[1].running_mean, plain.helpers[1].running_mean)
    assert fast.helpers[0].calls == plain.helpers[0].calls == 3


def counted_in_training(m: Net, x: Tensor) -> Tensor:
    if m.training:
        m.steps += 1
    return m.mlp(m.norm(m.e(x)))


@pytest.mark.parametrize("form", [counted_in_training, trained_alone])
def test_a_graph_that_does_not_count_keeps_nothing_aside(form: Form) -> None:
    fast = recast.optimize(made(form), example=ids(16))
    cases = fast._runner.cases
    assert cases["eval"].undo is None and cases["train"].undo is not None
    assert cases["eval"].traced.numbers == (("steps",) if form is trained_alone else ())


def test_statistics_are_kept_aside_only_where_they_are_written() -> None:
    """Nor are versions asked for where nothing leaves torch."""
    undo = recast.optimize(made(counted_in_training), example=ids(16))._runner.cases["train"].undo
    assert undo is not None and undo.read is None
    assert {name for _, name in undo.buffers} == {
        "running_mean", "running_var", "num_batches_tracked"
    }  # fmt: skip
    none = recast.optimize(made(annealed), example=ids(16))._runner.cases["both"].undo
    assert none is not None and not none.buffers and none.read is None


@pytest.mark.usefixtures("known_calls")
def test_calls_that_count_are_known_ones() -> None:
    """They count as examined ones do, and one that raises has counted."""
    plain, fast = made(counted_in_training), made(counted_in_training)
    fast = recast.optimize(fast, example=ids(16))
    for _ in range(3):
        for model in (plain, fast):
            model(ids(16))
    assert fast._runner.known_call((ids(16),), {}) is not None
    for x in (ids(16), ids(16) + 50, ids(16)):
        for model in (plain, fast):
            try:
                model(x)
            except (IndexError, RuntimeError):
                assert x.max() > 50
        assert fast.steps == plain.steps
        torch.testing.assert_close(list(fast.buffers()), list(plain.buffers()))
    assert fast.steps == 6
    assert fast._runner.known_call((ids(16),), {}) is not None


def test_statistics_that_are_replaced_are_kept_aside_too() -> None:
    plain, fast = made(fails_at_five), recast.optimize(made(fails_at_five), example=ids(16))
    for model in (plain, fast):
        for buffer in ("running_mean", "running_var"):
            model.norm._buffers[buffer] = torch.full((8,), 2.0)
        for rows in (16, 1, 16):
            try:
                model(ids(rows))
            except ValueError:
                assert rows == 1
    torch.testing.assert_close(list(fast.buffers()), list(plain.buffers()))
    assert fast.steps == plain.steps == 3
