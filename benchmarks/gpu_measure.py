"""Timing on a GPU: variants in turn, medians of CUDA events; who is far behind gets fewer turns."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

Step = Callable[[int], object]  # the number of the batch

BEHIND = 8.0  # times the fastest from which a variant has few turns, of one step each
FEW = 4  # turns of such a variant, among those of the others
LEAST = 5  # rounds of the others, however long they take
PEERS_WARM = 3  # steps of a peer before it is timed: two compile or allocate

# Whether all is only run so that compilers are done when it is timed, in processes side by side.
preparing = False


@dataclass
class Variant:
    """One way to do a step, made when its turn comes; ``why`` says why it was not measured."""

    name: str
    make: Callable[[], Step]
    ms: list[float] = field(default_factory=list)  # of one step, round by round
    why: str | None = None
    host: list[float] = field(default_factory=list)  # ms until the host has asked for a step
    kernels: dict[str, object] = field(default_factory=dict)  # of one step; see ``profiled``
    steps: int = 0  # of a round
    peak: int = 0  # bytes, where each is measured alone

    @property
    def ours(self) -> bool:
        return self.name.startswith("recast")


class Effort(NamedTuple):
    """How long to measure: ``seconds`` for all, in rounds of ``steps`` steps of each variant."""

    seconds: float
    warmup: int = 6
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
    trace: bool = True,
) -> None:
    """Time all variants in turn, in changing order; not those that have a ``why`` already.

    A variant that raises while it is made or warms up is left out, and says why. One that is
    ``BEHIND`` times slower than the fastest has ``FEW`` turns, spread over those of the others.
    ``apart``: one after the other, each forgotten with all its memory before the next. ``trace``:
    look at the kernels of a step of ours when all is timed, since a profiler that was there once
    slows every launch after it.
    """
    variants = [v for v in variants if v.why is None]
    if preparing:
        for v in variants:
            if not v.name.startswith("eager"):
                _warm([v], device, effort._replace(warmup=PEERS_WARM), batches)
                _forget(device)
        return
    if apart:
        for v in variants:
            one = effort._replace(seconds=effort.seconds / len(variants))
            _forget(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            measure([v], device, one, batches=batches, trace=trace)
            v.peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        _forget(device)
        return
    with _quiet():
        live = _warm(variants, device, effort, batches)
        _timed(live, device, effort, batches)
        for v, step, _ in live if trace and device.type == "cuda" else ():
            if v.ours:
                v.kernels = _traced(step)


Live = list[tuple[Variant, Step, float]]  # and the seconds of a step, roughly


def _forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What is there by now is not searched for garbage while something is timed.

    A compiler leaves a million objects: a search that any variant's turn may set off takes tenths
    of a second, and it was a variant with many small objects that met most of them.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
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
            live.append((v, step, took))
        except Exception as error:
            said = str(error).splitlines()
            v.why = f"{type(error).__name__}: {said[0] if said else ''}"[:400]
        if v.why is not None:
            _settle(device)  # raises where the context is lost: nothing more to time
            _forget(device)
    return live


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def turns(seconds: Sequence[float], effort: Effort) -> tuple[int, list[int]]:
    """How many rounds there are, and of how many steps each variant's turns: 0, few of one step.

    ``seconds``: of a step of each variant.
    """
    fastest = min(seconds, default=0.0)
    slow = [s > BEHIND * fastest for s in seconds]
    behind = sum(s for s, far in zip(seconds, slow, strict=True) if far)
    others = sum(s for s, far in zip(seconds, slow, strict=True) if not far)
    room = int((effort.seconds - FEW * behind) / max(effort.steps * others, 1e-9))
    rounds = min(effort.rounds, max(LEAST, room))
    return rounds, [0 if far else effort.steps for far in slow]


def _timed(live: Live, device: torch.device, effort: Effort, batches: int) -> None:
    rounds, steps = turns([took for *_, took in live], effort)
    gc.collect()
    gc.freeze()  # what warming up has made, too
    clock, late = Clock(device), time.monotonic() + 2 * effort.seconds
    few = {k * rounds // FEW for k in range(FEW)}
    order = list(zip(live, steps, strict=True))
    for turn in range(rounds):
        for (v, step, _), count in order if turn % 2 else reversed(order):
            if count or turn in few:
                v.steps = count or 1
                clock.time(v.ms, _turn(v, step, turn * effort.steps, batches), v.steps)
        clock.read()
        if time.monotonic() > late and turn + 1 >= min(LEAST, rounds):
            break


def _turn(v: Variant, step: Step, at: int, batches: int) -> Callable[[], None]:
    def work() -> None:
        start = time.perf_counter()
        for k in range(v.steps):
            step((at + k) % batches)
        v.host.append((time.perf_counter() - start) * 1e3 / v.steps)

    return work


def _traced(step: Step) -> dict[str, object]:
    """:func:`profiled`; a machine without its library loses the kernels, not the times."""
    try:
        return profiled(step)
    except RuntimeError as error:
        return {"kernels": f"not seen: {str(error).splitlines()[0]}"}


def profiled(step: Step, most: int = 16) -> dict[str, object]:
    """Of one step on the device: ms of all its kernels, how many, and those that take most."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step(0)
        torch.cuda.synchronize()
    events = [e for e in seen.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda e: -e.self_device_time_total)
    return {
        "device ms": round(sum(e.self_device_time_total for e in events) / 1e3, 4),
        "launches": sum(e.count for e in events),
        "kernels": [
            [round(e.self_device_time_total / 1e3, 4), e.count, e.key[:120]] for e in events[:most]
        ],
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


def rows(
    case: str, variants: Iterable[Variant], floor: Mapping[str, float], bar: Bar | None = None
) -> list[dict[str, object]]:
    """A line for each variant: its median beside the floor and the others, and all its rounds.

    ``bar`` judges what runs as one graph; where nothing does, all of ours.
    """
    held = list(variants)
    middles = {v.name: statistics.median(v.ms) for v in held if v.why is None and v.ms}
    peers = {v.name: middles[v.name] for v in held if not v.ours and v.name in middles}
    graphs = [v.name for v in held if v.ours and "graph" in v.name and v.name in middles]
    found: list[dict[str, object]] = []
    for v in held:
        if v.name not in middles:
            found.append({"case": case, "variant": v.name, "why not": v.why or "no time was left"})
            continue
        middle = middles[v.name]
        row: dict[str, object] = {
            "case": case,
            "variant": v.name,
            "ms": round(middle, 4),
            "quartiles": _quartiles(v.ms),
            "rounds": len(v.ms),
            "steps a round": v.steps,
            "floor ms": round(floor["ms"], 4),
            "times the floor": round(middle / floor["ms"], 2),
            **({"host ms": round(statistics.median(v.host), 4)} if v.host else {}),
            **({"peak GB": round(v.peak / 1e9, 2)} if v.peak else {}),
            **v.kernels,
            "all ms": [round(x, 4) for x in v.ms],
        }
        for rate in ("copy", "matrix"):
            if floor.get(f"{rate} ms"):
                row[f"of {rate} rate"] = round(floor[f"{rate} ms"] / middle, 3)
        if v.ours:
            row |= {f"beside {name}": round(ms / middle, 2) for name, ms in peers.items()}
        if v.ours and bar is not None and (v.name in graphs or not graphs):
            row["must"], row["met"] = str(bar), bar.met(middle, peers)
        found.append(row)
    found.append({"case": case, "variant": "floor", **{k: round(x, 4) for k, x in floor.items()}})
    return found


def _quartiles(ms: Sequence[float]) -> list[float]:
    low, _, high = statistics.quantiles(ms, n=4) if len(ms) > 1 else (ms[0],) * 3
    return [round(low, 4), round(high, 4)]
