"""Embedding lookups concatenated with other tensors: one matrix (B, columns), in one call.

With ``rows = embedding_bags(weights, ids, ...)``, and ``order`` naming lookup k by k and the i-th
of ``others`` by -1 - i::

    out[0]   = cat([rows[k] or others[i] by order], 1)          (B, columns)
    out[1:]  = the rows of lookups that order leaves out

Lookups in ``order`` give (B, dim) each. On a GPU they are written to their place, and the gradients
of their tables read slices of the gradient of ``out[0]``: nothing is concatenated, cut or cast
piece by piece. The dtype of ``out[0]`` is that of ``cat``.

``narrow`` promises that all readers of ``out[0]`` cast it to the dtype of autocast: a GPU under
autocast then writes it in that dtype, rounded once from float32 sums. ``aligned`` promises that all
readers take rows of any stride: on a GPU rows then start at multiples of 16 bytes
(:mod:`~recast.runtime.aligned`).

Raises InputError for a wrong ``order``, and what ``embedding_bags`` raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recast.errors import InputError
from recast.runtime.cost import Cost, moved
from recast.runtime.embedding import cuda as embedding_cuda
from recast.runtime.embedding import embedding_bags
from recast.runtime.embedding.call import Call, call_of
from recast.runtime.embedding.columns import Columns, columns_of
from recast.runtime.gpu import cuda_launch
from recast.runtime.op import Kernel, Op, Sample, register, wants_grad
from recast.runtime.recorded import recording

_LOOKUPS = 9  # arguments of embedding_bags, without its flag

SCHEMA = (
    "(Tensor[] weights, Tensor[] ids, Tensor?[] offsets, Tensor?[] per_sample_weights, int[] table,"
    " str[] mode, int?[] padding_idx, bool[] include_last_offset, bool[] sparse, Tensor[] others,"
    " int[] order, bool narrow=False, bool aligned=False) -> Tensor[]"
)


def _columns(
    args: tuple[Any, ...], cast: torch.dtype | None = None, aligned: bool = False
) -> Columns:
    weights, ids, table, mode = args[0], args[1], args[4], args[5]
    others, order = args[_LOOKUPS : _LOOKUPS + 2]
    for k in order:
        if 0 <= k < len(ids) and mode[k] == "none" and ids[k].dim() != 1:
            shape = tuple(ids[k].shape)
            raise InputError(f"lookup {k} of ids {shape} gives other than one row a sample")
    return columns_of([weights[t] for t in table], others, order, cast, aligned)


# ---------------------------------------------------------------- the definition


def reference(*args: Any) -> list[Tensor]:
    """Plain torch: the lookups, then cat. See the module docstring."""
    return _columns(args).joined(embedding_bags.reference(*args[:_LOOKUPS]), args[_LOOKUPS])


def fake(*args: Any) -> list[Tensor]:
    """Shapes and dtypes of the result."""
    return _columns(args).joined(embedding_bags.fake(*args[:_LOOKUPS]), args[_LOOKUPS])


# ---------------------------------------------------------------- the kernels


def _call(args: tuple[Any, ...], cast: torch.dtype | None = None, aligned: bool = False) -> Call:
    call = call_of(*args[:_LOOKUPS])
    call.columns, call.others = _columns(args, cast, aligned), args[_LOOKUPS]
    return call


def forward(*args: Any) -> list[Tensor]:
    """The result, without autograd; contiguous, and each tensor with its own storage."""
    return embedding_bags.run(_call(args), apart=True)


def differentiable(*args: Any) -> list[Tensor]:
    """The result, recorded by autograd if an input requires a gradient."""
    return _differentiable(args, None)


def autocast(dtype: torch.dtype, *args: Any) -> list[Tensor]:
    """The result under autocast to ``dtype``."""
    return _differentiable(args, dtype)


def _differentiable(args: tuple[Any, ...], dtype: torch.dtype | None) -> list[Tensor]:
    narrow, aligned = (*args[_LOOKUPS + 2 :], False, False)[:2]
    records = wants_grad((args[0], args[3], args[_LOOKUPS]))
    if torch._C._len_torch_dispatch_stack() and recording.current() is None:
        if not records:
            with torch._C._AutoDispatchBelowAutograd():
                found: list[Tensor] = embedding_cat.target(*args)
            return found
        rows = embedding_bags.differentiable(*args[:_LOOKUPS])  # a dispatch mode sees this, and cat
        return _columns(args).joined(rows, args[_LOOKUPS])
    call = _call(args, dtype if narrow else None, aligned)
    return embedding_bags.recorded(call, records)


# ---------------------------------------------------------------- cost, samples


def cost(*args: Any) -> Cost:
    """The cost of the lookups, which write their rows once, and of copying the other tensors."""
    copied = moved(*args[_LOOKUPS])
    return embedding_bags.cost(*args[:_LOOKUPS]) + Cost(0, 2 * copied)


def samples() -> list[Sample]:
    """Odd widths, every mode, bags of all sizes, shared tables, parts left out, no rows."""
    g = torch.Generator().manual_seed(17)

    def ids(rows: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(0, rows, shape, generator=g, dtype=dtype)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    def sample(
        label: str, weights: list[Tensor], lookups: list[Any], others: list[Tensor],
        order: list[int], *flags: bool,
    ) -> Sample:  # fmt: skip
        """``lookups``: (ids, table, mode[, offsets[, weights]]) each."""
        full = [(*x, *(None, None)[len(x) - 3 :]) for x in lookups]
        chosen, table, mode, offsets, factors = map(list, zip(*full, strict=True))
        n = len(full)
        off = [False] * n
        args = (weights, chosen, offsets, factors, table, mode, [None] * n, off, off)
        return Sample(label, (*args, others, order, *flags))

    starts = torch.tensor([0, 0, 3, 3, 8])
    tables = [rand(30, 16), rand(7, 8), rand(50, 9), rand(9, 1)]
    mixed = [
        (ids(30, 5), 0, "none"), (ids(7, 5, 3, dtype=torch.int32), 1, "mean"),
        (ids(50, 12), 2, "sum", starts, rand(12)), (ids(9, 5, 1), 3, "sum"),
        (ids(30, 5, 2), 0, "max"),
    ]  # fmt: skip
    wide, odd = rand(5, 3), rand(3, 5).t()
    ones = [(ids(7, 33, 1), 1, "sum"), (ids(30, 33), 0, "none"), (ids(7, 33), 1, "none")]
    bags = [(ids(7, 5, 2), 1, "sum")]
    none = [(ids(7, 0, 2), 1, "sum"), (ids(30, 0), 0, "none")]
    return [
        sample("all kinds", tables, mixed, [wide], [0, 1, 2, 3, 4, -1], False, True),
        sample("some apart", tables, mixed, [wide, odd], [-2, 4, 1, -1, 0]),
        sample("one-hot", tables[:2], ones, [rand(33, 10)], [0, 1, 2, -1], True, True),
        sample("no other", tables[:2], ones, [], [2, 0, 1], True),
        sample("alone", tables[1:2], [(bags[0][0], 0, "sum")], [], [0], False, True),
        sample("empty batch", tables[:2], none, [rand(0, 3)], [1, -1, 0], False, True),
    ]


embedding_cat = register(
    Op(
        name="embedding_cat",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        samples=samples,
        devices=("cpu", "cuda"),
        autocast=autocast,
        cost=cost,
        kernels=(
            Kernel("cuda", "cuda", embedding_cuda.CONDITION, cuda_launch.why_not),
            Kernel("torch", "cpu", "the lookups, and torch's cat behind them", lambda: None),
        ),
    )
)
