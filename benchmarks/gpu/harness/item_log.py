"""The file of a group: lines that its processes write, and what they say together.

An item has a line when it starts, one for each intermediate result, and one when it ends; the group
has one when all its items have ended. A process may be ended at any moment, even in the middle of a
line, so half a line is ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]

STARTED, SO_FAR, WHOLE = "started", "so far", "whole"
DIED_IN_ITEM = "the process ended in it"


def lines(file: Path) -> list[Row]:
    """All whole lines."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def read(file: Path) -> list[Row]:
    """What is known of every item, in order; one that began and did not end is a failure.

    An item that was ended or raised keeps the rows it had reported by then.
    """
    rows: dict[str, Row] = {}
    for row in lines(file):
        if row["status"] == WHOLE:
            continue
        name = row["name"]
        before = {"rows": rows[name]["rows"]} if "rows" in rows.get(name, {}) else {}
        if row["status"] == STARTED:
            rows[name] = {"name": name, "status": "failed", "detail": DIED_IN_ITEM}
        elif row["status"] == SO_FAR:
            rows[name] |= {"rows": row["rows"]}
        else:
            rows[name] = before | row
    return list(rows.values())


def ended(file: Path) -> list[Row]:
    """The items of which the end is known."""
    return [row for row in read(file) if row.get("detail") != DIED_IN_ITEM]


def add(file: Path, row: Mapping[str, object]) -> None:
    """Append a line, even after half a line of a process that was ended."""
    trim(file)
    with file.open("a") as out:
        out.write(json.dumps(row) + "\n")


def trim(file: Path) -> None:
    """Leave whole lines only."""
    if file.exists():
        with file.open("rb+") as held:
            held.truncate(held.read().rfind(b"\n") + 1)


def drop_failures(file: Path) -> None:
    """Leave the items that need no second run."""
    if file.exists():
        rows = read(file)
        kept = [row for row in rows if row["status"] in ("ok", "skipped")]
        if len(kept) == len(rows) and is_complete(file):
            kept.append({"status": WHOLE})
        replace(file, "".join(json.dumps(row) + "\n" for row in kept))


def is_complete(file: Path) -> bool:
    """Whether no item is left to be run."""
    return any(row["status"] == WHOLE for row in lines(file))


def replace(file: Path, text: str) -> None:
    """Write ``text`` atomically: a reader of ``file`` finds all of the old text or of the new."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(text)
    os.replace(part, file)
