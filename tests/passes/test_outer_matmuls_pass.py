"""contract-products, of outer products: cross networks by their formula; others stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from passkit import fired, optimized, same
from torch import Tensor, nn

WIDE, OTHER, OUT = 6, 5, 3
Form = Callable[[Any, Tensor, Tensor], Tensor]


def batch(rows: int, seed: int) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, WIDE, generator=g, dtype=torch.float64),)


BATCHES = [batch(6, 0), batch(9, 1)]


class Model(nn.Module):
    """``form(self, x0, x)`` of two layers' results, (B, WIDE) and (B, OTHER)."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.first, self.second = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, OTHER)
        self.one, self.few = nn.Linear(OTHER, 1), nn.Linear(OTHER, OUT)
        self.bare = nn.Linear(OTHER, 1, bias=False)
        self.vector = nn.Parameter(torch.randn(OTHER))
        self.matrix = nn.Parameter(torch.randn(OTHER, OUT))

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, torch.tanh(self.first(x)), torch.tanh(self.second(x)))


FORMS: dict[str, Form] = {
    "a layer of one": lambda m, x, y: (
        m.one(torch.bmm(x.unsqueeze(2), y.unsqueeze(1))).squeeze(2) + x
    ),
    "without a bias": lambda m, x, y: m.bare(x[:, :, None] @ y[:, None]).squeeze(-1),
    "not squeezed": lambda m, x, y: m.one(torch.matmul(x.unsqueeze(-1), y.unsqueeze(1))),
    "a layer of several": lambda m, x, y: m.few(x.unsqueeze(2) * y.unsqueeze(1)),
    "the factors turned": lambda m, x, y: m.few(y.unsqueeze(1) * x.unsqueeze(2)),
    "a matrix": lambda m, x, y: torch.einsum("bi,bj->bij", x, y) @ m.matrix,
    "einsum, turned": lambda m, x, y: torch.einsum("bj,bi->bij", y, x) @ m.matrix,
    "a vector": lambda m, x, y: torch.matmul(torch.bmm(x.unsqueeze(2), y.unsqueeze(1)), m.vector),
    "linear": lambda m, x, y: F.linear(x.unsqueeze(2) @ y.unsqueeze(1), m.few.weight, m.few.bias),
    "of views": lambda m, x, y: m.few(torch.bmm(x.view(-1, WIDE, 1), y.view(-1, 1, OTHER))),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_outer_product_is_not_written(form: str) -> None:
    fast = same(Model(FORMS[form]), BATCHES)
    assert fired(fast)["contract-outer-products"] == 1
    assert not any(n.target in (torch.bmm, torch.einsum) for n in fast.graph.nodes)


OTHERS: dict[str, Form] = {
    "read elsewhere": lambda m, x, y: (lambda z: m.few(z) + z[:, :, :OUT])(
        torch.bmm(x.unsqueeze(2), y.unsqueeze(1))
    ),
    "no outer product": lambda m, x, y: m.few(torch.bmm(x.view(-1, 3, 2), y[:, :4].view(-1, 2, 2))
                                              .sum(2, keepdim=True).expand(-1, -1, OTHER)),
    "of one number": lambda m, x, y: m.few(x[:, :1].unsqueeze(2) * y.unsqueeze(1)),
    "by a matrix of the batch": lambda m, x, y: torch.matmul(
        x.unsqueeze(2) * y.unsqueeze(1), y.unsqueeze(2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", OTHERS)
def test_others_stay(form: str) -> None:
    fast = same(Model(OTHERS[form]), BATCHES, steps=False)
    assert fired(fast)["contract-outer-products"] == 0


@pytest.mark.parametrize("form", ["a layer of one", "a matrix", "a vector"])
def test_under_autocast_the_result_has_the_dtype_of_the_plain_one(form: str) -> None:
    model = Model(FORMS[form])
    x, y = (b[0].float() for b in BATCHES)
    fast = optimized(model, [(x,), (y,)])
    assert fired(fast)["contract-outer-products"] == 1
    with torch.autocast("cpu", torch.bfloat16):
        wanted, got = model(x), fast(x)
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got.float(), wanted.float(), rtol=0.05, atol=0.05)


SUMS: dict[str, Form] = {
    "bmm": lambda m, x, y: torch.bmm(x.unsqueeze(2), y.unsqueeze(1)).sum(0),
    "by name": lambda m, x, y: torch.sum(x[:, :, None] @ y[:, None], dim=0),
    "from the end": lambda m, x, y: torch.matmul(x.unsqueeze(-1), y.unsqueeze(1)).sum(dim=-3),
    "einsum": lambda m, x, y: torch.einsum("bi,bj->bij", x, y).sum(0),
    "einsum, turned": lambda m, x, y: torch.einsum("bj,bi->bij", y, x).sum([0]),
    "of views": lambda m, x, y: torch.bmm(x.view(-1, WIDE, 1), y.view(-1, 1, OTHER)).sum(0),
    "of a table": lambda m, x, y: (
        torch.bmm(m.matrix.unsqueeze(2), m.matrix.unsqueeze(1)).sum(0).sum() * x
    ),
}


@pytest.mark.parametrize("form", SUMS)
def test_a_sum_of_outer_products_is_one_product(form: str) -> None:
    fast = same(Model(SUMS[form]), BATCHES)
    assert fired(fast)["contract-outer-products"] == 1
    assert not any(n.target in (torch.bmm, torch.einsum) for n in fast.graph.nodes)


@pytest.mark.parametrize(
    "form",
    [
        lambda m, x, y: torch.bmm(x.unsqueeze(2), y.unsqueeze(1)).sum(1),
        lambda m, x, y: torch.bmm(x.unsqueeze(2), y.unsqueeze(1)).sum(0, keepdim=True),
        lambda m, x, y: torch.bmm(x.unsqueeze(2), y.unsqueeze(1)).mean(0),
        lambda m, x, y: (x.unsqueeze(2) * y.unsqueeze(1)).sum(0),
        lambda m, x, y: (z := torch.bmm(x.unsqueeze(2), y.unsqueeze(1))).sum(0) + z[0],
    ],
)
def test_other_sums_of_outer_products_stay(form: Form) -> None:
    assert not fired(same(Model(form), BATCHES))["contract-outer-products"]


def test_a_sum_of_outer_products_under_autocast() -> None:
    plain = Model(SUMS["bmm"])
    fast = optimized(plain, [tuple(t.float() for t in b) for b in BATCHES])
    assert fired(fast)["contract-outer-products"] == 1
    with torch.autocast("cpu", torch.bfloat16):
        x = BATCHES[0][0].float()
        assert fast(x).dtype is plain(x).dtype
