"""fuse-field-attention: by hand in every form, nn.MultiheadAttention, dropout, each Miss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from passkit import calls, fired, journal, misses, same
from torch import Tensor, nn

FIELDS, HEADS, DIM = 5, 2, 6


def batch(rows: int, seed: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, FIELDS, DIM, generator=g, dtype=torch.float64),)


BATCHES = [batch(6, 0), batch(9, 1)]


class Model(nn.Module):
    """``forward(x) = attend(self, x)``, with layers to use."""

    def __init__(self, attend: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.attend = attend
        for name in ("q", "k", "v"):
            setattr(self, name, nn.Linear(DIM, DIM))
        self.drop = nn.Dropout(0.3)
        self.attention = nn.MultiheadAttention(DIM, HEADS, dropout=0.3, batch_first=True)
        self.fields_first = nn.MultiheadAttention(DIM, HEADS, dropout=0.3, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.attend(self, x)


def _heads(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    split = (x.shape[0], FIELDS, HEADS, DIM // HEADS)
    return tuple(layer(x).view(split).transpose(1, 2) for layer in (m.q, m.k, m.v))


def _rechub(m: Any, x: Tensor) -> Tensor:
    q, k, v = _heads(m, x)
    a = m.drop(F.softmax(torch.matmul(q, k.transpose(-2, -1)) * 3**-0.5, dim=-1))
    return torch.matmul(a, v).transpose(1, 2).contiguous().view(x.shape[0], FIELDS, DIM)


def _in_place(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (torch.stack(torch.split(layer(x), DIM // HEADS, 2)) for layer in (m.q, m.k, m.v))
    scores = torch.einsum("bnik,bnjk->bnij", q, k)
    scores /= 3**0.5
    a = torch.softmax(scores, -1)
    out = torch.cat(torch.split(torch.matmul(a, v), 1), dim=-1).squeeze(0)
    return out, a


def _unmasked(m: Any, x: Tensor) -> Tensor:
    return torch.bmm(F.softmax(m.q(x) @ m.k(x).permute(0, 2, 1), dim=2), m.v(x))


FORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "heads by view, dropout": _rechub,
    "heads by stack, scaled in place, weights read": _in_place,
    "three dimensions": _unmasked,
    "einsum": lambda m, x: torch.einsum(
        "bij,bjd->bid", torch.softmax(torch.einsum("bid,bjd->bij", m.q(x), m.k(x)) / 2, 2), m.v(x)
    ),
    "functional dropout": lambda m, x: torch.bmm(
        F.dropout((m.q(x) @ m.k(x).mT).softmax(-1), 0.2, m.training), m.v(x)
    ),
    "scaled_dot_product_attention": lambda m, x: F.scaled_dot_product_attention(*_heads(m, x)),
    "the same, of three dimensions": lambda m, x: F.scaled_dot_product_attention(
        m.q(x), m.k(x), value=m.v(x), scale=0.5
    ),
    "module": lambda m, x: m.attention(x, x, x, need_weights=False)[0],
    "module, weights made for nobody": lambda m, x: m.attention(x, x, x)[0],
    "module, fields first": lambda m, x: (lambda y: m.fields_first(y, y, y)[0])(x.transpose(0, 1)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_write_it(form: str) -> None:
    fast = same(Model(FORMS[form]), BATCHES)
    assert fired(fast)["fuse-field-attention"] == 1, journal(fast).missed
    (call,) = calls(fast, "field_attention")
    assert call.args[6] is ("weights read" in form)
    assert not [n for n in fast.graph.nodes if n.target in (torch.bmm, torch.matmul, torch.einsum)]


MISSES: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "weights": (lambda m, x: m.attention(x, x, x), "weights are used"),
    "dropout": (
        lambda m, x: F.scaled_dot_product_attention(*_heads(m, x), None, 0.3), "order of its own",
    ),
    "wide": (
        lambda m, x: (lambda y: torch.bmm(torch.softmax(y @ y.mT, -1), y))(x.repeat(1, 1, 30)),
        "heads of 180 elements",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", MISSES)
def test_every_miss_says_why_and_keeps_the_numbers(form: str) -> None:
    attend, why = MISSES[form]
    fast = same(Model(attend), BATCHES, steps=False)
    assert not calls(fast, "field_attention")
    assert any(why in text for text in misses(fast, "fuse-field-attention")), journal(fast).missed


def test_a_length_that_is_not_known() -> None:
    def attend(m: Any, x: Tensor) -> Tensor:
        return torch.bmm(torch.softmax(m.q(x) @ m.k(x).mT, -1), m.v(x)).sum(1)

    shorter = [(BATCHES[0][0],), (BATCHES[1][0][:, :3],)]
    fast = same(Model(attend), shorter, steps=False)
    assert any("is not known" in text for text in misses(fast, "fuse-field-attention"))


@pytest.mark.parametrize(
    "attend",
    [
        lambda m, x: torch.bmm(torch.softmax(m.q(x) @ m.k(x).mT, 1), m.v(x)),  # over the queries
        lambda m, x: torch.bmm(torch.softmax((m.q(x) @ m.k(x).mT).exp(), -1), m.v(x)),
        lambda m, x: m.attention(m.q(x), m.k(x), m.v(x))[0],  # of three inputs
    ],
)
def test_what_is_none_stays(attend: Callable[[Any, Tensor], Any]) -> None:
    fast = same(Model(attend), BATCHES, steps=False)
    assert not calls(fast, "field_attention")
