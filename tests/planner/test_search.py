"""The search on abstract options: against all plans of tiny problems, and its proven bound."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from recast.runtime.planner.bound import lower_bound
from recast.runtime.planner.problem import Options, Problem, Where, undominated
from recast.runtime.planner.search import search


def problem(
    seed: int, tables: int, hosts: int, each: int, terms: int = 1, tight: float = 2.0
) -> Problem:
    """Random options of every kind; ``tight``: memory, relative to what half of the tables need."""
    r = np.random.default_rng(seed)
    ranks = hosts * each
    made: list[tuple[int, Where, int]] = []
    for t in range(tables):
        made += [(t, Where.ANY, 1), (t, Where.ALL, ranks)]
        made += [(t, Where.ANY, 2)] * (ranks > 1)
        made += [(t, Where.HOST, each)] * (hosts > 1)
        made += [(t, Where.WITHIN, 2)] * (hosts > 1 and each > 1)
    count = np.array([m[2] for m in made])
    cost = (
        r.uniform(0.5, 2, (terms, len(made)))
        * r.uniform(0.5, 3, tables)[[m[0] for m in made]]
        / count**0.8
    )
    device = r.uniform(0.5, 2, len(made)) / count
    host = r.uniform(0, 1, len(made))
    capacity = tight * tables / ranks
    return Problem(
        tables,
        Options(
            np.array([m[0] for m in made]), np.array([int(m[1]) for m in made]), count,
            cost, device, host, cost * count, device * count, host * count,
        ),
        ranks, each, each, capacity, 2.0 * tables, r.uniform(0, 0.5, (terms, ranks)),
        np.zeros(ranks), np.zeros(hosts),
    )  # fmt: skip


def places(p: Problem, option: int) -> Iterator[tuple[int, ...]]:
    where, count = int(p.options.where[option]), int(p.options.count[option])
    hosts = [range(h, h + p.ranks_per_host) for h in range(0, p.ranks, p.ranks_per_host)]
    if where == Where.ANY:
        yield from combinations(range(p.ranks), count)
    elif where == Where.ALL:
        yield tuple(range(p.ranks))
    else:
        for host in hosts:
            yield from combinations(host, count)


def score(p: Problem, chosen: list[tuple[int, tuple[int, ...]]]) -> float | None:
    """None where memory overflows."""
    load, device = p.start.copy(), p.start_device.copy()
    host = p.start_host.copy()
    for option, ranks in chosen:
        for rank in ranks:
            load[:, rank] += p.options.cost[:, option]
            device[rank] += p.options.device[option]
            host[rank // p.ranks_per_pool] += p.options.host[option]
    full = device.max() > p.device_capacity + 1e-9 or host.max() > p.host_capacity + 1e-9
    return None if full else float(load.max())


def best_of_all(p: Problem) -> float | None:
    first = p.first
    ways = [
        [(o, ranks) for o in range(first[t], first[t + 1]) for ranks in places(p, o)]
        for t in range(p.tables)
    ]
    scores = [s for plan in product(*ways) if (s := score(p, list(plan))) is not None]
    return min(scores, default=None)


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 1), (2, 2)])
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("tight", [0.9, 2.0])
def test_equals_the_best_of_all_plans(shape: tuple[int, int], terms: int, tight: float) -> None:
    solved = 0
    for seed in range(3):
        p = problem(seed, 3, *shape, terms, tight)
        due, bound = best_of_all(p), lower_bound(p)
        if due is None:
            continue
        assert bound is not None
        assert bound.value <= due * (1 + 1e-9)
        found = search(p, bound)
        assert found is not None
        assert found.score == pytest.approx(due, rel=1e-9)
        solved += 1
    assert solved or tight < 1


@settings(deadline=None, max_examples=10)
@given(
    seed=st.integers(0, 10**6),
    tables=st.integers(1, 6),
    shape=st.sampled_from([(1, 2), (1, 5), (2, 2), (3, 2)]),
    terms=st.sampled_from([1, 2]),
    tight=st.sampled_from([1.2, 3.0]),
)
def test_found_plans_hold(
    seed: int, tables: int, shape: tuple[int, int], terms: int, tight: float
) -> None:
    p = problem(seed, tables, *shape, terms, tight)
    bound = lower_bound(p)
    assume(bound is not None)
    assert bound is not None
    found = search(p, bound)
    assume(found is not None)
    assert found is not None
    chosen = [
        (int(o), tuple(ranks.tolist())) for o, ranks in zip(found.option, found.ranks, strict=True)
    ]
    assert [int(p.options.table[o]) for o, _ in chosen] == list(range(tables))
    assert all(ranks in set(places(p, o)) for o, ranks in chosen)
    assert score(p, chosen) == pytest.approx(found.score, rel=1e-9)
    assert bound.value <= found.score * (1 + 1e-9)


def test_deterministic() -> None:
    p = problem(5, 8, 2, 2, 2)
    bound = lower_bound(p)
    assert bound is not None
    one, two = search(p, bound), search(p, bound)
    assert one is not None and two is not None
    assert one.option.tolist() == two.option.tolist()
    assert [r.tolist() for r in one.ranks] == [r.tolist() for r in two.ranks]


def test_close_to_the_bound() -> None:
    p = problem(1, 400, 2, 4)
    bound = lower_bound(p)
    assert bound is not None
    found = search(p, bound)
    assert found is not None
    assert found.score <= bound.value * 1.005


def test_no_memory_is_proven() -> None:
    assert lower_bound(problem(0, 6, 1, 3, tight=0.1)) is None


def test_undominated_keeps_the_best() -> None:
    p = problem(3, 3, 1, 3)
    kept = undominated(p)
    assert set(kept.tolist()) <= set(range(len(p.options)))
    worse = p.options.take(np.repeat(np.arange(len(p.options)), 2))
    worse.cost[:, 1::2] *= 1.1
    doubled = undominated(Problem(**{f: getattr(p, f) for f in p.__slots__} | {"options": worse}))
    assert (doubled % 2 == 0).all()
    assert len(doubled) == len(kept)
