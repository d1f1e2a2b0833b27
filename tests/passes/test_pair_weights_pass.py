"""fuse-pair-products: products of pairs with a weight each, and matrices that are held apart."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from passkit import calls, fired, journal, misses, optimized, same
from torch import Tensor, nn

FIELDS, DIM = 5, 4
PAIRS = list(combinations(range(FIELDS), 2))


def batch(rows: int, seed: int) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, FIELDS, DIM, generator=g, dtype=torch.float64),)


BATCHES = [batch(6, 0), batch(9, 1)]


class Model(nn.Module):
    """``forward(x) = products(self, x * scale)``, with weights of every form."""

    def __init__(self, products: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.products = products
        self.scale = nn.Parameter(torch.ones(DIM))
        self.square = nn.Parameter(torch.randn(FIELDS, FIELDS))
        self.vector = nn.Parameter(torch.randn(len(PAIRS)))
        self.column = nn.Parameter(torch.randn(len(PAIRS), 1))
        self.scalars = nn.ParameterList(nn.Parameter(torch.randn(())) for _ in PAIRS)
        self.ones = nn.ParameterList(nn.Parameter(torch.randn(1)) for _ in PAIRS)
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(DIM, DIM)) for _ in PAIRS)
        self.blocks = nn.Parameter(torch.randn(FIELDS, FIELDS, DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.products(self, x * self.scale)


def _inner(x: Tensor, i: int, j: int, keep: bool = False) -> Tensor:
    return (x[:, i] * x[:, j]).sum(1, keepdim=keep)


def _total(weigh: Callable[[Any, int, int, int], Any], keep: bool = False) -> Any:
    """``x + w_k * inner_k + ..``."""

    def products(m: Any, x: Tensor) -> Tensor:
        out = x[:, 0, :1] if keep else x[:, 0, 0]
        for k, (i, j) in enumerate(PAIRS):
            out = out + weigh(m, k, i, j) * _inner(x, i, j, keep)
        return out

    return products


WEIGHED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a matrix": _total(lambda m, k, i, j: m.square[i, j]),
    "a matrix, kept": _total(lambda m, k, i, j: m.square[i, j], keep=True),
    "a matrix, row by row": _total(lambda m, k, i, j: m.square[i][j]),
    "a matrix, from its end": _total(lambda m, k, i, j: m.square[-1 - i, -1 - j]),
    "a computed matrix": _total(lambda m, k, i, j: torch.tanh(m.square)[i, j]),
    "a vector": _total(lambda m, k, i, j: m.vector[k]),
    "a column": _total(lambda m, k, i, j: m.column[k], keep=True),
    "numbers": _total(lambda m, k, i, j: m.scalars[k]),
    "of two parameters": _total(lambda m, k, i, j: m.square[i, j] if k % 2 else m.vector[k]),
    "vectors of one": _total(lambda m, k, i, j: m.ones[k], keep=True),
    "a list": lambda m, x: torch.stack(
        [_inner(x, i, j) * m.vector[k] for k, (i, j) in enumerate(PAIRS)], 1
    ),
    "a list, summed": lambda m, x: torch.cat(
        [m.square[i, j] * _inner(x, i, j, True) for i, j in PAIRS], 1
    ).sum(1),
    "beside others": lambda m, x: torch.cat(
        [x[:, 0], *(m.vector[k] * _inner(x, i, j, True) for k, (i, j) in enumerate(PAIRS))], 1
    ),
}


@pytest.mark.parametrize("form", WEIGHED)
def test_every_way_to_weigh(form: str) -> None:
    fast = same(Model(WEIGHED[form]), BATCHES, steps=form == "a matrix")
    assert fired(fast)["fuse-pair-products"] == 1, journal(fast).missed
    (call,) = calls(fast, "pair_products")
    assert call.args[5] == "dim"


@pytest.mark.parametrize("form", WEIGHED)
def test_under_autocast_the_result_has_the_dtype_of_the_plain_one(form: str) -> None:
    """Of vectors that a product has made narrow: weights without dimensions keep them so."""
    model = Model(lambda m, x: WEIGHED[form](m, x @ m.matrices[0]))
    batches = [(x.float(),) for (x,) in BATCHES]
    fast = optimized(model, batches)
    assert fired(fast)["fuse-pair-products"] == 1
    with torch.autocast("cpu", torch.bfloat16):
        want, got = model(*batches[0]), fast(*batches[0])
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.5)


OTHERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "weights of the samples": lambda m, x: sum(x[:, 0, k] * _inner(x, *p)
                                               for k, p in enumerate(PAIRS[:4])),
    "products, not sums": lambda m, x: sum(m.vector[k] * (x[:, i] * x[:, j])
                                           for k, (i, j) in enumerate(PAIRS)),
    "a weight that is read at its own place": lambda m, x: sum(
        m.square[:, k][: x.shape[2] - 3] * _inner(x, *p, keep=True)
        for k, p in enumerate(PAIRS[:4])
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", OTHERS)
def test_other_weights_keep_their_numbers(form: str) -> None:
    same(Model(OTHERS[form]), BATCHES, steps=False)


def test_some_with_a_weight_and_some_without_are_named() -> None:
    def products(m: Any, x: Tensor) -> Tensor:
        found = [_inner(x, i, j) for i, j in PAIRS]
        return torch.stack([m.vector[0] * found[0], *found[1:]], 1)

    fast = same(Model(products), BATCHES, steps=False)
    assert any("in one form" in text for text in misses(fast, "fuse-pair-products"))


BILINEAR: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a list of parameters": lambda m, x: torch.stack(
        [(x[:, i] @ m.matrices[k]) * x[:, j] for k, (i, j) in enumerate(PAIRS)], 1
    ),
    "one of four dimensions": lambda m, x: torch.stack(
        [torch.mm(x[:, i], m.blocks[i, j]) * x[:, j] for i, j in PAIRS], 1
    ),
    "one for each vector": lambda m, x: torch.cat(
        [torch.matmul(x[:, i : i + 1], m.matrices[i]) * x[:, j : j + 1] for i, j in PAIRS], 1
    ),
    "one for all": lambda m, x: torch.stack(
        [(x[:, i] @ m.matrices[0]) * x[:, j] for i, j in PAIRS], 1
    ),
}


@pytest.mark.parametrize("form", BILINEAR)
def test_matrices_that_are_held_apart_are_grouped(form: str) -> None:
    fast = same(Model(BILINEAR[form]), BATCHES)
    assert fired(fast)["group-vector-linears"] == 1, journal(fast).missed
    left = [n for n in fast.graph.nodes if n.target in (torch.matmul, torch.mm) and n.users]
    assert not left
