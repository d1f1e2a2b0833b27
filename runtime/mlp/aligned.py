"""The operands of a chain's first layer on the GPU, whose input has rows of any width.

    X W' = [X 0] [W 0]'        dW = (dY' [X 0]) without its last columns, dX = (dY [W 0]) likewise

with just enough zeros for rows to start at multiples of 16 bytes (:mod:`~recast.runtime.aligned`):
products of such rows take a half to a quarter of the time. The weight is copied once a step, which
costs little, and nothing extra when it is cast anyway; the input only if there are no zeros behind
its rows already, or if it is cast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from recast.runtime import aligned, fastest
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.mlp import casts
from recast.runtime.mlp.products import arithmetic, rows

_COMPARED = 4096  # rows of a result to compare, to check that both ways agree
_ALIGNED, _AS_GIVEN = "aligned", "as given"

Operands = tuple[Tensor, Tensor]


def operands(gpu: Gpu, x: Tensor, weight: Tensor, trains: bool) -> Operands:
    """Input (rows, in) and weight (out, in), either both padded with zero columns or neither.

    ``x`` (..., in) is cast to the dtype of ``weight``; ``trains``: gradients will follow. Takes the
    faster way, timed once per shape; if nothing can be timed, pads unless that copies the input.
    """
    dtype, (out, width) = weight.dtype, weight.shape
    if aligned.fits(width, dtype):
        return rows(x.to(dtype)), rows(weight)
    marked = aligned.is_marked(x) and x.dtype == dtype

    def whole(matrix: Tensor) -> Tensor:
        if aligned.is_marked(matrix) and matrix.dtype == dtype:
            return aligned.whole(matrix)
        return casts.widened(gpu, matrix, dtype)

    def wide() -> Operands:
        return whole(x if marked else _flat(x)), whole(weight)

    def given() -> Operands:
        return rows(x.to(dtype)), rows(weight)

    free = marked or x.dtype != dtype
    count = x.numel() // width
    sizes = count.bit_length(), width, out
    of = dtype, arithmetic(dtype), x.dtype  # in TF32 narrow rows cost far more than in float32
    key = "first layer", x.get_device(), *of, marked, trains, *sizes
    way = fastest.chosen(key)
    if way is None:
        ways = {_ALIGNED: partial(_layer, wide, trains), _AS_GIVEN: partial(_layer, given, trains)}
        if free:
            ways = dict(reversed(ways.items()))
        way = fastest.choose(key, ways, x, lambda y: (y[:_COMPARED],))
    return wide() if way == _ALIGNED else given()


def _flat(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _layer(made: Callable[[], Operands], trains: bool) -> Tensor:
    """The products of a layer; its result stands in for the upstream gradient."""
    x, weight = made()
    y = x.mm(weight.t())
    if trains:
        y.t().mm(x)
        y.mm(weight)
    return y


def only_columns(work: Callable[[], None], wide: Tensor, out: Tensor) -> Callable[[], None]:
    """Run ``work``, which writes ``wide``, then copy its first columns to ``out``."""

    def run() -> None:
        work()
        out.copy_(wide[:, : out.shape[1]])

    return run
