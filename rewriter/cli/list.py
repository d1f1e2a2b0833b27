"""``recast list`` and ``recast env``: passes, ops, and what this machine has."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any, cast

from recast import passes as library
from recast.runtime import OPS, build_cache
from recast.runtime.gpu import cuda_launch

from . import env
from .terminal import emit
from .usage import YES, common


def add(verbs: Any) -> None:
    """Add both verbs to the parser."""
    listing = verbs.add_parser(
        "list",
        help="all passes, or all ops",
        description="List all passes in their order, with their options; or all ops.",
    )
    listing.add_argument("what", choices=("passes", "ops"), metavar="passes|ops")
    common(listing, _list)
    machine = verbs.add_parser(
        "env",
        help="which kernels are usable here, and versions",
        description="Say which kernels are usable on this machine, and why others are not.",
    )
    common(machine, _env)


def _list(args: argparse.Namespace) -> int:
    data = {"passes": _list_passes, "ops": _list_ops}[args.what]()
    width = max(len(str(entry["name"])) for entry in data)
    groups: dict[str, list[str]] = {}
    for e in data:
        groups.setdefault(_title(e), []).append(f"{e['name']:<{width}}  {_details(e)}".rstrip())
    texts = ("\n".join([*([title] if title else []), *rows]) for title, rows in groups.items())
    emit(args, "\n\n".join(texts), data)
    return YES


def _title(entry: dict[str, Any]) -> str:
    """The heading below which an entry stands."""
    if entry.get("default", True):
        return ""
    if entry["name"].startswith("sabotage-"):
        return "wrong on purpose, to see that diff catches them (--passes default,NAME):"
    return "not in the default pipeline:"


def _list_passes() -> list[dict[str, Any]]:
    default = list(dict.fromkeys(p.name for p in library.PIPELINE))
    rest = sorted(set(library.REGISTRY) - set(default))
    entries = []
    for name in [*default, *rest]:
        made = library.REGISTRY[name]
        doc = (made.__doc__ or "").strip().splitlines()
        options = {
            f.name.replace("_", "-"): _option(f.default) for f in fields(cast(Any, made)) if f.init
        }
        entry = {"name": name, "default": name in default, "equation": doc[0] if doc else ""}
        entries.append(entry | {"options": options})
    return entries


def _option(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) else None


def _list_ops() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "schema": op.schema,
            "kernels": [{"kernel": k, "usable": ok, "why": why} for k, ok, why in op.usable()],
        }
        for name, op in sorted(OPS.items())
    ]


def _details(entry: dict[str, Any]) -> str:
    if "schema" in entry:
        kernels = [k["kernel"] for k in entry["kernels"] if k["usable"]]
        return f"{', '.join(kernels) or 'reference'}   {entry['schema']}"
    options = ",".join(f"{k}={v}" for k, v in entry["options"].items())
    return entry["equation"] + (f"   {{{options}}}" if options else "")


def environment() -> dict[str, Any]:
    """What this machine has: versions, cores, and every kernel, with the reason if it is not
    usable.
    """
    return env.collect(OPS, cuda_launch.facts(), build_cache.facts())


def _env(args: argparse.Namespace) -> int:
    found = environment()
    emit(args, env.text(found), found)
    return YES
