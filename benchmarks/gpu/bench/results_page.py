"""The results of the benchmark as a page: first each bar, met or not, then every line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpu.bench import judged_models, step_parts, synthetic_models
from gpu.bench.timing import Bar
from gpu.harness import results
from gpu.harness.item_log import Row
from gpu.harness.items import REST

MODELS = {
    "tiny": (synthetic_models.TINY, Bar(ms=1.2)),
    "small": (synthetic_models.SMALL, Bar(ms=4.5)),
}
DLRM = Bar(ms=3.0)


def judged(groups: Sequence[str]) -> Iterator[tuple[str, Bar]]:
    """Every case of ``groups`` that has a bar, whether or not it was measured."""
    for group in groups:
        if group in MODELS:
            config, bar = MODELS[group]
            yield from ((label, bar) for label, _, _ in judged_models.labels(config))
        elif group == "dlrm":
            yield from ((f"MLPerf DLRM, {ids}", DLRM) for ids in ("ranked", "shuffled"))
        elif group == "dropout":
            yield step_parts.DROPOUT, Bar(times=1.3)
        elif group == "ops":
            for _, both in step_parts.labels():
                yield from ((label, Bar(times=2.0)) for label in both)
        elif group == "updates":
            yield from ((label, Bar(times=2.0)) for _, label in step_parts.update_cases())


def summary(items: Sequence[Row], groups: Sequence[str]) -> list[dict[str, object]]:
    """A line for each judged case: ours as it is judged, the other ways, the peers, the floor."""
    lines = [line for item in items for line in item.get("rows", [])]
    return [
        _bar(case, bar, [x for x in lines if x["case"] == case]) for case, bar in judged(groups)
    ]


def _bar(case: str, bar: Bar, lines: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    ms = {x["variant"]: x["ms"] for x in lines if "ms" in x}
    ours = next((x for x in lines if "must" in x), None)
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
        "judged": ours.get("ms", "") if ours else "",
        "": _verdict(ours),
        "which is": ours["variant"].removeprefix("recast ") if ours else "",
        "one graph": ms.get("recast graph", ""),
        "default mode": ms.get("recast", ""),
        "torch.compile": rival or "",
        "eager": eager or "",
        "floor": (floor := ms.get("floor", "")),
        "at best": f"{rival / floor:.1f} x" if bar.times and rival and floor else "",
        "times the floor": ours.get("times the floor", "") if ours else "",
        "share": f"{shares[bound]} of the {bound} rate" if bound else "",
    }


def _verdict(ours: Mapping[str, Any] | None) -> str:
    if ours is None or "ms" not in ours:
        return "not measured"
    return {True: "met", False: "NOT met"}.get(ours["met"], "not judged: no torch.compile")


def unjudged(items: Sequence[Row], groups: Sequence[str]) -> list[str]:
    """The judged cases of which it is not known whether they meet their bars."""
    return [
        str(line["case"]) for line in summary(items, groups) if line[""] not in ("met", "NOT met")
    ]


def missing(items: Sequence[Row], groups: Sequence[str], open_groups: Sequence[str]) -> list[str]:
    """What a whole record has and this one has not."""
    found = [f"group {name} to its end" for name in open_groups]
    found += [
        f"{'rest of' if r['name'] == REST else r['name'] + ' in'} {r['group']} ({r['status']})"
        for r in items
        if r["status"] != "ok"
    ]
    lost, cases = unjudged(items, groups), list(judged(groups))
    if lost:
        found.append(f"verdict on {len(lost)} of {len(cases)} judged cases")
    return found


WORDS = """\
Milliseconds, medians of rounds. Of models `mode="graph"` is judged, in a plain loop; 'one graph' \
is `TrainingStep`, and 'default mode' what `optimize` gives by itself. Of ops and the dropout MLP \
their forward, and backward, as one graph is judged, beside the faster of torch.compile's two \
ways, as it is and as a CUDA graph; 'at best' is how often the floor goes into it: what is above \
is out of reach. 'before peers' is the same of ours before torch.compile and others were in the \
process. The gradient of lookups alone stays ids and rows with us, and is as large as the tables \
with the peers; 'lookups and' an optimizer compare whole updates. float32 products are TF32, for \
all."""


def page(items: Sequence[Row], groups: Sequence[str], notes: Sequence[str], seconds: float) -> str:
    """All of it, as Markdown."""
    bars = summary(items, groups)
    words = [str(line[""]) for line in bars]
    counts = ", ".join(f"{words.count(w)} {w}" for w in dict.fromkeys(words))
    lines = [row for r in items for row in r.get("rows", [])]
    traced = [r for r in lines if "kernels" in r]
    return "\n\n".join(
        [
            f"{len(bars)} judged cases: {counts}.",
            WORDS,
            results.table(bars),
            "## Every line",
            results.table([_short(r) for r in lines if "ms" in r]),
            *(f"- {r['case']}: {r['variant']}: {r['why not']}" for r in lines if "why not" in r),
            *(["## Kernels of a step"] if traced else []),
            *map(_traced, traced),
            *_ends(items),
            *notes,
            f"{seconds:.0f} s",
        ]
    )


def _ends(items: Sequence[Row]) -> Iterator[str]:
    """What failed, was skipped or warned."""
    for r in items:
        if r["status"] != "ok":
            yield f"- **{r['name']}**: {r['status']}: {r.get('detail', '')}"
        for warned in r.get("warned", ()):
            yield f"- {r['name']} warned: {warned}"


def _traced(row: Mapping[str, Any]) -> str:
    most = [f"    {ms:8.4f} ms {count:4} x {name}" for ms, count, name in row["kernels"]]
    head = f"{row['case']}, {row['variant']}: {row['device ms']} ms, {row['launches']} launches"
    return "\n".join([head, "", *most])


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
        "replayed": row.get("recorded", ""),
        "host ms": row.get("host ms", ""),
        "before peers": row.get("before peers", ""),
        "faster": ", ".join(beside),
        "must": f"{row['must']} {met}" if "must" in row else "",
    }
