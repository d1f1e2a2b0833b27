"""Gives memory to a model built on ``torch.device("meta")``: shard by shard, never a whole table.

Rows of tables come from ``initial_rows``: N(0, 1) as in nn.Embedding, with the padding row zero; or
from ``module.initial_rows(ids)``, a function that the user may set on the module. Everything else
comes from ``reset_parameters`` of its module, with one seed; every rank gets rank 0's values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from recast.errors import UsageError
from recast.runtime.plan import Placement, Shard, Table
from recast.runtime.ranks import faults, initial_rows, placeholders, shards
from recast.runtime.ranks.shards import ShardedTable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_BLOCK = 1 << 22  # values of a user's own rows at once
_TABLES = (nn.Embedding, nn.EmbeddingBag)


def on_meta(root: nn.Module) -> bool:
    """Whether any parameter or buffer of ``root`` has no memory of its own yet."""
    tensors = (*root.parameters(), *root.buffers())
    return any(t.is_meta or placeholders.has_placeholder(t) for t in tensors)


def prepare(root: nn.Module, example: Any) -> bool:
    """Give placeholder memory to a model on meta, so that ``example`` can run; False if the model
    is not on meta.

    Call ``materialise`` afterwards, or ``placeholders.remove``.

    Raises:
        UsageError: something cannot be initialised (see :func:`materialise`), or the example is not
            on the CPU.
    """
    if not on_meta(root):
        return False
    tensors = [v for v in tree_leaves(example) if isinstance(v, Tensor)]
    if any(not v.is_cpu for v in tensors):
        raise UsageError(
            f"optimize: the model is on meta, and the example on {tensors[0].device}",
            why="it is run on the CPU first, where tables need not have memory",
            tries=("an example on the CPU, then fast.to(device)",),
        )
    paths, dense = _checked(root)
    _reset([module for _, module in dense], torch.initial_seed(), torch.device("cpu"))
    placeholders.give(((path, module.weight) for module, path in paths.items()), example)
    return True


def materialise(
    root: nn.Module,
    tables: Mapping[str, ShardedTable],
    *,
    seed: int | None = None,
    device: torch.device | str = "cpu",
    group: ProcessGroup | None = None,
) -> None:
    """Give memory to what ``root`` has on meta, and place ``tables``. Every rank calls it.

    Parameters stay the same objects, so an optimizer may hold them already; then call
    ``shards.place_state(optimizer)``. If there is a process group, seed and dense values are those
    of its rank 0.

    Args:
        tables: by name in ``state_dict()``; other tables on meta get all their rows.
        seed: None: ``torch.initial_seed()``; nothing is drawn from torch's generator.
        device: where memory is allocated.

    Raises:
        UsageError: something cannot be initialised: its module has no ``reset_parameters``, or is a
            table that overrides it. Or a user's ``initial_rows`` returns another shape.
    """
    if not on_meta(root):
        return
    paths, dense = _checked(root)
    seed = _seed(torch.initial_seed() if seed is None else seed, device, group)
    for module, path in paths.items():
        weight = module.weight
        if not (weight.is_meta or placeholders.has_placeholder(weight)):
            continue
        name = f"{path}.weight" if path else "weight"
        own = tables.get(name) or _alone(name, weight)
        shards.place(weight, own, _rows(module, own, seed, torch.device(device)))
        placeholders.forget(weight)
    _reset([module for _, module in dense], seed, torch.device(device))
    held = dict(root.named_parameters(remove_duplicate=False))
    for name, own in tables.items():
        if shards.of(held[name]) is None:  # not the table of a module, or not on meta
            shards.place(held[name], own)
    if group is not None or dist.is_initialized():
        _broadcast(root, group)


def _checked(root: nn.Module) -> tuple[dict[Any, str], list[tuple[str, nn.Module]]]:
    """Modules of tables, and other modules with something on meta. Raises UsageError unless all can
    be initialised.
    """
    paths = _tables(root)
    dense = [(path, m) for path, m in root.named_modules() if m not in paths and _is_meta(m)]
    for path, module in dense:
        _check_reset(path, module)
    for module, path in paths.items():
        _check_table(path, module)
    return paths, dense


def _tables(root: nn.Module) -> dict[Any, str]:
    """Modules of tables, one per weight, with the first path to it."""
    seen: set[int] = set()
    found: dict[Any, str] = {}
    for path, module in root.named_modules():
        # A parametrized weight is not a table: its parameters belong to another module.
        weight = module._parameters.get("weight") if isinstance(module, _TABLES) else None
        if weight is not None and id(weight) not in seen:
            seen.add(id(weight))
            found[module] = path
    return found


def _is_meta(module: nn.Module) -> bool:
    own = (*module._parameters.values(), *module._buffers.values())
    return not isinstance(module, _TABLES) and any(t is not None and t.is_meta for t in own)


def _check_reset(path: str, module: nn.Module) -> None:
    if callable(getattr(module, "reset_parameters", None)):
        return
    held = {**module._parameters, **module._buffers}
    names = [name for name, t in held.items() if t is not None and t.is_meta]
    raise UsageError(
        f"{', '.join(names)} of {path or 'the model'} ({type(module).__name__}) has no first value",
        why="the model is on meta, and the class has no reset_parameters() that would make it",
        tries=(
            f"give {type(module).__name__} a reset_parameters()",
            "build this module on a real device",
        ),
    )


def _check_table(path: str, module: nn.Module) -> None:
    kind: Any = type(module)
    own = kind.reset_parameters not in [k.reset_parameters for k in _TABLES]
    if own and module.weight.is_meta and not hasattr(module, "initial_rows"):
        raise UsageError(
            f"{path or 'the model'}.weight has no first value for some of its rows",
            why=f"{type(module).__name__} has its own reset_parameters(), which makes all of them",
            tries=("module.initial_rows = lambda ids: ..., (n, dim) rows for n ids",),
        )


def _alone(name: str, weight: Tensor) -> ShardedTable:
    """A table that is not in the plan: whole, as if data_parallel."""
    rows, dim = map(int, weight.shape)
    whole = Placement(name, "data_parallel", (Shard(0, (0, 0), (rows, dim)),))
    return ShardedTable(Table(name, rows, dim), whole, 0, 1)


# --- rows ----------------------------------------------------------------------------------------


def _rows(module: Any, own: ShardedTable, seed: int, device: torch.device) -> Tensor:
    """The initial values of the local part; of all rows if the table is data_parallel."""
    dim, dtype = own.table.dim, module.weight.dtype
    everywhere = own.placement.sharding_type == "data_parallel"
    first, end = (0, own.table.rows) if everywhere else own.rows
    columns = ((0, dim),) if everywhere or not own.columns else own.columns
    made = getattr(module, "initial_rows", None)
    local = torch.empty(end - first, sum(b - a for a, b in columns), dtype=dtype, device=device)
    step = max(1, _BLOCK // dim)
    for start in range(first, end, step):
        ids = torch.arange(start, min(end, start + step), device=device)
        whole = None if made is None else _users(made, own.table.name, ids, dim)
        at = 0
        for a, b in columns:
            target = local[start - first : start - first + len(ids), at : at + b - a]
            if whole is None:
                target.copy_(initial_rows.rows(
                    ids, dim, seed=seed, name=own.table.name, columns=(a, b), dtype=dtype
                ))  # fmt: skip
            else:
                target.copy_(whole[:, a:b])
            at += b - a
    padding = module.padding_idx
    if made is None and padding is not None and first <= padding < end:
        local[padding - first].zero_()
    return local


@torch.no_grad()
def _users(made: Any, name: str, ids: Tensor, dim: int) -> Tensor:
    rows = made(ids)
    if not isinstance(rows, Tensor) or tuple(rows.shape) != (len(ids), dim):
        what = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise UsageError(
            f"{name}: initial_rows(ids) gave {what}, not ({len(ids)}, {dim})",
            why="it is asked for some rows at a time",
        )
    return rows


# --- all else ------------------------------------------------------------------------------------


@torch.no_grad()
def _reset(modules: Iterable[nn.Module], seed: int, device: torch.device) -> None:
    buffers: dict[int, Tensor] = {}  # a shared one stays shared
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        for module in modules:
            for parameter in module._parameters.values():
                if parameter is not None and parameter.is_meta:
                    shards.fill(parameter, torch.empty_like(parameter, device=device))
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    new = torch.zeros_like(buffer, device=device)
                    module._buffers[key] = buffers.setdefault(id(buffer), new)
            module.reset_parameters()  # type: ignore[operator]


def _seed(seed: int, device: torch.device | str, group: ProcessGroup | None) -> int:
    if group is None and not dist.is_initialized():
        return seed
    # torch.manual_seed takes 64 bits, signed or unsigned
    told = torch.tensor([seed - 2**64 if seed >= 2**63 else seed], device=device)
    with faults.collective("broadcast of the seed"):
        dist.broadcast(told, group=group, group_src=0)
    return int(told)


@torch.no_grad()
def _broadcast(root: nn.Module, group: ProcessGroup | None) -> None:
    seen: set[int] = set()
    for tensor in (*root.parameters(), *root.buffers()):
        if shards.of(tensor) is None and id(tensor) not in seen:
            seen.add(id(tensor))
            with faults.collective("broadcast of parameters"):
                dist.broadcast(tensor.detach(), group=group, group_src=0)
