"""Writes a ``Compiled`` to files: its graphs in any format, one file per graph, and the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from recast.errors import UsageError
from recast.rewriter.compiled.module import Compiled
from recast.rewriter.ir import Graph

from . import draw, dump
from .journal import Journal

if TYPE_CHECKING:
    from recast.rewriter.capture.capture_model import Captured


def graphs(
    source: Captured | Compiled, root: nn.Module, label: str = ""
) -> Iterator[tuple[str, Graph, nn.Module]]:
    """``(label, graph, root)`` of all graphs: by mode when there are two, by path in a part, by
    number of a further form.
    """
    root = root._root if isinstance(root, Compiled) else root  # a module may be named as our own
    by_mode, parts = _graphs_and_parts(source)
    for mode, graph in by_mode.items():
        yield ".".join(p for p in (label, "" if mode == "both" else mode) if p), graph, root
    for path, part in parts.items():
        yield from graphs(part, root.get_submodule(path), ".".join(p for p in (label, path) if p))
    for k, form in enumerate(source._forms if isinstance(source, Compiled) else ()):
        yield from graphs(form, root, f"forms.{k}")


def _graphs_and_parts(
    source: Captured | Compiled,
) -> tuple[Mapping[str, Graph], Mapping[str, Captured] | Mapping[str, Compiled]]:
    if isinstance(source, Compiled):
        return source._graphs, source._parts
    return source.graphs, source.parts


def text(source: Captured | Compiled, name: str) -> str:
    """The dump of all graphs of ``source``."""
    found = graphs(source, source if isinstance(source, nn.Module) else source.root)
    return "\n".join(dump.text(g, root, _title(name, label)) for label, g, root in found)


def pictures(captured: Captured, compiled: Compiled, journal: Journal) -> dict[str, str]:
    """Dot text before and after the rewrites, for the report; laid out only when it is shown."""
    missed = {m.node for m in journal.missed}
    out: dict[str, str] = {}
    both = {"before": graphs(captured, captured.root), "after": graphs(compiled, compiled)}
    for when, found in both.items():
        for label, graph, root in found:
            title = f"{label}, {when}" if label else when
            out[title] = draw.dot(graph, root, captured.name, missed=missed)
    return dict(
        sorted(out.items(), key=lambda item: (item[0].rpartition(", ")[0], "after" in item[0]))
    )


def write(compiled: Compiled, folder: Path, files: Mapping[str, str]) -> list[Path]:
    """Write ``{format: file name}`` into ``folder``; return the paths, in order.

    A second graph (another mode or part) has its label before the suffix: ``graph.eval.txt``.
    Raises UsageError where they cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _write(compiled, folder, files)
    except OSError as error:
        raise UsageError(
            f"output: cannot write to the folder {folder}", why=str(error.strerror or error),
            tries=("-o FOLDER, one that can be written",),
        ) from error  # fmt: skip


def _write(compiled: Compiled, folder: Path, files: Mapping[str, str]) -> list[Path]:
    report = compiled.report
    missed = {m.node for m in report.journal.missed}
    written: list[Path] = []
    for form, name in files.items():
        if form == "html":
            written.append(report.to_html(folder / name))
            continue
        for label, graph, root in graphs(compiled, compiled):
            path = folder / name
            if label:
                path = path.with_suffix(f".{label}{path.suffix}")
            content = _content(form, graph, root, _title(report.model, label), missed)
            path.write_text(content, encoding="utf-8")
            written.append(path)
    return written


def _title(name: str, label: str) -> str:
    return f"{name}.{label}" if label else name


def _content(form: str, graph: Graph, root: nn.Module, name: str, missed: set[str]) -> str:
    if form == "text":
        return dump.text(graph, root, name)
    if form == "json":
        return dump.json(graph, root, name)
    if form == "python":
        return dump.python(graph, root, name)
    if form == "dot":
        return draw.dot(graph, root, name, missed=missed)
    return draw.svg(graph, root, name, missed=missed)
