"""``precision=`` with dynamic tables: their rows stay in their dtype, plain tables are stored."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from dynamickit import Model, Stream, example, train
from dynamicranks import ADAGRAD, HOW
from harness import run
from torch import Tensor

import recast
from recast.runtime import tolerances
from recast.runtime.embedding import precision as formats
from recast.runtime.embedding.precision_table import StoredTable

EXAMPLE = example(Stream(0))
BATCHES = [Stream(1).batch(n) for n in (5, 9, 2, 6)]  # of the same users and items
NEW = Stream(2).batch(7)  # of others


def model() -> Model:
    torch.manual_seed(3)
    return Model()


def trained() -> Any:
    """A model that has met the ids of BATCHES; its own forward runs the graph."""
    fresh = model()
    fast, opt = recast.optimize(
        fresh, ADAGRAD(fresh.parameters()), example=EXAMPLE, tables=HOW, inplace=True
    )
    train(fast, opt, BATCHES)
    return fast.eval()


@torch.no_grad()
def outputs(fast: Any) -> list[Tensor]:
    return [fast(*batch) for batch in (*BATCHES, NEW)]


def rounded(fast: Any, precision: str) -> Any:
    """A copy whose plain table is rounded as a stored one."""
    twin = copy.deepcopy(fast)
    table = twin.get_parameter("day.weight")
    packed = formats.pack(table, precision)
    table.data.copy_(formats.unpack(packed, precision, table.shape[1]))
    return twin


def close(got: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert tolerances.excess(a, b, b.double()) <= 1


@pytest.mark.parametrize("precision", ["int8", "bf16"])
def test_a_trained_model_is_served(precision: Any) -> None:
    plain = trained()
    fast = recast.optimize(plain._root, example=EXAMPLE, precision=precision)
    before = {name: len(t) for name, t in recast.dynamic.tables(fast).items()}
    assert sum(before.values()) > 20
    close(outputs(fast), outputs(rounded(plain, precision)))
    assert any(not torch.equal(a, b) for a, b in zip(outputs(fast), outputs(plain), strict=True))
    assert {name: len(t) for name, t in recast.dynamic.tables(fast).items()} == before
    assert isinstance(fast.day.weight, StoredTable)
    assert fast.user.weight.dtype == torch.float32 and not isinstance(fast.user.weight, StoredTable)
    whys = [m.why for m in fast.report.journal.missed if m.rule == "quantise-tables"]
    assert "its table is dynamic: rows come and go, each in the dtype of the table" in whys
    assert "outputs differ by at most" in str(fast.report)


def test_on_two_ranks(tmp_path: Path) -> None:
    """One exchange for the tables of both kinds; rows come from a checkpoint of one rank."""
    plain = trained()
    recast.checkpoint.save(tmp_path / "last", plain)

    def rank_of(rank: int) -> Any:
        fast = recast.optimize(
            model().eval(), example=EXAMPLE, tables=HOW, precision="int8",
            sharding={"day": "row_wise"},
        )  # fmt: skip
        recast.checkpoint.load(tmp_path / "last", fast)
        assert isinstance(fast.day.weight, StoredTable)
        return outputs(fast), str(fast), sum(len(t) for t in recast.dynamic.tables(fast).values())

    results = run(2, rank_of)
    wanted = outputs(rounded(plain, "int8"))
    for found, graph, _ in results:
        close(found, wanted)
        assert graph.count("recast.send_ids") == 1 and "quantised_embedding_bags" in graph
    rows = sum(len(t) for t in recast.dynamic.tables(plain).values())
    assert sum(r[2] for r in results) == rows and all(r[2] < rows for r in results)
