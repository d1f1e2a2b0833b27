"""Sharded tables in ``state_dict``: saved as DTensors, loaded from DTensors or whole tensors.

This uses torch's own hooks on the modules and the optimizer, so names and order are torch's. A
DTensor holds the shards of its rank as views of the very parameter, which ``torch.distributed.
checkpoint`` writes and reads in place. ``Places.full`` makes whole tensors of them, table by table.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from recast.errors import CheckpointError, RecastWarning, UsageError
from recast.runtime.embedding.precision_table import StoredTable
from recast.runtime.ranks import faults, shards
from recast.runtime.ranks.shards import ShardedTable
from recast.runtime.rows import state_hooks

BLOCK = 1 << 26  # bytes sent, written or read at once


class Shards(LocalShardsWrapper):
    """Shards of one table inside a DTensor. Torch's own wrapper would gather uneven or column-wise
    shards into nonsense, where this one raises; it also claims to be float32 whatever it holds,
    where this one has the dtype of its shards.
    """

    def __new__(cls, held: list[Tensor], offsets: list[tuple[int, ...]]) -> Self:
        made: Any = super().__new__(cls, held, offsets)
        if held[0].dtype == made.dtype:
            return made
        own: Any = torch.Tensor._make_wrapper_subclass(cls, made.shape, dtype=held[0].dtype)
        own._local_shards, own._storage_meta = made._local_shards, made._storage_meta
        return own

    def __reduce_ex__(self, protocol: Any) -> Any:
        _warn_of_pickling("a state_dict")
        return Shards, (self.local_shards(), [tuple(o) for o in self.local_offsets()])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            if func.namespace == "_c10d_functional":
                raise NotImplementedError("it would gather them")
            if torch.Tag.pointwise in func.tags or func is torch.ops.aten.copy_.default:
                return _shard_by_shard(func, args, kwargs or {})
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except NotImplementedError as error:
            raise UsageError(
                f"{func} of the shards of a table, which are only copied, saved and computed with"
                " element by element",
                why="a plan may cut it unevenly and by columns",
                tries=("fast.full_state_dict(), which has whole tables", "recast.checkpoint.save"),
            ) from error
        if type(result) is LocalShardsWrapper:
            return Shards(result.local_shards(), list(map(tuple, result.local_offsets())))
        return result


def _shard_by_shard(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``func``, which computes element by element, as averages of weights over steps do. Raises
    NotImplementedError for operands that are neither numbers nor cut in the same way.
    """
    leaves, spec = tree_flatten((args, dict(kwargs)))
    cut = [leaf for leaf in leaves if isinstance(leaf, Shards)]
    places = [(leaf.local_offsets(), leaf.local_sizes()) for leaf in cut]
    whole = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Shards)]
    if any(place != places[0] for place in places) or any(leaf.dim() > 0 for leaf in whole):
        raise NotImplementedError("an operand is cut otherwise")
    results = []
    for k in range(len(cut[0].local_shards())):
        own = [leaf.local_shards()[k] if isinstance(leaf, Shards) else leaf for leaf in leaves]
        its_args, its_kwargs = tree_unflatten(own, spec)
        results.append(func(*its_args, **its_kwargs))
    written = func._schema.arguments[0].alias_info
    if written is not None and written.is_write:
        return args[0]
    return Shards(results, [tuple(offset) for offset in cut[0].local_offsets()])


def _warn_of_pickling(what: str) -> None:
    warnings.warn(
        f"{what} with tables that are spread over ranks is pickled: this file has the"
        f" parts of rank {dist.get_rank() if dist.is_initialized() else 0}, and of no other;"
        " recast.checkpoint.save writes those of all ranks, full_state_dict() has whole tables",
        RecastWarning,
        stacklevel=3,
    )


# Each rank may write and read a file of its own.
torch.serialization.add_safe_globals([Shards])


# --- one tensor ----------------------------------------------------------------------------------

_MESHES: WeakKeyDictionary[ProcessGroup, dict[str, DeviceMesh]] = WeakKeyDictionary()


def _mesh(group: ProcessGroup | None, device: torch.device) -> DeviceMesh:
    if not dist.is_initialized():
        raise UsageError(
            "a sharded table has no state_dict without its process group",
            why="the other ranks hold the rest of it",
            tries=("state_dict() before dist.destroy_process_group()",),
        )
    group = dist.group.WORLD if group is None else group
    assert group is not None
    meshes = _MESHES.setdefault(group, {})
    if device.type not in meshes:
        meshes[device.type] = DeviceMesh.from_group(group, device.type)
    return meshes[device.type]


@torch.no_grad()
def as_dtensor(local: Tensor, sharded: ShardedTable) -> DTensor:
    """The local part of a table, or of its optimizer state, as a DTensor of the global shape.

    Its shards are views of ``local``. Raises UsageError without a process group.
    """
    shape = sharded.whole_shape(local)
    assert shape is not None, f"{sharded.table.name}: {tuple(local.shape)}"
    pieces = _pieces(local.detach(), sharded)
    held = Shards([piece for _, piece in pieces], [offset for offset, _ in pieces])
    mesh = _mesh(sharded.group, local.device)
    stride = (shape[1], 1) if len(shape) == 2 else (1,)
    return DTensor.from_local(
        held, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
    )


def _pieces(local: Tensor, sharded: ShardedTable) -> list[tuple[tuple[int, ...], Tensor]]:
    """The shards of this rank; if it owns none, an empty one after the last row, which still has
    dtype and device.
    """
    return sharded.pieces(local) or [((sharded.table.rows, 0)[: local.dim()], local)]


def to_local(value: Tensor, sharded: ShardedTable) -> Tensor:
    """The local part of ``value``: a DTensor of this plan's shards, or a whole tensor.

    Raises:
        CheckpointError: it is neither.
    """
    name = sharded.table.name
    if not isinstance(value, DTensor):
        if tuple(value.shape) not in (sharded.shape, sharded.shape[:1]):
            raise CheckpointError(
                f"{name}: {tuple(value.shape)} is not the shape of the whole table, {sharded.shape}"
            )
        return sharded.local(value)
    held = value.to_local()
    if not isinstance(held, LocalShardsWrapper):
        raise CheckpointError(
            f"{name}: a DTensor of {value.placements}, not of the shards of a plan",
            tries=("value.full_tensor()", "recast.checkpoint.load"),
        )
    shape = sharded.local_shape if value.dim() == 2 else sharded.local_shape[:1]
    local = torch.empty(shape, dtype=value.dtype, device=held.device)
    mine = _pieces(local, sharded)
    theirs = list(zip(map(tuple, held.local_offsets()), held.local_shards(), strict=True))
    if [(o, p.shape) for o, p in mine] != [(o, p.shape) for o, p in theirs]:
        raise CheckpointError(
            f"{name}: these are shards of another plan",
            why=f"rank {sharded.rank} holds {[(o, tuple(p.shape)) for o, p in mine]} of it",
            tries=("recast.checkpoint.load, which cuts anew", "full_state_dict() of the other"),
        )
    with torch.no_grad():
        for (_, piece), (_, other) in zip(mine, theirs, strict=True):
            piece.copy_(other)
    return local


# --- modules -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Places:
    """The placed tables of one model, by each of their names in its ``state_dict``."""

    tables: Mapping[str, ShardedTable]

    def __deepcopy__(self, memo: dict[int, Any]) -> Places:
        return self

    def __reduce__(self) -> tuple[Any, ...]:  # as part of a whole model
        _warn_of_pickling("a model")
        return Places, (dict(self.tables),)

    def renew(self, root: nn.Module) -> None:
        """Note that parameters of ``root``, a copied or unpickled model, are local parts too."""
        held = dict(root.named_parameters(remove_duplicate=False))
        for name, sharded in self.tables.items():
            shards.register(held[name], sharded)
        hook(root)

    def full(
        self, state: Mapping[str, Any], *, ranks: Literal[0, "all"] = 0,
        device: torch.device | str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """``state``, from the model's ``state_dict()``, with whole tensors in place of DTensors.

        A collective: every rank calls it. Tables are sent one by one, ``BLOCK`` bytes at a time; a
        rank that does not get them holds no more than one block of others' rows.

        Args:
            ranks: 0: whole tables on rank 0, and no entry for them on others; "all": everywhere.
            device: that of the whole tables; None: that of the shards.

        Raises:
            UsageError: another value of ``ranks``.
        """
        if ranks not in (0, "all"):
            raise UsageError(
                f"full_state_dict: ranks={ranks!r}",
                why="it says which ranks get whole tables: 0, or 'all'",
                tries=("ranks=0", "ranks='all'"),
            )
        found: dict[str, Any] = OrderedDict()
        for name, value in state.items():
            sharded = self.tables.get(name)
            if sharded is None or not isinstance(value, DTensor):
                found[name] = value
                continue
            wanted = ranks == "all" or sharded.rank == 0
            whole = _gather(value, sharded, wanted, torch.device(device or value.device))
            if whole is not None:
                found[name] = whole
        self._full_dynamic(found, ranks)
        if hasattr(state, "_metadata"):
            found._metadata = state._metadata  # type: ignore[attr-defined]
        return found

    def _full_dynamic(self, found: dict[str, Any], ranks: Literal[0, "all"]) -> None:
        """Replace the entries of dynamic tables by those of all ranks."""
        from recast.runtime.dynamic import gather  # here: it imports this package

        for path in [name.rpartition(".")[0] for name, own in self.tables.items() if own.hashed]:
            prefix = f"{path}." if path else ""
            entries = {k: found[prefix + k] for k in gather.KEYS if prefix + k in found}
            whole = gather.entries(entries, ranks)
            for key in entries:
                if gather.wants(ranks):
                    found[prefix + key] = whole[key]
                else:
                    del found[prefix + key]


def hook(root: nn.Module) -> Places:
    """Let the modules of ``root`` that own placed parameters save and load them as one whole."""
    for module in root.modules():
        if any(_placed(module)):
            if _going_out not in module._state_dict_hooks.values():
                module._register_state_dict_hook(_going_out)
            hooks = module._load_state_dict_pre_hooks.values()
            if not any(getattr(h, "hook", None) is _coming_in for h in hooks):
                module.register_load_state_dict_pre_hook(_coming_in)
    held = root.named_parameters(remove_duplicate=False)
    return Places({name: own for name, p in held if (own := shards.of(p)) is not None})


def _placed(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, ShardedTable]]:
    for key, parameter in module._parameters.items():
        sharded = None if parameter is None else shards.of(parameter)
        if parameter is not None and sharded is not None and not sharded.hashed:
            yield key, parameter, sharded


def _going_out(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for key, parameter, sharded in _placed(module):
        value = state.get(prefix + key)
        # keep_vars=True asks for the Parameter objects themselves
        if isinstance(value, Tensor) and value is not parameter and not isinstance(value, DTensor):
            if isinstance(value, StoredTable):
                value = value.whole()
            state[prefix + key] = as_dtensor(value, sharded)


def _coming_in(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, strict: bool,
    missing: list[str], unexpected: list[str], errors: list[str],
) -> None:  # fmt: skip
    for key, parameter, sharded in _placed(module):
        value = state.get(prefix + key)
        if not isinstance(value, Tensor):
            continue
        if metadata.get("assign_to_params_buffers"):
            raise UsageError(
                f"{prefix}{key}: load_state_dict(assign=True) of a table that is spread over ranks",
                why="the part of this rank is known by its Parameter, which would be another",
                tries=("load_state_dict(state), which copies this rank's part",),
            )
        try:
            state[prefix + key] = to_local(value, sharded)
        except CheckpointError as error:
            errors.append(str(error))
            state[prefix + key] = parameter  # reported already; avoids a second error


# --- optimizers ----------------------------------------------------------------------------------


class Local:
    """A tensor that is local already, on its way into ``Optimizer.load_state_dict``."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def hook_optimizer(optimizer: Optimizer) -> None:
    """Let ``optimizer`` save and load the state of placed parameters as one whole."""
    state_hooks.add(optimizer, state_out, state_in)


def _numbered(optimizer: Optimizer, saved: Mapping[str, Any]) -> Iterator[tuple[Any, ShardedTable]]:
    """The key in ``saved`` of each parameter that is a local part: a number, or a name if
    ``torch.distributed.checkpoint.state_dict`` made it.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    for key, parameter in zip(keys, held, strict=False):  # torch raises if they do not match
        sharded = shards.of(parameter)
        if sharded is not None and not sharded.hashed:
            yield key, sharded


def state_out(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    state = dict(saved["state"])
    for number, sharded in _numbered(optimizer, saved):
        if number in state:
            state[number] = {
                key: as_dtensor(value, sharded)
                if isinstance(value, Tensor) and sharded.whole_shape(value) is not None
                else value
                for key, value in state[number].items()
            }
    return {**saved, "state": state}


def state_in(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    state = dict(saved["state"])
    for number, sharded in _numbered(optimizer, saved):
        if number in state:
            state[number] = {k: _entering(v, sharded) for k, v in state[number].items()}
    return {**saved, "state": state}


def full_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """The ``state_dict`` of ``optimizer`` with whole tensors for DTensors, on every rank. A
    collective.
    """
    saved = optimizer.state_dict()
    state = dict(saved["state"])
    for number, sharded in _numbered(optimizer, saved):
        state[number] = {
            key: _gather(value, sharded, True, value.device)
            if isinstance(value, DTensor)
            else value
            for key, value in state.get(number, {}).items()
        }
    return {**saved, "state": {k: v for k, v in state.items() if v}}


def _entering(value: Any, sharded: ShardedTable) -> Any:
    if isinstance(value, Local):
        return value.value
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    return to_local(value, sharded)


# --- whole tensors -------------------------------------------------------------------------------


@torch.no_grad()
def _gather(
    value: DTensor, sharded: ShardedTable, wanted: bool, device: torch.device
) -> Tensor | None:
    """The whole tensor; None if it is not ``wanted`` here. A collective."""
    per_row = value.dim() == 1
    whole = torch.empty(value.shape, dtype=value.dtype, device=device) if wanted else None
    held = value.to_local()
    assert isinstance(held, LocalShardsWrapper)
    own = iter(held.local_shards())
    for shard in sorted(sharded.placement.shards, key=lambda s: (s.rank, s.offset[1])):
        mine = next(own) if shard.rank == sharded.rank else None
        (row, column), (rows, columns) = shard.offset, shard.size
        width = (slice(None),) if per_row else (slice(None), slice(column, column + columns))
        step = max(1, BLOCK // max(1, columns * value.dtype.itemsize))
        for first in range(0, rows, step):
            n = min(step, rows - first)
            if mine is None:
                shape = (n,) if per_row else (n, columns)
                block = torch.empty(shape, dtype=value.dtype, device=held.device)
            else:
                block = mine[first : first + n].contiguous()
            with faults.collective("rows of whole tables"):
                dist.broadcast(block, group=sharded.group, group_src=shard.rank)
            if whole is not None:
                whole[row + first : row + first + n][width] = block.to(device)
    return whole
