"""All embedding lookups of a step in tables that are stored in fewer bits, for inference.

Lookup k reads the table ``W = unpack(tables[table[k]])`` of shape (rows, dim[table[k]]), float32,
stored in ``precision[table[k]]`` (see :mod:`.precision`); only looked-up rows are unpacked.
Lookups, bags, modes, weights, padding and errors are those of ``embedding_bags`` on W, and the
float32 result is the same bit for bit. Tables have no gradient: with ``training`` the op raises
UsageError.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.errors import InputError, UsageError
from recast.runtime import device
from recast.runtime.cost import Cost, moved
from recast.runtime.embedding import precision as formats
from recast.runtime.embedding.call import (
    MODES,
    Call,
    call_of,
    check,
    check_values,
    id_error,
    offset_error,
)
from recast.runtime.embedding.outputs import allocate, run_new
from recast.runtime.embedding.samples import samples as plain_samples
from recast.runtime.op import Kernel, Op, Sample, cpu_kernels, register, wants_grad

SCHEMA = (
    "(Tensor[] tables, Tensor[] ids, Tensor?[] offsets, Tensor?[] per_sample_weights, int[] table,"
    " str[] mode, int?[] padding_idx, bool[] include_last_offset, str[] precision, int[] dim,"
    " bool training) -> Tensor[]"
)
_FORMATS = {"fp16": 1, "bf16": 2, "int8": 3, "int4": 4}  # as in csrc/embedding_bags.cpp


@dataclass(slots=True, eq=False)
class _Stored:
    """What does not change between calls: the format of each table, and the layout in C++."""

    precision: tuple[str, ...]
    dim: tuple[int, ...]
    native: Any = None


@lru_cache(maxsize=256)
def _stored(precision: tuple[str, ...], dim: tuple[int, ...], *layout: Any) -> _Stored:
    unknown = set(precision) - set(formats.PRECISIONS)
    if unknown:
        raise InputError(
            f"unknown precision {sorted(unknown)[0]!r}",
            tries=[f"one of {', '.join(formats.PRECISIONS)}"],
        )
    return _Stored(precision, dim)


def _read(*args: Any) -> tuple[Call, _Stored]:
    """The call over its packed tables, and how these are stored."""
    tables, ids, offsets, weights, *layout, precision, dim, training = args
    table, mode, padding, ends = layout
    if training:
        raise UsageError(
            "lookups in tables that are stored for inference, in train mode",
            why=f"tables in {', '.join(dict.fromkeys(precision))} have no gradient",
            tries=(
                "model.eval() for inference",
                "optimize() without precision, to train",
                "embedding.to(torch.bfloat16): tables of that dtype train",
            ),
        )
    call = call_of(tables, ids, offsets, weights, table, mode, padding, ends, [False] * len(table))
    return call, _stored(tuple(precision), tuple(dim), *map(tuple, layout))


def _wide(call: Call, stored: _Stored) -> Call:
    """The same call on placeholder tables with the unpacked shapes and dtype."""
    zero = torch.zeros((), dtype=torch.float32)
    weights = [
        zero.expand(t.shape[0], d) for t, d in zip(call.weights, stored.dim, strict=True)
    ]  # fmt: skip
    return Call(weights, call.ids, call.offsets, call.per_sample_weights, call.layout)


# ---------------------------------------------------------------- the definition


def reference(*args: Any) -> list[Tensor]:
    """Plain torch, one lookup after the other, each unpacking the rows it needs. See above."""
    call, stored = _read(*args)
    if call.weights[0].is_meta:
        return fake(*args)
    _check_tables(call, stored)
    wide = _wide(call, stored)
    check(wide)
    check_values(wide)
    return [_reference_lookup(call, stored, k) for k in range(len(call.ids))]


def _check_tables(call: Call, stored: _Stored) -> None:
    for t, (table, precision, dim) in enumerate(
        zip(call.weights, stored.precision, stored.dim, strict=True)
    ):
        width = formats.row_bytes(precision, dim) // table.element_size()
        if table.dim() != 2 or table.shape[1] != width:
            raise InputError(
                f"table {t} has shape {tuple(table.shape)}, but {dim} columns in {precision} take"
                f" {width} places",
                why="tables are made by recast.runtime.embedding.precision.pack",
            )


def _reference_lookup(call: Call, stored: _Stored, k: int) -> Tensor:
    ids, mode, t = call.ids[k], call.layout.mode[k], call.layout.table[k]
    found, places = torch.unique(ids.reshape(-1), return_inverse=True)
    rows = formats.unpack(call.weights[t][found], stored.precision[t], stored.dim[t])
    if mode == "none":
        return rows[places].reshape(*ids.shape, stored.dim[t])
    padding = call.left_out(k)
    same = [] if padding is None else (found == padding).nonzero().reshape(-1).tolist()
    weights = call.per_sample_weights[k]
    starts, ended = call.starts(k)
    if not len(rows):  # torch refuses a table without rows
        rows = rows.new_zeros((1, stored.dim[t]))
    return F.embedding_bag(
        places.to(starts.dtype),
        rows,
        starts,
        mode="sum" if mode == "total" else mode,
        per_sample_weights=None if weights is None else weights.reshape(-1),
        include_last_offset=ended,
        padding_idx=same[0] if same else None,
    )


def fake(*args: Any) -> list[Tensor]:
    """Shapes and dtypes of the result."""
    call, stored = _read(*args)
    outs = []
    for k, ids in enumerate(call.ids):
        shape = tuple(ids.shape) if call.layout.mode[k] == "none" else (call.bags(k),)
        dim = stored.dim[call.layout.table[k]]
        outs.append(call.weights[0].new_empty((*shape, dim), dtype=torch.float32))
    return outs


# ---------------------------------------------------------------- forward


def forward(*args: Any) -> list[Tensor]:
    """All lookups; each output has its own storage, as compilers expect."""
    return _forward(args, apart=True)


def differentiable(*args: Any) -> list[Tensor]:
    """All lookups. Per-sample weights get their gradient from the reference."""
    if wants_grad((args[3],)):
        return reference(*args)
    if torch._C._len_torch_dispatch_stack():  # a user's dispatch mode sees the op
        with torch._C._AutoDispatchBelowAutograd():
            return quantised_embedding_bags.target(*args)
    return _forward(args, apart=False)


def _forward(args: tuple[Any, ...], apart: bool) -> list[Tensor]:
    extension = device.extension()
    if extension is None:
        return reference(*args)
    call, stored = _read(*args)
    if stored.native is None:
        layout = call.layout
        stored.native = extension.EmbeddingLayout(
            layout.table, [MODES[m] for m in layout.mode], layout.left_out(),
            layout.include_last_offset, [_FORMATS[p] for p in stored.precision], stored.dim,
        )  # fmt: skip
    step = extension.embedding_step(
        stored.native, call.weights, call.ids, call.offsets, call.per_sample_weights
    )
    return reference(*args) if step is None else _run(step, call, stored, apart)


def _run(step: Any, call: Call, stored: _Stored, apart: bool) -> list[Tensor]:
    dtypes = [torch.float32] * len(call.ids)
    if apart:
        outs = allocate(call, step.shapes(), dtypes, torch.device("cpu"), apart)
        failure = step.run(outs, [], device.threads())
    else:
        outs, failure = run_new(step, dtypes)
    if failure is not None:
        k, is_offset, position = failure
        wide = _wide(call, stored)
        raise offset_error(wide, k, position) if is_offset else id_error(wide, k, position)
    return outs


# ---------------------------------------------------------------- cost, samples


def cost(*args: Any) -> Cost:
    """Each id reads one stored row, with 3 operations a column; each output is written once."""
    call, stored = _read(*args)
    flops = traffic = 0
    for k, ids in enumerate(call.ids):
        t = call.layout.table[k]
        dim = stored.dim[t]
        flops += 3 * ids.numel() * dim
        traffic += ids.numel() * formats.row_bytes(stored.precision[t], dim)
        traffic += moved(ids, call.offsets[k], call.per_sample_weights[k]) + 4 * call.bags(k) * dim
    return Cost(flops, traffic)


def samples() -> list[Sample]:
    """The samples of ``embedding_bags``, with tables alternately in int8 and int4."""
    found = []
    for n, sample in enumerate(plain_samples()):
        weights, *lookups, _ = sample.args[:9]
        precision = [("int8", "int4")[(n + t) % 2] for t in range(len(weights))]
        tables = [formats.pack(w, p) for w, p in zip(weights, precision, strict=True)]
        dims = [w.shape[1] for w in weights]
        found.append(Sample(sample.label, (tables, *lookups, precision, dims, False)))
    return found


quantised_embedding_bags = register(
    Op(
        name="quantised_embedding_bags",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        samples=samples,
        cost=cost,
        trains=False,
        kernels=(
            *cpu_kernels("fp16, bf16, int8 and int4 rows"),
            Kernel("torch", "cpu", "the rows that are looked up, unpacked", lambda: None),
        ),
    )
)
