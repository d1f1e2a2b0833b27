"""Settings and parts of torch's layers that a rewrite read once, changed afterwards."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import recast
from tests.capture.guarded import ids


def layer(**settings: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, **settings)


class Halved(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.GRU(8, 4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.g(x)[0]
        return out


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(10, 4, padding_idx=0)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = (self.e(ids) * (ids != 0).unsqueeze(-1)).sum(1)
        return out


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x.mean(1))
        return out


def encoder() -> nn.Module:
    return nn.Sequential(nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False))


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    change: Callable[[Any], object]
    says: str
    batch: Callable[[int], Tensor] = lambda rows: torch.randn(rows, 5, 8)


def no_statistics(model: Any) -> None:
    model.net[1].running_mean = model.net[1].running_var = None


CASES = {
    "activation": Case(
        lambda: nn.Sequential(layer()), lambda m: setattr(m[0], "activation", F.gelu),
        "a setting of 0 was .*relu.* and is now .*gelu",
    ),
    "activation becomes a module": Case(
        lambda: nn.Sequential(layer()), lambda m: setattr(m[0], "activation", nn.Tanh()),
        "a setting of 0 was .*relu",
    ),
    "activation is a module": Case(
        lambda: nn.Sequential(layer(activation=nn.GELU())),
        lambda m: setattr(m[0], "activation", nn.Tanh()), "the module '0.activation' was replaced",
    ),
    "norm of a layer": Case(
        lambda: nn.Sequential(layer()), lambda m: setattr(m[0], "norm1", Halved(8)),
        "the module '0.norm1' was replaced",
    ),
    "norm that was None": Case(
        encoder, lambda m: setattr(m[0], "norm", nn.LayerNorm(8)), "a setting of 0 was None",
    ),
    "hook inside a layer": Case(
        encoder, lambda m: m[0].layers[1].linear2.register_forward_hook(lambda *a: a[2] * 2),
        "a hook was added to the module '0.layers.1.linear2'",
    ),
    "hook on a layer of an encoder": Case(
        encoder, lambda m: m[0].layers[0].register_forward_pre_hook(lambda _, a: (a[0] * 2,)),
        "a hook was added to the module '0.layers.0'",
    ),
    "backward hook inside a layer": Case(
        encoder, lambda m: m[0].layers[0].linear1.register_full_backward_pre_hook(
            lambda _, up: (up[0] * 2,)
        ),
        "a hook was added to the module '0.layers.0.linear1'",
    ),
    "method of a layer": Case(
        encoder, lambda m: setattr(m[0].layers[1], "_ff_block", torch.tanh),
        "0.layers.1._ff_block was changed",
    ),
    "dropout of GRU": Case(
        Recurrent, lambda m: setattr(m.g, "dropout", 0.5), "a setting of g was 0.0 and is now 0.5",
    ),
    "padding under a mask": Case(
        Pooled, lambda m: setattr(m.e, "padding_idx", 4), "a setting of e was 0 and is now 4",
        lambda rows: ids(rows, 5),
    ),
    "no statistics": Case(Normed, no_statistics, "net.1.running_mean is None"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make()
    plain = copy.deepcopy(model)
    fast = recast.optimize(model, example=case.batch(6))
    assert fast.report.journal.fired
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agree(fast, plain, case.batch(4))
    for one in (fast, plain):
        torch.manual_seed(1)
        case.change(one)
    with pytest.warns(recast.RecastWarning, match=case.says):
        agree(fast, plain, case.batch(4))
    agree(fast, plain, case.batch(6))
    agree(fast.eval(), plain.eval(), case.batch(3))


def agree(fast: nn.Module, plain: nn.Module, x: Tensor) -> None:
    found = []
    for model in (fast, plain):
        torch.manual_seed(2)
        out = model(x)
        model.zero_grad()
        out.backward(torch.linspace(-1, 2, out.numel()).view_as(out))
        grads = [None if p.grad is None else p.grad.to_dense() for p in model.parameters()]
        found.append((out, grads, dict(model.state_dict())))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
