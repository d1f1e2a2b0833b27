"""JSON -> Plan. An error names the path of the wrong value in the file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeVar

import torch

from recast.errors import UsageError

from . import json_text
from .plan import SHARDING_TYPES, VERSION, Load, Placement, Plan, Shard, Table, Why
from .topology import Topology

T = TypeVar("T")
_MOST = 2**63 - 1  # of torch's sizes


def read(text: str) -> Plan:
    """Read the plan that ``Plan.to_json`` wrote. Raises UsageError if ``text`` is not a plan."""
    whole = _Object(json_text.read(text, "the plan"), "plan", None)
    version = whole.number("version", int)
    if version != VERSION:
        raise UsageError(
            f"a plan of version {version}",
            why=f"this Recast reads version {VERSION}",
            tries=("make the plan again: recast plan ... -o plan.json",),
        )
    whole.has_only(Plan)
    topology = whole.data.get("topology")
    return Plan(
        world_size=whole.number("world_size", int),
        fingerprint=whole.text("fingerprint"),
        tables=whole.list("tables", _table),
        placements=whole.list("placements", _placement),
        topology=None if topology is None else Topology.from_dict(topology),
        cost=whole.maybe("cost"),
        lower_bound=whole.maybe("lower_bound"),
        loads=whole.list("loads", _load, ()),
        reserved=whole.number("reserved", int, 0, least=0),
        notes=whole.list("notes", _note, ()),
        version=version,
    )


def _note(data: Any, path: str) -> str:
    if not isinstance(data, str):
        raise UsageError(f"{path}: {json_text.shown(data)}", why="it should be a text")
    return data


def _table(data: Any, path: str) -> Table:
    t = _Object(data, path, Table)
    name, rows, dim = t.text("name"), t.number("rows", int, least=0), t.number("dim", int, least=0)
    dtype = t.text("dtype")
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise UsageError(f"{path}.dtype: {dtype!r}", why="it should be a dtype of torch: 'float32'")
    return Table(name, rows, dim, dtype, t.flag("dynamic"))


def _placement(data: Any, path: str) -> Placement:
    p = _Object(data, path, Placement)
    kind, memory = p.text("sharding_type"), p.text("memory", "device")
    if kind not in SHARDING_TYPES:
        raise UsageError(
            f"{path}.sharding_type: {kind!r}",
            why=f"there are {', '.join(SHARDING_TYPES)}",
            tries=get_close_matches(kind, SHARDING_TYPES, n=2),
        )
    if memory not in ("device", "host"):
        raise UsageError(f"{path}.memory: {memory!r}", why="it is 'device' or 'host'")
    why = p.data.get("why")
    return Placement(
        table=p.text("table"),
        sharding_type=kind,
        shards=p.list("shards", _shard),
        memory=memory,
        why=None if why is None else _why(why, f"{path}.why"),
        state_bytes=p.number("state_bytes", float, 0.0, least=0),
        stored_row=p.maybe("stored_row", least=0),
    )


def _shard(data: Any, path: str) -> Shard:
    s = _Object(data, path, Shard)
    return Shard(s.number("rank", int), s.pair("offset"), s.pair("size"))


def _why(data: Any, path: str) -> Why:
    w = _Object(data, path, Why)
    runner_up = w.data.get("runner_up")
    return Why(
        chosen=w.text("chosen"),
        cost=w.number("cost", float),
        runner_up=None if runner_up is None else w.text("runner_up"),
        runner_up_cost=w.maybe("runner_up_cost"),
        reason=w.text("reason", ""),
    )


def _load(data: Any, path: str) -> Load:
    rank = _Object(data, path, Load)
    return Load(
        compute=rank.number("compute", float),
        communication=rank.number("communication", float),
        step=rank.number("step", float),
        device_bytes=rank.number("device_bytes", int),
        host_bytes=rank.number("host_bytes", int),
    )


class _Object:
    """A JSON object at ``path``, whose values are asked for by name and kind.

    ``kind``: what is made of it, whose fields it may have; None: to be told by ``has_only``.
    """

    def __init__(self, data: Any, path: str, kind: type | None) -> None:
        if not isinstance(data, dict):
            raise UsageError(f"{path}: it should be an object, not {json_text.shown(data)}")
        self.data, self.path = data, path
        if kind is not None:
            self.has_only(kind)

    def has_only(self, kind: Any) -> None:
        names = [f.name for f in fields(kind)]
        unknown = [name for name in self.data if name not in names]
        if unknown:
            near = get_close_matches(unknown[0], names, n=1)
            raise UsageError(
                f"{self.path}: unknown {', '.join(map(repr, unknown))}",
                why=f"there are {', '.join(names)}",
                tries=(f"{near[0]!r}?",) if near else ("without it",),
            )

    def _get(self, name: str, default: Any, fits: Callable[[Any], bool], due: str) -> Any:
        if name not in self.data:
            if default is None:
                raise UsageError(f"{self.path}: no {name!r}", why=f"it should be {due}")
            return default
        value = self.data[name]
        if not fits(value):
            raise UsageError(
                f"{self.path}.{name}: {json_text.shown(value)}", why=f"it should be {due}"
            )
        return value

    def text(self, name: str, default: str | None = None) -> str:
        found: str = self._get(name, default, lambda v: isinstance(v, str), "a text")
        return found

    def number(
        self, name: str, kind: type[T], default: T | None = None, *, least: int | None = None
    ) -> T:
        def fits(v: Any) -> bool:
            if type(v) is not int and (kind is int or type(v) is not float):
                return False
            most = _MOST if kind is int else sys.float_info.max
            return -most <= v <= most if least is None else least <= v <= most

        due = "a whole number" if kind is int else "a finite number"
        due += "" if least is None else f" of at least {least}"
        return kind(self._get(name, default, fits, due))  # type: ignore[call-arg]

    def flag(self, name: str) -> bool:
        found: bool = self._get(name, False, lambda v: isinstance(v, bool), "true or false")
        return found

    def maybe(self, name: str, *, least: int | None = None) -> float | None:
        return None if self.data.get(name) is None else self.number(name, float, least=least)

    def pair(self, name: str) -> tuple[int, int]:
        def fits(v: Any) -> bool:
            return isinstance(v, list) and len(v) == 2 and all(type(n) is int for n in v)

        row, column = self._get(name, None, fits, "[row, column]")
        return row, column

    def list(
        self, name: str, each: Callable[[Any, str], T], default: tuple[T, ...] | None = None
    ) -> tuple[T, ...]:
        values = self._get(name, default, lambda v: isinstance(v, list), "a list")
        return (
            tuple(each(v, f"{self.path}.{name}[{k}]") for k, v in enumerate(values))
            if (name in self.data)
            else tuple(values)
        )
