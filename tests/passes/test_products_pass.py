"""contract-products: inner products of pairs, sums of broadcast products, each Miss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from passkit import calls, fired, journal, misses, optimized, same
from torch import Tensor, nn

FIELDS, DIM = 6, 5
LI, LJ = [0, 0, 1, 2, 4], [1, 5, 2, 4, 3]


def batch(rows: int, seed: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, FIELDS, DIM, generator=g, dtype=torch.float64),)


BATCHES = [batch(6, 0), batch(9, 1)]


class Model(nn.Module):
    """``forward(x) = products(self, x * scale)``, with parameters for the products to use."""

    def __init__(self, products: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.products = products
        self.scale = nn.Parameter(torch.ones(DIM))
        self.kernel = nn.Parameter(torch.randn(DIM, len(LI), DIM))
        self.vector = nn.Parameter(torch.randn(DIM))
        self.register_buffer("li", torch.tensor(LI))
        self.register_buffer("lj", torch.tensor(LJ))

    def forward(self, x: Tensor) -> Tensor:
        return self.products(self, x * self.scale)


INNER: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "lists": lambda m, x: torch.sum(x[:, LI] * x[:, LJ], dim=2),
    "buffers": lambda m, x: (x[:, m.li] * x[:, m.lj]).sum(-1),
    "every column named": lambda m, x: torch.mul(x[:, LI, :], x[:, LJ, :]).sum(2),
    "index_select": lambda m, x: (
        torch.index_select(x, 1, m.li) * torch.index_select(x, 1, m.lj)
    ).sum(dim=-1),
    "a triangle": lambda m, x: (lambda li, lj: (x[:, li] * x[:, lj]).sum(-1))(
        *torch.triu_indices(FIELDS, FIELDS, 1)
    ),
    "einsum": lambda m, x: torch.einsum("bpd, bpd -> bp", x[:, m.li], x[:, m.lj]),
    "with itself": lambda m, x: (lambda p: (p * p).sum(-1))(x[:, LI]),
}


@pytest.mark.parametrize("form", INNER)
def test_every_way_to_write_inner_products(form: str) -> None:
    fast = same(Model(INNER[form]), BATCHES)
    assert fired(fast) == {"fuse-inner-products": 1}, journal(fast).missed
    assert len(calls(fast, "inner_products")) == 1


def _outer(m: Any, x: Tensor) -> Tensor:
    p, q = x[:, LI], x[:, LJ]
    mixed = torch.sum(p.unsqueeze(1) * m.kernel, dim=-1).permute(0, 2, 1)
    return torch.sum(mixed * q, -1)


CONTRACTIONS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "outer product network": (_outer, "acd,bcd->abc"),
    "the other way round": (
        lambda m, x: (m.kernel * x[:, LI].unsqueeze(1)).sum(3) * m.vector[:, None], "bcd,acd->abc",
    ),
    "unsqueezed in place": (
        lambda m, x: torch.sum(
            torch.cat([x[:, :2], x[:, 2:5]], 1).unsqueeze_(1) * m.kernel, dim=-1
        ), "acd,bcd->abc",
    ),
    "of each other": (
        lambda m, x: (x.unsqueeze(1) * x.unsqueeze(2)).sum(-1), "acd,abd->abc",
    ),
    "a size of 1 is stretched": (
        lambda m, x: (x.unsqueeze(1) * m.kernel[:, :1]).sum(-1), "acd,bd->abc",
    ),
    "a matrix for each place, as in ComiRec": (
        lambda m, x: torch.sum(m.kernel.unsqueeze(0) * x[:, :5].unsqueeze(2), dim=3),
        "bcd,abd->abc",
    ),
    "the same from a parameter of one sample": (
        lambda m, x: torch.sum(
            m.kernel.view(1, DIM, len(LI), DIM)[:, :4] * x[:, :4].unsqueeze(2), dim=3
        ), "bcd,abd->abc",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", CONTRACTIONS)
def test_a_product_larger_than_its_factors_is_never_written(form: str) -> None:
    products, equation = CONTRACTIONS[form]
    fast = same(Model(products), BATCHES)
    (call,) = calls(fast, "contraction")
    assert call.args[2] == equation


def test_its_result_lies_as_that_of_a_sum() -> None:
    products, _ = CONTRACTIONS["a size of 1 is stretched"]
    fast = optimized(Model(products).double(), BATCHES)
    assert calls(fast, "contraction") and fast(*BATCHES[0]).is_contiguous()


@pytest.mark.parametrize(
    "products",
    [
        lambda m, x: (x * m.vector).sum(-1),  # no larger than x
        lambda m, x: (x[:, :1].unsqueeze(1) * m.kernel[:, :1]).sum(-1),  # a size of 1 in both
        # both have inserted one dimension
        lambda m, x: (x[:, None].unsqueeze(1) * m.kernel[:, :1].unsqueeze(0)).sum(-1),
        lambda m, x: (x.unsqueeze(1) * x.unsqueeze(2)).sum(1),  # another dimension
        lambda m, x: (x.unsqueeze(1) * x.unsqueeze(2)).sum(-1, keepdim=True),
        lambda m, x: (lambda y: (y.unsqueeze_(1) * m.kernel).sum(-1) + y.sum())(x[:, LI] + 1.0),
    ],
)
def test_what_gains_nothing_or_is_none_stays(products: Callable[[Any, Tensor], Tensor]) -> None:
    fast = same(Model(products), BATCHES, steps=False)
    assert not fired(fast)


MISSES: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "two tensors": (lambda m, x: (x[:, LI] * (x + 1)[:, LJ]).sum(-1), "the pairs are of two"),
    "int32 index": (lambda m, x: (x[:, m.li.int()] * x[:, m.lj.int()]).sum(-1), "torch.int32"),
}


@pytest.mark.parametrize("form", MISSES)
def test_every_miss_says_why_and_keeps_the_numbers(form: str) -> None:
    products, why = MISSES[form]
    fast = same(Model(products), BATCHES, steps=False)
    assert not calls(fast, "inner_products")
    assert any(why in text for text in misses(fast, "fuse-inner-products")), journal(fast).missed


@pytest.mark.parametrize("products", [INNER["lists"], _outer, INNER["einsum"]])
def test_under_autocast_it_has_the_dtype_of_the_model(
    products: Callable[[Any, Tensor], Tensor],
) -> None:
    import recast

    model = Model(products)
    x = BATCHES[0][0].float()
    fast = recast.optimize(model, example=[x, BATCHES[1][0].float()])
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = model(x), fast(x)
    assert got.dtype == expected.dtype
    assert (got.dtype == torch.float32) == (products is not INNER["einsum"])
    truth = model.double()(x.double())
    worst = [(out.double() - truth).abs().max().item() for out in (expected, got)]
    assert worst[1] <= 1.5 * worst[0]
