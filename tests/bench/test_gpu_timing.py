"""How the GPU benchmark measures: turns, bars, memory, floors, and what a record must say."""

from __future__ import annotations

import gc
import json
import statistics
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.bench import (
    compile_ahead,
    memory_needs,
    op_cases,
    results_page,
    step_parts,
    synthetic_models,
    timing,
    variants,
)
from gpu.bench.groups import NAMES
from gpu.bench.roofline import Rates
from gpu.bench.timing import Bar, Effort, Variant
from gpu.check import kernel_coverage, op_checks
from gpu.harness import items, results
from gpu.harness.items import REST

from recast.runtime.recorded import recording

CPU = torch.device("cpu")


def timed(name: str, ms: list[float], why: str | None = None) -> Variant:
    return Variant(name, lambda: lambda k: None, ms, why)


# ---------------------------------------------------------------- turns


def test_who_is_far_behind_has_few_turns() -> None:
    """Tiny: ours take 2 and 10 ms, eager 150, which would use nine tenths of the time."""
    seconds = [0.002, 0.010, 0.150]
    rounds, steps = timing.turns(seconds, Effort(4.0))
    assert steps == [5, 5, 0]
    few = timing.FEW * (timing.SHORT + 1)
    took = rounds * ((5 + 5) * 0.002 + (5 + 1) * 0.010) + few * 0.150
    assert 3.9 < took <= 4.0 + 1e-9
    assert timing.turns([0.07, 0.075], Effort(2.0)) == (timing.LEAST, [5, 5])
    assert timing.turns([1e-6], Effort(2.0)) == (60, [5])
    assert timing.turns([0.4], Effort(2.0)) == (5, [0]), "alone, but too slow for whole turns"


def test_a_turn_begins_in_full_swing() -> None:
    """10 ms of steps first, at most eight: a cold step is not like one of a running loop."""
    assert [timing.warm_up_steps(s) for s in (1e-4, 0.0013, 0.002, 0.009, 0.150)] == [8, 8, 5, 2, 1]


def way(calls: list[str], name: str) -> Any:
    return lambda: lambda k: calls.append(f"{name}{k}")


def test_turns_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the fast variant's, with a few of the slow one's in between, each on other batches;
    both warm up first. Before that, ours has some alone, whose median is kept.
    """
    monkeypatch.setattr(timing, "turns", lambda seconds, effort: (8, [3, 0][: len(seconds)]))
    calls: list[str] = []
    fast, slow = Variant("recast", way(calls, "f")), Variant("eager", way(calls, "s"))
    heard: list[list[float]] = []
    effort = Effort(5.0, warmup=2)
    timing.measure(
        [fast, slow], CPU, effort, batches=10, told=lambda: heard.append([*fast.ms, *slow.ms])
    )
    few, short = timing.FEW, timing.SHORT
    assert (len(fast.ms), fast.steps, len(slow.ms), slow.steps) == (8, 3, few, short)
    assert len(fast.host) == 8 and len(slow.host) == few
    assert [len(ms) for ms in heard] == [8]
    assert fast.before == statistics.median(heard[0]) and slow.before is None
    assert calls[:2] == ["f0", "f1"] and calls[26:28] == ["s0", "s1"]
    assert all(call.startswith("f") for call in calls[2:26])
    rest = calls[28:]
    assert [call for call in rest if call[0] == "s"] == [f"s{k}" for k in range(few * short)]
    words = "".join(call[0] for call in rest)
    assert words.count("f") == 24 and "s" in words[:9] and "s" in words[17:], "spread"


class Queue:
    """A GPU that works off what its host has queued, with a clock of its own, in seconds."""

    def __init__(self) -> None:
        self.now = self.free = 0.0

    def step(self, host: float, device: float) -> Any:
        def step(k: int) -> None:
            self.now += host
            self.free = max(self.free, self.now) + device

        return lambda: step

    def wait(self) -> None:
        self.now = max(self.now, self.free)

    def event(self, **_: object) -> Any:
        event = types.SimpleNamespace()
        event.record = lambda: setattr(event, "at", max(self.now, self.free))
        event.elapsed_time = lambda last: (last.at - event.at) * 1e3
        return event


def test_a_turn_does_not_hide_the_host_behind_another(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Queue()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.wait)
    ours = Variant("recast", gpu.step(0.003, 0.001))
    graph, peer = Variant("recast graph", gpu.step(0.0005, 0.001)), Variant("e", gpu.step(0, 0.007))
    timing.measure([ours, graph, peer], torch.device("cuda"), Effort(1.0), batches=1)
    for v, ms in (ours, 3.0), (graph, 1.0), (peer, 7.0):
        assert v.ms == pytest.approx([ms] * len(v.ms))


def test_who_fails_in_its_turn_takes_no_other_with_it() -> None:
    ours, calls = Variant("recast", lambda: lambda k: None), [0]

    def make() -> Any:
        def step(k: int) -> None:
            calls[0] += 1
            if calls[0] > timing.PEERS_WARM + 2:
                raise RuntimeError("out of memory\nby so much")

        return step

    peer = Variant("torch.compile", make)
    timing.measure([ours, peer], CPU, Effort(1.0, rounds=6), batches=2)
    assert peer.why == "RuntimeError: out of memory" and len(ours.ms) == 6
    first, second, _ = timing.rows("c", [ours, peer], {"ms": 1.0}, Bar(times=2.0))
    assert first["met"] is None and second["why not"] == peer.why


def test_what_was_to_be_replayed_and_is_not_has_no_figure() -> None:
    """A failed recording only warns: a step that is not replayed would be timed as if it were."""

    def make(said: str) -> Any:
        return lambda: timing.Graphed(lambda k: None, lambda: said)

    found = [Variant("recast graph", make("")), Variant("recast", make("forward, backward"))]
    timing.measure(found, CPU, Effort(0.0, rounds=1), batches=1)
    assert found[0].why == "RuntimeError: nothing was recorded" and not found[0].ms
    lines = timing.rows("c", found, {"ms": 1.0})
    assert "ms" not in lines[0] and lines[1]["recorded"] == "forward, backward"


def test_one_after_the_other_leaves_nothing() -> None:
    """Two variants of Small would not fit into memory: each is gone when the next is made."""

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
    timing.measure(found, CPU, Effort(0.0, 1, 1, 1), batches=1, apart=True)
    gc.collect()
    assert len(there) == 3 and all(ref() is None for ref in there)
    assert found[0].ms and found[2].ms and not found[1].ms
    assert (found[1].why or "").startswith("RuntimeError: out of memory")
    assert found[3].why == "does not fit"


def test_preparing_times_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled runs a few times; eager torch has nothing to compile."""
    monkeypatch.setattr(timing, "preparing", True)
    calls: list[str] = []
    names = "recast", "eager sparse", "torch.compile", "torch.compile graph"
    found = [Variant(n, lambda n=n: lambda k: calls.append(n)) for n in names]
    timing.measure(found, CPU, Effort(5.0), batches=2)
    assert calls.count("recast") == 12 and calls.count("torch.compile") == 3
    assert {*calls} == {"recast", "torch.compile"} and not any(v.ms for v in found)


def test_a_step_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded at the first call, after three steps; ours prepares each replay as it must."""
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
    for make, before in ((variants.recorded, ["prepare"]), (variants.captured, [])):
        calls.clear()
        run = make(lambda k: calls.append("step"), torch.device("cuda"))
        run(0), run(1)
        replay = [*before, "replay"]
        assert calls == ["step"] * 3 + ["record", "step", *replay, *replay]
        assert recording.current() is None


# ---------------------------------------------------------------- bars and rows


def test_bars() -> None:
    """torch.compile's faster mode counts; without one, no bar counts as met."""
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
    loop, ours, eager, compiled, other, last = timing.rows("c", found, floor, Bar(times=2.0))
    assert ours["times the floor"] == 2.0 and ours["beside eager"] == 4.0
    assert ours["of copy rate"] == 0.5 and ours["of matrix rate"] == 0.25
    assert ours["must"] == "2.0 x torch.compile" and ours["met"] is False
    assert "must" not in loop, "what runs as one graph is judged"
    assert ours["all ms"] == [2.0, 2.0, 3.0]
    assert "met" not in eager and "met" not in compiled and other["why not"] == "out of memory"
    assert last["variant"] == "floor" and last["ms"] == 1.0
    (alone, *_) = timing.rows("c", [found[0], found[3]], floor, Bar(times=2.0))
    assert alone["met"] is False, "nothing runs as a graph: the loop is judged"
    found.insert(1, timed('recast mode="graph"', [], "it failed"))
    lines = timing.rows("c", found, floor, Bar(times=2.0))
    assert [x["variant"] for x in lines if "must" in x] == ['recast mode="graph"']
    assert "met" not in lines[1] and lines[1]["why not"] == "it failed", "nothing stands in for it"


# ---------------------------------------------------------------- memory


def test_small_fits_into_80_gb_and_all_of_it_into_141() -> None:
    """Bytes from the specification: 28.2 GB of tables, and as much of sums of squares."""
    needs = memory_needs.of_synthetic(synthetic_models.SMALL, 65536, 10, 4)
    assert needs["tables"] == needs["state"] == 4 * 7_058_084_800
    assert needs["batches"] == 10 * 65536 * 8 * 377
    h100 = memory_needs.room(needs, CPU, 79.18 * 2**30)
    assert h100("recast graph") is None and h100('recast mode="graph"') is None
    assert h100("eager sparse") is None
    why = h100("torch.compile") or ""
    assert why.startswith("does not fit: it needs 10") and why.endswith("of 85.0")
    h200 = memory_needs.room(needs, CPU, 139.8 * 2**30)
    assert all(h200(name) is None for name in ("recast", "eager sparse", "torch.compile"))
    small = memory_needs.room(needs, CPU, 40e9)
    with pytest.raises(items.Skip, match="it needs 6"):
        memory_needs.refuse(small("recast graph"))
    memory_needs.refuse(h100("recast graph"))


# ---------------------------------------------------------------- every op, every kernel


def test_every_op_of_the_gpu_is_measured() -> None:
    assert {op for _, op, _, _ in op_cases.ALONE} == {op.name for op in op_checks.ops()}
    labels = [label for label, _ in step_parts.labels()]
    assert len(set(labels)) == len(labels)


def test_lanes_share_groups_out() -> None:
    """Each item is in one lane; lookups, which fill the memory, are all in the first; Tiny's items
    for float32 are in one, those for bfloat16 in the other.
    """
    assert compile_ahead.lanes(["dlrm", "more of dlrm"]) == ["dlrm"]
    known = Rates(1.0, {"float32": 1.0, "bfloat16": 1.0})

    def names(group: str) -> list[list[str]]:
        lanes = compile_ahead.lanes([group])
        return [[i.name for i in compile_ahead.lane(lane, known)(CPU, True)] for lane in lanes]

    ops = names("ops")
    every = [name for lane in ops for name in lane]
    assert sorted(every) == sorted(label for label, _ in step_parts.labels())
    assert all("lookups" in name for name in ops[0]) and len(ops) == compile_ahead.LANES["ops"]
    assert not any("lookups" in name for lane in ops[1:] for name in lane)
    assert max(map(len, ops)) <= 6
    first, second = names("tiny")
    assert [n.split(", ")[1] for n in (*first, *second)] == ["fp32", "fp32", "bf16", "bf16"]


def test_all_kernels_are_known() -> None:
    there = kernel_coverage.all_kernels()
    assert there["row_update"] == "row_update.cu" and there["cin_products_4"].startswith("comp")
    left = kernel_coverage.never_launched(set(there) - {"row_combine", "row_update"})
    assert left == ["row_update.cu: row_combine, row_update"]


# ---------------------------------------------------------------- records


def test_a_record_cut_short_does_not_look_whole(tmp_path: Path) -> None:
    groups, bar = ["dropout", "dlrm"], results_page.DLRM
    floor = {"ms": 1.0}
    found = [timed('recast mode="graph"', [2.0]), timed("recast graph", [4.0])]
    lines = timing.rows("MLPerf DLRM, ranked", found, floor, bar)
    items: list[dict[str, Any]] = [
        {"group": "dlrm", "name": "MLPerf DLRM, ranked", "status": "ok", "rows": lines,
         "warned": ["a library gives another result"]},
        {"group": "dlrm", "name": REST, "status": "failed", "detail": "time was over"},
    ]  # fmt: skip
    lacks = results_page.missing(items, groups, ["dropout"])
    assert lacks == [
        "group dropout to its end", "rest of dlrm (failed)", "verdict on 2 of 3 judged cases",
    ]  # fmt: skip
    text = results_page.page(items, groups, ["a note"], 3.0)
    assert "3 judged cases: 2 not measured, 1 met." in text and "time was over" in text
    assert "MLPerf DLRM, ranked warned: a library gives another result" in text
    page = results.write(tmp_path, "b", "A title", {"gpu": "x"}, items, text, lacks, notes=[])
    assert "**Not complete**: no group dropout to its end; no rest of dlrm" in page.read_text()
    held = json.loads(page.with_suffix(".json").read_text())
    assert held["complete"] is False and held["missing"] == lacks
    assert held["rows"][0]["rows"][0]["all ms"] == [2.0]
    whole = results.write(tmp_path, "b", "A title", {"gpu": "x"}, items[:1], text)
    assert "Not complete" not in whole.read_text()
    assert json.loads(whole.with_suffix(".json").read_text())["complete"] is True
    assert not list(tmp_path.glob("*.part"))


def test_a_bar_is_for_the_mode_and_its_failure_is_seen() -> None:
    """TrainingStep, which is faster, never replaces it; the default mode is shown beside it."""
    names = "recast", 'recast mode="graph"', "recast graph"
    found = [timed(name, [ms]) for name, ms in zip(names, (9.0, 3.5, 2.0), strict=True)]
    label = "MLPerf DLRM, ranked"

    def line() -> dict[str, object]:
        rows = timing.rows(label, found, {"ms": 1.0}, results_page.DLRM)
        return results_page.summary([{"rows": rows}], ["dlrm"])[0]

    told = line()
    assert (told["judged"], told[""], told["which is"]) == (3.5, "NOT met", 'mode="graph"')
    assert (told["one graph"], told["default mode"], told["floor"]) == (2.0, 9.0, 1.0)
    found[1] = timed(names[1], [], "nothing was recorded")
    assert (line()[""], line()["judged"]) == ("not measured", "")


def test_the_judged_cases() -> None:
    """Those of the bars: four of Tiny, four of Small, two of DLRM, dropout, each op both ways."""
    cases = list(results_page.judged(NAMES))
    ops = 2 * len(op_cases.ALONE)
    assert len(cases) == len(dict(cases)) == 4 + 4 + 2 + 1 + ops + len(step_parts.UPDATES)
    bars = dict(cases)
    assert bars["synthetic Tiny, bf16, shuffled"].ms == 1.2
    assert bars["synthetic Small, fp32, ranked"].ms == 4.5
    assert bars["MLPerf DLRM, ranked"].ms == 3.0 and bars[step_parts.DROPOUT].times == 1.3
    assert bars["Dice, 200, float32, forward"].times == 2.0
