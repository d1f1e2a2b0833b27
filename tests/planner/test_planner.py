"""Plans for tables are valid and deterministic, obey thresholds and pins, and say why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recast.errors import UsageError
from recast.runtime.plan import SHARDING_TYPES, Placement, Plan, Shard, Table
from recast.runtime.planner import Dense, TableLoad, cost, plan
from recast.runtime.topology import GIB, Topology, named

PAIR = named("dgx-a100x16")


def loads(*rows: int, dim: int = 16, **given: Any) -> list[TableLoad]:
    return [TableLoad(Table(f"t{k}", n, dim), **given) for k, n in enumerate(rows)]


def kinds(made: Plan) -> list[str]:
    return [p.sharding_type for p in made.placements]


def bytes_held(made: Plan, given: Sequence[TableLoad]) -> tuple[list[float], list[float]]:
    """Weights and state on each rank, and in the memory of each host."""
    assert made.topology is not None
    device, host = [0.0] * made.world_size, [0.0] * made.topology.hosts
    for load, p in zip(given, made.placements, strict=True):
        for s in p.shards:
            size = s.size[0] * (s.size[1] * (load.element + load.state_element) + load.state_row)
            if p.memory == "host":
                host[made.topology.host(s.rank)] += size
            else:
                device[s.rank] += size
    return device, host


TABLE_LOADS = st.builds(
    lambda rows, dim, ids, lookups, pooling, state, without: TableLoad(
        Table(f"t{rows}", rows, dim),
        ids=ids,
        lookups=lookups,
        pooling=pooling,
        state_element=state,
        types=tuple(k for k in SHARDING_TYPES if k != without),
    ),
    st.integers(1, 10**6),
    st.integers(1, 80),
    st.floats(0, 30),
    st.integers(1, 3),
    st.sampled_from(["sum", "mean", "none"]),
    st.sampled_from([0.0, 4.0]),
    st.sampled_from(SHARDING_TYPES),
)


@settings(deadline=None, max_examples=15)
@given(
    given_loads=st.lists(TABLE_LOADS, min_size=1, max_size=5, unique_by=lambda t: t.table.name),
    shape=st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 2), (8, 1)]),
    memory=st.sampled_from([64, 400]),
    hideable=st.sampled_from([0.0, 1e6]),
)
def test_plans_hold(
    given_loads: list[TableLoad], shape: tuple[int, int], memory: int, hideable: float
) -> None:
    ranks, hosts = shape
    machines = replace(
        PAIR, ranks=ranks, hosts=hosts, device_memory=memory << 20, host_memory=memory << 20
    )
    try:
        made = plan(given_loads, machines, batch=8, dense=Dense(hideable_flops=hideable))
    except UsageError as error:
        assert "no plan fits" in error.what and error.tries[0].startswith("1. ")
        return
    made.check([load.table for load in given_loads])
    assert Plan.from_json(made.to_json()) == made
    assert made.cost is not None and made.lower_bound is not None
    assert 0 < made.lower_bound <= made.cost * (1 + 1e-9)
    assert max(load.step for load in made.loads) == pytest.approx(made.cost)
    device, host = bytes_held(made, given_loads)
    for held, load in zip(device, made.loads, strict=True):
        assert held + made.reserved <= load.device_bytes + 1 <= machines.device_memory + 1
    assert max(host) <= machines.host_memory
    for load, p in zip(given_loads, made.placements, strict=True):
        assert p.sharding_type in load.types or ranks == 1


def test_deterministic() -> None:
    given = loads(*range(1000, 90_000, 16000), ids=3.0)
    one = plan(given, PAIR, batch=64)
    assert plan(given, PAIR, batch=64).to_json() == one.to_json()


def test_one_rank() -> None:
    made = plan(loads(10, 20), PAIR.of(1), batch=4)
    assert kinds(made) == ["data_parallel"] * 2
    made.check()


def test_kinds_follow_cost() -> None:
    small, large = loads(4, ids=1.0)[0], loads(50_000_000, dim=128, ids=60.0)[0]
    large = replace(large, table=replace(large.table, name="large"))
    made = plan([small, large], PAIR.of(8), batch=4096)
    assert kinds(made)[0] == "data_parallel"  # a hundred bytes, reduced with the rest
    assert kinds(made)[1] in ("row_wise", "column_wise")  # else one rank would do all of it
    assert len({s.rank for s in made.placements[1].shards}) == 8


def test_thresholds() -> None:
    given = loads(100, 10_000, 1_000_000, dim=16)
    made = plan(
        given, PAIR.of(8), batch=64, data_parallel_threshold=1600,
        row_slice_threshold=16_000_000, column_slice_threshold=50_000,
    )  # fmt: skip
    assert kinds(made) == ["data_parallel", "column_wise", "row_wise"]
    assert len(made.placements[1].shards) == 4  # 160,000 elements, at most 50,000 a shard
    assert [p.why and p.why.reason for p in made.placements] == [
        "data_parallel_threshold", "column_slice_threshold", "row_slice_threshold",
    ]  # fmt: skip
    none = plan(given, PAIR.of(8), batch=64, data_parallel_threshold=0)
    assert "data_parallel" not in kinds(none)
    with pytest.raises(UsageError, match="row_slice_threshold=-1"):
        plan(given, PAIR, batch=4, row_slice_threshold=-1)


@pytest.mark.parametrize("kind", SHARDING_TYPES)
def test_pins(kind: str) -> None:
    made = plan(loads(100, 64, 3), PAIR, batch=16, pins={"t1": kind})
    made.check()
    assert made.placement("t1").sharding_type == kind
    why = made.placement("t1").why
    assert why is not None and why.reason == "pinned"


def test_a_pinned_placement_stays() -> None:
    own = Placement("t1", "row_wise", (Shard(1, (0, 0), (60, 16)), Shard(0, (60, 0), (4, 16))))
    made = plan(loads(100, 64), PAIR.of(2), batch=16, pins={"t1": own})
    made.check()
    assert made.placement("t1").shards == own.shards
    alone = plan(loads(100, 64)[1:], PAIR.of(2), batch=16, pins={"t1": own})
    assert alone.cost is not None and alone.cost == alone.lower_bound > 0


def test_wrong_arguments() -> None:
    given = [replace(t, types=("table_wise", "data_parallel")) for t in loads(10, 20)]
    with pytest.raises(UsageError, match="pinned to row_wise"):
        plan(given, PAIR, batch=4, pins={"t1": "row_wise"})
    with pytest.raises(UsageError, match="no table 't2'"):
        plan(given, PAIR, batch=4, pins={"t2": "row_wise"})
    with pytest.raises(UsageError, match="by_row"):
        plan(given, PAIR, batch=4, pins={"t1": "by_row"})
    with pytest.raises(UsageError, match="batch=0"):
        plan(given, PAIR, batch=0)
    with pytest.raises(UsageError, match="two tables"):
        plan([given[0], given[0]], PAIR, batch=4)
    with pytest.raises(UsageError, match=r"t0: .* cannot have ids=-1.0, pooling='median'\n"):
        replace(given[0], pooling="median", ids=-1.0)
    for wrong in ({"types": ()}, {"types": ("by_row",)}, {"distinct": 1.5}, {"lookups": -1}):
        ((name, value),) = wrong.items()
        with pytest.raises(UsageError, match=re.escape(f"cannot have {name}={value}\n")):
            replace(given[0], **wrong)
    with pytest.raises(UsageError, match="cannot have rows=-1, dim=0\n"):
        TableLoad(Table("t", -1, 0))


def _small(**changed: Any) -> Topology:
    return replace(PAIR.of(8), device_memory=GIB, host_memory=0, **changed)


def test_remedies_have_figures() -> None:
    given = loads(20_000_000, 20_000_000, dim=64, state_element=4.0)  # 2 x 9.54 GiB
    with pytest.raises(UsageError, match="no plan fits") as caught:
        plan(given, _small(), batch=8)
    error = caught.value
    assert "19.1 GiB" in error.why
    assert error.tries[0] == "1. 24 ranks of 1.0 GiB"
    assert [t[:2] for t in error.tries] == [f"{k}." for k in range(1, len(error.tries) + 1)]
    made = plan(given, replace(PAIR.of(8), ranks=24, hosts=3, device_memory=GIB), batch=8)
    made.check()


def test_small_memory_has_figures_too() -> None:
    small = replace(_small(), device_memory=2**22)
    with pytest.raises(UsageError, match="no plan fits") as caught:
        plan(loads(1_000_000, dim=8), small, batch=8)
    assert "8 ranks of 4.0 MiB leave" in caught.value.why and "0.0 GiB" not in str(caught.value)


def test_spill_only_when_full() -> None:
    given = loads(*[4_000_000] * 6, dim=64)  # 6 x 0.95 GiB on 8 ranks of 0.9
    room = replace(_small(), host_memory=64 * GIB)
    assert {p.memory for p in plan(given, room, batch=8).placements} == {"device"}
    given = loads(*[4_000_000] * 9, dim=64)  # 8.6 GiB
    made = plan(given, room, batch=8)
    made.check()
    assert {p.memory for p in made.placements} == {"device", "host"}
    assert any("host memory" in note for note in made.notes)


def test_why_names_both_costs() -> None:
    made = plan(loads(1_000_000, 900_000, 800_000, dim=64, ids=5.0), PAIR, batch=256)
    for p in made.placements:
        assert p.why is not None and p.why.runner_up is not None
        assert p.why.runner_up_cost is not None
        if p.why.cost > p.why.runner_up_cost:
            assert p.why.reason in ("device memory is short", "it evens out the ranks")


def test_costs_by_hand() -> None:
    t = replace(
        PAIR.of(8), memory_bandwidth=1e9 / cost.MEMORY, intra_host=1e9 / cost.LINK, latency=1.0
    )
    load = TableLoad(Table("t", 1000, 16), ids=4.0, lookups=2, state_element=4.0, distinct=0.25)
    setting = cost.Setting(t, 10)  # 80 samples, 320 ids, 80 distinct rows
    whole = cost.shard(load, setting, 1000, 16, "device")
    forward = 320 * (8 + 64) + 160 * 64
    backward = 320 * (8 + cost.SORT + 64)
    update = 80 * 16 * 2 * 8
    assert whole.compute == pytest.approx((forward + backward + update) / 1e6 + 0.005)
    sent = (320 * 8 + 2 * 160 * 64) * 7 / 8
    assert whole.communication == pytest.approx(sent / 1e6)
    assert whole.device == 1000 * 16 * 8 + 320 * 8 + 160 * 16 * 8
    half = cost.shard(load, setting, 500, 16, "device")
    answered = 160 * (1 - 0.5**2)  # bags of two ids that have one in this half
    assert half.communication == pytest.approx((160 * 8 + 2 * answered * 64) * 7 / 8 / 1e6)
    copy = cost.replica(load, setting)
    assert copy.communication == pytest.approx(2 * 7 / 8 * 1000 * 16 * 4 / 1e6)
    hosted = cost.shard(load, setting, 1000, 16, "host")
    assert hosted.compute > whole.compute and hosted.host == 1000 * 16 * 8


def test_wire_and_hosts_matter() -> None:
    load = loads(1000, ids=3.0)[0]
    near = cost.shard(load, cost.Setting(PAIR.of(8), 64), 1000, 16, "device")
    far = cost.shard(load, cost.Setting(PAIR, 32), 1000, 16, "device")
    small = cost.shard(load, cost.Setting(PAIR, 32, 2.0, 1.0), 1000, 16, "device")
    assert near.communication < small.communication < far.communication
    assert far.compute == small.compute == near.compute


def test_the_only_type_of_a_table_has_its_reason() -> None:
    """In the plan, and where a threshold or a pin rules that type out."""
    why = "matmul reads it as a whole"
    only = TableLoad(Table("a", 100, 16), types=("data_parallel",), only=why)
    for limit in (None, 10**6):
        made = plan([only], PAIR.of(2), batch=64, data_parallel_threshold=limit)
        told = made.placement("a").why
        assert told is not None and told.reason == why
    with pytest.raises(UsageError, match="data_parallel_threshold rules that out") as caught:
        plan([only], PAIR.of(2), batch=64, data_parallel_threshold=10)
    assert caught.value.why == why
    with pytest.raises(UsageError, match="pinned to row_wise, which it cannot be") as caught:
        plan([only], PAIR.of(2), batch=64, pins={"a": "row_wise"})
    assert caught.value.why == why
