"""Plans as values: they cover every row once, survive JSON, and refuse what is invalid."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recast
from recast.errors import UsageError
from recast.runtime.plan import (
    SHARDING_TYPES,
    Placement,
    Plan,
    Shard,
    Table,
    explicit,
    fingerprint,
    shards,
    single,
)
from recast.runtime.topology import named

TABLES = (Table("a.weight", 10, 6), Table("b.weight", 7, 4))


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(0, 40),
    dim=st.integers(1, 20),
    each=st.integers(1, 4),
    hosts=st.integers(1, 3),
    kind=st.sampled_from(SHARDING_TYPES),
)
def test_every_element_once(rows: int, dim: int, each: int, hosts: int, kind: str) -> None:
    table = Table("t", rows, dim)
    plan = explicit([table], each * hosts, kind, hosts=hosts)
    plan.check([table])
    owners = [[0] * dim for _ in range(rows)]
    for s in plan.placement("t").shards:
        for r in range(s.offset[0], s.offset[0] + s.size[0]):
            for c in range(s.offset[1], s.offset[1] + s.size[1]):
                owners[r][c] += 1
    due = each * hosts if kind == "data_parallel" else 1
    assert all(n == due for row in owners for n in row)


def test_even_cuts() -> None:
    assert [s.size for s in shards(Table("t", 5, 3), "row_wise", range(4))] == [
        (2, 3), (1, 3), (1, 3), (1, 3),
    ]  # fmt: skip
    two = shards(Table("t", 2, 3), "row_wise", range(4))
    assert [s.rank for s in two] == [0, 1]  # the others own nothing


def test_shards_of_a_rank_in_column_order() -> None:
    p = Placement("t", "column_wise", (Shard(0, (0, 4), (5, 2)), Shard(0, (0, 0), (5, 4))))
    assert [s.offset[1] for s in p.of(0)] == [0, 4]
    assert p.of(1) == ()


def test_json_round_trip(tmp_path: Path) -> None:
    plan = explicit(TABLES, 4, {"a.weight": "row_wise"}, hosts=2)
    plan = replace(plan, topology=named("cpu"), cost=2.0, lower_bound=1.0, notes=("a note",))
    assert Plan.from_json(plan.to_json()) == plan
    path = tmp_path / "plan.json"
    plan.save(path)
    assert recast.Plan.load(path) == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    (data,) = (p for p in json.loads(path.read_text())["placements"] if p["table"] == "a.weight")
    assert data["shards"][0] == {"rank": 0, "offset": [0, 0], "size": [3, 6]}
    assert (data["sharding_type"], data["memory"]) == ("row_wise", "device")


def test_a_failed_save_leaves_the_old_plan(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "plan.json"
    single(TABLES).save(path)
    before = path.read_text()

    def fails(self: Path, text: str, **_: Any) -> None:
        with self.open("w") as file:
            file.write(text[:10])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", fails)
    with pytest.raises(OSError, match="disk full"):
        explicit(TABLES, 2).save(path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 1}, "version 1"),
        ({"world_size": "2"}, "plan.world_size"),
        ({"placements": [{"table": "a.weight"}]}, r"placements\[0\]: no 'sharding_type'"),
        ({"tables": {}}, "plan.tables"),
        ({"topology": {"name": "x"}}, "topology x"),
        ({"shardings": {}, "note": "mine"}, "plan: unknown 'shardings', 'note'"),
        ({"tables": [{"name": "a", "row": 9}]}, r"plan\.tables\[0\]: unknown 'row'"),
        ({"tables": [{"name": "a", "rows": 9, "dim": 4, "dtype": "f4"}]}, r"\.dtype: 'f4'"),
        ({"cost": float("nan")}, "plan.cost: NaN"),
        ({"cost": 10**400}, "plan.cost: 1000"),
        ({"reserved": -1}, "plan.reserved: -1(.|\n)*of at least 0"),
        ({"world_size": True}, "plan.world_size: true"),
        ({"notes": [3]}, r"plan\.notes\[0\]: 3"),
        ({"tables": [{"name": "a", "rows": -9, "dim": 4, "dtype": "float32"}]}, r"\.rows: -9"),
    ],
)
def test_wrong_json(change: dict[str, Any], said: str) -> None:
    data = json.loads(single(TABLES).to_json()) | change
    with pytest.raises(UsageError, match=said):
        Plan.from_json(json.dumps(data))


def test_what_no_plan_has_is_not_passed_over() -> None:
    """An unknown key in a plan edited by hand, if ignored, would be a placement not made."""
    data = json.loads(single(TABLES).to_json())
    for place, name in ((data["placements"][0], "kind"), (data["placements"][0]["shards"][0], "r")):
        place[name] = "row_wise"
        with pytest.raises(UsageError, match=f"unknown '{name}'"):
            Plan.from_json(json.dumps(data))
        del place[name]
    assert Plan.from_json(json.dumps(data)) == single(TABLES)
    twice = single(TABLES).to_json().replace('"version"', '"world_size": 1, "version"')
    with pytest.raises(UsageError, match="says 'world_size' twice"):
        Plan.from_json(twice)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        Plan.load(tmp_path / "none.json")
    (tmp_path / "cut.json").write_text(single(TABLES).to_json()[:50])
    with pytest.raises(UsageError, match=r"cut\.json: the plan is not JSON"):
        Plan.load(tmp_path / "cut.json")


def _with(plan: Plan, *placed: Placement) -> Plan:
    return replace(plan, placements=placed)


A, B = explicit(TABLES, 2, {"a.weight": "row_wise"}).placements
PLAN = explicit(TABLES, 2, {"a.weight": "row_wise"})


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (_with(PLAN, A), "'b.weight' is not placed"),
        (replace(PLAN, tables=PLAN.tables + PLAN.tables[:1]), "two tables are named 'a.weight'"),
        (_with(PLAN, A, B, B), "'b.weight' is placed twice"),
        (_with(PLAN, A, B, replace(B, table="c")), "'c' is unknown"),
        (_with(PLAN, replace(A, shards=A.shards[:1]), B), "row 5 lives nowhere"),
        (
            _with(PLAN, replace(A, shards=(A.shards[0], Shard(1, (4, 0), (6, 6)))), B),
            "row 4 lives twice",
        ),
        (
            _with(PLAN, replace(A, shards=(A.shards[0], Shard(2, (5, 0), (5, 6)))), B),
            "rank 2 of a plan for 2 ranks",
        ),
        (
            _with(PLAN, replace(A, shards=(A.shards[0], Shard(1, (5, 0), (6, 6)))), B),
            "outside the table",
        ),
        (
            _with(PLAN, replace(A, shards=(A.shards[0], Shard(0, (5, 0), (5, 6)))), B),
            "two ranges of rows",
        ),
        (_with(PLAN, replace(A, sharding_type="table_wise"), B), "its rows are cut"),
        (_with(PLAN, replace(A, sharding_type="data_parallel"), B), "data_parallel, but not whole"),
        (replace(PLAN, topology=named("cpu")), "on a topology of 4"),
    ],
)
def test_check_refuses(plan: Plan, said: str) -> None:
    PLAN.check(TABLES)
    with pytest.raises(UsageError, match=said):
        plan.check()


def test_a_rank_too_full() -> None:
    small = replace(named("cpu").of(2), device_memory=240, host_memory=1000)
    plan = replace(explicit(TABLES, 2, "row_wise"), topology=small)
    with pytest.raises(UsageError, match="rank 0 is too full"):  # 5 x 6 x 4 + 4 x 4 x 4 = 184
        replace(plan, reserved=60).check()
    replace(plan, reserved=56).check()
    state = tuple(replace(p, state_bytes=24.0) for p in plan.placements)
    with pytest.raises(UsageError, match="too full"):
        replace(plan, placements=state).check()
    hosted = tuple(replace(p, memory="host") for p in state)
    replace(plan, placements=hosted).check()


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ((TABLES[0],), "plan has a table 'b.weight'"),
        ((*TABLES, Table("c", 1, 1)), "model has a table 'c'"),
        ((TABLES[0], Table("b.weight", 8, 4)), "8 x 4 float32 in the model, 7 x 4"),
        ((TABLES[0], Table("b.weight", 7, 4, "float16")), "float16 in the model"),
        (TABLES[::-1], "order of the tables"),
    ],
)
def test_a_plan_for_another_model(tables: tuple[Table, ...], said: str) -> None:
    assert fingerprint(tables) != PLAN.fingerprint
    with pytest.raises(UsageError, match="for another model") as caught:
        PLAN.check(tables)
    assert said in caught.value.why


def test_explicit_refuses() -> None:
    for wrong in ({"c": "row_wise"}, {"a.weight": "by_row"}):
        with pytest.raises(UsageError):
            explicit(TABLES, 2, wrong)
    with pytest.raises(UsageError, match="3 ranks on 2 hosts"):
        explicit(TABLES, 3, hosts=2)
    with pytest.raises(UsageError, match="no table 'c'"):
        PLAN.placement("c")
