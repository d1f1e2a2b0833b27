"""How the GPU's bench measures: turns, bars, memory, floors, and what a record must say."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import gpu_bench
import gpu_cases
import gpu_check_ops
import gpu_groups
import gpu_launches
import gpu_measure
import gpu_memory
import gpu_page
import gpu_parts
import gpu_synthetic
import gpu_variants
import pytest
import torch
from gpu_floor import Rates
from gpu_measure import Bar, Effort, Variant

from recast.runtime.recorded import recording

CPU = torch.device("cpu")


def timed(name: str, ms: list[float], why: str | None = None) -> Variant:
    return Variant(name, lambda: lambda k: None, ms, why)


# ---------------------------------------------------------------- turns


def test_who_is_far_behind_has_few_turns() -> None:
    """Tiny: ours of 2 and 10 ms, eager of 150: it would take nine tenths of the time."""
    seconds = [0.002, 0.010, 0.150]
    rounds, steps = gpu_measure.turns(seconds, Effort(3.0))
    assert steps == [5, 5, 0]
    took = rounds * 5 * 0.012 + gpu_measure.FEW * 0.150
    assert 2.9 < took <= 3.0 + 1e-9
    assert gpu_measure.turns([1.0, 1.1], Effort(2.0)) == (gpu_measure.LEAST, [5, 5])
    assert gpu_measure.turns([1e-6], Effort(2.0)) == (60, [5])


def test_turns_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the fast one's, and few of the slow one's among them; both warm up first."""
    monkeypatch.setattr(gpu_measure, "turns", lambda seconds, effort: (8, [3, 0]))
    calls: list[str] = []

    def way(name: str) -> Any:
        return lambda: lambda k: calls.append(name)

    fast, slow = Variant("recast", way("f")), Variant("eager", way("s"))
    gpu_measure.measure([fast, slow], CPU, Effort(5.0, warmup=2), batches=4)
    assert (len(fast.ms), fast.steps, len(slow.ms), slow.steps) == (8, 3, gpu_measure.FEW, 1)
    assert "".join(calls[:4]) == "ffss"
    rest = "".join(calls[4:])
    assert rest.count("f") == 24 and rest.count("s") == 4
    assert "s" in rest[:7] and "s" in rest[14:], "spread over the rounds"


def test_one_after_the_other_leaves_nothing() -> None:
    """Of Small, memory of two would not fit: each is gone when the next is made."""

    class Held:
        pass

    there: list[weakref.ref[Held]] = []

    def make() -> Any:
        assert all(ref() is None for ref in there), "memory of the one before"
        held = Held()
        there.append(weakref.ref(held))
        return lambda k: held

    def fail() -> Any:
        held = Held()
        there.append(weakref.ref(held))
        raise RuntimeError(f"out of memory {held}")

    found = [Variant("recast", make), Variant("a", fail), Variant("b", make)]
    found += [Variant("c", fail, why="does not fit")]
    gpu_measure.measure(found, CPU, Effort(0.0, 1, 1, 1), batches=1, apart=True)
    gc.collect()
    assert len(there) == 3 and all(ref() is None for ref in there)
    assert found[0].ms and found[2].ms and not found[1].ms
    assert (found[1].why or "").startswith("RuntimeError: out of memory")
    assert found[3].why == "does not fit"


def test_preparing_times_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled runs a few times; eager torch has nothing to compile."""
    monkeypatch.setattr(gpu_measure, "preparing", True)
    calls: list[str] = []
    names = "recast", "eager sparse", "torch.compile"
    found = [Variant(n, lambda n=n: lambda k: calls.append(n)) for n in names]
    gpu_measure.measure(found, CPU, Effort(5.0), batches=2)
    assert calls.count("recast") == calls.count("torch.compile") == 3
    assert "eager sparse" not in calls and not any(v.ms for v in found)


def test_a_step_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded at the first call, after three steps; ours does before replays what it has to."""
    calls: list[str] = []

    class Recorder:
        def __init__(self, device: torch.device) -> None:
            pass

        def eagerly(self, run: Any) -> None:
            run()

        def record(self, run: Any) -> Any:
            now = recording.current()
            calls.append("record")
            if now is not None:
                now.before_replay(lambda: calls.append("prepare"))
            return run(), lambda: calls.append("replay")

    monkeypatch.setattr(recording, "CudaRecorder", Recorder)
    for make, before in ((gpu_variants.recorded, ["prepare"]), (gpu_variants.captured, [])):
        calls.clear()
        run = make(lambda k: calls.append("step"), torch.device("cuda"))
        run(0), run(1)
        replay = [*before, "replay"]
        assert calls == ["step"] * 3 + ["record", "step", *replay, *replay]
        assert recording.current() is None


# ---------------------------------------------------------------- bars and rows


def test_bars() -> None:
    """The faster way of torch.compile counts; without one, nothing is said to be met."""
    bar = Bar(times=2.0)
    assert bar.met(1.0, {"torch.compile": 2.5, "torch.compile graph": 2.0, "eager": 1.0}) is True
    assert bar.met(1.0, {"torch.compile": 2.5, "torch.compile graph": 1.9}) is False
    assert bar.met(1.0, {"eager": 9.0}) is None
    assert Bar(ms=1.2).met(1.2, {}) is True and Bar(ms=1.2).met(1.21, {}) is False


def test_rows_tell_ratios_shares_and_bars() -> None:
    rates = Rates(1e12, {"float32": 1e14})
    floor = rates.floor(1e9, 5e10, "float32")
    assert floor["ms"] == floor["copy ms"] == 1.0 and floor["matrix ms"] == 0.5
    found = [
        timed("recast", [2.5]),
        timed("recast graph", [2.0, 2.0, 3.0]),
        timed("eager", [8.0, 8.0, 9.0]),
        timed("torch.compile", [3.0]),
        timed("other", [], "out of memory"),
    ]
    loop, ours, eager, compiled, other, last = gpu_measure.rows("c", found, floor, Bar(times=2.0))
    assert ours["times the floor"] == 2.0 and ours["beside eager"] == 4.0
    assert ours["of copy rate"] == 0.5 and ours["of matrix rate"] == 0.25
    assert ours["must"] == "2.0 x torch.compile" and ours["met"] is False
    assert "must" not in loop, "what runs as one graph is judged"
    assert ours["all ms"] == [2.0, 2.0, 3.0]
    assert "met" not in eager and "met" not in compiled and other["why not"] == "out of memory"
    assert last["variant"] == "floor" and last["ms"] == 1.0
    (alone, *_) = gpu_measure.rows("c", [found[0], found[3]], floor, Bar(times=2.0))
    assert alone["met"] is False, "nothing runs as a graph: the loop is judged"


# ---------------------------------------------------------------- memory


def test_small_fits_into_80_gb_and_all_of_it_into_141() -> None:
    """Bytes from the specification: 28.2 GB of tables, as many of sums of squares."""
    needs = gpu_memory.of_synthetic(gpu_synthetic.SMALL, 65536, 10, 4)
    assert needs["tables"] == needs["state"] == 4 * 7_058_084_800
    assert needs["batches"] == 10 * 65536 * 8 * 377
    h100 = gpu_memory.room(needs, CPU, 79.18 * 2**30)
    assert h100("recast graph") is None and h100('recast mode="graph"') is None
    assert h100("eager sparse") is None
    why = h100("torch.compile") or ""
    assert why.startswith("does not fit: it needs 10") and why.endswith("of 85.0")
    h200 = gpu_memory.room(needs, CPU, 139.8 * 2**30)
    assert all(h200(name) is None for name in ("recast", "eager sparse", "torch.compile"))
    small = gpu_memory.room(needs, CPU, 40e9)
    with pytest.raises(gpu_groups.Skip, match="it needs 6"):
        gpu_memory.refuse(small("recast graph"))
    gpu_memory.refuse(h100("recast graph"))


# ---------------------------------------------------------------- every op, every kernel


def test_every_op_of_the_gpu_is_measured() -> None:
    assert {op for _, op, _, _ in gpu_cases.ALONE} == {op.name for op in gpu_check_ops.ops()}
    labels = [label for label, _ in gpu_parts.labels()]
    assert len(set(labels)) == len(labels)


def test_lanes_share_the_ops_out() -> None:
    """Each item is in one lane, and lookups, which fill the memory, all in the first."""
    assert gpu_bench.lanes(["tiny"]) == ["tiny"]
    lanes = gpu_bench.lanes(["ops"])
    known = Rates(1.0, {"float32": 1.0, "bfloat16": 1.0})
    names = [[i.name for i in gpu_bench.lane(lane, known)(CPU, True)] for lane in lanes]
    every = [name for lane in names for name in lane]
    assert sorted(every) == sorted(label for label, _ in gpu_parts.labels())
    assert all("lookups" in name for name in names[0]) and len(names) == gpu_bench.LANES
    assert not any("lookups" in name for lane in names[1:] for name in lane)


def test_all_kernels_are_known() -> None:
    there = gpu_launches.there()
    assert there["row_update"] == "row_update.cu" and there["cin_products_4"].startswith("comp")
    left = gpu_launches.unused(set(there) - {"row_combine", "row_update"})
    assert left == ["row_update.cu: row_combine, row_update"]


# ---------------------------------------------------------------- records


def test_a_record_cut_short_does_not_look_whole(tmp_path: Path) -> None:
    groups, bar = ["dropout", "dlrm"], Bar(ms=3.0)
    floor = {"ms": 1.0}
    lines = gpu_measure.rows("MLPerf DLRM, ranked", [timed("recast graph", [2.0])], floor, bar)
    items: list[dict[str, Any]] = [
        {"group": "dlrm", "name": "MLPerf DLRM, ranked", "status": "ok", "rows": lines},
        {"group": "dlrm", "name": gpu_groups.REST, "status": "failed", "detail": "time was over"},
    ]
    lacks = gpu_page.missing(items, groups, ["dropout"])
    assert lacks == [
        "group dropout to its end", "more of dlrm (failed)", "figures of 2 of 3 judged cases",
    ]  # fmt: skip
    text = gpu_page.page(items, groups, ["a note"], 3.0)
    assert "3 judged cases: 2 not measured, 1 met." in text and "time was over" in text
    page = gpu_groups.write(tmp_path, "b", "A title", {"gpu": "x"}, items, text, lacks, notes=[])
    assert "**Not complete**: no group dropout to its end; no more of dlrm" in page.read_text()
    held = json.loads(page.with_suffix(".json").read_text())
    assert held["complete"] is False and held["missing"] == lacks
    assert held["rows"][0]["rows"][0]["all ms"] == [2.0]
    whole = gpu_groups.write(tmp_path, "b", "A title", {"gpu": "x"}, items[:1], text)
    assert "Not complete" not in whole.read_text()
    assert json.loads(whole.with_suffix(".json").read_text())["complete"] is True


def test_the_judged_cases() -> None:
    """Those of the bars: four of Tiny, four of Small, two of DLRM, dropout, each op both ways."""
    cases = list(gpu_page.judged(gpu_bench.NAMES))
    ops = 2 * len(gpu_cases.ALONE)
    assert len(cases) == len(dict(cases)) == 4 + 4 + 2 + 1 + ops + len(gpu_parts.UPDATES)
    bars = dict(cases)
    assert bars["synthetic Tiny, bf16, shuffled"].ms == 1.2
    assert bars["synthetic Small, fp32, ranked"].ms == 4.5
    assert bars["MLPerf DLRM, ranked"].ms == 3.0 and bars[gpu_parts.DROPOUT].times == 1.3
    assert bars["Dice, 200, float32, forward"].times == 2.0
