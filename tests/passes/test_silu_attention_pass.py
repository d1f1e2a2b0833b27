"""fuse-silu-attention: HSTU's attention in the ways it is written; others stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from passkit import calls, misses, same
from torch import Tensor, nn
from torch.nn import functional as F

import recast

ROWS, HEADS, DIM = 5, 2, 6
Form = Callable[[Any, Tensor, Tensor], Tensor]


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    times = torch.randint(0, 90, (rows, ROWS), generator=g)
    return torch.randn(rows, ROWS, DIM, generator=g, dtype=torch.float64), times


BATCHES = [batch(6, 0), batch(9, 1)]


class Layer(nn.Module):
    """``forward(x, times) = form(self, x, times)``, with what HSTU's layers have."""

    def __init__(self, form: Form, places: int = ROWS) -> None:
        super().__init__()
        self.form = form
        self.uvqk = nn.Linear(DIM, 4 * DIM)
        self.position = nn.Parameter(torch.randn(places, places))
        self.time = nn.Parameter(torch.randn(10))
        self.register_buffer("causal", torch.ones(places, places).tril())

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        return self.form(self, x, times)

    def parts(self, x: Tensor) -> list[Tensor]:
        """u, v, q and k as (B, N, H, d)."""
        made = F.silu(self.uvqk(x)).view(x.shape[0], x.shape[1], 4, HEADS, DIM // HEADS)
        return list(made.unbind(2))

    def bias(self, times: Tensor) -> Tensor:
        apart = (times[:, :, None] - times[:, None, :]).abs() // 10
        return self.position + F.embedding(apart, self.time[:, None]).squeeze(-1)


def _einsums(m: Any, x: Tensor, times: Tensor) -> Tensor:
    """As the paper's code has it."""
    u, v, q, k = m.parts(x)
    a = torch.einsum("bnhd,bmhd->bhnm", q, k)
    a = F.silu(a + m.bias(times).unsqueeze(1)) / ROWS
    a = a * m.causal.unsqueeze(0).unsqueeze(0)
    return (u * torch.einsum("bhnm,bmhd->bnhd", a, v)).flatten(2)


def _heads_first(m: Any, x: Tensor, times: Tensor) -> Tensor:
    u, v, q, k = (t.transpose(1, 2) for t in m.parts(x))
    a = torch.matmul(q, k.transpose(-2, -1)) * 0.5 + m.position
    a = F.silu(m.bias(times)[:, None] + a) * m.causal * (1 / ROWS)
    return (u * torch.matmul(a, v)).transpose(1, 2).flatten(2)


def _bare(m: Any, x: Tensor, times: Tensor) -> Tensor:
    u, v, q, k = (t.transpose(1, 2) for t in m.parts(x))
    return (u * (F.silu(q @ k.mT) @ v)).transpose(1, 2).flatten(2)


def _two_masks(m: Any, x: Tensor, times: Tensor) -> Tensor:
    u, v, q, k = (t.transpose(1, 2) for t in m.parts(x))
    seen = (times > 20)[:, None, None, :]
    a = m.causal * F.silu(q @ k.mT) * seen
    return (u * (a @ v)).transpose(1, 2).flatten(2)


def _one_head(m: Any, x: Tensor, times: Tensor) -> Tensor:
    u, v, q, k = (t.flatten(2) for t in m.parts(x))
    a = F.silu(torch.bmm(q, k.transpose(1, 2)) + m.bias(times)) / ROWS * m.causal
    return u * torch.bmm(a, v)


def _learnt_mask(m: Any, x: Tensor, times: Tensor) -> Tensor:
    u, v, q, k = (t.transpose(1, 2) for t in m.parts(x))
    a = F.silu(q @ k.mT) * torch.sigmoid(m.position)
    return (u * (a @ v)).transpose(1, 2).flatten(2)


FORMS: dict[str, Form] = {
    "einsums": _einsums,
    "heads first": _heads_first,
    "no bias and no mask": _bare,
    "two masks": _two_masks,
    "one head": _one_head,
    "a mask that learns": _learnt_mask,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_one_call(form: str) -> None:
    torch.manual_seed(2)
    fast = same(Layer(FORMS[form]), BATCHES, steps=form == "einsums")
    assert len(calls(fast, "silu_attention")) == 1
    assert not any(n.target is F.silu and "attention" in n.name for n in fast.graph.nodes)


@pytest.mark.parametrize("form", FORMS)
def test_the_kernels_train_as_torch_does(form: str) -> None:
    torch.manual_seed(4)
    model = Layer(FORMS[form])
    examples = [(x.float(), times) for x, times in BATCHES]
    fast = recast.optimize(model, example=examples, strict=True)
    assert len(calls(fast, "silu_attention")) == 1
    assert recast.diff(model, fast, examples[0], steps=3).check().ok


def _tanh(m: Any, x: Tensor, times: Tensor) -> Tensor:
    u, v, q, k = (t.transpose(1, 2) for t in m.parts(x))
    return (u * (torch.tanh(q @ k.mT) @ v)).transpose(1, 2).flatten(2)


def _read_twice(m: Any, x: Tensor, times: Tensor) -> Tensor:
    u, v, q, k = (t.transpose(1, 2) for t in m.parts(x))
    a = F.silu(q @ k.mT)
    return (u * (a @ v)).transpose(1, 2).flatten(2) + a.mean()


def _no_scores(m: Any, x: Tensor, times: Tensor) -> Tensor:
    u, v, q, k = (t.transpose(1, 2) for t in m.parts(x))
    a = F.silu(m.position.expand(x.shape[0], HEADS, ROWS, ROWS))
    return (u * (a @ v) + q * k).transpose(1, 2).flatten(2)


def _product_of_weights(m: Any, x: Tensor, times: Tensor) -> Tensor:
    u, v, q, k = (t.transpose(1, 2) for t in m.parts(x))
    a = F.silu(q @ k.mT)
    return (u * ((a * a) @ v)).transpose(1, 2).flatten(2)


def _sum_of_scores(m: Any, x: Tensor, times: Tensor) -> Tensor:
    u, v, q, k = (t.transpose(1, 2) for t in m.parts(x))
    a = q @ k.mT
    return (u * (F.silu(a + a) @ v)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    "form", [_tanh, _read_twice, _no_scores, _product_of_weights, _sum_of_scores]
)
def test_what_is_none_stays(form: Form) -> None:
    torch.manual_seed(2)
    assert not calls(same(Layer(form), BATCHES, steps=False), "silu_attention")


def test_long_sequences_are_left_to_torch() -> None:
    x = torch.randn(2, 300, DIM)
    fast = recast.optimize(Layer(_bare, 300), example=(x, torch.zeros(2, 300, dtype=torch.int64)))
    assert not calls(fast, "silu_attention")
    assert any("300 places" in why for why in misses(fast, "fuse-silu-attention"))
