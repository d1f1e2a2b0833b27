"""Timing on a GPU: variants in turn, medians of CUDA events, and the floors of the machine itself.

A floor is the larger part of what a step cannot do without: bytes over the copy bandwidth measured
in this run, and operations over the matrix rate measured in this run. It supposes perfect reuse on
the chip, and that nothing else takes time.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[int], object]  # the number of the batch


@dataclass
class Variant:
    """One way to do a step; ``why`` is set when it cannot be measured here."""

    name: str
    step: Step
    ms: list[float] = field(default_factory=list)
    why: str | None = None
    host: list[float] = field(default_factory=list)  # ms until the host has asked for a step
    kernels: dict[str, object] = field(default_factory=dict)  # of one step; see ``profiled``


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
    *,
    batches: int,
    seconds: float,
    warmup: int = 6,
    steps: int = 5,
    rounds: int = 60,
    apart: bool = False,
    trace: bool = True,
) -> None:
    """Time all variants in turn, ``steps`` steps each, in changing order, for ``seconds`` in all.

    A variant that raises while it warms up is left out, and says why. ``apart``: one after the
    other, each forgotten with all its memory before the next. ``trace``: look at the kernels of a
    step when all is timed, since a profiler that was there once slows every launch after it.
    """
    if apart:
        for v in variants:
            measure([v], device, batches=batches, seconds=seconds / len(variants), warmup=warmup,
                    steps=steps, rounds=rounds, trace=trace)  # fmt: skip
            v.step = _gone
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        return
    with _quiet():
        live = _measure(variants, device, batches, seconds, warmup, steps, rounds)
        for v in live if trace and device.type == "cuda" else ():
            if not v.name.startswith("eager"):
                v.kernels = _traced(v.step)


def _gone(batch: int) -> object:
    raise RuntimeError("measured already, and forgotten")


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


def _measure(
    variants: Sequence[Variant], device: torch.device, batches: int, seconds: float, warmup: int,
    steps: int, rounds: int,
) -> list[Variant]:  # fmt: skip
    """Fill in the times; the variants that were timed."""
    for v in variants:
        try:
            for k in range(warmup):
                v.step(k % batches)
            if device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            v.why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if device.type == "cuda":
                torch.cuda.synchronize()  # raises where the context is lost: nothing more to time
                torch.cuda.empty_cache()
    live = [v for v in variants if v.why is None]
    gc.collect()
    gc.freeze()  # what warming up has made, too
    clock, deadline = Clock(device), time.monotonic() + seconds
    for turn in range(rounds):
        for v in live if turn % 2 else reversed(live):
            at = turn * steps

            def work(v: Variant = v, at: int = at) -> None:
                start = time.perf_counter()
                for k in range(steps):
                    v.step((at + k) % batches)
                v.host.append((time.perf_counter() - start) * 1e3 / steps)

            clock.time(v.ms, work, steps)
        clock.read()
        if time.monotonic() > deadline:
            break
    return live


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


def rows(
    case: str, variants: Iterable[Variant], floor: dict[str, float], bar: float | None = None
) -> list[dict[str, object]]:
    """A line for each variant: its median beside the floor and the others; ``bar``: of graphs."""
    found: list[dict[str, object]] = []
    held = {v.name: v for v in variants}
    for v in held.values():
        if v.why is not None or not v.ms:
            found.append({"case": case, "variant": v.name, "why not": v.why or "no time was left"})
            continue
        middle = statistics.median(v.ms)
        low, high = (
            (statistics.quantiles(v.ms, n=4)[0], statistics.quantiles(v.ms, n=4)[2])
            if len(v.ms) > 1
            else (middle, middle)
        )
        row: dict[str, object] = {
            "case": case,
            "variant": v.name,
            "ms": round(middle, 4),
            "quartiles": [round(low, 4), round(high, 4)],
            "rounds": len(v.ms),
            "floor ms": round(floor["ms"], 4),
            "times the floor": round(middle / floor["ms"], 2),
            **({"host ms": round(statistics.median(v.host), 4)} if v.host else {}),
            **v.kernels,
        }
        ours = v.name.startswith("recast")
        if ours:
            for peer in held.values():
                if not peer.name.startswith("recast") and peer.ms:
                    row[f"beside {peer.name}"] = round(statistics.median(peer.ms) / middle, 2)
            if bar is not None and "graph" in v.name:
                row["must ms"], row["met"] = bar, middle <= bar
        found.append(row)
    found.append({"case": case, "variant": "floor", **{k: round(x, 4) for k, x in floor.items()}})
    return found


# ---------------------------------------------------------------- what the machine can do


@dataclass(frozen=True)
class Rates:
    """Bytes and operations a second, as measured."""

    copy: float
    matrix: dict[str, float]  # by dtype: "float32" as the precision settings say

    def ms(self, moved: float, flops: float, dtype: str) -> float:
        """The larger of the two, in milliseconds."""
        return max(moved / self.copy, flops / self.matrix[dtype]) * 1e3


def rates(device: torch.device, tiny: bool) -> Rates:
    """A copy of gigabytes, and square products of random numbers."""
    n = 1 << (16 if tiny else 30)
    source, target = (torch.empty(n, dtype=torch.uint8, device=device) for _ in range(2))
    moved = best(lambda: target.copy_(source), device)
    found = {}
    size = 64 if tiny else 8192
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        name = str(dtype).removeprefix("torch.")
        found[name] = 2.0 * size**3 / best(lambda a=a, b=b: a @ b, device)
    return Rates(2.0 * n / moved, found)


def best(work: Callable[[], object], device: torch.device) -> float:
    """The median of some runs, in seconds."""
    clock, ms = Clock(device), list[float]()
    for _ in range(3):
        work()
    for _ in range(10):
        clock.time(ms, work, 1)
    clock.read()
    return statistics.median(ms) / 1e3


# ---------------------------------------------------------------- what a step must do


def lookup_bytes(
    ids: Iterable[tuple[int, Tensor]], dims: Sequence[int], outputs: int, *, state: int, width: int
) -> float:
    """Bytes of all lookups of a step, forward, backward and update.

    ids: (table, ids) of every input; each id is read twice, each distinct row once forward and
    twice (read, write) in the update, with ``state`` more numbers a weight likewise; each of the
    ``outputs`` elements is written forward and its gradient read, ``width`` bytes each.
    """
    by_table: dict[int, list[Tensor]] = {}
    moved = 2.0 * outputs * width
    for table, given in ids:
        by_table.setdefault(table, []).append(given.reshape(-1))
        moved += 2.0 * given.numel() * given.element_size()
    for table, parts in by_table.items():
        distinct = torch.cat(parts).unique().numel()
        moved += distinct * dims[table] * 4.0 * (1 + 2 + 2 * state)
    return moved


def chain_work(sizes: Sequence[int], batch: int, width: int) -> tuple[float, float]:
    """(bytes, operations) of an MLP, forward and backward.

    The input is read twice and its gradient written; of each hidden element, the value is written,
    read forward and read backward, and so is its gradient.
    """
    macs = sum(a * b for a, b in pairwise(sizes))
    moved = batch * width * (3.0 * sizes[0] + 6.0 * sum(sizes[1:]))
    return moved, 6.0 * batch * macs


def linears(model: nn.Module) -> list[int]:
    """The sizes of a chain of linear layers."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return [layers[0].in_features, *(m.out_features for m in layers)]
