"""The arguments of one call of ``embedding_bags``, and the checks of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from recast.errors import DtypeError, IdError, InputError
from recast.runtime.embedding.columns import Columns

# Torch's numbers, and one more. A total is a sum that leaves no id out: see Layout.left_out.
MODES = {"sum": 0, "mean": 1, "max": 2, "none": 3, "total": 0}
_INTS = (torch.int64, torch.int32)
Stacks: TypeAlias = tuple[tuple[int, ...], ...]  # the lookups of each, in order


@dataclass(slots=True, eq=False)
class Layout:
    """What does not change between calls: the table, mode and flags of each lookup."""

    table: tuple[int, ...]
    mode: tuple[str, ...]
    padding_idx: tuple[int | None, ...]
    include_last_offset: tuple[bool, ...]
    sparse: tuple[bool, ...]
    native: Any = None  # the same for the C++ kernels, made on first use
    served: dict[Any, Any] = field(default_factory=dict)  # and for each GPU, likewise

    def left_out(self) -> list[int | None]:
        """The id that each lookup leaves out of its bags: its padding_idx. Lookups without bags and
        totals read that row too.
        """
        reads = ("none", "total")
        pairs = zip(self.mode, self.padding_idx, strict=True)
        return [None if mode in reads else padding for mode, padding in pairs]


@lru_cache(maxsize=256)
def _layout(*fields: Any) -> Layout:
    layout = Layout(*fields)
    unknown = set(layout.mode) - set(MODES)
    if unknown:
        raise InputError(
            f"unknown pooling mode {sorted(unknown)[0]!r}", tries=[f"one of {', '.join(MODES)}"]
        )
    return layout


@dataclass(slots=True)
class Call:
    """The arguments of one call. All lists are per lookup, except ``weights``, which is per table.

    ``narrow``: every reader of the outputs casts them to autocast's dtype. ``autocast``: that
    dtype if autocast is on and a GPU runs the call. ``whole``: for each lookup, whether its table's
    gradient is to be dense; empty if none is. ``stacks``: lookups whose outputs may be one tensor.
    ``columns``: the places of lookups and ``others`` in one matrix, which is then the first
    output; the lookups without a place in it follow, in order.
    """

    weights: Sequence[Tensor]
    ids: Sequence[Tensor]
    offsets: Sequence[Tensor | None]
    per_sample_weights: Sequence[Tensor | None]
    layout: Layout
    narrow: bool = False
    autocast: torch.dtype | None = None
    stacks: Stacks = ()
    columns: Columns | None = None
    others: Sequence[Tensor] = ()
    whole: Sequence[bool] = ()

    def weight(self, k: int) -> Tensor:
        return self.weights[self.layout.table[k]]

    def padding(self, k: int) -> int | None:
        """``padding_idx`` of lookup k, counted from the first row: it gets no gradient."""
        index = self.layout.padding_idx[k]
        return index + self.weight(k).shape[0] if index is not None and index < 0 else index

    def left_out(self, k: int) -> int | None:
        """The same if the bags of lookup k leave it out: see :meth:`Layout.left_out`."""
        return None if self.layout.mode[k] in ("none", "total") else self.padding(k)

    def dtype(self, k: int) -> torch.dtype:
        """The dtype of the output of lookup k."""
        own = self.weight(k).dtype
        if self.columns is not None and k in self.columns.order:
            return self.columns.dtype
        narrows = self.narrow and self.autocast is not None and own is torch.float32
        return self.autocast if narrows and self.autocast is not None else own

    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the op, without ``narrow``."""
        layout = self.layout
        constants = (
            layout.table,
            layout.mode,
            layout.padding_idx,
            layout.include_last_offset,
            layout.sparse,
        )
        tensors = (self.weights, self.ids, self.offsets, self.per_sample_weights)
        return tuple(list(x) for x in (*tensors, *constants))

    def bags(self, k: int) -> int:
        """How many bags lookup k has; for "none", how many ids."""
        if self.layout.mode[k] == "none":
            return self.ids[k].numel()
        offsets = self.offsets[k]
        if offsets is None:
            return self.ids[k].shape[0]
        # An int: traced sizes are compared with, and take away, no bool.
        return offsets.shape[0] - int(self.layout.include_last_offset[k])

    def starts(self, k: int) -> tuple[Tensor, bool]:
        """Offsets of lookup k in the dtype of its ids, and whether the last one is an end."""
        ids, offsets = self.ids[k], self.offsets[k]
        if offsets is not None:
            return offsets.to(ids.dtype), self.layout.include_last_offset[k]
        ends = torch.arange(ids.shape[0] + 1, dtype=ids.dtype, device=ids.device) * ids.shape[1]
        return ends, True


# By number of lookups: the constants of the last call with that many, and their layout.
_RECENT: dict[int, tuple[tuple[Any, ...], Layout]] = {}
_MOST_RECENT = 64


def _copied(constants: Any) -> Any:
    return list(constants) if type(constants) is list else tuple(constants)


def call_of(
    weights: Sequence[Tensor],
    ids: Sequence[Tensor],
    offsets: Sequence[Tensor | None],
    per_sample_weights: Sequence[Tensor | None],
    table: Sequence[int],
    mode: Sequence[str],
    padding_idx: Sequence[int | None],
    include_last_offset: Sequence[bool],
    sparse: Sequence[bool],
    narrow: bool = False,
    whole: Sequence[bool] = (),
) -> Call:
    """The arguments of the op as a Call."""
    # A model passes the same few lists again and again: comparing costs a tenth of hashing.
    constants = (table, mode, padding_idx, include_last_offset, sparse)
    known = _RECENT.get(len(table))
    if known is None or known[0] != constants:
        layout = _layout(*map(tuple, constants))
        if len(_RECENT) >= _MOST_RECENT:
            _RECENT.clear()
        known = _RECENT[len(table)] = tuple(map(_copied, constants)), layout
    layout = known[1]
    return Call(weights, ids, offsets, per_sample_weights, layout, narrow, whole=whole)


class Found(NamedTuple):
    """What a forward pass returns: an output per lookup, and the winners of each "max" lookup.

    Winners, (bags, dim) int64, are the rows that the output elements came from, -1 in empty bags;
    with ``by_place``, their positions in the lookup's ids, and the number of ids in empty bags.
    """

    outs: list[Tensor]
    winners: list[Tensor]
    by_place: bool = False
    stacks: Stacks = ()  # those of the call that are the first outputs; the others follow


def widen(call: Call) -> None:
    """Cast ids and offsets of different integer dtypes to the wider one, as torch does."""
    for k, (ids, offsets) in enumerate(zip(call.ids, call.offsets, strict=True)):
        if offsets is None or call.layout.mode[k] == "none" or ids.dtype is offsets.dtype:
            continue
        wide = torch.promote_types(ids.dtype, offsets.dtype)
        if wide in _INTS:
            call.ids, call.offsets = list(call.ids), list(call.offsets)
            call.ids[k], call.offsets[k] = ids.to(wide), offsets.to(wide)


# ---------------------------------------------------------------- bad input


def check(call: Call) -> None:
    """Raise InputError for a wrong shape, DtypeError for a wrong dtype; values are not read."""
    for k, ids in enumerate(call.ids):
        _check_lookup(call, k, ids, f"lookup {k} (table {call.layout.table[k]})")


def _check_lookup(call: Call, k: int, ids: Tensor, name: str) -> None:
    weight, offsets, weights = call.weight(k), call.offsets[k], call.per_sample_weights[k]
    mode, padding = call.layout.mode[k], call.layout.padding_idx[k]
    if weight.dim() != 2:
        raise InputError(f"the table of {name} has shape {tuple(weight.shape)}, not (rows, dim)")
    if ids.is_meta and not weight.is_meta:
        raise InputError(
            f"ids of {name} are on the meta device",
            why="they have no values to look up",
            tries=["ids on the device of the table"],
        )
    if ids.dtype not in _INTS:
        raise DtypeError(
            f"ids of {name} are {_short(ids.dtype)}",
            why="ids must be int64 or int32; torch refuses others too",
            tries=["ids.long()", "give features as floats to the dense part instead"],
        )
    rows = weight.shape[0]
    if padding is not None and not -rows <= padding < rows:
        raise InputError(f"padding_idx {padding} of {name} is outside its {rows} rows")
    if weights is not None:
        _check_sample_weights(weights, ids, weight, mode, name)
    if mode == "none":
        return
    if offsets is None:
        if ids.dim() != 2:
            raise InputError(
                f"ids of {name} have {ids.dim()} dimensions and no offsets",
                why="a bag is a row of (batch, ids per bag), or is cut out of flat ids by offsets",
                tries=["pass offsets", "reshape the ids to (batch, ids per bag)"],
            )
        return
    if ids.dim() != 1:
        raise InputError(
            f"ids of {name} have {ids.dim()} dimensions and offsets",
            why="offsets cut flat ids into bags; ids of two dimensions are cut already",
            tries=["drop the offsets", "flatten the ids"],
        )
    if offsets.dim() != 1 or offsets.shape[0] < int(call.layout.include_last_offset[k]):
        raise InputError(
            f"offsets of {name} have shape {tuple(offsets.shape)}",
            why="offsets are one-dimensional, one start per bag"
            + (" and the end" if call.layout.include_last_offset[k] else ""),
        )
    if offsets.dtype not in _INTS:
        raise DtypeError(
            f"offsets of {name} are {_short(offsets.dtype)}",
            why="offsets must be int64 or int32",
            tries=["offsets.long()"],
        )


def _check_sample_weights(
    weights: Tensor, ids: Tensor, table: Tensor, mode: str, name: str
) -> None:
    if mode not in ("sum", "total"):
        raise InputError(
            f"per_sample_weights of {name} are given with mode {mode!r}",
            why="torch defines them for sums only",
            tries=["mode='sum'", "drop per_sample_weights"],
        )
    if weights.shape != ids.shape:
        raise InputError(
            f"per_sample_weights of {name} have shape {tuple(weights.shape)}, its ids"
            f" {tuple(ids.shape)}",
            why="each id has one weight",
        )
    if weights.dtype != table.dtype:
        raise DtypeError(
            f"per_sample_weights of {name} are {_short(weights.dtype)}, its table"
            f" {_short(table.dtype)}",
            why="torch asks for one dtype",
            tries=["weights.to(table.weight.dtype)"],
        )


def check_values(call: Call) -> None:
    """Raise IdError for the first id outside its table or wrong offset. Reads every value."""
    for k, ids in enumerate(call.ids):
        rows, offsets = call.weight(k).shape[0], call.offsets[k]
        bad = ((ids < 0) | (ids >= rows)).reshape(-1).nonzero()
        if offsets is not None and call.layout.mode[k] != "none":
            _check_offsets(call, k, offsets)
        if len(bad):
            raise id_error(call, k, int(bad[0]))


def _check_offsets(call: Call, k: int, offsets: Tensor) -> None:
    if not len(offsets):
        return
    steps = torch.cat((offsets.new_zeros(1), offsets)).diff()
    wrong = ((steps < 0) | (offsets > call.ids[k].shape[0])).nonzero()
    if offsets[0] != 0:
        raise offset_error(call, k, 0)
    if len(wrong):
        raise offset_error(call, k, int(wrong[0]))


def id_error(call: Call, k: int, position: int) -> IdError:
    """The error for the id at flat ``position`` of lookup ``k``."""
    ids, table, rows = call.ids[k], call.layout.table[k], call.weight(k).shape[0]
    value = int(ids.reshape(-1)[position])
    place = str(position)
    if ids.dim() > 1:
        index = torch.unravel_index(torch.tensor(position), tuple(ids.shape))
        place = f"[{', '.join(str(int(i)) for i in index)}]"
    remedies = [f"map ids into 0..{rows - 1} where the batch is made"]
    if value >= rows:
        remedies.append(f"give the table at least {value + 1} rows")
    else:
        remedies.append("give missing values an id of their own, and name it padding_idx")
    return IdError(
        f"id {value} of lookup {k} (table {table}) is outside its {rows} rows",
        why=f"it stands at ids[{place.strip('[]')}]; valid ids are 0..{rows - 1}",
        tries=remedies,
    )


def offset_error(call: Call, k: int, position: int) -> IdError:
    """The error for the offset at ``position`` of lookup ``k``."""
    offsets, count = call.offsets[k], call.ids[k].shape[0]
    assert offsets is not None
    value = int(offsets[position])
    name = f"lookup {k} (table {call.layout.table[k]})"
    if position == 0 and value != 0:
        what = f"offsets of {name} start at {value}, not at 0"
    elif value > count:
        what = f"offsets[{position}] = {value} of {name} runs past its {count} ids"
    else:
        before = int(offsets[position - 1])
        what = f"offsets of {name} decrease: {before} then {value} at position {position}"
    return IdError(
        what,
        why="offsets are the starts of the bags: from 0, never decreasing, within the ids",
        tries=["torch.cumsum of the bag sizes, shifted by one"],
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
