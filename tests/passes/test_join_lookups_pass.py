"""join-lookups and align-rows: what is taken, each Miss, and the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import emulated_gpu
import models
import pytest
import torch
from passkit import calls, fired, journal, misses, optimized, same
from torch import Tensor, nn

import recast
from recast.passes import REGISTRY, AlignRows, JoinLookups
from recast.rewriter.report import dump

EVERYWHERE = "{everywhere=true}"
JOIN = f"default,join-lookups{EVERYWHERE},align-rows{EVERYWHERE}"
ALL = (
    f"default,join-lookups{EVERYWHERE},narrow-lookups{EVERYWHERE},align-rows{EVERYWHERE},"
    f"overlap-lookups{EVERYWHERE}"
)
Read = Callable[[Any, list[Tensor], Tensor], Tensor]


class Model(nn.Module):
    """``forward(ids, dense) = read(self, rows of three tables, dense)``."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.read = read
        self.emb = nn.ModuleList(nn.Embedding(9, dim) for dim in (8, 3))
        self.bag = nn.EmbeddingBag(9, 8, mode="mean")
        self.bottom = nn.Linear(6, 8)
        self.deep = nn.Sequential(nn.Linear(25, 8), nn.ReLU(), nn.Linear(8, 1))
        self.whole = nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 1))
        self.few = nn.Sequential(nn.Linear(11, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        rows = [e(ids[:, k]) for k, e in enumerate(self.emb)]
        return self.read(self, [*rows, self.bag(ids)], dense)


def batch(rows: int, seed: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 9, (rows, 2), generator=g)
    return ids, torch.randn(rows, 6, generator=g, dtype=torch.float64)


BATCHES = [batch(5, 0), batch(8, 1)]

TAKEN: dict[str, tuple[Read, list[int]]] = {
    "with numbers": (lambda m, r, x: m.deep(torch.cat([*r, x], 1)), [0, 1, 2, -1]),
    "another order": (lambda m, r, x: m.deep(torch.cat([x, r[2], r[0], r[1]], -1)), [-1, 2, 0, 1]),
    "rows alone": (lambda m, r, x: m.few(torch.cat(r[:2], dim=1)) + r[2].sum(1, True), [0, 1]),
    "some are read elsewhere": (
        lambda m, r, x: m.few(torch.cat([r[1], r[2]], 1)) + r[0].sum(1, True) * x.sum(), [1, 2],
    ),
    "two readers": (
        lambda m, r, x: m.deep(y := torch.cat([*r, x], 1)) + y.sum(1, True), [0, 1, 2, -1],
    ),
    "numbers of a function": (
        lambda m, r, x: m.deep(torch.cat([*r, torch.log1p(x.abs())], 1)), [0, 1, 2, -1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", TAKEN)
def test_what_is_joined(form: str) -> None:
    read, order = TAKEN[form]
    fast = same(Model(read), BATCHES, JOIN)
    (call,) = calls(fast, "embedding_cat")
    assert call.args[10] == order, misses(fast, "join-lookups")
    assert not calls(fast, "embedding_bags") and fired(fast)["join-lookups"] == 1
    # Of two readers one may want to see rows without a gap between them.
    assert (call.args[11:] == (False, True)) == (form != "two readers")


REFUSED: dict[str, tuple[Read, str]] = {
    "rows read twice": (
        lambda m, r, x: m.deep(torch.cat([*r, x], 1)) + r[0].sum(1, True), "not by one cat alone",
    ),
    "one part twice": (
        lambda m, r, x: m.whole(torch.cat([r[0], r[2], r[0]], 1)) + r[1].sum(), "not by one cat",
    ),
    "numbers twice": (
        lambda m, r, x: torch.cat([*r, x, x], 1).sum(1, True), "it reads one tensor twice",
    ),
    "work beside": (
        lambda m, r, x: m.whole(torch.cat([m.bottom(x), r[0], r[2]], 1)) + r[1].sum(),
        "can run beside",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", REFUSED)
def test_every_miss_says_why(form: str) -> None:
    read, why = REFUSED[form]
    fast = same(Model(read), BATCHES, JOIN, steps=False)
    assert not calls(fast, "embedding_cat")
    assert any(why in text for text in misses(fast, "join-lookups")), misses(fast, "join-lookups")


def test_rows_beneath_each_other_are_left_alone() -> None:
    fast = same(
        Model(lambda m, r, x: torch.cat([r[0], r[2]], 0).sum(1) + r[1].sum()), BATCHES, JOIN,
        steps=False,
    )  # fmt: skip
    assert not calls(fast, "embedding_cat") and not misses(fast, "join-lookups")


def test_tables_on_a_cpu_are_left_alone() -> None:
    fast = optimized(Model(TAKEN["with numbers"][0]).double(), BATCHES)
    assert calls(fast, "embedding_bags") and not calls(fast, "embedding_cat")
    assert not misses(fast, "join-lookups") and not misses(fast, "align-rows")


def test_an_interaction_is_aligned() -> None:
    model, batches, _ = models.build("dlrm")
    fast = optimized(model, batches, f"default,align-rows{EVERYWHERE}")
    (call,) = calls(fast, "dot_interaction")
    (entry,) = (e for e in journal(fast).fired if e.rule == "align-rows")
    assert call.args[5] is True and "start at whole 16 bytes" in entry.what


def test_a_width_that_fits_is_left_alone() -> None:
    fast = same(Model(lambda m, r, x: m.whole(torch.cat([r[0], r[2], x[:, :5], r[1]], 1))),
                BATCHES, JOIN, steps=False)  # fmt: skip
    assert not fired(fast)["align-rows"]


def test_the_dump(golden: Callable[[str, str], None]) -> None:
    fast = optimized(Model(TAKEN["some are read elsewhere"][0]).double(), BATCHES, ALL)
    golden("passes/join_lookups/some.txt", dump.text(fast.graph, fast, "Model"))


def test_many_ranks_exchange_their_lookups() -> None:
    model = Model(TAKEN["with numbers"][0]).double()
    fast = recast.optimize(model, example=BATCHES, passes=JOIN, world_size=2)
    assert not calls(fast, "embedding_cat") and "send_ids" in str(fast)


def test_stored_tables_are_not_joined() -> None:
    model, batches = Model(TAKEN["with numbers"][0]).eval(), [(i, x.float()) for i, x in BATCHES]
    fast = recast.optimize(model, example=batches, passes=JOIN, precision="int8")
    assert not calls(fast, "embedding_cat") and calls(fast, "quantised_embedding_bags")


def test_they_are_registered() -> None:
    assert REGISTRY["join-lookups"] is JoinLookups and REGISTRY["align-rows"] is AlignRows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["with numbers", "some are read elsewhere"])
def test_on_kernels_of_a_gpu(form: str, dtype: torch.dtype) -> None:
    """Emulated: the same bits forward, under autocast too, as without the passes."""
    torch.manual_seed(1)
    model = Model(TAKEN[form][0])
    batches = [(ids, dense.float()) for ids, dense in BATCHES]
    found = []
    for passes in (None, ALL):
        fast = optimized(copy.deepcopy(model), batches, passes)
        with (
            emulated_gpu.serve(),
            torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32),
        ):
            out = fast(*batches[0])
            up = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
            out.backward(up)
        grads = [p.grad + 0 for p in fast.parameters() if p.grad is not None]
        found.append([out.detach(), *grads])
    assert len(found[0]) == len(found[1]) > 6
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
