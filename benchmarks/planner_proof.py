"""A stronger bound for a small planner problem: an integer program over its hosts, by HiGHS.

    T >= shared + every[h]                     of every host h
    T >= shared + every[h] + cost[o] y[o, h]   of every shard of one rank on it
    W T >= the total of all choices            W ranks

``shared`` is the cost of what lies on all ranks, ``every[h]`` of what lies on all ranks of host h;
y[o, h] is 1 if option o lies on one rank of h. Of options that cost more than half of a known
score, a host takes at most one per rank: two on one rank would be a worse plan. Memory is left out,
and so are the shards of options on several free ranks, except in the total: no plan scores less
than the least T.
"""

from __future__ import annotations

from importlib import import_module

import numpy as np

from recast.runtime.planner.problem import Problem, Where

SMALL = 40  # tables
SECONDS = 120.0


def proven(problem: Problem, score: float) -> float | None:
    """A lower bound for all plans, given the ``score`` of one. None: too large, or no HiGHS."""
    try:
        optimize, sparse = (import_module(f"scipy.{part}") for part in ("optimize", "sparse"))
    except ImportError:
        return None
    if problem.tables > SMALL or len(problem.start) > 1 or problem.start.any():
        return None
    o, each = problem.options, problem.ranks_per_host
    hosts = range(problem.ranks // each)
    cost = o.cost[0]
    least = np.maximum(o.total[0] - (o.count - 1) * cost, 0.0)  # of its shards, which may differ
    free = o.where == Where.ALL
    single = (o.where == Where.ANY) & (o.count == 1)
    variables = [
        (k, host)
        for k in np.flatnonzero(cost <= score * (1 + 1e-9)).tolist()
        for host in ([-1] if not (single[k] or o.where[k] == Where.HOST) else hosts)
    ]
    last = len(variables)  # T
    rows: list[tuple[dict[int, float], float, float]] = [
        ({j: 1.0 for j, (k, _) in enumerate(variables) if o.table[k] == table}, 1.0, 1.0)
        for table in range(problem.tables)
    ]
    for host in hosts:
        base = {
            j: float(least[k])
            for j, (k, h) in enumerate(variables)
            if free[k] or (h == host and o.where[k] == Where.HOST)
        } | {last: -1.0}
        rows.append((base, -np.inf, 0))
        mine = [(j, k) for j, (k, h) in enumerate(variables) if h == host and single[k]]
        rows += [(base | {j: float(cost[k])}, -np.inf, 0) for j, k in mine]
        rows.append(({j: 1.0 for j, k in mine if 2 * cost[k] > score}, 0, each))
    total = {j: float(o.total[0, k]) for j, (k, _) in enumerate(variables)}
    rows.append((total | {last: -float(problem.ranks)}, -np.inf, 0))
    at = [(r, j, v) for r, (row, _, _) in enumerate(rows) for j, v in row.items()]
    r, j, v = map(np.array, zip(*at, strict=True))
    found = optimize.milp(
        np.eye(1, last + 1, last)[0],
        constraints=optimize.LinearConstraint(
            sparse.coo_array((v, (r, j)), shape=(len(rows), last + 1)).tocsr(),
            [low for _, low, _ in rows],
            [high for _, _, high in rows],
        ),
        integrality=np.append(np.ones(last), 0),
        bounds=optimize.Bounds(0, np.append(np.ones(last), score * (1 + 1e-9))),
        options={"time_limit": SECONDS, "mip_rel_gap": 1e-6},
    )
    bound = found.mip_dual_bound
    return None if bound is None or not np.isfinite(bound) else min(float(bound), score)
