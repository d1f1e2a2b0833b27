"""Times several ways to compute the same thing on this device, and remembers the fastest.

The last way takes every call and is trusted; a way with a different result is left out, with a
warning. The choice holds for the rest of the process, for all calls with the same key. Only the
device's time counts: the timed calls wait in its queue until all have been launched. Otherwise one
launch could win over three faster ones because of the host's time, which a recorded step does not
spend. While a graph is recorded, and under ``torch.use_deterministic_algorithms``, where two runs
must choose alike, nothing is timed and the last way is taken.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recast.errors import KernelError, RecastWarning
from recast.runtime import device
from recast.runtime.gpu import cublaslt
from recast.runtime.recorded import recording

Ways = Mapping[str, Callable[[], Any]]
Results = Callable[[Any], Sequence[Tensor | None]]
Timer = Callable[[Callable[[], Any]], float]

_ROUNDS, _CALLS = 3, 5  # the best of three rounds counts, the ways in turn
_SHARE = 0.05  # of the largest number, by which results may differ: more is not rounding
_HELD_BACK = 2_000_000  # cycles that the device idles first, some 1 ms: the host's time for a round
_log = logging.getLogger("recast")
_chosen: dict[Hashable, str] = {}
_times: dict[Hashable, dict[str, float]] = {}
_left_out: dict[Hashable, dict[str, str]] = {}  # ways that were not timed, and why


def chosen(key: Hashable) -> str | None:
    """The way that :func:`choose` chose before; None while :func:`device.use` forces one."""
    return None if device.held() in device.WAYS else _chosen.get(key)


def timings() -> list[dict[str, object]]:
    """All choices made so far, with ``key`` as text: the milliseconds of each way, and the reason
    for each that was left out.
    """
    found: list[dict[str, object]] = []
    for key, of in _times.items():
        ms = {k: round(1e3 * t, 4) for k, t in of.items()}
        fastest = min(of, key=of.__getitem__)
        found.append({"key": str(key), "chosen": fastest, **ms, **_left_out.get(key, {})})
    return found


def leave_out(key: Hashable, name: str, why: str) -> None:
    """Note for :func:`timings` that a way was left out."""
    _left_out.setdefault(key, {})[name] = why


def choose(key: Hashable, ways: Ways, like: Tensor, results: Results) -> str:
    """The name of the fastest of ``ways`` on the device of ``like``.

    Each way is called several times, so calls must not build on each other. ``results`` returns the
    tensors to compare from what a way has just returned.
    """
    last = [*ways][-1]
    held = device.held()
    if held in device.WAYS:
        return held if held in ways else last
    if len(ways) == 1:
        return last
    if torch.are_deterministic_algorithms_enabled() or recording.current() is not None:
        return last
    timer = timer_of(like)
    if timer is None:
        return last
    with cublaslt.on_device(like):
        right = _right(key, ways, results)
        best = dict.fromkeys(right, float("inf"))
        for _ in range(_ROUNDS if len(right) > 1 else 0):
            for name, way in right.items():
                best[name] = min(best[name], timer(way))
    fastest = min(best, key=lambda name: best[name])
    _log.debug("%s: %s of %s", key, fastest, best)
    _times.setdefault(key, best)
    return _chosen.setdefault(key, fastest)


def timer_of(like: Tensor) -> Timer | None:
    """The timer for work on the device of ``like``; None when nothing can be timed now."""
    if not like.is_cuda or torch.cuda.is_current_stream_capturing():
        return None
    return _seconds


def _seconds(way: Callable[[], Any]) -> float:
    """Seconds of a call on the current CUDA stream, after one to warm up."""
    way()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    hold_back = getattr(torch.cuda, "_sleep", None)
    if hold_back is not None:
        hold_back(_HELD_BACK)
    start.record()
    for _ in range(_CALLS):
        way()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000 / _CALLS


def _right(key: Hashable, ways: Ways, results: Results) -> Ways:
    """Those of ``ways`` whose results equal those of the last one, apart from rounding."""
    *others, last = ways
    wanted = results(ways[last]())
    found = {}
    for name in others:
        try:
            same = all(map(_alike, results(ways[name]()), wanted))
        except KernelError as error:  # proposed, and then refused
            leave_out(key, name, error.why or str(error))
            continue
        if same:
            found[name] = ways[name]
            continue
        leave_out(key, name, f"gives another result than {last}")
        warnings.warn(
            f"{name} gives another result than {last} for {key}: it is not used for this",
            RecastWarning,
            stacklevel=2,
        )
    return {**found, last: ways[last]}


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    a, b = a.float(), b.float()
    off = torch.where(a.isfinite() & b.isfinite(), a - b, 0.0)
    return bool(off.norm() <= _SHARE * torch.where(b.isfinite(), b, 0.0).norm())
