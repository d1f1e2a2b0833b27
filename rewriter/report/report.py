"""The report: what was captured, what fired, what nearly fired and why, and what it is worth."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from .journal import Fired, Journal, Missed, Raised
from .short_lists import braces
from .wrap import words, wrapped

_RULE, _VERB, _WHAT = 24, 11, 56  # fixed columns
_ORIGIN = 60  # columns of module paths, at most
_NARROW = 36  # columns of a sentence; with fewer it stands below its rule
_BELOW = 6  # its indent there


@dataclass
class Report:
    """What :func:`recast.optimize` did. ``print`` it, or read :meth:`to_dict`."""

    model: str
    captured: str  # "whole", "partial" or "none"
    why: str | None = None  # why not whole, where, and what could be tried
    where: str | None = None
    tries: tuple[str, ...] = ()
    journal: Journal = field(default_factory=Journal)
    notes: list[str] = field(default_factory=list)  # sentences for the user
    seconds: dict[str, float] = field(default_factory=dict)  # where the time went; "total" is all
    world_size: int = 1
    graph_text: str = ""  # the dump of the rewritten graph
    pictures: dict[str, str] = field(default_factory=dict)  # "before", "after": dot text
    asks: list[Callable[[], Iterable[str]]] = field(default_factory=list)  # what running it shows
    bound: str | None = None  # what bounds the speed of a step, if known
    forms: list[Report] = field(default_factory=list)  # one for each of ``optimize(forms=)``

    def __str__(self) -> str:
        return self.text()

    def text(self, *, times: bool = True, width: int | None = None) -> str:
        """The report as text, the answer first; ``times=False`` leaves out what varies from run to
        run.

        ``width``: the columns of a terminal to wrap it for. By default rows have fixed columns, and
        a note is one line.
        """
        lines = [self._headline(), *self._not_whole()]
        layout = _layout(self.journal, width)
        for rule in self._rules():
            lines += _rule_lines(rule, self.journal, layout)
        for raised in self.journal.raised:
            told = f"{raised.error} at {raised.node}; skipped, the graph is as it was"
            lines += _rows(raised.rule, "raised", told, raised.where, layout)
        if not self.journal.fired and self.captured != "none":
            lines.append("  nothing to rewrite: the model runs as it was")
        lines += [f"  note  {n}" for n in self.told_notes()]
        for form in self.forms:
            lines += form._as_form(self.told_notes())
        if times:
            lines += [f"  note  {self.bound}"] if self.bound else []
            lines += [f"  now   {sentence}" for sentence in self.running()]
        if times and self.seconds:
            lines.append(self._times())
        text = "\n".join(lines)
        return text if width is None else wrapped(text, width)

    def told_notes(self) -> list[str]:
        """The notes for the text: each once, and without those that a near miss already says."""
        told = {f"{m.node} runs as it is: {m.why}" for m in self.journal.missed}
        notes = dict.fromkeys([*self.notes, *self.journal.notes])
        return [n for n in notes if n not in told]

    def running(self) -> list[str]:
        """What is known only from running the model, as sentences about the present state."""
        return [sentence for ask in self.asks for sentence in ask()]

    def _headline(self) -> str:
        found, fused = self.journal.lookups_found, self.journal.lookups_fused
        lookups = f"; {fused} of {found} embedding lookups grouped" if found else ""
        state = {"whole": "captured whole", "partial": "captured in part", "none": "not captured"}
        rewrites = _count(len(self.journal.fired), "rewrite")
        return f"{self.model}: {state.get(self.captured, self.captured)}, {rewrites}{lookups}"

    def _not_whole(self) -> list[str]:
        if self.captured == "whole":
            return []
        lines = [f"  at   {self.where}"] if self.where else []
        lines += [f"  why  {self.why}"] if self.why else []
        return lines + ([f"  try  {'   |   '.join(self.tries)}"] if self.tries else [])

    def _as_form(self, known: Sequence[str]) -> list[str]:
        """What the report of the example says of this form, without notes that are ``known``."""
        raised = (f"{r.rule} raised {r.error}; skipped" for r in self.journal.raised)
        told = (n for n in (*raised, *self.told_notes()) if n not in known)
        below = [*self._not_whole(), *(f"  note  {text}" for text in told)]
        return [f"  form  {self._headline()}", *(f"      {line}" for line in below)]

    def _rules(self) -> list[str]:
        """Rules in the order of the pipeline's first word about them."""
        entries: list[Fired | Missed] = [*self.journal.fired, *self.journal.missed]
        return list(dict.fromkeys(e.rule for e in entries))

    def _times(self) -> str:
        total = self.seconds.get("total", sum(self.seconds.values()))
        own: dict[str, float] = {}  # a pass runs once for each mode and part
        for step in self.journal.steps:
            own[step.name] = own.get(step.name, 0.0) + step.seconds
        parts = {k: v for k, v in self.seconds.items() if k != "total"}
        if own and "passes" in parts:  # the rest of it: the example is run and compared
            rewriting = min(sum(own.values()), parts["passes"])
            parts |= {"passes": rewriting, "checks": parts["passes"] - rewriting}
        slow = sorted(own.items(), key=lambda s: -s[1])[:2]
        steps = ", ".join(f"{name} {seconds:.2f}" for name, seconds in slow if seconds >= 0.01)
        told = {"passes": f" ({steps})"} if steps else {}
        detail = ", ".join(f"{k} {v:.2f}{told.get(k, '')}" for k, v in parts.items())
        return f"optimize took {total:.2f} s: {detail}"

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values; ``fired`` has the counts, ``rewrites`` the details."""
        journal = self.journal
        fired: dict[str, int] = {}
        for entry in journal.fired:
            fired[entry.rule] = fired.get(entry.rule, 0) + 1
        return {
            "version": 1,
            "model": self.model,
            "captured": self.captured,
            "why": self.why,
            "where": self.where,
            "tries": list(self.tries),
            "lookups": {"found": journal.lookups_found, "fused": journal.lookups_fused},
            "fired": fired,
            "rewrites": [_plain(e) for e in journal.fired],
            "missed": [_plain(e) for e in journal.missed],
            "raised": [_plain(e) for e in journal.raised],
            "stored": [_plain(e) for e in journal.stored],
            "running": self.running(),
            "bound": self.bound,
            "notes": list(dict.fromkeys([*self.notes, *journal.notes])),
            "steps": [{"name": s.name, "fired": s.fired, "changed": s.changed, "seconds": s.seconds}
                      for s in journal.steps],
            "seconds": dict(self.seconds),
            "world_size": self.world_size,
            "graph": self.graph_text,
            "forms": [form.to_dict() for form in self.forms],
        }  # fmt: skip

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained page that opens offline; return its path.

        Raises UsageError when jinja2 is not installed, OSError when ``path`` cannot be written. It
        shows module names and lines of the model's code.
        """
        from .html import page

        path = Path(path)
        path.write_text(page(self), encoding="utf-8")
        return path


def _plain(entry: Any) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(entry).items()}


@dataclass(frozen=True)
class _Layout:
    """How wide a sentence is; if not ``beside`` its rule it stands below, the place at its end."""

    sentence: int
    beside: bool


def _layout(journal: Journal, width: int | None) -> _Layout:
    if width is None:
        return _Layout(_WHAT, beside=True)
    entries: list[Fired | Missed | Raised] = [*journal.fired, *journal.missed, *journal.raised]
    place = max((2 + len(e.where) for e in entries if e.where), default=0)
    left = min(_WHAT, width - 2 - _RULE - _VERB - place)
    return _Layout(left, beside=True) if left >= _NARROW else _Layout(width - _BELOW, beside=False)


def _rule_lines(rule: str, journal: Journal, layout: _Layout) -> list[str]:
    lines: list[str] = []
    for row in fired_rows([e for e in journal.fired if e.rule == rule]):
        what = f"{row.what} ← {row.origin}" if row.origin else row.what
        lines += _rows("" if lines else rule, f"fired {row.times}", what, row.where, layout)
        if row.saves:
            lines += _rows("", "", f"saves {row.saves}", None, layout)
    for verb, what, where, tries in missed_rows([e for e in journal.missed if e.rule == rule]):
        lines += _rows("" if lines else rule, verb, what, where, layout)
        if tries:
            lines += _rows("", "", f"try: {'   |   '.join(tries)}", None, layout)
    return lines


class FiredRow(NamedTuple):
    """Rewrites that share one row."""

    times: int
    what: str
    where: str | None
    saves: str | None
    origin: str


def fired_rows(fired: list[Fired]) -> Iterable[FiredRow]:
    """One row for rewrites that read alike, with their number and all their origins. Those of a
    rule that only prepares for others in several ways, and saves nothing itself, share one row.
    """
    whats = dict.fromkeys(e.what for e in fired)
    if len(whats) > 1 and not any(e.saves for e in fired):
        yield FiredRow(len(fired), "; ".join(whats), None, None, "")
        return
    groups: dict[tuple[str, str | None, str | None], list[Fired]] = {}
    for e in fired:
        groups.setdefault((e.what, e.where, e.saves), []).append(e)
    for (what, where, saves), entries in groups.items():
        origin = origin_text([e.origin for e in entries])
        yield FiredRow(len(entries), what, where, saves, origin)


def origin_text(origins: Iterable[Sequence[str]]) -> str:
    """Module paths of some rewrites, as short as the dump writes them; else their containers."""
    listed = [list(o) for o in origins if o]
    for paths in ([p for o in listed for p in o], [_container(o) for o in listed]):
        text = " ".join(braces(dict.fromkeys(p or "self" for p in paths)))
        if len(text) <= _ORIGIN and text != "self":
            return text
    return f"{listed[0][0] or 'self'} …"


def _container(paths: list[str]) -> str:
    """The module that contains all of ``paths``; empty for the whole model."""
    split = [p.split(".") for p in paths]
    levels = zip(*split, strict=False)
    common = takewhile(lambda names: len(set(names)) == 1, levels)
    return ".".join(names[0] for names in common)


def missed_rows(
    missed: list[Missed],
) -> Iterable[tuple[str, str, str | None, tuple[str, ...]]]:
    """One row for misses with the same reason, with their number and the first of their nodes."""
    groups: dict[tuple[str, tuple[str, ...]], list[Missed]] = {}
    for e in missed:
        groups.setdefault((e.why, e.tries), []).append(e)
    for (why, tries), entries in groups.items():
        names = ", ".join(dict.fromkeys(e.node for e in entries[:3]))
        more = f" and {len(entries) - 3} more" if len(entries) > 3 else ""
        yield f"missed {len(entries)}", f"{names}{more}: {why}", entries[0].where, tries


def _rows(rule: str, verb: str, what: str, where: str | None, layout: _Layout) -> list[str]:
    """The lines of one row; a long sentence continues below itself, to keep the columns."""
    if not layout.beside:
        head = f"  {f'{rule} ':<{_RULE}}{verb}".rstrip()
        sentence = words(f"{what} ({where})" if where else what, layout.sentence)
        return [*([head] if head else []), *(" " * _BELOW + part for part in sentence)]
    if len(rule) >= _RULE:  # a line of its own, to keep the columns
        return [f"  {rule}", *_rows("", verb, what, where, layout)]
    first, *more = words(what, layout.sentence)
    left = f"  {f'{rule} ':<{_RULE}}{verb:<{_VERB}}{first}"
    width = 2 + _RULE + _VERB + layout.sentence
    indent = " " * (2 + _RULE + _VERB + 2)
    line = f"{left:<{width}}  {where}" if where else left
    return [line.rstrip(), *(indent + m for m in more)]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
