"""A proven lower bound: no choice of options is faster.

Average over ranks: the slowest rank is no faster than the mean of any mix ``w`` (w >= 0, sum 1) of
the K terms, and memory can be priced (p >= 0), which gives for every w and p a bound,

    g(w, p) = w . start + 1/W sum_t min_o (w . total[o] + p total_device[o]) - p room,

the Lagrangian dual of the linear relaxation; its maximum over w and p equals that relaxation.
Moreover, in a plan with score T no rank takes longer than T. So it has no shard that takes longer
by itself, or together with what every rank must do because tables have no other option. With the
remaining options the bound is g_T, which decreases in T, so the best score is at least the smallest
T with g_T <= T.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .problem import Floats, Ints, Problem, Where

STEPS = 40
CLOSE = 1e-4  # relative accuracy of the smallest T


@dataclass(frozen=True, slots=True)
class Bound:
    """``value``: no plan scores less. ``mix`` and ``price`` are the w and p that prove it."""

    value: float
    mix: Floats
    price: float
    allowed: NDArray[np.bool_]  # (O,) options that a plan with that score may use


def lower_bound(problem: Problem) -> Bound | None:
    """The bound of ``problem``; None if no choice fits into memory."""
    if _too_much(problem):
        return None
    whole = _dual(problem, _allowed(problem, np.inf))
    if whole is None:
        return None
    low, best = whole.value, whole
    found = _dual(problem, _allowed(problem, low))
    if found is not None and found.value <= low * (1 + 1e-9):
        return found
    high = low
    while found is None or found.value > high:  # no plan has a score of ``high`` or less
        low, best = high, found or best
        high *= 1.25
        found = _dual(problem, _allowed(problem, high))
        if high > 1e6 * max(whole.value, 1e-300):
            return None
    while high - low > CLOSE * low:
        middle = (low + high) / 2
        found = _dual(problem, _allowed(problem, middle))
        if found is None or found.value > middle:
            low, best = middle, found or best
        else:
            high = middle
    allowed = _allowed(problem, high)
    return Bound(low, best.mix, best.price, allowed)


def _allowed(problem: Problem, limit: float) -> NDArray[np.bool_]:
    """(O,) bool: options that fit a rank with score ``limit``, beside what every rank has anyway.

    The latter are the smallest shards of tables whose remaining options are all on all ranks.
    """
    o, first = problem.options, problem.first[:-1]
    time = limit * (1 + 1e-9) - problem.start.min(1)
    room = problem.device_capacity * (1 + 1e-9) - problem.start_device.min()
    everywhere = o.where == Where.ALL
    allowed = np.ones(len(o), dtype=bool)
    while True:
        forced = ~np.logical_or.reduceat(allowed & ~everywhere, first)
        cost = np.where(allowed, o.cost, np.inf)
        least = np.where(forced, np.minimum.reduceat(cost, first, axis=1), 0.0)
        device = np.where(allowed, o.device, np.inf)
        held = np.where(forced, np.minimum.reduceat(device, first), 0.0)
        if not (np.isfinite(least).all() and np.isfinite(held).all()):
            return np.zeros(len(o), dtype=bool)  # a table has no option left
        beside = least.sum(1)[:, None] - least[:, o.table]
        fits = (o.cost + beside <= time[:, None]).all(0)
        fits &= o.device + (held.sum() - held[o.table]) <= room
        if (allowed <= fits).all():
            return allowed
        allowed &= fits


def _too_much(problem: Problem) -> bool:
    """Whether devices and hosts together are too small for the smallest options."""
    o = problem.options
    need = np.minimum.reduceat(o.total_device + o.total_host, problem.first[:-1]).sum()
    room = (problem.device_capacity - problem.start_device).sum()
    room += (problem.host_capacity - problem.start_host).sum()
    return bool(need > room * (1 + 1e-12))


def _dual(problem: Problem, allowed: NDArray[np.bool_]) -> Bound | None:
    """The relaxation with the options in ``allowed``; None if they do not fit into memory."""
    if not np.logical_or.reduceat(allowed, problem.first[:-1]).all():
        return None
    o = problem.options.take(np.flatnonzero(allowed))
    first = np.searchsorted(o.table, np.arange(problem.tables))
    start = problem.start.mean(1)
    room = float((problem.device_capacity - problem.start_device).sum())
    if np.minimum.reduceat(o.total_device, first).sum() > room * (1 + 1e-12):
        return None
    terms = len(problem.start)

    def g(mix: Floats, price: float) -> tuple[float, float, Floats]:
        """The bound, its slope in ``price``, and the mean of each term under the choice made."""
        cost = mix @ o.total + price * o.total_device
        chosen = _least(cost, first)
        means = start + o.total[:, chosen].sum(1) / problem.ranks
        slope = (o.total_device[chosen].sum() - room) / problem.ranks
        return float(mix @ means + price * slope), float(slope), means

    def best_price(mix: Floats) -> tuple[float, float, Floats]:
        """The best price for one mix, by bisection: the slope decreases in the price."""
        value, slope, means = g(mix, 0.0)
        if slope <= 0:
            return value, 0.0, means
        high = float((mix @ o.total).max()) / max(problem.device_capacity, 1.0) or 1.0
        best = (value, 0.0, means)
        while True:
            value, slope, means = g(mix, high)
            best = max(best, (value, high, means), key=lambda b: b[0])
            if slope <= 0 or high > 1e30:
                break
            high *= 8
        low = 0.0
        for _ in range(STEPS):
            middle = (low + high) / 2
            value, slope, means = g(mix, middle)
            best = max(best, (value, middle, means), key=lambda b: b[0])
            low, high = (middle, high) if slope > 0 else (low, middle)
        return best

    mix, (value, price, _) = _best_mix(terms, best_price)
    return Bound(value, mix, price, allowed)


def _best_mix(
    terms: int, value: Callable[[Floats], tuple[float, float, Floats]]
) -> tuple[Floats, tuple[float, float, Floats]]:
    """The best mix of one or two terms; of more, the best single term, which is still a bound."""
    corners = [(row, value(row)) for row in np.eye(terms)]
    best = max(corners, key=lambda c: c[1][0])
    if terms != 2:
        return best
    low, high = 0.0, 1.0  # the weight of term 1; the slope is its mean minus that of term 0
    for _ in range(STEPS // 2):
        middle = (low + high) / 2
        mix = np.array([1 - middle, middle])
        found = value(mix)
        best = max(best, (mix, found), key=lambda c: c[1][0])
        rising = found[2][1] > found[2][0]
        low, high = (middle, high) if rising else (low, middle)
    return best


def _least(cost: Floats, first: Ints) -> Ints:
    """The option of least cost of each table, the first of equal ones."""
    least = np.minimum.reduceat(cost, first)
    sizes = np.diff(np.append(first, len(cost)))
    hits = np.flatnonzero(cost == np.repeat(least, sizes))
    return hits[np.searchsorted(hits, first)]


def relaxed_choice(problem: Problem, bound: Bound) -> Floats:
    """(O,) the priced cost of each option, which the relaxation minimises; inf if not allowed."""
    o = problem.options
    cost = bound.mix @ o.total + bound.price * o.total_device
    return np.where(bound.allowed, cost, np.inf)
