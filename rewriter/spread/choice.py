"""Which sharding types a table may have, given its lookups, its optimizer and the user's choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import torch
from torch.optim import Optimizer

from recast.errors import UsageError
from recast.passes.table_uses import Use
from recast.runtime import optim
from recast.runtime.plan import SHARDING_TYPES, Placement
from recast.runtime.ranks.late_optimizers import NOT_BY_PART
from recast.runtime.rows import rules as row_rules

_ROWS, _COLUMNS = ("row_wise", "table_row_wise"), ("column_wise", "table_column_wise")
_THRESHOLDS = ("column_slice_threshold", "row_slice_threshold", "data_parallel_threshold")


@dataclass
class Choice:
    """The sharding types that one table may have, and why not the others."""

    types: tuple[str, ...] = SHARDING_TYPES
    refused: dict[str, str] = field(default_factory=dict)

    def without(self, why: str, *types: str) -> None:
        """Exclude these types, for the given reason."""
        self.types = tuple(t for t in self.types if t not in types)
        self.refused |= dict.fromkeys(types, why)

    @property
    def only(self) -> str:
        """Why there is but one type left; empty if there are more."""
        why = dict.fromkeys(self.refused.values())
        return "; ".join(why) if len(self.types) == 1 else ""


def choice_of(
    use: Use,
    optimizer: Optimizer | None,
    excluded: tuple[str, tuple[str, ...]] | None = None,
    lazy: bool = False,
) -> Choice:
    """The sharding types open to a table with this use, under ``optimizer``. ``excluded``: types
    that are not for another reason, which comes first. ``lazy``: ``sparse_semantics="lazy"``.
    """
    choice = Choice()
    apart = tuple(t for t in SHARDING_TYPES if t != "data_parallel")
    if use.whole is not None:
        choice.without(use.whole, *apart)
    if isinstance(optimizer, NOT_BY_PART):
        name = type(optimizer).__name__
        choice.without(f"{name} steps a table as a whole", *apart)
    if "max" in use.modes:
        choice.without("it is pooled by max", *_ROWS)
    if isinstance(optimizer, optim.RowWiseAdagrad):
        choice.without("RowWiseAdagrad needs the gradient of whole rows", *_COLUMNS)
    if excluded is not None:
        choice.without(excluded[0], *excluded[1])
    if use.lookups and use.sparse and (optimizer is None or _insists(optimizer)):
        choice.without(
            "its gradient must be sparse, and all ranks reduce dense ones", "data_parallel"
        )
    elif use.lookups and use.whole is None and lazy and _inexact(optimizer):
        choice.without(
            f'sparse_semantics="lazy" has {type(optimizer).__name__} step looked-up rows only, and'
            " all ranks reduce dense gradients", "data_parallel",
        )  # fmt: skip
    return choice


def choice_of_dynamic(name: str, use: Use) -> Choice:
    """The only sharding type of a dynamic table. Raises UsageError if it cannot be sharded."""
    why = use.whole
    if "max" in use.modes:
        why = "it is pooled by max, and the ids of a bag are on several ranks"
    if why is not None:
        raise UsageError(
            f"tables: {name} cannot be dynamic on several ranks",
            why=f"every rank has a part of its ids, and {why}",
            tries=("recast.explain(model, example=batch), for what is in the way", "world_size=1"),
        )
    choice = Choice()
    choice.without(
        "a dynamic table is row_wise, by the hash of its ids",
        *(t for t in SHARDING_TYPES if t != "row_wise"),
    )
    return choice


def fused(optimizer: Optimizer | None) -> bool:
    """Whether ``optimizer`` steps tables from row gradients."""
    return optimizer is not None and row_rules.rule_of(optimizer, lazy=True) is not None


def _insists(optimizer: Optimizer) -> bool:
    rule = row_rules.rule_of(optimizer, lazy=True)
    return rule is not None and rule.sparse


def _inexact(optimizer: Optimizer | None) -> bool:
    """Whether stepping looked-up rows only gives other numbers than a dense gradient does."""
    rule = None if optimizer is None else row_rules.rule_of(optimizer, lazy=True)
    return rule is not None and not rule.exact


def allowed(kinds: Iterable[tuple[str, str]], choices: Mapping[str, Choice]) -> None:
    """Raise UsageError if the type asked for would not give the numbers of one process."""
    for name, kind in kinds:
        choice = choices[name]
        if kind not in choice.types:
            raise UsageError(
                f"sharding: {name} cannot be {kind}",
                why=choice.refused.get(kind, "there is no such sharding type"),
                tries=[f"sharding={{{name!r}: {t!r}}}" for t in choice.types[:3]],
            )


def thresholds(sharding: Any) -> dict[str, int]:
    """The thresholds in the user's ``sharding``. Raises UsageError for invalid ones."""
    if sharding is None or isinstance(sharding, str):
        if sharding is not None and sharding not in SHARDING_TYPES:
            raise UsageError(
                f"optimize: there is no sharding type {sharding!r}",
                why=f"there are {', '.join(SHARDING_TYPES)}",
                tries=get_close_matches(sharding, SHARDING_TYPES, n=2) or ("leave sharding out",),
            )
        return {}
    if not isinstance(sharding, Mapping):
        raise UsageError(
            f"optimize: sharding is a {type(sharding).__name__}",
            why="it is one sharding type for all tables, or a dict of thresholds and tables",
            tries=("sharding='row_wise'", "sharding={'emb.0': 'row_wise'}"),
        )
    found = {key: sharding[key] for key in _THRESHOLDS if key in sharding}
    for key, value in found.items():
        least = 1 if key == "column_slice_threshold" else 0  # a shard of 0 elements holds nothing
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(
                f"optimize: {key}={value!r} is not a number of elements",
                why="a table of rows x columns has as many, and it is compared with them",
                tries=(f"sharding={{{key!r}: 1_000_000}}",),
            )
    return found


def pins_of(sharding: Any, choices: Mapping[str, Choice]) -> dict[str, str | Placement]:
    """The user's choices for single tables, by their names in the plan."""
    if sharding is None:
        return {}
    if isinstance(sharding, str):
        return {name: sharding for name, c in choices.items() if sharding in c.types}
    pins: dict[str, str | Placement] = {}
    for key, kind in sharding.items():
        if key in _THRESHOLDS:
            continue
        name = key if key in choices else f"{key}.weight"
        if name not in choices:
            raise UsageError(
                f"sharding: no table is named {key!r}",
                why="keys are tables by their names in state_dict(), or thresholds",
                tries=get_close_matches(name, list(choices), n=2) or list(choices)[:4],
            )
        if not isinstance(kind, str | Placement):
            raise UsageError(
                f"sharding: {name} is to be {kind!r}",
                why=f"it can be one of {', '.join(choices[name].types)}, or a Placement",
                tries=[f"sharding={{{name!r}: {choices[name].types[0]!r}}}"],
            )
        pins[name] = kind
    allowed([(n, p) for n, p in pins.items() if isinstance(p, str)], choices)
    return pins


def state_of(optimizer: Optimizer | None) -> tuple[float, float]:
    """Bytes of optimizer state per row, and per element."""
    if optimizer is None:
        return 0.0, 0.0
    if isinstance(optimizer, optim.RowWiseAdagrad):
        return 4.0, 0.0
    if isinstance(optimizer, torch.optim.SGD):
        return 0.0, 4.0 * any(g["momentum"] for g in optimizer.param_groups)
    rule = row_rules.rule_of(optimizer, lazy=True)
    return 0.0, 4.0 * (2 if rule is None else len(rule.states))  # most keep two moments
