"""Lookups in tables sharded over ranks, against one process that has the whole tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness import run
from torch import Tensor

from recast.runtime.embedding.call import call_of
from recast.runtime.embedding.embedding_bags import embedding_bags
from recast.runtime.plan import Table, explicit
from recast.runtime.ranks.exchange_buckets import prepare
from recast.runtime.ranks.exchange_ids import send_ids, wait_ids
from recast.runtime.ranks.exchange_route import Route
from recast.runtime.ranks.exchange_rows import send_rows, wait_rows
from recast.runtime.ranks.shards import ShardedTable

SCHEMES = ("table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise")


@dataclass
class Lookup:
    """One lookup: which table, pooled how, in which form."""

    table: int
    mode: str
    form: str  # "fixed", "one", "ragged", "ended" or a shape of ids without pooling: "flat", "deep"
    weighted: bool = False
    padding: int | None = None
    dtype: torch.dtype = torch.int64


def ids_of(lookup: Lookup, rows: int, batch: int, g: torch.Generator) -> tuple[Any, Any]:
    """``(ids, offsets)`` of ``batch`` samples."""
    draw = lambda *shape: torch.randint(rows, shape, generator=g).to(lookup.dtype)  # noqa: E731
    if lookup.form == "one":
        return draw(batch, 1), None
    if lookup.form == "fixed":
        return draw(batch, 3), None
    if lookup.form == "flat":
        return draw(batch), None
    if lookup.form == "deep":
        return draw(batch, 2, 2), None
    lengths = torch.randint(4, (batch,), generator=g)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    count = int(offsets[-1])
    return draw(count), offsets if lookup.form == "ended" else offsets[:-1]


def joined(lookup: Lookup, parts: list[tuple[Tensor, Any]]) -> tuple[Tensor, Any]:
    """The batches of all ranks as one."""
    ids = torch.cat([ids for ids, _ in parts])
    if parts[0][1] is None:
        return ids, None
    offsets, first = [], 0
    for own, starts in parts:
        last = lookup.form == "ended"
        offsets.append(starts[: len(starts) - last] + first)
        first += len(own)
    end = [torch.tensor([first])] if lookup.form == "ended" else []
    return ids, torch.cat([*offsets, *end])


def constants(lookups: list[Lookup]) -> tuple[list[Any], ...]:
    return (
        [x.table for x in lookups], [x.mode for x in lookups], [x.padding for x in lookups],
        [x.form == "ended" for x in lookups], [False] * len(lookups),
    )  # fmt: skip


def check(
    tables: list[tuple[int, int]],
    lookups: list[Lookup],
    kinds: str | dict[str, str],
    batches: list[int],
    *,
    dtype: torch.dtype = torch.float32,
    exact: bool = False,
    ranks: Any = run,
    hosts: int = 1,
    wire: tuple[str, str] = ("fp32", "fp32"),
    rtol: float | None = None,
    repeating: frozenset[str] = frozenset(),
) -> None:
    """Rows, gradients of tables and of weights on ``len(batches)`` ranks equal those of one."""
    world, g = len(batches), torch.Generator().manual_seed(7)
    names = tuple(
        Table(f"t{k}.weight", rows, dim, str(dtype).removeprefix("torch."))
        for k, (rows, dim) in enumerate(tables)
    )
    plan = explicit(names, world, kinds, hosts=hosts)
    plan.check(names)
    whole = [torch.randn(shape, generator=g).to(dtype).requires_grad_() for shape in tables]
    parts = [[ids_of(x, tables[x.table][0], b, g) for x in lookups] for b in batches]
    factors = [
        [
            torch.randn(ids.shape, generator=g).to(dtype) if x.weighted else None
            for x, (ids, _) in zip(lookups, part, strict=True)
        ]
        for part in parts
    ]
    route = Route(
        world, names, plan.placements, tuple(x.table for x in lookups),
        tuple(x.mode for x in lookups), tuple(x.form == "ended" for x in lookups), wire,
        repeating,
    )  # fmt: skip

    every = [joined(x, [part[k] for part in parts]) for k, x in enumerate(lookups)]
    all_factors = [
        torch.cat([f[k] for f in factors]).requires_grad_() if x.weighted else None
        for k, x in enumerate(lookups)
    ]
    wanted = embedding_bags.target(
        whole, [ids for ids, _ in every], [o for _, o in every], all_factors, *constants(lookups)
    )
    upstream = [torch.randn(out.shape, generator=g).to(dtype) for out in wanted]
    torch.autograd.backward(wanted, upstream)

    def one(rank: int) -> Any:
        held = [ShardedTable(t, plan.placement(t.name), rank, world) for t in names]
        local = [h.local(w.detach()).requires_grad_() for h, w in zip(held, whole, strict=True)]
        own = [None if f is None else f.clone().requires_grad_() for f in factors[rank]]
        sent = send_ids(
            local, [ids for ids, _ in parts[rank]], route, offsets=[o for _, o in parts[rank]],
            per_sample_weights=own, padding_idx=[x.padding for x in lookups],
        )  # fmt: skip
        ids, offsets, weights, padding, x = wait_ids(sent)
        table, _, _, _, sparse = constants(lookups)
        rows = embedding_bags.target(
            local, ids, offsets, weights, table, x.route.local_modes, padding,
            [True] * len(lookups), sparse,
        )  # fmt: skip
        outs = wait_rows(send_rows(rows, x))
        mine = [up.split(batches)[rank] for up in upstream]
        torch.autograd.backward(outs, mine)
        assert all(w.grad is not None for w in local), "every rank has a gradient of every table"
        return (
            [o.detach() for o in outs],
            [w.grad.to_dense() if w.grad.is_sparse else w.grad.dense() for w in local],
            [None if f is None else f.grad for f in own],
        )

    results = ranks(world, one)
    tolerance = (
        {"rtol": 0, "atol": 0} if exact else {} if rtol is None else {"rtol": rtol, "atol": rtol}
    )
    for k, lookup in enumerate(lookups):
        torch.testing.assert_close(torch.cat([r[0][k] for r in results]), wanted[k], **tolerance)
        if lookup.weighted:
            got = torch.cat([r[2][k] for r in results])
            torch.testing.assert_close(got, all_factors[k].grad, **tolerance)
    for t, table in enumerate(names):
        grad = whole[t].grad.dense() / world
        for rank, result in enumerate(results):
            held = ShardedTable(table, plan.placement(table.name), rank, world)
            torch.testing.assert_close(result[1][t], held.local(grad), **tolerance)


FORMS = [
    Lookup(0, "sum", "fixed"),
    Lookup(1, "mean", "ragged", padding=2),
    Lookup(2, "none", "deep", padding=-1, dtype=torch.int32),
    Lookup(0, "mean", "one", padding=0),
    Lookup(3, "sum", "ended", weighted=True, dtype=torch.int32),
    Lookup(1, "none", "flat"),
    Lookup(3, "sum", "fixed", weighted=True, padding=1),
    Lookup(4, "mean", "fixed"),
    Lookup(2, "sum", "one"),
]
TABLES = [(11, 8), (7, 5), (23, 3), (9, 16), (1, 4)]  # odd, and fewer rows than ranks
BATCHES = {1: [5], 2: [4, 3], 3: [4, 0, 5], 4: [2, 0, 1, 6], 8: [1, 2, 0, 3, 4, 0, 1, 2]}


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("kind", SCHEMES)
def test_every_form(kind: str, world: int) -> None:
    check(TABLES, FORMS, kind, BATCHES[world], hosts=2 if world % 2 == 0 else 1)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_whole_tables_are_equal_to_the_bit(world: int) -> None:
    check(TABLES, FORMS, "table_wise", BATCHES[world], exact=True)


def test_mixed() -> None:
    kinds = dict(zip((f"t{k}.weight" for k in range(5)), SCHEMES, strict=True))
    check(TABLES, FORMS, kinds, BATCHES[4], hosts=2)


@pytest.mark.parametrize("kind", ["table_wise", "column_wise", "table_column_wise"])
def test_max(kind: str) -> None:
    lookups = [Lookup(0, "max", "fixed"), Lookup(1, "max", "ragged", padding=1)]
    check(TABLES[:2], lookups, kind, BATCHES[4], hosts=2, exact=True)


@pytest.mark.parametrize("kind", ["table_wise", "column_wise", "row_wise"])
def test_each_id_once(kind: str) -> None:
    """Repeated ids travel once if each has a row of its own."""
    every = frozenset(f"t{k}.weight" for k in range(5))
    check(TABLES, FORMS, kind, [9, 0, 12], repeating=every)


def test_what_repeats_is_found() -> None:
    """Bags of several ids and ids with weights stay as they are."""
    table = (Table("t", 9, 4),)
    plan = explicit(table, 2, "row_wise")
    ids = [torch.tensor([3, 3, 8, 3]), torch.tensor([[3, 3], [8, 3]])]
    route = Route(2, table, plan.placements, (0, 0), ("none", "sum"), (False, False),
                  repeating=frozenset({"t"}))  # fmt: skip
    none = [None, None]
    call = call_of(
        route.metas, ids, none, none, [0, 0], ["none", "sum"], none, [False] * 2, [False] * 2
    )
    first, second = prepare(call, route)
    assert [b.count for b in first.buckets] == [1, 1] and first.buckets[0].bags == 1
    assert first.buckets[0].repeat.tolist() == [0, 0, 0]
    assert [b.count for b in second.buckets] == [3, 1] and second.buckets[0].repeat is None
