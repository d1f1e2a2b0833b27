"""The load of every rank as text, SVG and a page: compute, communication, memory."""

from __future__ import annotations

from html import escape

from ..plan import Load, Placement, Plan, Table
from ..topology import GIB

WIDTH, ROW, LEFT = 560, 18, 70
BAR, BESIDE = 40, 38  # columns of the text: of the longest bar, and of what stands beside it
MOST_TABLES = 32  # told in the text
MOST = 64  # ranks drawn: of more, evenly spaced ones and the slowest
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.compute{fill:#3b6ea5}"
    ".communication{fill:#e0a13c}.memory{fill:#7a9e7e}.bound{stroke:#b33;stroke-dasharray:4 3}"
)


def text(plan: Plan, width: int = BAR) -> str:
    """A bar for each rank, of ``width`` columns at most: ``#`` compute, ``=`` communication; with
    its memory; then the tables.
    """
    lines = [str(plan)]
    if plan.topology is not None:
        lines.append(str(plan.topology))
    if plan.loads:
        longest = max(_both(load) for load in plan.loads) or 1.0
        lines += ["", "rank   # compute  = communication"]
        for rank, load in _shown(plan):
            done = round(load.compute / longest * width)
            sent = round(_both(load) / longest * width) - done
            bar = "#" * done + "=" * sent
            memory = f"{load.device_bytes / GIB:.1f} GiB" + _hosted(load)
            lines.append(f"{rank:>4}   {bar:<{width}}  {load.step:8.3f} ms  {memory}")
        lines += _left_out(plan)
    lines += _tables(plan) if plan.world_size > 1 else []
    lines += ["", *plan.notes] if plan.notes else []
    return "\n".join(lines)


def _tables(plan: Plan) -> list[str]:
    """Where the largest tables live."""
    if not plan.tables:
        return []
    placed = {p.table: p for p in plan.placements}
    shown = sorted(plan.tables, key=lambda t: -t.rows * t.dim)[:MOST_TABLES]
    cells = [
        (t.name, f"{t.rows:,} x {t.dim}", placed[t.name].sharding_type, _place(placed[t.name]))
        for t in shown
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = ("  ".join(f"{c:<{w}}" for c, w in zip(cell, widths, strict=True)) for cell in cells)
    more = len(plan.tables) - len(shown)
    left = [f"  and {more} more"] if more else []
    return ["", "tables, largest first", *(f"  {row.rstrip()}" for row in rows), *left]


def _place(placement: Placement) -> str:
    return _ranks(placement) + (", in host memory" if placement.memory == "host" else "")


def _ranks(placement: Placement) -> str:
    ranks = sorted({s.rank for s in placement.shards})
    if placement.sharding_type == "data_parallel":
        return "on every rank"
    if len(ranks) == 1:
        return f"on rank {ranks[0]}"
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 4 and ranks == list(range(first, last + 1)):
        return f"on ranks {first} to {last}"
    return f"on ranks {', '.join(map(str, ranks))}" if len(ranks) <= 8 else f"on {len(ranks)} ranks"


def explain(plan: Plan, name: str) -> str:
    """Why a table is where it is; ``name`` may be that of its module. Raises UsageError for an
    unknown one.
    """
    names = {t.name for t in plan.tables}
    name = f"{name}.weight" if name not in names and f"{name}.weight" in names else name
    p = plan.placement(name)
    table = next(t for t in plan.tables if t.name == name)
    size = f"{table.rows:,} x {table.dim} {table.dtype}"
    size = f"dynamic, at most {size}" if table.dynamic else size
    lines = [f"{name}: {size}, {p.sharding_type}, {p.memory}"]
    if p.why is not None:
        why = p.why
        lines.append(f"  chosen     {why.chosen}: {why.cost:.4g} ms, summed over ranks")
        if why.runner_up is not None:
            lines.append(f"  runner-up  {why.runner_up}: {why.runner_up_cost:.4g} ms")
        if why.reason:
            lines.append(f"  because    {why.reason}")
    for s in p.shards[:16]:
        (r, c), (n, m) = s.offset, s.size
        if table.dynamic:
            lines.append(f"  rank {s.rank:>4}  ids of its hash, at most {n} rows")
            continue
        lines.append(f"  rank {s.rank:>4}  rows {r}..{r + n}, columns {c}..{c + m}")
    if len(p.shards) > 16:
        lines.append(f"  and {len(p.shards) - 16} more shards")
    return "\n".join(lines)


def svg(plan: Plan) -> str:
    """Two columns of bars: time with the lower bound as a dashed line, and device memory."""
    shown = _shown(plan)
    height = ROW * len(shown) + 44
    longest = max((_both(load) for _, load in shown), default=1.0) or 1.0
    capacity = plan.topology.device_memory if plan.topology else None
    full = capacity or max((load.device_bytes for _, load in shown), default=1) or 1
    total = LEFT + 2 * WIDTH + 190
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{height}"'
        f' viewBox="0 0 {total} {height}"><style>{STYLE}</style>',
        f'<text x="{LEFT}" y="16">ms a step: compute, communication</text>',
        f'<text x="{LEFT + WIDTH + 110}" y="16">GiB of device memory</text>',
    ]
    for k, (rank, load) in enumerate(shown):
        y = 26 + k * ROW
        a, b = load.compute / longest * WIDTH, load.communication / longest * WIDTH
        m = min(load.device_bytes / full, 1) * (WIDTH - 60)
        at = LEFT + WIDTH + 110
        out += [
            f'<text x="4" y="{y + 12}">rank {rank}</text>',
            f'<rect class="compute" x="{LEFT}" y="{y}" width="{a:.1f}" height="{ROW - 4}"/>',
            f'<rect class="communication" x="{LEFT + a:.1f}" y="{y}" width="{b:.1f}"'
            f' height="{ROW - 4}"/>',
            f'<text x="{LEFT + a + b + 6:.1f}" y="{y + 12}">{load.step:.3f}</text>',
            f'<rect class="memory" x="{at}" y="{y}" width="{m:.1f}" height="{ROW - 4}"/>',
            f'<text x="{at + m + 6:.1f}" y="{y + 12}">{load.device_bytes / GIB:.1f}'
            f"{escape(_hosted(load))}</text>",
        ]
    if plan.lower_bound is not None and plan.lower_bound <= longest:
        x = LEFT + plan.lower_bound / longest * WIDTH
        out.append(f'<line class="bound" x1="{x:.1f}" x2="{x:.1f}" y1="22" y2="{height - 14}"/>')
    return "".join([*out, "</svg>"])


def html(plan: Plan) -> str:
    """A self-contained page: the bars, and every table with its reason."""
    known = {t.name: t for t in plan.tables}
    rows = "".join(_row(known[p.table], p) for p in plan.placements)
    notes = "".join(f"<p>{escape(note)}</p>" for note in plan.notes)
    head = "table", "rows", "dim", "kind", "memory", "ranks", "ms", "runner-up", "ms", "why"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Plan</title><style>'
        "body{font:14px system-ui,sans-serif;margin:24px}td,th{padding:2px 10px;text-align:left}"
        f"</style><h1>{escape(str(plan))}</h1><p>{escape(str(plan.topology or ''))}</p>"
        f"{svg(plan)}{notes}<table><tr>{''.join(f'<th>{h}</th>' for h in head)}</tr>{rows}"
        "</table></html>"
    )


def _row(table: Table, p: Placement) -> str:
    why = p.why
    cells = [
        p.table, f"{'≤ ' if table.dynamic else ''}{table.rows:,}", table.dim, p.sharding_type,
        p.memory,
        len({s.rank for s in p.shards}), "" if why is None else f"{why.cost:.4g}",
        "" if why is None or why.runner_up is None else why.runner_up,
        "" if why is None or why.runner_up_cost is None else f"{why.runner_up_cost:.4g}",
        "" if why is None else why.reason,
    ]  # fmt: skip
    return "<tr>" + "".join(f"<td>{escape(str(c))}</td>" for c in cells) + "</tr>"


def _both(load: Load) -> float:
    return load.compute + load.communication


def _hosted(load: Load) -> str:
    return f" + {load.host_bytes / GIB:.1f} in host memory" if load.host_bytes else ""


def _shown(plan: Plan) -> list[tuple[int, Load]]:
    """Every rank; if there are many, evenly spaced ones and the slowest."""
    ranks = range(len(plan.loads))
    if len(ranks) > MOST:
        slowest = max(ranks, key=lambda r: plan.loads[r].step)
        ranks_shown = sorted({*ranks[:: -(-len(ranks) // MOST)], slowest})
        return [(r, plan.loads[r]) for r in ranks_shown]
    return list(enumerate(plan.loads))


def _left_out(plan: Plan) -> list[str]:
    missing = len(plan.loads) - len(_shown(plan))
    return [f"and {missing} more ranks, none slower than the slowest shown"] if missing else []
