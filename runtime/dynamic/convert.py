"""Makes plain embedding modules dynamic: they stay the same modules with the same Parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from recast.errors import NotBuiltError, UsageError
from recast.runtime.dynamic import cuda_table, cuda_tiered
from recast.runtime.dynamic import step as dynamic_step
from recast.runtime.dynamic import tiers as dynamic_tiers
from recast.runtime.dynamic.cuda_table import CudaTable
from recast.runtime.dynamic.cuda_tiered import TieredCudaTable
from recast.runtime.dynamic.module import DynamicEmbedding, DynamicEmbeddingBag, _Dynamic
from recast.runtime.dynamic.settings import Dynamic, Initial, check, initial_of
from recast.runtime.dynamic.slab import hold, reserve
from recast.runtime.dynamic.table import _TABLES, DynamicTable, only_read
from recast.runtime.gpu.gpu import serving
from recast.runtime.ranks import shards

_KINDS: dict[type[nn.Module], type[_Dynamic]] = {
    nn.Embedding: DynamicEmbedding,
    nn.EmbeddingBag: DynamicEmbeddingBag,
}
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# In the id table, at most: the facts about a row, its slot in buckets that are three eighths full,
# and its slot in the old buckets, which exist beside the new ones while the table grows.
_BYTES_OF_AN_ID = 20 + 34 + 10


@contextmanager
def made(
    model: nn.Module, given: object, optimizer: torch.optim.Optimizer | None, *, lazy: bool,
    keep: bool = True, parts: int = 1,
) -> Iterator[list[str]]:  # fmt: skip
    """Make tables dynamic; yields a sentence about each. If the body raises, or without ``keep``,
    they become plain again. ``parts``: ranks over which they will be sharded.

    Lookups in the body store nothing.

    Raises:
        UsageError: an unknown name, wrong settings, or an optimizer that moves every row.
    """
    if not isinstance(given, Mapping) or not given:
        raise UsageError(
            f"optimize: tables={given!r}",
            why="tables names modules of the model, and says how each is dynamic",
            tries=('tables={"user_emb": recast.Dynamic(max_rows=1_000_000)}',),
        )
    undo: list[Callable[[], None]] = []
    try:
        with only_read():
            yield [_make(model, name, check(name, how), optimizer, lazy, parts, undo)
                   for name, how in given.items()]  # fmt: skip
    except BaseException:
        keep = False
        raise
    finally:
        for back in reversed([] if keep else undo):
            back()


def tables_of(model: nn.Module) -> dict[str, DynamicTable]:
    """The dynamic tables of ``model``, by the paths of their modules."""
    return {path: m.table for path, m in model.named_modules() if isinstance(m, _Dynamic)}


def _make(
    model: nn.Module, name: str, how: Dynamic, optimizer: torch.optim.Optimizer | None,
    lazy: bool, parts: int, undo: list[Callable[[], None]],
) -> str:  # fmt: skip
    module = _module(model, name)
    weight = module.weight
    sharing = _sharing(model, name, weight)
    for one in sharing.values():
        _check_module(name, one)
    padding = {m.padding_idx for m in sharing.values()}
    if len(padding) > 1:
        raise _refused(name, f"its modules {', '.join(sharing)} have different padding_idx")
    if optimizer is not None:
        sparse = all(m.sparse for m in sharing.values())
        dynamic_step.check(optimizer, weight, name, lazy=lazy, sparse=sparse)
    real = weight.detach()
    index = padding.pop()
    if index is not None:
        real = torch.cat([real[:index], real[index + 1 :]])
    initial = how.initial or initial_of(real)
    on = serving(weight)
    if on is None:
        capacity = _capacity(name, how, weight, optimizer, lazy, parts)
        if capacity < parts:
            raise UsageError(
                f"tables: {name}: its budget is {capacity} row{'s' * (capacity != 1)}, and there"
                f" are {parts} ranks",
                why="every rank has its share of the rows",
                tries=(f"recast.Dynamic(max_rows={parts}), or more",),
            )
        table = DynamicTable(name, weight.shape[1], how, capacity, initial, index)
    else:
        cuda_table.check(name, how, weight)
        row = _bytes_of_row(weight, optimizer, lazy)
        kind = TieredCudaTable if how.tiers else CudaTable
        table = kind(name, weight.shape[1], how, row, initial, index, on, parts)
    before = weight.data, weight.grad, dict(optimizer.state.get(weight, {})) if optimizer else {}
    undo.append(lambda: _back(weight, sharing, before, optimizer))
    in_record = dynamic_step.states_in_record(optimizer, weight, lazy=lazy)
    shape = table.slab_rows, table.dim * (1 + len(in_record))
    record = reserve(shape, weight.dtype, weight.device)
    slab, *states = record.split(table.dim, 1)
    if index is not None:
        slab[0] = weight.detach()[index]
    weight.grad = None
    weight.data = slab
    table.mark_generation(slab)
    hold(table, record, [weight, *states])
    _TABLES[weight] = table
    for one in sharing.values():
        vars(one)["table"] = table
        one.__class__ = _KINDS[type(one)]
    if optimizer is not None:
        spare = dict(zip(in_record, states, strict=True))
        dynamic_step.adopt(optimizer, weight, table, spare, lazy=lazy)
    if how.tiers:
        undo.append(lambda: dynamic_tiers.detach(table))
        if isinstance(table, TieredCudaTable):
            cuda_tiered.attach(
                table, weight, optimizer, lazy=lazy, bytes_of_an_id=_BYTES_OF_AN_ID, parts=parts
            )
        else:
            dynamic_tiers.attach(table, weight, optimizer, lazy=lazy, parts=parts)
    return _sentence(name, table, before[0], how.initial is None, parts)


def _back(
    weight: Tensor, sharing: dict[str, Any], before: tuple[Any, ...],
    optimizer: torch.optim.Optimizer | None,
) -> None:  # fmt: skip
    for one in sharing.values():
        for plain, kind in _KINDS.items():
            if type(one) is kind:
                one.__class__ = plain  # type: ignore[assignment]
        vars(one).pop("table", None)
    _TABLES.pop(weight, None)
    shards.forget(weight)
    weight.data, weight.grad, state = before
    if optimizer is not None:
        optimizer.state.pop(weight, None)
    if optimizer is not None and state:
        optimizer.state[weight].update(state)


def _sentence(name: str, table: DynamicTable, old: Tensor, measured: bool, parts: int) -> str:
    how: Initial = table.initial
    words = f"mean {how.a:.3g} and deviation {how.b:.3g}"
    words = words if how.kind == "normal" else f"from {how.a:.3g} to {how.b:.3g}"
    source = ", as its own rows were" if measured else ""
    room = f"{table.capacity} rows"
    if isinstance(table, CudaTable):
        room += f" in buckets of {table.index.slots} on {table.index.gpu.device}"
    if isinstance(table, TieredCudaTable):
        room += f" and {parts * table.tier.capacity if table.tier else 0} below"
    elif table.tier is not None:
        room += f" in memory and {table.tier.capacity} on disk"
    return (
        f"{name} is dynamic: at most {room}; new ones are {how.kind},"
        f" {words}{source}; the {old.shape[0]} rows that the model came with are dropped"
    )


def _module(model: nn.Module, name: str) -> Any:
    known = [p for p, m in model.named_modules() if isinstance(m, tuple(_KINDS))]
    try:
        module = model.get_submodule(name)
    except AttributeError:
        module = None
    if module is None or not name:
        raise UsageError(
            f"tables: the model has no module {name!r}",
            why=f"its embedding modules are {', '.join(known) or 'none'}",
        )
    if isinstance(module, _Dynamic):
        raise _refused(name, "it is dynamic already")
    if type(module) not in _KINDS:
        raise _refused(
            name, f"it is a {type(module).__name__}", "a plain nn.Embedding or nn.EmbeddingBag"
        )
    return module


def _sharing(model: nn.Module, name: str, weight: Tensor) -> dict[str, Any]:
    """All modules that hold ``weight``."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        if any(p is weight for p in module._parameters.values()):
            if type(module) not in _KINDS:
                raise _refused(
                    name, f"{path or 'the model'} holds its weight too, and is no embedding"
                )
            found[path] = module
    return found


def _check_module(name: str, module: Any) -> None:
    weight = module.weight
    if module.max_norm is not None or module.scale_grad_by_freq:
        raise _refused(name, "it has max_norm or scale_grad_by_freq")
    if parametrize.is_parametrized(module) or "forward" in vars(module):
        raise _refused(name, "its weight or its forward is not its own")
    if not weight.is_cpu and serving(weight) is None:
        raise NotBuiltError(
            f"tables: {name} is on {weight.device}",
            why="dynamic tables live in the memory of the host, or of a GPU that runs our kernels",
            tries=("model.cpu()", "recast env says what is missing"),
        )
    if weight.dtype not in _DTYPES:
        raise _refused(name, f"its weight is {weight.dtype}")


def _capacity(
    name: str, how: Dynamic, weight: Tensor, optimizer: torch.optim.Optimizer | None, lazy: bool,
    parts: int,
) -> int:  # fmt: skip
    if how.max_rows is not None:
        return how.max_rows
    if how.tiers:
        return dynamic_tiers.rows_of_host(
            name, how, weight, optimizer, lazy=lazy, other_bytes=_BYTES_OF_AN_ID, parts=parts
        )
    assert isinstance(how.max_bytes, int)  # check() has made it a number
    row = _bytes_of_row(weight, optimizer, lazy) + _BYTES_OF_AN_ID
    if how.max_bytes < row:
        raise UsageError(
            f"tables: {name}: max_bytes={how.max_bytes} is less than one row",
            why=f"a row takes {row} bytes with its optimizer state and its id",
        )
    return how.max_bytes // row


def _bytes_of_row(weight: Tensor, optimizer: torch.optim.Optimizer | None, lazy: bool) -> int:
    """Bytes of one row with its optimizer state."""
    own = weight.shape[1] * weight.element_size()
    return own + dynamic_step.bytes_of_state(optimizer, weight, lazy=lazy)


def _refused(name: str, why: str, *tries: str) -> UsageError:
    return UsageError(f"tables: {name} cannot be dynamic", why=why, tries=tries)
