"""Whole training steps: first all judged items, then the peers that take long, other ways of ours,
and the kernels of a step.

The variants of Small, whose tables and sums take two thirds of 80 GB, are measured one after the
other, each freed before the next. A variant that cannot fit, by the bytes that follow from its
specification, is reported with these and not tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from gpu.bench import memory_needs
from gpu.bench.judged_models import Subject
from gpu.bench.timing import measure, profiled, replayed, rows
from gpu.bench.variants import Case, effort, steps
from gpu.harness.items import Item
from gpu.harness.worker import report_so_far
from recast.runtime import fastest

Found = dict[str, object]
Subjects = Callable[[torch.device, bool], Iterable[Subject]]

OURS = "recast", 'recast mode="graph"', "recast graph"
LIMIT = 75.0  # seconds of a judged case, twice what it took where nothing had been compiled
SECONDS, APART = 4.0, 3.0  # of measuring: variants in turn; one after the other


def judged(subjects: Subjects, device: torch.device, tiny: bool) -> Iterator[Item]:
    """Ours beside eager torch and what compiles within the time."""
    for subject in subjects(device, tiny):
        yield Item(subject.label, partial(_judged, subject, device, tiny), LIMIT)


def more(subjects: Subjects, device: torch.device, tiny: bool) -> Iterator[Item]:
    """The other peers, one by one; other ways of ours; last the kernels of steps, as a profiler
    slows every launch after it.
    """
    known = list(subjects(device, tiny))
    for subject in known:
        for peer in subject.later:
            run = partial(_alone, subject, peer, device, tiny)
            yield Item(f"{subject.label}, {peer}", run)
    for subject in known:
        if subject.ways:
            yield Item(f"{subject.label}, ways", partial(_ways, subject, device, tiny))
    for low in dict.fromkeys(s.low for s in known):
        subject = next(s for s in known if s.low == low)
        yield Item(f"{subject.label}, kernels", partial(_kernels, subject, device, tiny))


def _case(subject: Subject, device: torch.device, tiny: bool) -> Case:
    plain, sparse, optimizer = subject.built()
    return Case(
        plain, sparse, subject.make, optimizer, subject.batches(), subject.low, device, tiny
    )


def _judged(subject: Subject, device: torch.device, tiny: bool) -> Found:
    room = memory_needs.room(subject.needs, device)
    memory_needs.refuse(room("recast graph"))
    case = _case(subject, device, tiny)
    floor = subject.floor_of(case.plain, case.data)
    found = steps(case, *OURS, *subject.peers, room=room)

    def lines() -> list[dict[str, object]]:
        return rows(subject.label, found, floor, subject.bar)

    measure(
        found, device, effort(tiny, APART if subject.large else SECONDS), batches=len(case.data),
        apart=subject.large, told=lambda: report_so_far(lines()),
    )  # fmt: skip
    told: Found = {"needs GB": {k: round(v / 1e9, 1) for k, v in subject.needs.items()}}
    if subject.published:
        told["published A100 ms"] = subject.published
    return {"rows": lines(), **told, "chosen": _chosen()}


_known: set[str] = set()


def _chosen() -> list[dict[str, object]]:
    """What the process has chosen by time since it was asked last."""
    found = [of for of in fastest.timings() if str(of["key"]) not in _known]
    _known.update(str(of["key"]) for of in found)
    return found


def _alone(subject: Subject, peer: str, device: torch.device, tiny: bool) -> Found:
    """One peer, with all memory to itself."""
    room = memory_needs.room(subject.needs, device)
    if (why := room(peer)) is not None:
        return {"rows": [{"case": subject.label, "variant": peer, "why not": why}]}
    case = _case(subject, device, tiny)
    found = steps(case, peer, room=room)
    measure(found, device, effort(tiny, 2), batches=len(case.data), apart=True)
    floor = subject.floor_of(case.plain, case.data)
    return {"rows": rows(subject.label, found, floor)[:-1]}  # the floor's line is there


def _ways(subject: Subject, device: torch.device, tiny: bool) -> Found:
    """Ours beside other ways of ours."""
    case = _case(subject, device, tiny)
    found = steps(case, "recast graph", *subject.ways, room=lambda name: None)
    measure(found, device, effort(tiny, 2), batches=len(case.data))
    floor = subject.floor_of(case.plain, case.data)
    return {"rows": rows(f"{subject.label}, ways", found, floor)}


def _kernels(subject: Subject, device: torch.device, tiny: bool) -> Found:
    """What a step of ours is on the device."""
    room = memory_needs.room(subject.needs, device)
    memory_needs.refuse(room("recast graph"))
    case, lines = _case(subject, device, tiny), list[dict[str, object]]()
    for v in steps(case, *OURS[1:], room=room):
        step = v.make()
        for k in range(effort(tiny, 0).warmup):
            step(k % len(case.data))
        about = {"case": subject.label, "variant": v.name, "recorded": replayed(step)}
        lines.append({**about, **profiled(step, device)})
        report_so_far(lines)
    return {"rows": lines}
