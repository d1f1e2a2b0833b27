"""group-embeddings where a small table is read as a whole too: its gradient is dense anyway."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from passkit import calls, journal, same
from torch import Tensor, nn
from torch.nn import functional as F

import recast
from recast.errors import IdError
from recast.passes import embeddings
from recast.passes.shard import ShardTables
from recast.runtime.plan import Table, explicit
from recast.runtime.rows.grad import RowGrad

ROWS, DIM = 12, 4


class Forward(nn.Module):
    """Two tables, and a forward that is given."""

    def __init__(self, forward: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.e = nn.Embedding(ROWS, DIM, **options)
        self.other = nn.Embedding(ROWS, DIM)
        self.head = nn.Linear(DIM, ROWS, bias=False)
        self._forward = forward

    def forward(self, *args: Any) -> Any:
        return self._forward(self, *args)


def batches(*shape: int) -> list[tuple[Tensor, ...]]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randint(0, ROWS, (rows, *shape), generator=g),) for rows in (6, 9)]


def flags(fast: Any) -> list[list[bool]]:
    """What each call says of its lookups; nothing where no table is read whole."""
    return [list(node.args[10]) for node in calls(fast, "embedding_bags") if len(node.args) > 10]


def tied(m: Any, x: Tensor) -> Tensor:
    return m.e(x) @ m.e.weight.t()


def propagated(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return F.softmax(m.e.weight, 0)[x] * m.other(x), m.e(x)


def as_module(m: Any, x: Tensor) -> Tensor:
    return m.head(m.e(x))


def bag(m: Any, x: Tensor) -> Tensor:
    return F.embedding_bag(x, m.e.weight, mode="max") @ m.e.weight.t()


def with_tied_head() -> nn.Module:
    model = Forward(as_module)
    model.head.weight = model.e.weight
    return model


WHOLE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[list[bool]]]] = {
    "tied": (lambda: Forward(tied), (), [[True]]),
    "tied, of sequences": (lambda: Forward(tied), (3,), [[True]]),
    "tied, with padding": (lambda: Forward(tied, padding_idx=-2), (3,), [[True]]),
    "one of two": (lambda: Forward(propagated), (), [[False, True]]),
    "a module of the same weight": (with_tied_head, (), [[True]]),
    "the largest of a bag": (lambda: Forward(bag), (3,), [[True]]),
}


@pytest.mark.parametrize("most", [0, 8192])
@pytest.mark.parametrize("form", WHOLE)
def test_numbers_are_the_plain_models_and_gradients_plain_tensors(
    form: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "recast.runtime.embedding.embedding_bags._MOST_IDS", most
    )  # ours, and torch's
    make, shape, told = WHOLE[form]
    torch.manual_seed(2)
    fast = same(make(), batches(*shape))
    assert flags(fast) == told
    assert journal(fast).lookups_fused == journal(fast).lookups_found
    fast.zero_grad(set_to_none=True)
    (out, *_) = torch.utils._pytree.tree_leaves(fast(*batches(*shape)[0]))
    out.backward(torch.randn(out.shape, dtype=out.dtype))
    assert type(fast.get_submodule("e").weight.grad) is Tensor
    if form == "one of two":
        assert type(fast.get_submodule("other").weight.grad) is RowGrad


NOT_WHOLE: dict[str, Callable[..., Any]] = {
    "its shape": lambda m, x: m.e(x) * m.e.weight.shape[1],
    "its size": lambda m, x: m.e(x) * m.e.weight.size(0),
    "detached": lambda m, x: m.e(x) @ m.e.weight.detach().t(),
    "two lookups": lambda m, x: m.e(x) + F.embedding(x // 2, m.e.weight),
    "another table": lambda m, x: m.e(x) @ m.other.weight.t(),
    "lookups of two levels": lambda m, x: m.e((m.e(x).sum(-1) > 0).long()),
}


@pytest.mark.parametrize("form", NOT_WHOLE)
def test_what_makes_no_gradient_of_all_of_it_is_no_reader(form: str) -> None:
    fast = same(Forward(NOT_WHOLE[form]), batches())
    assert flags(fast) == []


def test_a_large_table_keeps_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "SMALL", ROWS * DIM - 1)
    assert flags(same(Forward(tied), batches())) == []


def test_a_sparse_table_stays_sparse() -> None:
    fast = same(Forward(lambda m, x: (m.e(x), m.e.weight.sum()), sparse=True), batches())
    assert flags(fast) == [[True]]


def test_the_report_tells() -> None:
    (fired,) = (e for e in journal(same(Forward(tied), batches())).fired if "group" in e.rule)
    assert "dense gradients of 1, read as a whole too" in fired.what
    assert "dense gradient" not in (fired.saves or "")


@pytest.mark.parametrize("most", [0, 8192])
def test_a_bad_id_is_named(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recast.runtime.embedding.embedding_bags._MOST_IDS", most)
    fast = same(Forward(tied), batches(), steps=False)
    with pytest.raises(IdError, match=f"id {ROWS} of lookup 0"):
        fast(torch.tensor([1, ROWS, 2]))


def test_a_part_of_a_model_does_not_know_who_reads_its_table() -> None:
    torch.manual_seed(5)
    e = nn.Embedding(ROWS, DIM)
    fast = recast.optimize(e, example=batches())
    assert flags(fast) == [[True]]


def test_flags_go_with_their_lookups_when_tables_part() -> None:
    tables = [Table("e.weight", ROWS, DIM), Table("other.weight", ROWS, DIM)]
    plan = explicit(tables, 2, {"e.weight": "data_parallel", "other.weight": "row_wise"})
    fast = recast.optimize(Forward(propagated), example=batches())
    graph = fast.graph
    context = recast.rewriter.pipeline.Context(fast._root)
    recast.rewriter.pipeline.run(graph, [ShardTables(plan)], context)
    told = {str(n.args[0][0].target): list(n.args[10]) for n in calls(fast, "embedding_bags")}  # type: ignore[union-attr,index]
    assert told == {"other.weight": [False], "e.weight": [True]}


class Timed(nn.Module):
    """It reads the clock, so it is captured in part."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.e = table

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.e(x)
        return out if time.time() > 0 else -out


def test_a_part_does_not_claim_that_it_knows_the_other_readers() -> None:
    bags = Timed(nn.EmbeddingBag(ROWS, DIM))
    fired = recast.explain(bags, example=torch.tensor([[3, 4]])).journal.fired
    (told,) = (e for e in fired if e.rule == "group-embeddings")
    assert told.what.endswith("dense gradients of 1, which may be read elsewhere too")
    assert told.saves is None


def test_a_lookup_alone_in_its_part_is_left_to_torch() -> None:
    """Its call costs more than the lookup, and saves nothing."""
    report = recast.explain(Timed(nn.Embedding(ROWS, DIM)), example=torch.tensor([3]))
    assert report.to_dict()["lookups"] == {"found": 1, "fused": 0}
    assert not report.journal.fired
    (told,) = (e for e in report.journal.missed if e.rule == "group-embeddings")
    assert told.node == "e"
    assert told.why.startswith("called alone, outside of a graph, torch's own layer is as fast")


def test_a_lookup_alone_whose_dense_gradient_is_saved() -> None:
    rows = embeddings.SMALL // DIM + 1
    report = recast.explain(Timed(nn.Embedding(rows, DIM)), example=torch.tensor([3]))
    (told,) = (e for e in report.journal.fired if e.rule == "group-embeddings")
    assert told.saves == "1.05 MB of dense gradient a step"
