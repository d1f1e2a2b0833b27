"""A user's ``torch.autograd.Function`` is one call of the graph, with its own backward."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from compiledkit import same
from torch import Tensor, nn
from torch.nn import functional as F

import recast
from recast.errors import CaptureError, RecastWarning


class Reversed(torch.autograd.Function):
    """The same value; the gradient times ``-scale``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -ctx.scale * grad, None


class Handed(torch.autograd.Function):
    """Returns its input itself; doubles the gradient."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad


class Rounded(torch.autograd.Function):
    """A weight on a grid of steps; the gradient of the step by what it rounds."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, step: Tensor) -> Tensor:
        ctx.save_for_backward(weight, step)
        return torch.round(weight / step) * step

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, step = ctx.saved_tensors
        return grad, (grad * (torch.round(weight / step) - weight / step)).sum()


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        signs = torch.sign(x)
        ctx.mark_non_differentiable(signs)
        return x.exp(), signs

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        return grad * ctx.saved_tensors[0].exp() * 0.5


class OfABuiltin(Reversed):
    """Its ``apply`` is the builtin itself, as torch has it from 2.14 on."""

    apply = torch._C._FunctionBase.__dict__["apply"]


reverse = Reversed.apply


def reversed_by_a_helper(x: Tensor) -> Tensor:
    return Reversed.apply(x, 0.3)


class Model(nn.Module):
    """``inner`` makes (B, 8) of (B, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.ModuleList(nn.Embedding(9, 4) for _ in range(2))
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 2)
        self.step = nn.Parameter(torch.tensor(0.1))
        self.kept = Reversed.apply

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.cat([e(ids[:, k]) for k, e in enumerate(self.e)], 1)
        return torch.sigmoid(self.second(self.inner(F.relu(self.first(h)))))

    def inner(self, h: Tensor) -> Tensor:
        raise NotImplementedError


class Directly(Model):
    def inner(self, h: Tensor) -> Tensor:
        return Reversed.apply(h, 0.3)


class ByAlias(Model):
    def inner(self, h: Tensor) -> Tensor:
        return reverse(h, 0.5) + h


class ByAttribute(Model):
    def inner(self, h: Tensor) -> Tensor:
        return self.kept(h, 0.5) * h


class ByBuiltin(Model):
    def inner(self, h: Tensor) -> Tensor:
        return F.linear(h, OfABuiltin.apply(self.first.weight, 0.3), self.first.bias)


class ByHelper(Model):
    def inner(self, h: Tensor) -> Tensor:
        return reversed_by_a_helper(h)


class GivenBack(Model):
    def inner(self, h: Tensor) -> Tensor:
        return Handed.apply(h)


class Several(Model):
    def inner(self, h: Tensor) -> Tensor:
        value, signs = TwoOutputs.apply(Handed.apply(h) * 0.1)
        return value * signs


class OfAWeight(Model):
    def inner(self, h: Tensor) -> Tensor:
        return F.linear(h, Rounded.apply(self.first.weight, self.step), self.first.bias)


class OfATable(Model):
    def inner(self, h: Tensor) -> Tensor:
        table = Rounded.apply(self.e[0].weight, self.step)
        return h + table.repeat(1, 2).mean(0)


class Sized(Model):
    def inner(self, h: Tensor) -> Tensor:
        h = Reversed.apply(h, 0.3)
        if h.dim() == 2 and h.size(1) != 3:
            h = h / 2
        return h.reshape(h.shape[0], 2, 4).flatten(1)


class Unrecorded(Model):
    def inner(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            still = Reversed.apply(h, 2.0)
        return h * still


FORMS = (
    Directly, ByAlias, ByAttribute, ByBuiltin, ByHelper, GivenBack, Several,
    OfAWeight, OfATable, Sized, Unrecorded,
)  # fmt: skip


@pytest.mark.parametrize("make", FORMS)
def test_it_is_one_call_and_its_gradients_are_its_own(make: type[Model]) -> None:
    torch.manual_seed(1)
    model = make()
    batches = [torch.randint(9, (rows, 2)) for rows in (6, 4)]
    fast = recast.optimize(copy.deepcopy(model), example=[(b,) for b in batches])
    report = fast.report.to_dict()
    assert report["captured"] == "whole", report.get("why")
    assert report["lookups"] == {"found": 2, "fused": 2}
    assert report["fired"]["group-embeddings"] == 1
    for mode in (True, False):
        for rows in batches:
            numbers(model.train(mode), fast.train(mode), rows)


def numbers(plain: nn.Module, fast: nn.Module, ids: Tensor) -> None:
    """Outputs and all gradients, for a random gradient of the outputs."""
    results = []
    for model in (plain, fast):
        model.zero_grad()
        out = model(ids)
        torch.manual_seed(7)
        out.backward(torch.randn_like(out))
        results.append((out, {n: p.grad for n, p in model.named_parameters()}))
    (want, wanted), (got, had) = results
    torch.testing.assert_close(got, want)
    for name, grad in wanted.items():
        held = had[name]
        assert (grad is None) == (held is None), name
        if grad is not None:
            torch.testing.assert_close(held + 0, grad, msg=name)


def test_a_function_that_asks_for_a_size_sees_that_of_each_call() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return BySize.apply(self.line(x))

    model = Scaled()
    fast = recast.optimize(copy.deepcopy(model), example=[(torch.randn(n, 3),) for n in (4, 6)])
    assert fast.report.to_dict()["captured"] == "whole"
    same(model.eval(), fast.eval(), (torch.randn(9, 3),))


class BySize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / len(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


def test_a_function_that_is_no_global_name_is_told_of() -> None:
    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return -grad

    class Hidden(Model):
        def forward(self, ids: Tensor) -> Tensor:
            return self.second(self.first(Local.apply(self.e[0](ids).flatten(1))))

    torch.manual_seed(1)
    model, ids = Hidden(), torch.randint(9, (6, 2))
    fast = recast.optimize(copy.deepcopy(model), example=(ids,))
    assert fast.report.to_dict()["captured"] == "partial"
    assert "no global name" in str(fast.report)
    numbers(model, fast, ids)


class Positive(torch.autograd.Function):
    """A copy if all entries are positive, otherwise the positive ones in one row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x > 0)
        return x.clone() if bool((x > 0).all()) else x[x > 0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.zeros(ctx.saved_tensors[0].shape).masked_scatter(ctx.saved_tensors[0], grad)


class Counted(nn.Module):
    """The layers before the Function write statistics and draw a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.top = nn.Embedding(9, 3), nn.Linear(3, 3)
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.5)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        h = self.drop(self.norm(self.top(self.rows(ids))))
        return (Positive.apply(x + 0.1 * h.tanh()) * 2).mean(0).sum()


def test_a_function_of_another_width_than_in_both_examples() -> None:
    plain = Counted()
    model = copy.deepcopy(plain)
    example = [(torch.randint(9, (n,)), torch.rand(n, 3) + 1) for n in (4, 6)]
    fast, opt = recast.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), example=example)
    usual = torch.optim.SGD(plain.parameters(), lr=0.1)
    assert fast.report.to_dict()["captured"] == "whole"
    for step, low in enumerate((1.0, -1.0, 1.0)):
        ids, x = torch.randint(9, (5,)), torch.linspace(low, 2, 15).view(5, 3)
        for one, stepped in ((plain, usual), (fast, opt)):
            stepped.zero_grad()
            torch.manual_seed(step)
            if one is fast and low < 0:
                with pytest.warns(RecastWarning, match="Positive does not keep the shape"):
                    loss = one(ids, x)
            else:
                loss = one(ids, x)
            loss.backward()
            stepped.step()
        for name, want in plain.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], want, msg=name)


class Shifted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return Positive.apply(x).mean(0)


def test_one_behind_what_cannot_be_undone_is_held_to_its_width() -> None:
    fast = recast.optimize(Shifted(), example=[(torch.rand(n, 3) + 1,) for n in (4, 6)])
    assert fast.report.to_dict()["captured"] == "whole"
    with pytest.raises(CaptureError, match="does not keep the shape"):
        fast(torch.tensor([[1.0, -9.0, 2.0]]))


class Counting(Positive):
    """Writes to a buffer that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, calls: Tensor) -> Tensor:
        calls.add_(1)
        return Positive.forward(ctx, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Positive.backward(ctx, grad), None


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return Counting.apply(x, self.calls).mean(0)


def test_one_that_writes_to_a_buffer_does_it_once() -> None:
    fast = recast.optimize(Counter(), example=[(torch.rand(n, 3) + 1,) for n in (4, 6)])
    assert fast.report.to_dict()["captured"] == "whole"
    with pytest.raises(CaptureError, match="does not keep the shape"):
        fast(torch.tensor([[1.0, -9.0, 2.0]]))
    assert fast.get_buffer("calls") == 1


class Noisy(nn.Module):
    """Draws from generators of its own, and of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=self.generator)
        return Drawn.apply(x + 0.1 * noise).sum()


class Drawn(Positive):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Positive.forward(ctx, x) * random.random()


def test_numbers_that_are_drawn_once_more_are_the_same() -> None:
    plain = Noisy()
    fast = recast.optimize(Noisy(), example=[(torch.rand(n, 3) + 1,) for n in (4, 6)])
    assert fast.report.to_dict()["captured"] == "whole"
    results = []
    for model in (plain, fast):
        random.seed(5)
        few = pytest.warns(RecastWarning, match="does not keep") if model is fast else nullcontext()
        with few:
            results.append([model(torch.linspace(low, 2, 6).view(2, 3)) for low in (1.0, -1.0, 1)])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # which torch's compiler does
def test_torch_compile_follows_a_graph_with_one() -> None:
    torch.manual_seed(1)
    model, ids = Directly(), torch.randint(9, (6, 2))
    fast = recast.optimize(copy.deepcopy(model), example=(ids,))
    compiled = torch.compile(fast, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids), model(ids))


class Clamped(torch.autograd.Function):
    """Writes to its input, as the forward of a Function may."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        w.mul_(0.5)
        return w * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


def test_a_function_that_writes_to_a_parameter() -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(9, 4)

        def forward(self, ids: Tensor) -> Tensor:
            before = self.rows(ids[:, 0])
            total = Clamped.apply(self.rows.weight).sum()
            return before + self.rows(ids[:, 1]) + total

    plain = Between()
    other, ids = copy.deepcopy(plain), torch.randint(9, (6, 2))
    fast = recast.optimize(other, example=(ids,))
    assert torch.equal(other.rows.weight, plain.rows.weight)
    with torch.no_grad():
        torch.testing.assert_close(fast(ids), plain(ids))
    assert torch.equal(other.rows.weight, plain.rows.weight)


class Finite(torch.autograd.Function):
    """The rows that begin with a finite number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = x[:, 0].isfinite()
        return x[ctx.kept]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        whole = grad.new_zeros(len(ctx.kept), grad.shape[1])
        whole[ctx.kept] = grad
        return whole


def test_a_function_that_drops_rows_of_which_the_example_had_none() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.top = nn.Embedding(9, 4), nn.Linear(4, 1)

        def forward(self, ids: Tensor, x: Tensor) -> Tensor:
            return self.top(Finite.apply(self.rows(ids) + x)).mean()

    plain, ids, x = Dropping(), torch.randint(9, (6,)), torch.randn(6, 4)
    fast = recast.optimize(copy.deepcopy(plain), example=(ids, x))
    assert fast.report.to_dict()["captured"] == "whole"
    for bad in ([], [2], [0, 5]):
        x[bad] = float("nan")
        torch.testing.assert_close(fast(ids, x), plain(ids, x))


class Scaled(torch.autograd.Function):
    """The same value; the gradient times what ``scale`` is while it runs."""

    scale = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.scale = Scaled.scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.scale * grad


@contextmanager
def _scaled(scale: float) -> Iterator[None]:
    before, Scaled.scale = Scaled.scale, scale
    try:
        yield
    finally:
        Scaled.scale = before


@pytest.mark.parametrize("first", [True, False], ids=["of an input", "of a layer"])
def test_a_function_that_reads_what_is_set_for_a_while(first: bool) -> None:
    """No graph sets it, and nothing but gradients shows it."""

    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bottom, self.top = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = x if first else self.bottom(x)
            with _scaled(0.1):
                h = Scaled.apply(h)
            return self.top(self.bottom(h))

    torch.manual_seed(0)
    model, x = Sets(), torch.randn(6, 4, requires_grad=True)
    fast = recast.optimize(model, example=x)
    assert "by the graph is not that by the model" in str(fast.report)
    upstream = torch.randn(6, 1)
    got = [torch.autograd.grad(m(x), [x, *m.parameters()], upstream) for m in (model, fast)]
    torch.testing.assert_close(got[1], got[0])
