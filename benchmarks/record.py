"""Records a measurement: what was run, where and when, as JSON and as a readable table."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

import recast

Rows = Sequence[Mapping[str, object]]


def machine() -> dict[str, object]:
    """What the numbers depend on; nothing that names one particular computer."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists() and (found := re.search(r"model name\s*:\s*(.+)", info.read_text())):
        model = found.group(1).strip()
    return {
        "cpu": model,
        "isa": torch.backends.cpu.get_cpu_capability().lower(),  # one name may stand for several
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "recast": recast.__version__,
    }


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def slug() -> str:
    """The machine as part of a file name."""
    on = machine()
    return re.sub(r"[^a-z0-9]+", "-", f"{on['cpu']} {on['isa']} {on['cores']}c".lower()).strip("-")


def path(folder: Path, name: str) -> Path:
    """Where results of today are kept: ``<date>-<machine>-<name>.json``."""
    return folder / f"{today()}-{slug()}-{name}.json"


def write(folder: Path, name: str, title: str, options: Mapping[str, object], rows: Rows) -> Path:
    """Print the table and keep it in ``folder``: ``<date>-<machine>-<name>.json`` and ``.md``."""
    on, date, file = machine(), today(), path(folder, name)
    folder.mkdir(parents=True, exist_ok=True)
    held = {"date": date, "title": title, "machine": on, "options": options, "rows": rows}
    file.write_text(json.dumps(held, indent=2) + "\n")
    where = ", ".join(f"{key} {value}" for key, value in on.items())
    flags = " ".join(f"--{key} {value}" for key, value in options.items())
    command = f"python benchmarks/{name.replace('-', '_')}.py {flags}"
    text = f"# {title}\n\n{date}; {where}\n\n    {command}\n\n{table(rows)}\n"
    file.with_suffix(".md").write_text(text)
    print(text)
    return file


def table(rows: Rows) -> str:
    """Markdown, columns as wide as their widest entry."""
    head = list(rows[0])
    cells = [head, *([_cell(row[key]) for key in head] for row in rows)]
    width = [max(len(line[k]) for line in cells) for k in range(len(head))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, width, strict=True)) + " |"
        for line in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in width) + "|", *lines[1:]])


def _cell(value: object) -> str:
    if isinstance(value, list):
        return " to ".join(map(str, value))
    return "" if value is None else str(value)
