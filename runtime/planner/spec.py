"""Reads what to plan from JSON: tables, and optionally batch and topology.

Every value is checked here, as only here the file and the place in it are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from recast.errors import UsageError

from .. import json_text
from ..plan import Table
from ..topology import Topology
from .load import DUE, TableLoad

EXAMPLE = '{"batch": 1024, "tables": [{"name": "a", "rows": 1000, "dim": 64, "ids": 1.0}]}'
_DTYPES = ("float32", "float16", "bfloat16", "float64")  # of tables that are trained
_OF_TABLE = ("name", "rows", "dim", "dtype", "dynamic")
_OF_LOAD = tuple(f.name for f in fields(TableLoad) if f.name not in ("table", "only"))
_OF_FILE = ("tables", "batch", "topology", "world_size")


def read(path: str | Path) -> tuple[list[TableLoad], dict[str, Any]]:
    """The tables of a problem, and the rest of it: any of batch, topology, world_size; a topology
    that is an object in the file as a :class:`Topology`.

    The file is a list of tables, or an object with ``tables``. A table has name, rows, dim, and any
    field of :class:`TableLoad`; ``pooling`` may also be a number, the ids per sample. Raises
    UsageError for anything else.
    """
    data = json_text.of_file(path, f"tables {path}", (EXAMPLE,))
    rest: dict[str, Any] = {} if isinstance(data, list) else data
    tables = data if isinstance(data, list) else _of(data, "tables", path)
    unknown = [key for key in rest if key not in _OF_FILE]
    if unknown or not isinstance(tables, list):
        what = f"unknown key {unknown[0]!r}" if unknown else "tables is no list"
        raise UsageError(
            f"tables {path}: {what}", why=f"keys: {', '.join(_OF_FILE)}",
            tries=_near(unknown, _OF_FILE),
        )  # fmt: skip
    if not tables:
        raise UsageError(
            f"tables {path}: there are no tables in it", why="a plan places them", tries=(EXAMPLE,)
        )
    for key in ("batch", "world_size"):
        if key in rest and not (type(rest[key]) is int and 1 <= rest[key] < 2**63):
            raise UsageError(
                f"{path}: {key}: {json_text.shown(rest[key])}",
                why="it should be a whole number of at least 1",
            )
    loads = [_load(entry, f"{path}: tables[{k}]") for k, entry in enumerate(tables)]
    _once([load.table.name for load in loads], path)
    if "topology" in rest:
        rest = {**rest, "topology": _topology(rest["topology"], path)}
    return loads, {key: value for key, value in rest.items() if key != "tables"}


def _of(data: Any, key: str, path: str | Path) -> Any:
    if not isinstance(data, dict) or key not in data:
        raise UsageError(f"tables {path}: no {key!r}", tries=(EXAMPLE,))
    return data[key]


def _once(names: list[str], path: str | Path) -> None:
    for k, name in enumerate(names):
        if (first := names.index(name)) != k:
            raise UsageError(
                f"{path}: tables[{k}].name: {json_text.shown(name)}",
                why=f"tables[{first}] has that name, and they are told apart by it",
                tries=('one table, with "lookups": 2, if two features share it',),
            )


def _topology(given: Any, path: str | Path) -> str | Topology:
    if isinstance(given, str):
        return given
    if not isinstance(given, dict):
        raise UsageError(
            f"{path}: topology: {json_text.shown(given)}",
            why="it should be the name of a preset, or an object",
            tries=('"topology": "dgx-a100"',),
        )
    try:
        return Topology.from_dict(given)
    except UsageError as error:
        raise UsageError(f"{path}: {error.what}", why=error.why, tries=error.tries) from error


def _load(entry: Any, where: str) -> TableLoad:
    if not isinstance(entry, dict):
        raise UsageError(f"{where} is not an object", tries=(EXAMPLE,))
    given = dict(entry)
    keys = (*_OF_TABLE, *_OF_LOAD)
    unknown = [key for key in given if key not in keys]
    missing = [key for key in _OF_TABLE[:3] if key not in given]
    if unknown or missing:
        what = f"unknown key {unknown[0]!r}" if unknown else f"no {missing[0]!r}"
        raise UsageError(
            f"{where}: {what}", why=f"keys: {', '.join(keys)}", tries=_near(unknown, keys)
        )
    pooled = given.get("pooling")
    if isinstance(pooled, int | float) and not isinstance(pooled, bool):
        due = f"{DUE['pooling'][1]}, or {DUE['ids'][1]}"
        _fits("pooling", given, where, DUE["ids"][0], due)
        if "ids" in given:
            raise UsageError(
                f"{where}{_named(given)}: ids, and a number as pooling",
                why="both are the ids of a sample",
                tries=('"pooling": "sum"',),
            )
        given["ids"] = given.pop("pooling")
    for key in given:
        if key != "dtype":
            _fits(key, given, where, *DUE[key])
    if "dtype" in given:
        due = f"one of {', '.join(_DTYPES)}: what a trained table may be"
        _fits("dtype", given, where, lambda v: v in _DTYPES, due)
    if given.get("dynamic"):
        given.setdefault("types", ["row_wise"])
        due = 'left out, or ["row_wise"]: a table without end is cut by rows'
        _fits("types", given, where, lambda types: types == ["row_wise"], due)
    return _made(given)


def _made(given: Mapping[str, Any]) -> TableLoad:
    table = Table(**{key: given[key] for key in _OF_TABLE if key in given})
    rest = {key: value for key, value in given.items() if key not in _OF_TABLE}
    if "types" in rest:
        rest["types"] = tuple(rest["types"])
    return TableLoad(table, **rest)


def _fits(
    key: str, given: Mapping[str, Any], where: str, test: Callable[[Any], bool], due: str
) -> None:
    if not test(given[key]):
        shown = json_text.shown(given[key])
        raise UsageError(f"{where}.{key}{_named(given)}: {shown}", why=f"it should be {due}")


def _named(given: Mapping[str, Any]) -> str:
    return f" of table {given['name']!r}" if isinstance(given["name"], str) else ""


def _near(unknown: list[str], known: tuple[str, ...]) -> list[str]:
    return [f"{name!r}?" for name in get_close_matches(unknown[0], known, n=1)] if unknown else []
