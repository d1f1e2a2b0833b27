"""Regions of ``torch.autocast`` inside forward: captured whole, and each computes as it should."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.errors import RecastWarning
from recast.rewriter.compiled.codegen import compile_graph
from recast.rewriter.ir import autocast_regions

IDS = torch.randint(9, (6, 5), generator=torch.Generator().manual_seed(0))


def _chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 8)
        self.first, self.second = _chain(), _chain()
        self.narrow = True


class Off(Net):
    """In whatever its caller sets, the second chain is in float32."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(self.bag(ids))
        with torch.autocast("cpu", enabled=False):
            return self.second(x.float()).cos()


class On(Net):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(self.bag(ids))
        with torch.autocast("cpu", torch.bfloat16):
            y = self.second(x)
        return y.float().sin()


class Decorated(Net):
    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, ids: Tensor) -> Tensor:
        return self.second(self.first(self.bag(ids)))


class Nested(Net):
    """The same layer in both, which is not the same value; and a product between them."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.bag(ids)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.narrow):
            y = self.first(x)
            with torch.autocast("cpu", enabled=False):
                z = self.first(x)
            w = y @ self.second[0].weight
        return y.float() + z, w


class Asks(Net):
    """Python asks for a value that is computed in a region."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.bag(ids)
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ x.t()
            x = self.first(x) if bool(y.detach().sum() > 0) else self.second(x)
        return x.float()


KINDS = (Off, On, Decorated, Nested, Asks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ambient", [None, torch.bfloat16])
def test_whole_and_the_same_numbers(kind: type[Net], ambient: torch.dtype | None) -> None:
    """Bit for bit the plain model's, in its dtypes, whatever autocast holds around the call."""
    torch.manual_seed(0)
    net = kind()
    fast = recast.optimize(net, example=IDS)
    assert fast.report.captured == "whole"
    assert any(autocast_regions(graph.nodes) - {()} for graph in fast.graphs.values())
    ours, plain = [], []
    for model, found in ((fast, ours), (net, plain)):
        for training in (True, False):
            model.train(training).zero_grad()
            with torch.autocast("cpu", ambient or torch.bfloat16, enabled=ambient is not None):
                out = model(IDS)
            outs = out if isinstance(out, tuple) else (out,)
            sum((o.float() * torch.rand_like(o.float()).round()).sum() for o in outs)
            sum(o.float().square().sum() for o in outs).backward()
            found += [*outs, *(p.grad for p in model.parameters() if p.grad is not None)]
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, check_dtype=True)


@pytest.mark.parametrize("kind", [Off, On, Nested])
def test_chains_are_fused_within_a_region(kind: type[Net]) -> None:
    text = str(recast.optimize(kind(), example=IDS))
    assert "autocast(cpu:off)" in text or "autocast(cpu:bfloat16)" in text
    assert text.count("recast.mlp(") == 2
    assert "first.0" not in text.split("second", 1)[1] or kind is Nested


@pytest.mark.parametrize("kind", KINDS)
def test_proved(kind: type[Net]) -> None:
    net = kind()
    recast.diff(net, recast.optimize(net, example=IDS), IDS, steps=2).check()


def test_a_setting_that_decides() -> None:
    net = Nested()
    fast = recast.optimize(net, example=IDS)
    fast.narrow = net.narrow = False
    with pytest.warns(RecastWarning, match="narrow was True and is now False"):
        got = fast(IDS)
    torch.testing.assert_close(got, net(IDS))


class Inherits(Net):
    """Its dtype is that which holds around the call."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(self.bag(ids))
        with torch.autocast("cpu"):
            return self.second(x)


def test_a_dtype_that_is_not_given() -> None:
    net = Inherits()
    fast = recast.optimize(net, example=IDS)
    assert fast.report.captured == "whole"
    torch.testing.assert_close(fast(IDS), net(IDS))
    with torch.autocast("cpu", torch.float16):
        with pytest.warns(RecastWarning, match="get_autocast_dtype.* was changed"):
            got = fast(IDS)
        torch.testing.assert_close(got, net(IDS))


class Views(Net):
    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.first(self.bag(ids)).view(-1, 2, 4).transpose(1, 2).flatten(1)
            return self.first(x).float()


def test_views_do_not_end_a_block() -> None:
    """It would begin again behind each, and cast the weights anew."""
    net = Views()
    fast = recast.optimize(net, example=IDS)
    assert compile_graph(fast.graphs["both"], net, "test").source.count("with ") == 1
    recast.diff(net, fast, IDS).check()


class Sets(Net):
    def forward(self, ids: Tensor) -> Tensor:
        torch.set_autocast_enabled("cpu", True)
        try:
            return self.first(self.bag(ids)).float()
        finally:
            torch.set_autocast_enabled("cpu", False)


def test_what_is_not_seen_is_refused() -> None:
    net = Sets()
    fast = recast.optimize(net, example=IDS)
    assert fast.report.captured == "partial" and "switches autocast" in str(fast.report.why)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(fast(IDS), net(IDS))


class AsksDtypes(Net):
    """Of its input and its parameters; ``computed``: of what a layer returns, too."""

    computed = False

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        x = self.first(self.bag(ids)).to(scale.dtype)
        if self.computed and self.second(x).dtype != self.bag.weight.dtype:
            x = x.neg()
        return x * scale if scale.is_floating_point() else x


@pytest.mark.parametrize("computed", [False, True])
def test_dtypes_that_forward_asks_for(computed: bool) -> None:
    """Autocast around the call changes those of products, not those of inputs and parameters."""
    net, inputs = AsksDtypes(), (IDS, torch.rand(6, 1))
    net.computed = computed
    fast = recast.optimize(net, example=inputs)
    assert fast.report.captured == "whole"
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RecastWarning)
        got, wanted = fast(*inputs), net(*inputs)
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
    assert [("forward reads dtypes" in str(one.message)) for one in told] == [True] * computed


def test_without_an_example() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast = recast.optimize(On())
    assert fast.report.captured == "none" and "autocast" in str(fast.report.why)
