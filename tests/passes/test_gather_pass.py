"""gather-in-dots: which lookups the interaction does itself, each Miss, and all numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import emulated_gpu
import pytest
import torch
from passkit import calls, journal, misses, optimized, same
from torch import Tensor, nn

import recast
from recast.passes import PIPELINE, REGISTRY
from recast.passes.gather import GatherInDots
from recast.runtime import tolerances

GATHER = "default,gather-in-dots{everywhere=true}"
BESIDE = "default,overlap-lookups{everywhere=true},gather-in-dots{everywhere=true}"
NARROW = "default,narrow-lookups{everywhere=true},gather-in-dots{everywhere=true}"
WIDTH = 8


class Model(nn.Module):
    """A small DLRM; ``rows(self, ids)`` are its lookups."""

    def __init__(self, rows: Callable[[Any, Tensor], list[Tensor]], sparse: bool = False) -> None:
        super().__init__()
        self.read = rows
        self.emb = nn.ModuleList(nn.Embedding(9, WIDTH, sparse=sparse) for _ in range(3))
        self.bag = nn.EmbeddingBag(9, WIDTH, mode="mean", sparse=sparse)
        self.most = nn.EmbeddingBag(9, WIDTH, mode="max")
        self.bot = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, WIDTH))
        self.top = nn.LazyLinear(1)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        x = self.bot(dense)
        rows = self.read(self, ids)
        stacked = torch.stack([x, *rows], 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        li, lj = torch.tril_indices(stacked.shape[1], stacked.shape[1], -1)
        out = self.top(torch.cat([x, products[:, li, lj]], 1))
        return out + rows[0].sum(1, keepdim=True) if hasattr(self, "again") else out


def batch(rows: int, seed: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 9, (rows, 3), generator=g)
    return ids, torch.randn(rows, 5, generator=g, dtype=torch.float64)


BATCHES = [batch(5, 0), batch(8, 1)]


def model(
    rows: Callable[[Any, Tensor], list[Tensor]], again: bool = False, sparse: bool = False
) -> Model:
    torch.manual_seed(0)
    made = Model(rows, sparse)
    if again:
        made.again = True
    made(BATCHES[0][0], BATCHES[0][1].float())
    return made


def one_each(m: Any, ids: Tensor) -> list[Tensor]:
    return [e(ids[:, k]) for k, e in enumerate(m.emb)]


def with_bags(m: Any, ids: Tensor) -> list[Tensor]:
    return [m.bag(ids), *one_each(m, ids)[1:], m.emb[1](ids[:, 0])]


@pytest.mark.parametrize(
    ("rows", "passes"),
    [(one_each, BESIDE), (with_bags, GATHER)],
)
def test_the_interaction_looks_up(rows: Any, passes: str) -> None:
    fast = same(model(rows), BATCHES, passes)
    assert len(calls(fast, "gathered_dots")) == 1, misses(fast, "gather-in-dots")
    for name in ("embedding_bags", "embedding_bags_beside", "join", "dot_interaction"):
        assert not calls(fast, name)
    (said,) = [e.what for e in journal(fast).fired if e.rule == "gather-in-dots"]
    count = 3 if rows is one_each else 4
    assert said == f"{count} lookups done by the interaction that reads their rows"


def test_rows_that_were_aligned_stay_so() -> None:
    """The chain behind the interaction reads rows of 14 columns that start at whole 16 bytes."""
    plain = model(one_each)
    plain.top = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1))
    passes = "default,align-rows{everywhere=true},gather-in-dots{everywhere=true}"
    given = [(ids, dense.float()) for ids, dense in BATCHES]
    twin = copy.deepcopy(plain)
    fast = optimized(twin, given, passes)
    (call,) = calls(fast, "gathered_dots")
    assert call.args[-1] is True
    with emulated_gpu.serve():
        fast(*given[1]).square().mean().backward()
    plain(*given[1]).square().mean().backward()
    for a, b in zip(twin.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(None if a.grad is None else a.grad + 0, b.grad)


def largest(m: Any, ids: Tensor) -> list[Tensor]:
    return [*one_each(m, ids), m.most(ids)]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other readers": ({"rows": one_each, "again": True}, "readers other than the interaction"),
    "a maximum": ({"rows": largest}, "is a max or has a weight"),
    "sparse gradients": ({"rows": one_each, "sparse": True}, "asks for sparse gradients"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_every_miss_says_why(form: str) -> None:
    given, why = REFUSED[form]
    fast = same(model(**given), BATCHES, GATHER, steps=False)
    assert not calls(fast, "gathered_dots") and calls(fast, "embedding_bags")
    assert any(why in text for text in misses(fast, "gather-in-dots"))


def test_it_has_to_be_asked_for() -> None:
    assert REGISTRY["gather-in-dots"] is GatherInDots
    assert not any(isinstance(p, GatherInDots) for p in PIPELINE)
    fast = optimized(model(one_each).double(), BATCHES, "default,gather-in-dots")
    assert "its tables are not on a GPU" in misses(fast, "gather-in-dots")


@pytest.mark.parametrize("low", [None, pytest.param(torch.bfloat16, marks=pytest.mark.long)])
def test_training_on_kernels(low: torch.dtype | None) -> None:
    """Three steps: tables are updated from the rows that the kernel wrote, as those of torch."""
    plain = model(with_bags)
    wide, twin = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    nets = [twin, plain, wide]
    optimizers = [torch.optim.Adagrad(net.parameters(), lr=0.1) for net in nets]
    batches = [(ids, dense.float()) for ids, dense in (batch(6, k) for k in range(3))]
    with emulated_gpu.serve() as emulated:
        fast, _ = recast.optimize(twin, optimizers[0], example=batches[0], passes=NARROW)
        for own, net in zip(optimizers, [fast, plain, wide], strict=True):
            for ids, dense in batches:
                own.zero_grad()
                dtype = next(net.parameters()).dtype
                narrow = low if dtype == torch.float32 else None
                with torch.autocast("cpu", narrow or torch.bfloat16, enabled=narrow is not None):
                    net(ids, dense.to(dtype)).square().mean().backward()
                own.step()
    assert {"dot_forward", "dot_backward", "row_update"} <= set(emulated.launched)
    assert "embedding_forward" not in emulated.launched
    for a, b, c in zip(*(net.parameters() for net in nets), strict=True):
        if low is None:
            assert tolerances.excess(a, b, c, scale=1.0) <= tolerances.CHAIN
        else:  # Adagrad's first steps are of the size of the rate, whatever the gradient
            ours, usual = ((p.double() - c).abs().mean() for p in (a, b))
            assert ours <= 2 * usual + 1e-3


def test_ids_outside_their_tables_are_left_out_and_counted() -> None:
    ids, dense = batch(4, 0)
    ids[2, 1] = 9
    with emulated_gpu.serve():
        fast = recast.optimize(model(one_each), example=(ids % 9, dense.float()), passes=GATHER)
        before = recast.runtime.checked.bad_ids()
        out = fast(ids, dense.float())
        assert recast.runtime.checked.bad_ids() == before + 1
        with pytest.warns(recast.RecastWarning, match="left out 1 id outside the table, first at"):
            good = fast(ids % 9, dense.float())
        torch.testing.assert_close(out[[0, 1, 3]], good[[0, 1, 3]])
        with recast.checked(), pytest.raises(recast.IdError, match="id 9 of lookup 1"):
            fast(ids, dense.float())
