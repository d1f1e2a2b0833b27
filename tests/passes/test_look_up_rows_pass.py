"""look-up-rows: a Parameter indexed by ids is a table; other indexing stays what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from passkit import calls, fired, misses, same
from torch import Tensor, nn

import recast
from recast.runtime.rows.grad import RowGrad

ROWS, WIDTH, LENGTH = 11, 4, 3


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ids of which none is negative, and some that count from the end."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(ROWS, (rows, LENGTH), generator=g)
    return ids, torch.randint(-ROWS, ROWS, (rows, LENGTH), generator=g)


BATCHES = [batch(5, 0), batch(8, 1)]


class Model(nn.Module):
    """``form(self, ids, others)``, with tables that it may want."""

    def __init__(self, form: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.form = form
        self.table = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.numbers = nn.Parameter(torch.randn(ROWS))
        self.matrices = nn.Parameter(torch.randn(ROWS, WIDTH, 2))
        self.rows = nn.Embedding(ROWS, WIDTH)
        self.codes = nn.Parameter(torch.arange(ROWS * 2).view(ROWS, 2), requires_grad=False)
        self.register_buffer("known", torch.randn(ROWS, WIDTH))
        self.register_buffer("places", torch.tensor([4, 0, 3, 1]))

    def forward(self, ids: Tensor, others: Tensor) -> Tensor:
        return self.form(self, ids, others)


FORMS: dict[str, Callable[..., Tensor]] = {
    "a matrix of ids": lambda m, ids, _: m.table[ids],
    "a column": lambda m, ids, _: m.table[ids[:, 0]],
    "from the end": lambda m, _, others: m.table[others].tanh(),
    "int32": lambda m, _, others: m.table[others.int()],
    "the weight of a module": lambda m, _, others: m.rows.weight[others],
    "index_select": lambda m, ids, _: m.table.index_select(0, ids[:, 1]),
    "torch.index_select": lambda m, ids, _: torch.index_select(m.table, dim=0, index=ids[:, 1]),
    "beside an embedding": lambda m, ids, others: m.table[others] * m.rows(ids),
    "twice": lambda m, ids, others: m.table[others] * m.table[ids],
    "read as a whole too": lambda m, ids, _: m.table[ids] @ m.table.T,
    "written in place behind": lambda m, ids, _: m.table[ids].mul_(2.0),
    "pooled": lambda m, ids, _: m.table[ids % ROWS].sum(1),
    "pooled, from the end": lambda m, _, others: m.table[others].sum(1),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_indexed_parameter_is_a_lookup(form: str) -> None:
    fast = same(Model(FORMS[form]), BATCHES)
    assert fired(fast)["look-up-rows"] == (2 if form == "twice" else 1)
    (call,) = calls(fast, "embedding_bags")
    assert call.args[5] == (["sum"] if "pooled" in form else ["none"] * len(call.args[1]))


NEVER_NEGATIVE: dict[str, Callable[..., Tensor]] = {
    "a remainder": lambda m, _, others: m.table[(others * 7) % ROWS],
    "torch.remainder": lambda m, _, others: m.table[torch.remainder(others, ROWS).long()],
    "clamped": lambda m, _, others: m.table[others.clamp(min=0).view(-1)],
    "the greatest": lambda m, ids, _: m.table[m.rows(ids).argmax(-1)],
    "buckets": lambda m, ids, _: m.table[torch.bucketize(ids, m.places.sort()[0])[:, 0]],
    "index_select": FORMS["index_select"],
}


@pytest.mark.parametrize("form", [*NEVER_NEGATIVE, "clamped below zero", "a remainder of less"])
def test_ids_that_cannot_be_negative_are_used_as_they_are(form: str) -> None:
    negative: dict[str, Callable[..., Tensor]] = {
        "clamped below zero": lambda m, _, others: m.table[others.clamp(min=-2)],
        "a remainder of less": lambda m, _, others: m.table[others % -ROWS],
    }
    fast = same(Model((NEVER_NEGATIVE | negative)[form]), BATCHES, steps=False)
    assert fired(fast)["look-up-rows"] == 1
    assert any(n.target is torch.where for n in fast.graph.nodes) == (form in negative)


OTHER: dict[str, Callable[..., Tensor]] = {
    "one row": lambda m, ids, _: m.table[ids[0, 0]] + ids.sum(),
    "the same rows for all": lambda m, ids, _: m.table[m.places].sum() + ids,
    "a mask": lambda m, ids, _: m.table[m.known[:, 0] > 0].sum() + ids,
    "matrices": lambda m, ids, _: m.matrices[ids[:, 0]],
    "integers": lambda m, ids, _: m.codes[ids] * m.numbers[0],
    "a buffer": lambda m, ids, _: m.known[ids] * m.numbers[0],
    "columns": lambda m, ids, _: m.table.index_select(1, ids[:, 0] % WIDTH),
    "cells": lambda m, ids, _: m.table[ids, ids % WIDTH],
    "computed": lambda m, ids, _: (m.table * 2)[ids],
}


@pytest.mark.parametrize("form", OTHER)
def test_other_indexing_stays(form: str) -> None:
    fast = same(Model(OTHER[form]), BATCHES, steps=False)
    assert fired(fast)["look-up-rows"] == 0
    assert not misses(fast, "look-up-rows")


def test_numbers_by_ids_are_named() -> None:
    fast = same(Model(lambda m, ids, _: m.numbers[ids].sum(1)), BATCHES, steps=False)
    (missed,) = (e for e in fast.report.journal.missed if e.rule == "look-up-rows")
    assert "a vector indexed by ids" in missed.why and missed.tries


def _refused(model: Any, ids: list[int]) -> str:
    with pytest.raises(recast.IdError) as error:
        model(torch.tensor([[0, 0, 0], ids]), BATCHES[0][1])
    assert isinstance(error.value, IndexError)  # as plain torch raises
    return str(error.value)


def test_an_id_outside_is_named_as_it_was_given() -> None:
    net = Model(FORMS["a matrix of ids"])
    fast = recast.optimize(net, example=BATCHES[0])
    assert f"{-ROWS - 3}" in _refused(fast, [1, -ROWS - 3, -1])
    assert f"{ROWS}" in _refused(fast, [1, ROWS, -1])
    found = fast(torch.tensor([[-ROWS, -1, 1]]), BATCHES[0][1])
    torch.testing.assert_close(found[0], net.table[[0, -1, 1]])


def test_its_gradient_is_not_dense() -> None:
    net = Model(FORMS["from the end"])
    fast, optimizer = recast.optimize(
        net, torch.optim.SGD(net.parameters(), lr=0.1), example=BATCHES[0]
    )
    before = net.table.detach().clone()
    fast(*BATCHES[0]).square().sum().backward()
    assert isinstance(net.table.grad, RowGrad)
    optimizer.step()
    touched = set((BATCHES[0][1] % ROWS).flatten().tolist())
    moved = (net.table != before).any(1).nonzero().flatten().tolist()
    assert set(moved) == touched
