"""A ``torch.autograd.Function`` of the user's is one call of the graph, with its own backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compiledkit import same
from torch import Tensor, nn
from torch.nn import functional as F

import recast
from recast.errors import CaptureError


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
    """Returns what it is given itself; doubles the gradient."""

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
    Directly, ByAlias, ByAttribute, ByHelper, GivenBack, Several,
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
    """All entries in one line; without those that are not positive, if there are any."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone() if bool((x > 0).all()) else x[x > 0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise NotImplementedError


def test_a_function_that_kept_a_shape_in_both_examples_is_held_to_it() -> None:
    class Counted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Positive.apply(x).mean(0)

    fast = recast.optimize(Counted(), example=[(torch.rand(n, 3) + 1,) for n in (4, 6)])
    assert fast.report.to_dict()["captured"] == "whole"
    fast(torch.ones(5, 3))
    with pytest.raises(CaptureError, match="does not keep the shape"):
        fast(torch.tensor([[1.0, -1.0, 2.0]]))


class Clamped(torch.autograd.Function):
    """Writes to what it is given, which the forward of a Function may."""

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
