"""Reads what to plan from JSON: tables, and optionally batch and topology."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from recast.errors import UsageError

from ..plan import Table
from .load import TableLoad

EXAMPLE = '{"batch": 1024, "tables": [{"name": "a", "rows": 1000, "dim": 64, "ids": 1.0}]}'
_OF_TABLE = ("name", "rows", "dim", "dtype", "dynamic")
_OF_LOAD = tuple(f.name for f in fields(TableLoad) if f.name not in ("table", "only"))
_OF_FILE = ("tables", "batch", "topology", "world_size")
_KINDS = {
    str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list",
}  # fmt: skip


def read(path: str | Path) -> tuple[list[TableLoad], dict[str, Any]]:
    """The tables of a problem, and the rest of it: any of batch, topology, world_size.

    The file is a list of tables, or an object with ``tables``. A table has name, rows, dim, and any
    field of :class:`TableLoad`; ``pooling`` may also be a number, the ids per sample. Raises
    UsageError for anything else.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"tables {path} cannot be read", why=str(error.strerror)) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"tables {path} is not JSON", why=str(error), tries=(EXAMPLE,)) from error
    rest: dict[str, Any] = {} if isinstance(data, list) else data
    tables = data if isinstance(data, list) else _of(data, "tables", path)
    unknown = [key for key in rest if key not in _OF_FILE]
    if unknown or not isinstance(tables, list):
        what = f"unknown key {unknown[0]!r}" if unknown else "tables is no list"
        raise UsageError(f"tables {path}: {what}", why=f"keys: {', '.join(_OF_FILE)}")
    if not tables:
        raise UsageError(
            f"tables {path}: there are no tables in it", why="a plan places them", tries=(EXAMPLE,)
        )
    for key in ("batch", "world_size"):
        if key in rest and type(rest[key]) is not int:
            what = f"{path}: {key}: {json.dumps(rest[key])}"
            raise UsageError(what, why=f"it should be {_KINDS[int]}")
    loads = [_load(entry, f"{path}: tables[{k}]") for k, entry in enumerate(tables)]
    return loads, {key: value for key, value in rest.items() if key != "tables"}


def _of(data: Any, key: str, path: str | Path) -> Any:
    if not isinstance(data, dict) or key not in data:
        raise UsageError(f"tables {path}: no {key!r}", tries=(EXAMPLE,))
    return data[key]


def _load(entry: Any, where: str) -> TableLoad:
    if not isinstance(entry, dict):
        raise UsageError(f"{where} is not an object", tries=(EXAMPLE,))
    given = dict(entry)
    if isinstance(given.get("pooling"), int | float):
        given["ids"] = float(given.pop("pooling"))
    unknown = [key for key in given if key not in (*_OF_TABLE, *_OF_LOAD)]
    missing = [key for key in _OF_TABLE[:3] if key not in given]
    if unknown or missing:
        what = f"unknown key {unknown[0]!r}" if unknown else f"no {missing[0]!r}"
        raise UsageError(f"{where}: {what}", why=f"keys: {', '.join((*_OF_TABLE, *_OF_LOAD))}")
    for key, value in given.items():
        due: tuple[type, ...] = (int, float)
        due = {"name": (str,), "dtype": (str,), "pooling": (str,), "types": (list,)}.get(key, due)
        due = (int,) if key in ("rows", "dim", "lookups", "id_bytes") else due
        due = (bool,) if key in ("weighted", "dynamic") else due
        if not isinstance(value, due) or (isinstance(value, bool) and due != (bool,)):
            raise UsageError(
                f"{where}.{key}: {json.dumps(value)}", why=f"it should be {_KINDS[due[-1]]}"
            )
    table = Table(**{key: given.pop(key) for key in _OF_TABLE if key in given})
    if table.dynamic:
        given["types"] = ["row_wise"]
    if "types" in given:
        given["types"] = tuple(given["types"])
    return TableLoad(table, **given)
