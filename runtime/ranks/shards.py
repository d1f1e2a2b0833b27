"""The part of a table that one rank holds: its rows, its columns, and the parameter they are in.

    local = whole[r0:r1, [c0:c1, c0':c1', ...]]

``place`` turns a parameter into its local part. The parameter stays the same object, so optimizers,
hooks and the user's own references keep working; ``of`` tells which table it is a part of. All
shards of one table on one rank have the same rows; a rank without shards holds (0, dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from recast.errors import UsageError
from recast.runtime.plan import Placement, Shard, Table
from recast.runtime.rows import rules as row_rules

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ShardedTable:
    """A table as rank ``rank`` sees it.

    Attributes:
        group: the process group of all ``world_size`` ranks; None: the default one.
    """

    table: Table
    placement: Placement
    rank: int
    world_size: int
    group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.placement.table != self.table.name:
            raise UsageError(f"the placement of {self.placement.table} is not {self.table.name}'s")
        if len({(s.offset[0], s.size[0]) for s in self.shards}) > 1:
            raise UsageError(
                f"{self.table.name}: the shards of rank {self.rank} are not of the same rows",
                why="they are kept as the columns of one matrix",
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the whole table."""
        return self.table.rows, self.table.dim

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards of this rank, in the order of their columns."""
        return self.placement.of(self.rank)

    @property
    def whole(self) -> bool:
        """Whether this rank holds all of the table."""
        return self.local_shape == self.shape

    @property
    def hashed(self) -> bool:
        """Whether it is a part of a dynamic table, whose rows have no fixed numbers."""
        return self.table.dynamic

    @property
    def by_column(self) -> bool:
        """Whether any shard has only some of the columns."""
        return any(s.size[1] != self.table.dim for s in self.placement.shards)

    @property
    def rows(self) -> tuple[int, int]:
        """First row of this rank, and the one after its last."""
        own = self.shards
        return (own[0].offset[0], own[0].offset[0] + own[0].size[0]) if own else (0, 0)

    @property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """First column, and the one after the last, of each shard of this rank."""
        return tuple((s.offset[1], s.offset[1] + s.size[1]) for s in self.shards)

    @property
    def local_shape(self) -> tuple[int, int]:
        """(rows, columns) of this rank's part; (0, dim) if it owns nothing."""
        first, end = self.rows
        own = self.columns
        return end - first, sum(b - a for a, b in own) if own else self.table.dim

    def local(self, whole: Tensor) -> Tensor:
        """A contiguous copy of the local part of ``whole``: (rows, columns), or (rows,).

        Raises:
            UsageError: ``whole`` has neither shape; or it has one value per row, and the table is
                cut by columns.
        """
        first, end = self.rows
        if tuple(whole.shape) == self.shape[:1]:
            self._check_per_row()
            return whole[first:end].clone()
        if tuple(whole.shape) != self.shape:
            raise UsageError(
                f"{self.table.name}: {tuple(whole.shape)} is not the shape of the whole table",
                why=f"it has {self.shape[0]} rows of {self.shape[1]}",
            )
        own = [whole[first:end, a:b] for a, b in self.columns]
        if not own:
            return whole.new_empty(self.local_shape)
        return (
            own[0].clone(memory_format=torch.contiguous_format)
            if own[1:] == []
            else torch.cat(own, 1)
        )

    def pieces(self, local: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
        """Views of the shards in ``local``, each with its offset in the whole: (row, column), or
        (row,) if there is one value per row.
        """
        first, _ = self.rows
        if local.dim() == 1:
            self._check_per_row()
            return [((first,), local)] if self.shards else []
        found: list[tuple[tuple[int, ...], Tensor]] = []
        at = 0
        for a, b in self.columns:
            found.append(((first, a), local[:, at : at + b - a]))
            at += b - a
        return found

    def whole_shape(self, local: Tensor) -> tuple[int, ...] | None:
        """The whole shape of a tensor that is cut like the table; None if it is not cut."""
        if self.hashed:
            return None
        if tuple(local.shape) == self.local_shape:
            return self.shape
        if local.dim() == 1 and local.shape[0] == self.local_shape[0]:
            return self.shape[:1]
        return None

    def _check_per_row(self) -> None:
        if self.by_column:
            raise UsageError(
                f"{self.table.name}: one value a row cannot be kept by ranks that hold some of its"
                " columns",
                why="it is made of the gradients of all columns",
                tries=(f"sharding={{{self.table.name!r}: 'row_wise'}}", "an optimizer by element"),
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTable:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # A process group cannot be pickled: the copy belongs to the default one.
        return ShardedTable, (self.table, self.placement, self.rank, self.world_size)


# --- the parameters ------------------------------------------------------------------------------

_PLACES: WeakIdKeyDictionary = WeakIdKeyDictionary()


def of(parameter: Tensor) -> ShardedTable | None:
    """The table that ``parameter`` is the local part of; None if it is whole."""
    found: ShardedTable | None = _PLACES.get(parameter) if len(_PLACES) else None
    return found


def among(parameters: Sequence[Tensor]) -> list[ShardedTable | None] | None:
    """:func:`of` each of ``parameters``; None if all are whole."""
    if not len(_PLACES):
        return None
    found = [of(parameter) for parameter in parameters]
    return None if all(table is None for table in found) else found


def place(parameter: Tensor, sharded: ShardedTable, local: Tensor | None = None) -> None:
    """Make ``parameter``, the same object, the local part of its table.

    A data_parallel table stays whole. The memory of the whole is freed once nobody else holds it.

    Args:
        parameter: the whole table, (rows, dim), on a device or on meta.
        local: its local part; required if ``parameter`` is on meta.

    Raises:
        UsageError: it is placed already, has a gradient or another shape, or is on meta and
            ``local`` is missing.
    """
    name = sharded.table.name
    if sharded.placement.sharding_type == "data_parallel":
        if local is not None:
            fill(parameter, local)
        return
    if of(parameter) is not None:
        raise UsageError(f"{name} is placed already", tries=("a fresh model",))
    if parameter.grad is not None:
        raise UsageError(
            f"{name} has a gradient", why="it is of the whole table", tries=("zero_grad() first",)
        )
    if tuple(parameter.shape) != sharded.shape:
        sharded.local(parameter)  # raises the error
    if local is None:
        if parameter.is_meta:
            raise UsageError(f"{name} is on meta: its local part must be given")
        with torch.no_grad():
            local = parameter.detach() if sharded.whole else sharded.local(parameter.detach())
    if tuple(local.shape) != sharded.local_shape:
        raise UsageError(
            f"{name}: {tuple(local.shape)} is not the shape of its part on rank {sharded.rank}",
            why=f"that is {sharded.local_shape}",
        )
    fill(parameter, local)
    register(parameter, sharded)


def register(parameter: Tensor, sharded: ShardedTable) -> None:
    """Note that ``parameter``, in a copied or unpickled model, is a local part."""
    _PLACES[parameter] = sharded


def forget(parameter: Tensor) -> None:
    """Note that somebody has made ``parameter`` a whole table again."""
    _PLACES.pop(parameter, None)


def fill(parameter: Tensor, local: Tensor) -> None:
    """Let ``parameter``, the same object, hold ``local`` from now on, even if it was on meta."""
    if not parameter.is_meta:
        parameter.data = local
        return
    # ``.data`` cannot move a tensor off meta. This swaps the tensors behind two Python objects.
    new = nn.Parameter(local, requires_grad=parameter.requires_grad)
    torch._C._swap_tensor_impl(parameter, new)


# --- the state of an optimizer -------------------------------------------------------------------


def place_state(optimizer: Optimizer) -> None:
    """Make the state of placed parameters local too, and give memory to state on meta.

    Tensors with the shape of the whole table are cut like it, those with one value per row by rows;
    others stay unchanged.

    Raises:
        UsageError: a state has one value per row, and its table is cut by columns; or state is on
            meta and the optimizer is unknown to this package.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if not state:
                continue
            if any(isinstance(v, Tensor) and v.is_meta for v in state.values()):
                state.clear()
                state.update(_start(optimizer, group, parameter))
                continue
            sharded = of(parameter)
            if sharded is not None and not sharded.whole and not sharded.hashed:
                _cut(state, sharded)


def _cut(state: dict[str, Any], sharded: ShardedTable) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor) and tuple(value.shape) in (sharded.shape, sharded.shape[:1]):
            state[key] = sharded.local(value)


def _start(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    rule = row_rules.rule_of(optimizer, lazy=True)
    if rule is None or parameter.is_meta:
        raise UsageError(
            f"{type(optimizer).__name__} has its state on meta",
            why="what it was meant to hold is not known",
            tries=("make the optimizer after the model has memory", "torch.optim.Adagrad"),
        )
    return rule.start(optimizer, group, parameter)
