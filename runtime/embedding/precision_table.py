"""A table in fewer bits than float32 that is still a Parameter of the model, for serving."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from recast.errors import UsageError
from recast.runtime.embedding import precision as formats
from recast.runtime.ranks import shards

ROUNDED = (  # of a diff, with the precisions and how many tables have them
    "of the second model, tables are in {} ({} of them), for inference: those of the first were"
    " rounded in the same way, and eval mode alone was compared"
)
aten = torch.ops.aten
_SAME = {aten.detach.default, aten.alias.default, aten.clone.default}
_LOOKUPS = {
    aten.embedding.default, aten._embedding_bag.default, aten._embedding_bag_forward_only.default,
}  # fmt: skip


class StoredTable(Tensor):
    """A (rows, dim) float32 tensor whose rows are stored in ``packed`` (see :mod:`.precision`).

    A lookup unpacks only the rows it needs; any other operation reads a dense copy of the whole.
    ``copy_`` packs its source, so ``load_state_dict`` works. Nothing else may write to the table,
    and it has no gradient: it is for inference.
    """

    packed: Tensor
    precision: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, packed: Tensor, precision: str, dim: int) -> Self:
        shape = (packed.shape[0], dim)
        table: Self = Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.float32, device=packed.device
        )
        table.packed, table.precision = packed, precision
        return table

    def __init__(self, *_: object) -> None:
        pass  # object.__init__ would refuse the arguments of __new__

    @property
    def data(self) -> Tensor:
        """An alias, as for any tensor."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        # ``module.double()`` and the like: torch would swap the tensor without our seeing it.
        if isinstance(value, StoredTable):
            self.packed, self.precision = value.packed, value.precision
            return
        raise UsageError(
            f"a table that is stored in {self.precision} cannot become"
            f" {str(value.dtype).removeprefix('torch.')}",
            why="its rows are read as float32",
            tries=("convert the model first, then optimize()", "table.copy_(new_rows)"),
        )

    def whole(self) -> Tensor:
        """The rows as they are stored, unpacked: a plain (rows, dim) float32 tensor."""
        return formats.unpack(self.packed, self.precision, self.shape[1])

    def over(self, packed: Tensor) -> StoredTable:
        """A table like this one over ``packed``."""
        return StoredTable(packed, self.precision, self.shape[1])

    def share_memory_(self) -> Self:
        """Share the packed rows; torch's own method needs a storage, which a wrapper lacks."""
        self.packed.share_memory_()
        return self

    def is_shared(self) -> bool:
        return self.packed.is_shared()

    def __setitem__(self, index: object, value: object) -> None:
        raise _written("an assignment to rows", self)  # torch would write them to a dense copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredTable({tuple(self.shape)}, {self.precision})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = parameter(self.over(self.packed.clone()))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (self.packed, self.precision, self.shape[1])

    # torch's protocol for tensors made of others: with it, ``module.to`` replaces the whole tensor.
    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, int]]:
        return ["packed"], (self.precision, self.shape[1])

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], made: tuple[str, int], size: object, stride: object
    ) -> StoredTable:
        return StoredTable(inner["packed"], *made)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, StoredTable):
            if func in _SAME:
                return first.over(func(first.packed, **kwargs))
            if func is aten._to_copy.default and kwargs.get("dtype") in (None, torch.float32):
                kept = {k: v for k, v in kwargs.items() if k != "dtype"}
                return first.over(func(first.packed, **kept))
            if func is aten.empty_like.default and kwargs.get("dtype") in (None, torch.float32):
                # of ``module.to_empty``; a format of memory is that of the whole, not of the packed
                kept = {k: v for k, v in kwargs.items() if k not in ("dtype", "memory_format")}
                return first.over(func(first.packed, **kept))
            if func is aten.copy_.default:
                new = _plain(args[1])
                _check_fit(new, first.precision)
                first.packed.copy_(formats.pack(new, first.precision))
                return first
            if func in _LOOKUPS:
                return _look_up(func, first, args[1], *args[2:], **kwargs)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, StoredTable):
                raise _written(func._schema.name.removeprefix("aten::"), value)
        return func(*pytree.tree_map(_plain, args), **pytree.tree_map(_plain, kwargs))


def _written(what: str, table: StoredTable) -> UsageError:
    return UsageError(
        f"{what} writes to a table that is stored in {table.precision}",
        why="its rows are for inference; only copy_ packs new ones",
        tries=("table.copy_(new_rows)", "optimize() without precision, to train"),
    )


def _check_fit(rows: Tensor, precision: str) -> None:
    """Raise UsageError for ``rows`` that would be read as NaN or infinity. A table that has such
    numbers when it is optimised is not stored either.
    """
    why = formats.unfit(rows, precision)
    if why is not None:
        raise UsageError(
            f"a table that is stored in {precision} cannot take numbers {why}",
            why="their rows would be read as NaN or infinity",
            tries=("load them into the plain model, and optimize() that again",),
        )


def _plain(value: Any) -> Any:
    return value.whole() if isinstance(value, StoredTable) else value


def _look_up(func: Any, table: StoredTable, ids: Tensor, *rest: Any, **flags: Any) -> Any:
    """``func`` on a small table that holds only the rows that are looked up."""
    rest_of = list(rest)
    at = 0 if func is aten.embedding.default else 6  # position of padding_idx after the ids
    padding = rest_of[at] if len(rest_of) > at else -1
    if type(ids) is Tensor and type(table.packed) is Tensor:
        found, places = torch.unique(ids, return_inverse=True)
        same = (found == padding).nonzero() if padding >= 0 else found[:0]
        index = int(same[0]) if len(same) else -1
    else:  # traced, as by torch.export: no size may depend on values
        found, places, index = _each(ids, padding)
    rows = formats.unpack(table.packed[found], table.precision, table.shape[1])
    if padding >= 0:
        rest_of[at] = index
    return func(rows, places.to(ids.dtype), *rest_of, **flags)


def _each(ids: Tensor, padding: int) -> tuple[Tensor, Tensor, int]:
    """``(rows, positions, position of padding)``: a row per id, and first one for padding."""
    flat = ids.reshape(-1)
    places = torch.arange(1, 1 + flat.shape[0], device=ids.device)
    if padding >= 0:
        places = places.masked_fill(flat == padding, 0)
    first = flat.new_full((1,), max(padding, 0))
    return torch.cat([first, flat]), places.reshape(ids.shape), 0 if padding >= 0 else -1


def parameter(table: StoredTable) -> nn.Parameter:
    """``table`` as a Parameter, without gradient."""
    return nn.Parameter(table, requires_grad=False)


def _rebuild(packed: Tensor, precision: str, dim: int) -> nn.Parameter:
    return parameter(StoredTable(packed, precision, dim))


def stored(module: nn.Module) -> dict[str, StoredTable]:
    """The stored tables of ``module`` by name."""
    held: Iterable[tuple[str, Tensor]] = module.named_parameters()
    return {name: p for name, p in held if isinstance(p, StoredTable)}


def rounded(plain: nn.Module, tables: Mapping[str, StoredTable]) -> nn.Module:
    """A copy of ``plain`` whose tables of these names are rounded in the same way, and frozen."""
    same = copy.deepcopy(plain)
    held = dict(same.named_parameters(remove_duplicate=False))
    for name, table in tables.items():
        old = held[name]
        packed = formats.pack(old, table.precision)
        rows = formats.unpack(packed, table.precision, old.shape[1])
        new = nn.Parameter(rows, requires_grad=False)
        for module in same.modules():
            for key in [k for k, p in module._parameters.items() if p is old]:
                module._parameters[key] = new
    return same


def save_whole(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any]
) -> None:
    """A ``state_dict()`` hook that saves stored tables as plain float32 tensors."""
    slots: Mapping[str, Tensor | None] = module._parameters
    for name, held in slots.items():
        # ``shards_state`` unpacks the parts of tables that are spread over ranks.
        if isinstance(held, StoredTable) and shards.of(held) is None:
            state[prefix + name] = held.whole()
