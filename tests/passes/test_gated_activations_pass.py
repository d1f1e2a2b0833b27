"""fuse-gated-activations: SwiGLU, GEGLU and their like, by module, function and hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from passkit import calls, misses, same
from torch import Tensor, nn
from torch.nn import functional as F

from recast.runtime import device
from recast.runtime.layers.gated_activation import ACTIVATIONS

COLUMNS = 6
Form = Callable[[Any, Tensor, Tensor], Tensor]  # the model, gate, value


def batch(rows: int, seed: int) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, 3, COLUMNS, generator=g, dtype=torch.float64),)


BATCHES = [batch(6, 0), batch(9, 1)]
FORMS: dict[str, tuple[str, Form]] = {
    "swiglu": ("silu", lambda m, x, v: F.silu(x) * v),
    "value in front": ("silu", lambda m, x, v: v * m.silu(x)),
    "silu by hand": ("silu", lambda m, x, v: x * torch.sigmoid(x) * v),
    "geglu": ("gelu", lambda m, x, v: m.gelu(x) * v),
    "gelu by hand": ("gelu", lambda m, x, v: 0.5 * x * (1 + torch.erf(x / 2**0.5)) * v),
    "gelu by tanh": ("gelu_tanh", lambda m, x, v: F.gelu(x, approximate="tanh").mul(v)),
    "module by tanh": ("gelu_tanh", lambda m, x, v: torch.multiply(m.bent(x), v)),
    "its own gate": ("silu", lambda m, x, v: F.silu(x) * x),
}


class Net(nn.Module):
    """The feed-forward part of a block of today's transformers."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.one, self.three = nn.Linear(COLUMNS, 11), nn.Linear(COLUMNS, 11, bias=False)
        self.two = nn.Linear(11, COLUMNS)
        self.silu, self.gelu, self.bent = nn.SiLU(), nn.GELU(), nn.GELU("tanh")
        self.wet = nn.SiLU(inplace=True)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(self.form(self, self.one(x), self.three(x)))
        return out


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_one_call(form: str) -> None:
    activation, function = FORMS[form]
    torch.manual_seed(2)
    (call,) = calls(same(Net(function), BATCHES, steps=form == "swiglu"), "gated_activation")
    assert call.args[2] == activation


class Halves(nn.Module):
    """Both parts of one product, as ``chunk`` gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(COLUMNS, 10), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both(x).chunk(2, dim=-1)
        out: Tensor = self.out(F.gelu(gate) * value)
        return out


def test_halves_of_one_product() -> None:
    torch.manual_seed(2)
    assert len(calls(same(Halves(), BATCHES), "gated_activation")) == 1


def _kept(m: Any, x: Tensor, v: Tensor) -> Tensor:
    act = F.silu(x)
    return act * v + act


OTHERS: dict[str, Form] = {
    "read elsewhere": _kept,
    "of another shape": lambda m, x, v: F.silu(x) * v[:, :1],
    "in place": lambda m, x, v: m.wet(x) * v,
    "another activation": lambda m, x, v: F.elu(x) * v,
    "a number": lambda m, x, v: F.silu(x) * 2.0 + v,
}


@pytest.mark.parametrize("form", OTHERS)
def test_what_is_none_stays(form: str) -> None:
    torch.manual_seed(2)
    assert not calls(same(Net(OTHERS[form]), BATCHES, steps=False), "gated_activation")


def test_hooks_are_a_miss() -> None:
    net = Net(FORMS["value in front"][1])
    net.silu.register_forward_hook(lambda m, args, out: out * 2)
    fast = same(net, BATCHES, steps=False)
    assert not calls(fast, "gated_activation")
    assert any("hooks" in why for why in misses(fast, "fuse-gated-activations"))


@pytest.mark.parametrize(
    "activation, recorded, rows",
    [
        ("silu", True, 4096), ("silu", False, 4096), ("gelu", True, 0), ("gelu", False, 2048),
        ("gelu_tanh", True, 1024), ("gelu_tanh", False, 512),
    ],
)  # fmt: skip
def test_a_few_numbers_run_in_torch(activation: str, recorded: bool, rows: int) -> None:
    """From ``rows`` of 16 on the kernels run; on both sides the numbers agree."""
    definition = ACTIVATIONS[activation]
    for some, kernel in ((rows - 1, False), (max(rows, 1), True)):
        if some < 0:
            continue
        g = torch.Generator().manual_seed(3)
        gate, value = (torch.randn(some, 16, generator=g, requires_grad=recorded) for _ in range(2))
        out = torch.ops.recast.gated_activation(gate, value, activation)
        plain = definition(gate) * value
        torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-5)
        if recorded:
            name = type(out.grad_fn).__name__
            expected = kernel and device.extension() is not None
            assert (name == "GatedActivationBackward") is expected
            up = torch.randn(out.shape, generator=g)
            for a, b in zip(
                *(torch.autograd.grad(o, (gate, value), up) for o in (out, plain)), strict=True
            ):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        elif device.extension() is not None:
            assert (_calls_of_torch(gate, value, activation) > 0) is not kernel


def _calls_of_torch(gate: Tensor, value: Tensor, activation: str) -> int:
    """How often a call of the op multiplies in torch."""
    with torch.profiler.profile(acc_events=True) as seen:  # torch 2.11 warns without it
        torch.ops.recast.gated_activation(gate, value, activation)
    return sum(event.count for event in seen.key_averages() if event.key == "aten::mul")
