"""pool-sequences: sums under weights that a model computes or is given, and their dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from passkit import fired, journal, optimized, same
from torch import Tensor, nn

import recast

ROWS, LENGTH, DIM = 13, 4, 3


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(ROWS, (rows, LENGTH), generator=g)
    return ids, torch.randn(rows, LENGTH, generator=g, dtype=torch.float64)


BATCHES = [batch(5, 0), batch(8, 1)]
Pool = Callable[[Any, Tensor, Tensor, Tensor], Tensor]  # ids, rows (B, L, D), w (B, L)


class Model(nn.Module):
    """``pool(self, ids, rows, weights)`` of a table and weights with a scale that is trained."""

    def __init__(self, pool: Pool, **table: Any) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.pool = pool
        self.table = nn.Embedding(ROWS, DIM, **table)
        self.scale = nn.Parameter(torch.ones(LENGTH))

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        return self.pool(self, ids, self.table(ids), weights * self.scale)


WEIGHED: dict[str, Pool] = {
    "einsum": lambda m, ids, rows, w: torch.einsum("bld,bl->bd", rows, w),
    "einsum, the weights first": lambda m, ids, rows, w: torch.einsum("ij,ijk->ik", w, rows),
    "product": lambda m, ids, rows, w: (rows * w.unsqueeze(-1)).sum(1),
    "product, kept": lambda m, ids, rows, w: (w[:, :, None] * rows).sum(dim=1, keepdim=True),
    "bmm": lambda m, ids, rows, w: torch.bmm(w.unsqueeze(1), rows).squeeze(1),
    "matmul": lambda m, ids, rows, w: w.softmax(-1).view(-1, 1, LENGTH) @ rows,
    "of three dimensions": lambda m, ids, rows, w: (rows * torch.sigmoid(w.unsqueeze(2))).sum(1),
    "masked and normalised": lambda m, ids, rows, w: (
        lambda v: torch.einsum("bld,bl->bd", rows, v / (v.sum(1, keepdim=True) + 1e-8))
    )(w.abs() * (ids != 0)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_weights_that_the_table_cannot_hold_make_a_result_of_their_dtype(
    dtype: torch.dtype,
) -> None:
    model = Model(WEIGHED["product"])
    narrow = [(ids, weights.float()) for ids, weights in BATCHES]
    fast = recast.optimize(copy.deepcopy(model), example=narrow)
    assert fired(fast)["pool-sequences"] == 1
    ids, weights = BATCHES[0][0], torch.randn(5, LENGTH, dtype=dtype)
    with pytest.warns(recast.RecastWarning, match=f"weights is {dtype}, and the model"):
        torch.testing.assert_close(fast(ids, weights), model(ids, weights))
    half = narrow[0][1].half()  # widened, as torch does it: warnings are errors here
    torch.testing.assert_close(fast(ids, half), model(ids, half))
    wide = fast.double(), model.double()
    torch.testing.assert_close(wide[0](*BATCHES[1]), wide[1](*BATCHES[1]))


@pytest.mark.parametrize("form", WEIGHED)
def test_every_way_to_weigh(form: str) -> None:
    fast = same(Model(WEIGHED[form]), BATCHES)
    assert fired(fast)["pool-sequences"] == 1, journal(fast).missed
    assert not fired(fast)["fuse-gated-sums"]


def test_a_mask_in_an_einsum_is_padding() -> None:
    model = Model(
        lambda m, ids, rows, w: torch.einsum("bld,bl->bd", rows, (ids != 0).to(rows.dtype))
    )
    (entry,) = (e for e in journal(same(model, BATCHES)).fired if e.rule == "pool-sequences")
    assert "without 0" in entry.what


OTHERS: dict[str, Pool] = {
    "rows that are read again": lambda m, ids, rows, w: (
        torch.einsum("bld,bl->bd", rows, w) + rows[:, 0]
    ),
    "weights of the columns": lambda m, ids, rows, w: torch.einsum("bld,bd->bl", rows, w[:, :DIM]),
    "weights of all columns": lambda m, ids, rows, w: (rows * (rows * 0 + 2)).sum(1),
    "a column by row": lambda m, ids, rows, w: (rows * m.scale[:DIM]).sum(1),
}


@pytest.mark.parametrize("form", OTHERS)
def test_what_is_something_else_stays(form: str) -> None:
    assert not fired(same(Model(OTHERS[form]), BATCHES, steps=False))["pool-sequences"]


@pytest.mark.parametrize("form", WEIGHED)
def test_a_padding_row_of_the_table_is_weighed_too(form: str) -> None:
    model = Model(WEIGHED[form], padding_idx=0)
    nn.init.normal_(model.table.weight)
    assert fired(same(model, BATCHES))["pool-sequences"] == 1


MASKED: dict[str, Pool] = {
    "bmm under a mask": lambda m, ids, rows, w: torch.bmm((ids != 0).float().unsqueeze(1), rows),
    "bmm": lambda m, ids, rows, w: torch.bmm(w.unsqueeze(1), rows),
    "einsum": WEIGHED["einsum"],
    "product": WEIGHED["product"],
}


@pytest.mark.parametrize("form", MASKED)
def test_under_autocast_the_result_has_the_dtype_of_the_plain_one(form: str) -> None:
    ids, weights = BATCHES[0]
    model = Model(MASKED[form])
    fast = optimized(model, [(ids, weights.float()), (BATCHES[1][0], BATCHES[1][1].float())])
    assert fired(fast)["pool-sequences"] == 1
    with torch.autocast("cpu", torch.bfloat16):
        want, got = model(ids, weights.float()), fast(ids, weights.float())
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("form", ["product", "einsum", "masked and normalised"])
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("trained", [True, False])
def test_a_gradient_penalty(form: str, padding: int | None, trained: bool) -> None:
    plain = Model(WEIGHED[form], padding_idx=padding)
    plain.scale.requires_grad_(trained)
    batches = [(ids, weights.float()) for ids, weights in BATCHES]
    fast = optimized(copy.deepcopy(plain), batches)
    assert fired(fast)["pool-sequences"] == 1, journal(fast).missed
    for ids, weights in batches:
        upstream = torch.randn(len(ids), DIM, generator=torch.Generator().manual_seed(2))
        found = []
        for model in (plain, fast):
            model.zero_grad()
            parameters = [p for p in model.parameters() if p.requires_grad]
            out = model(ids, weights).tanh() * upstream
            grads = torch.autograd.grad(out.sum(), parameters, create_graph=True)
            sum((g.square() * (k + 1)).sum() for k, g in enumerate(grads)).backward()
            found.append([torch.as_tensor(p.grad) for p in parameters])
        torch.testing.assert_close(found[1], found[0])
