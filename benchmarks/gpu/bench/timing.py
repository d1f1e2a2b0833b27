"""Timing on a GPU: variants take turns, fewer if they are far behind; medians of CUDA events."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from recast.errors import RecastWarning

Step = Callable[[int], object]  # the number of the batch

BEHIND = 8.0  # times the fastest from which a variant has few turns
FEW, SHORT = 5, 2  # turns of such a variant, among those of the others, and their steps
LEAST = 5  # rounds of the others, however long they take
WARM_UP = 0.01, 8  # seconds and most steps of a turn before it is timed: see warm_up_steps()
PEERS_WARM = 3  # steps of a peer before it is timed: two compile or allocate
COMPILES_NOTHING = "eager", "torch.compile graph"  # begins of names: what others have compiled
FIRST = 0.5  # seconds that ours are timed at first, before a peer can take the process with it

# Whether all is only run so that compilers are done when it is timed, in processes side by side.
preparing = False
only_ours = False  # then without any peer


@dataclass
class Variant:
    """One way to do a step, made when its turn comes; ``why`` says why it was not measured."""

    name: str
    make: Callable[[], Step]
    ms: list[float] = field(default_factory=list)  # of one step, round by round
    why: str | None = None
    host: list[float] = field(default_factory=list)  # ms until the host has asked for a step
    recorded: str = ""  # what of a step replays do, where some of it should be
    steps: int = 0  # of a round
    peak: int = 0  # bytes, where each is measured alone
    before: float | None = None  # ms of ours before any peer was there

    @property
    def ours(self) -> bool:
        return self.name.startswith("recast")


class Graphed:
    """A step that should be replayed. ``recorded()`` says which parts are; "" means none."""

    def __init__(self, step: Step, recorded: Callable[[], str]) -> None:
        self._step, self.recorded = step, recorded

    def __call__(self, k: int) -> object:
        return self._step(k)


class Effort(NamedTuple):
    """How long to measure: ``seconds`` for all, in rounds of ``steps`` steps of each variant.

    warmup: steps of ours before: ``mode="graph"`` records the optimizer's at the eighth or so.
    """

    seconds: float
    warmup: int = 12
    steps: int = 5
    rounds: int = 60


class Clock:
    """Milliseconds of work on a device, read when all is done."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[list[float], Any, Any, int]] = []

    def time(self, into: list[float], work: Callable[[], object], steps: int) -> None:
        """Append to ``into``, at :meth:`read`, the milliseconds of one of ``steps`` steps."""
        if not self._cuda:
            start = time.perf_counter()
            work()
            into.append((time.perf_counter() - start) * 1e3 / steps)
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        self._spans.append((into, first, last, steps))

    def read(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        for into, first, last, steps in self._spans:
            into.append(first.elapsed_time(last) / steps)
        self._spans.clear()


def measure(
    variants: Sequence[Variant],
    device: torch.device,
    effort: Effort,
    *,
    batches: int,
    apart: bool = False,
    told: Callable[[], None] = lambda: None,
) -> None:
    """Time all variants in turn, in changing order; not those that have a ``why`` already.

    A variant that raises is left out, and says why. One that is ``BEHIND`` times slower than the
    fastest has ``FEW`` turns, spread over those of the others. ``apart``: one after the other, each
    freed with all its memory before the next. ``told`` is called when there are results to keep in
    case the process ends: first for ours alone, before any peer is made.
    """
    variants = [v for v in variants if v.why is None and (v.ours or not only_ours)]
    if preparing:
        for v in variants:
            if not v.name.startswith(COMPILES_NOTHING):
                _warm([v], device, effort, batches)
                _forget(device)
            if v.why is not None:  # it will be compiled where it is timed
                warnings.warn(f"{v.name}: {v.why}", RecastWarning, stacklevel=2)
        return
    if apart:
        for v in variants:
            one = effort._replace(seconds=effort.seconds / len(variants))
            _forget(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            _in_turn([v], device, one, batches)
            v.peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
            told()
        _forget(device)
        return
    _in_turn(variants, device, effort, batches, told)


def _in_turn(
    variants: Sequence[Variant], device: torch.device, effort: Effort, batches: int,
    told: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    with _quiet():
        live = _warm([v for v in variants if v.ours], device, effort, batches)
        peers = [v for v in variants if not v.ours]
        if told is not None and live and peers:
            _timed(live, device, effort._replace(seconds=min(FIRST, effort.seconds)), batches)
            told()
            for v, *_ in live:
                v.before = statistics.median(v.ms) if v.ms else None
                v.ms, v.host = [], []
            live = [one for one in live if one[0].why is None]
        live += _warm(peers, device, effort, batches)
        _timed(live, device, effort, batches)


Live = list[tuple[Variant, Step, float]]  # and the seconds of a step, roughly


def _forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Existing objects are not searched for garbage while something is timed.

    A compiler leaves a million objects. A collection may start in any variant's turn and takes
    tenths of a second; a variant with many small objects triggered most of them. What was frozen
    before stays so.
    """
    before = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not before:
            gc.unfreeze()


def _warm(variants: Sequence[Variant], device: torch.device, effort: Effort, batches: int) -> Live:
    """The variants that run, each after its first steps."""
    live: Live = []
    for v in variants:
        took = 0.0
        try:
            step = v.make()
            for k in range(effort.warmup if v.ours else min(effort.warmup, PEERS_WARM)):
                start = time.perf_counter()
                step(k % batches)
                _settle(device)
                took = time.perf_counter() - start
            if not preparing:
                v.recorded = replayed(step)
            live.append((v, step, took))
        except Exception as error:
            v.why = _why(error)
        if v.why is not None:
            _settle(device)  # raises where the context is lost: nothing more to time
            _forget(device)
    return live


def replayed(step: Step) -> str:
    """Which parts of ``step`` are replayed; RuntimeError if some should be and none is."""
    found = step.recorded() if isinstance(step, Graphed) else ""
    if isinstance(step, Graphed) and not found:
        raise RuntimeError("nothing was recorded")
    return found


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def warm_up_steps(seconds: float) -> int:
    """How many steps, of ``seconds`` each, a turn has before it is timed.

    A running loop always has a step in flight, and its code and objects in the caches: after
    another variant, the host takes two to three times as long for the first step, and a tenth more
    for the next few.
    """
    least, most = WARM_UP
    return max(1, min(most, math.ceil(least / max(seconds, 1e-9))))


def turns(seconds: Sequence[float], effort: Effort) -> tuple[int, list[int]]:
    """How many rounds there are, and of how many steps each variant's turns: 0, few of ``SHORT``.

    ``seconds``: of a step of each variant.
    """
    fastest = min(seconds, default=0.0)
    long = effort.seconds / (LEAST * max(effort.steps, 1))
    slow = [s > BEHIND * fastest or 0 < long < s for s in seconds]
    far, near = 0.0, 0.0
    for s, behind in zip(seconds, slow, strict=True):
        far += FEW * (SHORT + warm_up_steps(s)) * s * behind
        near += (effort.steps + warm_up_steps(s)) * s * (not behind)
    room = int((effort.seconds - far) / max(near, 1e-9))
    rounds = min(effort.rounds, max(LEAST, room))
    return rounds, [0 if behind else effort.steps for behind in slow]


def _timed(live: Live, device: torch.device, effort: Effort, batches: int) -> None:
    rounds, steps = turns([took for *_, took in live], effort)
    gc.collect()
    gc.freeze()  # what warming up has made, too
    clock, late = Clock(device), time.monotonic() + 2 * effort.seconds
    few = {k * rounds // FEW for k in range(FEW)}
    order = list(zip(live, steps, strict=True))
    for turn in range(rounds):
        for (v, step, took), count in order if turn % 2 else reversed(order):
            if v.why is None and (count or turn in few):
                v.steps = count or SHORT
                # Whoever has few turns takes them with other batches, too.
                at = turn * effort.steps if count else len(v.host) * SHORT
                try:
                    _settle(device)  # behind what another has left to do, its host would not show
                    for k in range(-warm_up_steps(took) if device.type == "cuda" else 0, 0):
                        step((at + k) % batches)
                    clock.time(v.ms, _turn(v, step, at, batches), v.steps)
                except Exception as error:
                    v.why = _why(error)
        clock.read()
        if time.monotonic() > late and turn + 1 >= min(LEAST, rounds):
            break


def _why(error: Exception) -> str:
    said = str(error).splitlines()
    return f"{type(error).__name__}: {said[0] if said else ''}"[:400]


def _turn(v: Variant, step: Step, at: int, batches: int) -> Callable[[], None]:
    def work() -> None:
        start = time.perf_counter()
        for k in range(v.steps):
            step((at + k) % batches)
        v.host.append((time.perf_counter() - start) * 1e3 / v.steps)

    return work


def profiled(step: Step, device: torch.device) -> dict[str, object]:
    """Of one step on the device: ms of all its kernels, how many, and those that take most."""
    from torch.profiler import ProfilerActivity, profile

    on = device.type == "cuda"
    _settle(device)
    activities = [ProfilerActivity.CUDA if on else ProfilerActivity.CPU]
    with profile(activities=activities, acc_events=True) as seen:  # torch 2.11 warns without it
        step(0)
        _settle(device)
    word = "self_device_time_total" if on else "self_cpu_time_total"
    events = [(getattr(e, word), e.count, e.key) for e in seen.key_averages()]
    events = sorted((e for e in events if e[0] > 0), reverse=True)
    return {
        "device ms": round(sum(us for us, *_ in events) / 1e3, 4),
        "launches": sum(count for _, count, _ in events),
        "kernels": [[round(us / 1e3, 4), count, key[:120]] for us, count, key in events[:24]],
    }


# ---------------------------------------------------------------- what is recorded


class Bar(NamedTuple):
    """What ours must reach: at most so many ``ms``, or ``times`` faster than torch.compile."""

    ms: float | None = None
    times: float | None = None

    def __str__(self) -> str:
        return f"{self.ms} ms" if self.ms is not None else f"{self.times} x torch.compile"

    def met(self, middle: float, peers: Mapping[str, float]) -> bool | None:
        """None: there is nothing to judge it by. Of torch.compile's ways the faster one counts."""
        if self.ms is not None:
            return middle <= self.ms
        rivals = [ms for name, ms in peers.items() if name.startswith("torch.compile")]
        return min(rivals) / middle >= (self.times or 0.0) if rivals else None


def judged(names: Sequence[str]) -> str | None:
    """Which of ``names`` is held to the bar: ``mode="graph"``, where that is one of the ways; else
    the same work as one graph; else ours as it is.
    """
    return next((w for w in ('recast mode="graph"', "recast graph", "recast") if w in names), None)


def rows(
    case: str, variants: Iterable[Variant], floor: Mapping[str, float], bar: Bar | None = None
) -> list[dict[str, object]]:
    """A line for each variant: its median beside the floor and the others, and all its rounds.

    ``bar`` is that of the :func:`judged` variant, whether or not it was measured.
    """
    held = list(variants)
    middles = {v.name: statistics.median(v.ms) for v in held if v.why is None and v.ms}
    peers = {v.name: middles[v.name] for v in held if not v.ours and v.name in middles}
    must = judged([v.name for v in held]) if bar is not None else None
    found: list[dict[str, object]] = []
    for v in held:
        row: dict[str, object] = {"case": case, "variant": v.name}
        if v.name == must:
            row["must"] = str(bar)
        if v.name not in middles:
            found.append(row | {"why not": v.why or "no time was left"})
            continue
        middle = middles[v.name]
        row |= {
            "ms": round(middle, 4),
            "quartiles": _quartiles(v.ms),
            "rounds": len(v.ms),
            "steps a round": v.steps,
            "floor ms": round(floor["ms"], 4),
            "times the floor": round(middle / floor["ms"], 2),
            **({"host ms": round(statistics.median(v.host), 4)} if v.host else {}),
            **({"before peers": round(v.before, 4)} if v.before is not None else {}),
            **({"peak GB": round(v.peak / 1e9, 2)} if v.peak else {}),
            **({"recorded": v.recorded} if v.recorded else {}),
            "all ms": [round(x, 4) for x in v.ms],
        }
        for rate in ("copy", "matrix"):
            if floor.get(f"{rate} ms"):
                row[f"of {rate} rate"] = round(floor[f"{rate} ms"] / middle, 3)
        if v.ours:
            row |= {f"beside {name}": round(ms / middle, 2) for name, ms in peers.items()}
        if v.name == must and bar is not None:
            row["met"] = bar.met(middle, peers)
        found.append(row)
    found.append({"case": case, "variant": "floor", **{k: round(x, 4) for k, x in floor.items()}})
    return found


def _quartiles(ms: Sequence[float]) -> list[float]:
    low, _, high = statistics.quantiles(ms, n=4) if len(ms) > 1 else (ms[0],) * 3
    return [round(low, 4), round(high, 4)]
