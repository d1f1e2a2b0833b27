"""What the bench has found, as a page: each bar first, met or not, then every line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gpu_groups
import gpu_parts
import gpu_steps
import gpu_synthetic
from gpu_groups import REST, Row
from gpu_measure import Bar

MODELS = {"tiny": (gpu_synthetic.TINY, Bar(ms=1.2)), "small": (gpu_synthetic.SMALL, Bar(ms=4.5))}


def judged(groups: Sequence[str]) -> Iterator[tuple[str, Bar]]:
    """Every case of ``groups`` that has a bar, whether or not it was measured."""
    for group in groups:
        if group in MODELS:
            config, bar = MODELS[group]
            yield from ((label, bar) for label, _, _ in gpu_steps.cases(config))
        elif group == "dlrm":
            yield from ((f"MLPerf DLRM, {ids}", Bar(ms=3.0)) for ids in ("ranked", "shuffled"))
        elif group == "dropout":
            yield gpu_parts.DROPOUT, Bar(times=1.3)
        elif group == "ops":
            for _, both in gpu_parts.labels():
                yield from ((label, Bar(times=2.0)) for label in both)
        elif group == "updates":
            yield from ((label, Bar(times=2.0)) for _, label in gpu_parts.update_cases())


def summary(items: Sequence[Row], groups: Sequence[str]) -> list[dict[str, object]]:
    """A line for each judged case: ours as one graph and as a plain loop, the peers, the floor."""
    lines = [line for item in items for line in item.get("rows", [])]
    return [
        _bar(case, bar, [x for x in lines if x["case"] == case]) for case, bar in judged(groups)
    ]


def _bar(case: str, bar: Bar, lines: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    ms = {x["variant"]: x["ms"] for x in lines if "ms" in x}
    ours = next((x for v in ("recast graph", "recast") for x in lines if _is(x, v)), None)
    peers = {k: v for k, v in ms.items() if not k.startswith("recast") and k != "floor"}
    rival = min((v for k, v in peers.items() if k.startswith("torch.compile")), default=None)
    eager = min((v for k, v in peers.items() if k.startswith("eager")), default=None)
    shares = {
        k: ours[f"of {k} rate"] for k in ("copy", "matrix") if ours and f"of {k} rate" in ours
    }
    bound = max(shares, key=lambda k: shares[k]) if shares else None
    return {
        "case": case,
        "must": str(bar),
        "as one graph": ms.get("recast graph", ""),
        "": _verdict(ours),
        'mode="graph"': ms.get('recast mode="graph"', ""),
        "plain loop": ms.get("recast", ""),
        "torch.compile": rival or "",
        "eager": eager or "",
        "floor": ms.get("floor", ""),
        "times the floor": ours.get("times the floor", "") if ours else "",
        "share": f"{shares[bound]} of the {bound} rate" if bound else "",
    }


def _is(line: Mapping[str, Any], variant: str) -> bool:
    return line["variant"] == variant and "ms" in line


def _verdict(ours: Mapping[str, Any] | None) -> str:
    if ours is None:
        return "not measured"
    words = {True: "met", False: "NOT met"}
    return words.get(ours.get("met"), "not judged: no torch.compile beside it")


def missing(items: Sequence[Row], groups: Sequence[str], open_groups: Sequence[str]) -> list[str]:
    """What a whole record has and this one has not."""
    found = [f"group {name} to its end" for name in open_groups]
    found += [
        f"{'more of' if r['name'] == REST else r['name'] + ' in'} {r['group']} ({r['status']})"
        for r in items
        if r["status"] != "ok"
    ]
    lines = {x["case"] for r in items for x in r.get("rows", []) if "ms" in x}
    cases = [case for case, _ in judged(groups)]
    lost = [case for case in cases if case not in lines]
    if lost:
        found.append(f"figures of {len(lost)} of {len(cases)} judged cases")
    return found


def page(items: Sequence[Row], groups: Sequence[str], notes: Sequence[str], seconds: float) -> str:
    """All of it, as Markdown."""
    bars = summary(items, groups)
    words = [str(line[""]) for line in bars]
    counts = ", ".join(f"{words.count(w)} {w}" for w in dict.fromkeys(words))
    failed = [r for r in items if r["status"] != "ok"]
    lines = [row for r in items for row in r.get("rows", [])]
    return "\n\n".join(
        [
            f"{len(bars)} judged cases: {counts}.",
            "Milliseconds, medians of rounds in turn; 'as one graph' is judged, of torch.compile"
            " the faster of two ways, alone and as a CUDA graph. float32 products are TF32.",
            gpu_groups.table(bars),
            "## Every line",
            gpu_groups.table([_short(r) for r in lines if "ms" in r]),
            *(f"- {r['case']}: {r['variant']}: {r['why not']}" for r in lines if "why not" in r),
            *(f"- **{r['name']}**: {r['status']}: {r.get('detail', '')}" for r in failed),
            *notes,
            f"{seconds:.0f} s",
        ]
    )


def _short(row: Mapping[str, Any]) -> dict[str, object]:
    beside = [f"{v} x {k.removeprefix('beside ')}" for k, v in row.items() if "beside" in k]
    met = {True: "met", False: "NOT met"}.get(row.get("met", ""), "")
    rates = [f"{row[f'of {k} rate']} {k}" for k in ("copy", "matrix") if f"of {k} rate" in row]
    return {
        "case": row["case"],
        "variant": row["variant"],
        "ms": row["ms"],
        "rounds": f"{row['rounds']} of {row['steps a round']}" if "rounds" in row else "",
        "times the floor": row.get("times the floor", ""),
        "of the rates": ", ".join(rates),
        "host ms": row.get("host ms", ""),
        "faster": ", ".join(beside),
        "must": f"{row['must']} {met}" if "must" in row else "",
    }
