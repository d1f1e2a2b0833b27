"""The products of a linear layer on the GPU, each with what follows it, in one of two ways.

"cublaslt" lets cublasLt's epilogue do relu, mask, bias and bias gradient, by one of the algorithms
that it proposes; "plain" is torch's own product and a kernel behind it. Between them nothing
differs but rounding, so each product takes the way that is the fastest for it: cublasLt's order is
that of an estimate, so all it proposes are timed, up to eight. With Z the mask of relu and dropout,

    forward          Y = dropout(relu(X W' + b)), Z     RELU_AUX_BIAS, or RELU_BIAS and a kernel
    input gradient   dX = scale * (dY W) * Z, db        DRELU_BGRAD, or DRELU and a sum of columns;
                                                        Z and db of the layer below
    weight gradient  dW = dY' X, db                     BGRAD; db where no mask was applied above

Gradients at a pre-activation of exactly 0 are torch's, that is 0. What cublasLt writes into the
mask there NVIDIA leaves open, so the algorithm is asked: on its first use it gets a product of
zeros. One that lets the gradient pass is not trusted with masks: a kernel reads them off the
output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.runtime import cublaslt, fastest, mlp_mask, recording
from recast.runtime.cublaslt import Epilogue, Ready
from recast.runtime.gpu import Gpu

# The ways by cublasLt, and which of the algorithms it proposes each takes.
_NUMBERS = ("second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_RANKS = {"cublaslt": 0} | {f"cublaslt {word}": 1 + k for k, word in enumerate(_NUMBERS)}
# Likewise, the bias gradient in a kernel of its own: fewer algorithms can do without.
_APART = {f"{way}, sums apart": rank for way, rank in _RANKS.items() if rank < 4}
_MANY = 4096  # rows from which on products without an epilogue are worth a choice
_COMPARED = 4096  # rows of a result that tell whether two ways compute the same
# Rows from which on cublasLt may sum a bias gradient. For one row some of its versions write a
# wrong one, and under compute-sanitizer so does one for seven; so few take no time the plain way.
# A power of two, as in the keys of choices.
_FEWEST = 64
_stops_at_zero: dict[bytes, bool] = {}  # algorithm: its mask's bit at 0 is 0


class After(NamedTuple):
    """What follows the product of a linear layer."""

    relu: bool
    p: float  # of the dropout; 0: none
    number: int  # of the layer, for its own random numbers


def rows(x: Tensor) -> Tensor:
    """(rows, features) of any (..., features), with features side by side."""
    x = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    n, width = x.shape
    dense = (width == 1 or x.stride(1) == 1) and (n == 1 or x.stride(0) >= width)
    return x if dense else x.contiguous()


# ---------------------------------------------------------------- forward


def forward(
    gpu: Gpu,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    after: After,
    seed: Tensor | None,
    keeps: bool,
) -> tuple[Tensor, Tensor | None]:
    """(rows, out) and, with ``keeps``, its mask, where there is relu or dropout.

    ``x`` (rows, in), ``weight`` (out, in), as :func:`rows` gives them; ``bias`` (out,), contiguous;
    all of one dtype. ``seed``: of :func:`mlp_mask.seed_for`, where there is dropout.
    """
    if not after.relu and not after.p:
        return F.linear(x, weight, bias), None
    bits = mlp_mask.empty(x.shape[0], weight.shape[0], x) if keeps else None

    def plain() -> Tensor:
        y = F.linear(x, weight, bias)
        _activate(gpu, y, y, bits, after, seed)
        return y

    if not after.relu:
        return plain(), bits

    def by_cublaslt(rank: int) -> Tensor:
        y = x.new_empty(x.shape[0], weight.shape[0])
        if not after.p and bits is not None and _with_mask(x, weight, bias, y, bits, rank):
            return y
        ready = _relu(x, weight, bias, y, None, rank)
        if ready is None:
            return plain()
        ready.run()
        if after.p or bits is not None:
            _activate(gpu, y, y if after.p else None, bits, after, seed)
        return y

    key = ("forward", bias is None, bool(after.p), keeps, *_sizes(x, weight.shape[0]))
    way = fastest.chosen(key)
    if way is None:
        columns = weight.shape[0]
        like = x.new_empty(x.shape[0], columns)

        def exists(rank: int) -> bool:
            return _relu(x, weight, bias, like, None, rank) is not None

        def results(y: Tensor) -> tuple[Tensor | None, ...]:
            mask = None if bits is None else mlp_mask.unpack(bits[:_COMPARED], columns)
            return y[:_COMPARED], mask

        way = fastest.choose(key, _ways(x, by_cublaslt, exists, plain, key), x, results)
        if bits is not None and not after.p and fastest.chosen(key) is not None and _may(x):
            _tell_of_masks(key, [_relu(x, weight, bias, like, bits, r) for r in _RANKS.values()])
    rank = _RANKS.get(way)
    return (plain() if rank is None else by_cublaslt(rank)), bits


def _tell_of_masks(key: tuple[object, ...], found: Sequence[Ready | None]) -> None:
    """Note which algorithms write the mask themselves, and what is wrong with that of others."""
    stops = [None if f is None else _stops_at_zero.get(f.product.algorithm) for f in found]
    told = {True: "by the product", False: "by a kernel: the bit of a sum of 0 is set"}
    for way, ready, each in zip(_RANKS, found, stops, strict=True):
        why = "by a kernel: no such algorithm" if ready is None else "by a kernel: not asked"
        fastest.leave_out(key, f"mask, {way}", why if each is None else told[each])


def _activate(
    gpu: Gpu, y: Tensor, out: Tensor | None, bits: Tensor | None, after: After, seed: Tensor | None
) -> None:
    seed = seed if after.p else None
    mlp_mask.activate(gpu, y, out, bits, relu=after.relu, p=after.p, seed=seed, layer=after.number)


def _relu(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, bits: Tensor | None, rank: int
) -> Ready | None:
    if bits is None:
        epilogue = Epilogue.RELU if bias is None else Epilogue.RELU_BIAS
    else:
        epilogue = Epilogue.RELU_AUX if bias is None else Epilogue.RELU_AUX_BIAS
    return cublaslt.product(x, weight.t(), y, epilogue, bias, bits, rank)


def _with_mask(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, bits: Tensor, rank: int
) -> bool:
    """relu(x weight' + bias) and its mask by one product; False: nothing was done."""
    ready = _relu(x, weight, bias, y, bits, rank)
    if ready is None:
        return False
    algorithm = ready.product.algorithm
    stops = _stops_at_zero.get(algorithm)
    if stops is None:
        if recording.current() is not None or (
            x.is_cuda and torch.cuda.is_current_stream_capturing()
        ):
            return False
        stops = _stops_at_zero[algorithm] = _ask(ready, x, bias, bits)
    if stops:
        ready.run()
    return stops


def _ask(ready: Ready, x: Tensor, bias: Tensor | None, bits: Tensor) -> bool:
    """Whether the mask is 0 where the sum is exactly 0. The device is waited for."""
    weight, _, out, _, mask = ready.addresses
    # The product is made for the leading dimension of x, and for its and the bias's alignment.
    zeros = x.new_zeros(x.shape[0] * max(x.stride(0), x.shape[1]) + cublaslt.ALIGNMENT)
    none = x.new_zeros(ready.out.shape[1] + cublaslt.ALIGNMENT)
    of_x, of_bias = (
        -(-t.data_ptr() // cublaslt.ALIGNMENT) * cublaslt.ALIGNMENT for t in (zeros, none)
    )
    addresses = (weight, of_x, out, 0 if bias is None else of_bias, mask)
    ready._replace(addresses=addresses).run()
    return not bool(mlp_mask.unpack(bits, ready.out.shape[1]).any())


# ---------------------------------------------------------------- backward


def input_gradient(
    gpu: Gpu,
    dy: Tensor,
    weight: Tensor,
    bits: Tensor | None,
    scale: float,
    sums: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """dX (rows, in); with ``bits``, the mask of the layer below, ``scale * dX`` under that mask.

    And the column sums of that, which are the bias gradient of the layer below, of dtype ``sums``.
    """
    if bits is None:
        return _product(dy, weight), None
    width = weight.shape[1]

    def plain() -> tuple[Tensor, Tensor | None]:
        dx = dy.mm(weight)
        found = None if sums is None else dx.new_empty(width, dtype=sums)
        mlp_mask.gradient(gpu, dx, bits, scale, dx, found)
        return dx, found

    def prepared(rank: int, apart: bool) -> tuple[Ready | None, Tensor | None]:
        found = None if sums is None or apart else dy.new_empty(width)
        epilogue = Epilogue.DRELU if found is None else Epilogue.DRELU_BGRAD
        dx = dy.new_empty(dy.shape[0], width)
        return cublaslt.product(dy, weight, dx, epilogue, found, bits, rank), found

    def by_cublaslt(rank: int, apart: bool = False) -> tuple[Tensor, Tensor | None]:
        ready, found = prepared(rank, apart)
        if ready is None:
            return plain()
        ready.run(scale)
        if sums is not None and found is None:
            return ready.out, ready.out.sum(0, dtype=sums)
        return ready.out, None if found is None or sums is None else found.to(sums)

    key = ("input gradient", sums, *_sizes(dy, width))
    way = fastest.chosen(key)
    if way is None:
        ways = _ways(dy, by_cublaslt, lambda rank: prepared(rank, False)[0] is not None, plain, key)
        if sums is not None and _may(dy):
            last = ways.pop("plain")
            for name, number in _APART.items():
                if prepared(number, True)[0] is not None:
                    ways[name] = partial(by_cublaslt, number, True)
            ways["plain"] = last
        way = fastest.choose(key, ways, dy, lambda found: (found[0][:_COMPARED], found[1]))
    if way in _APART:
        return by_cublaslt(_APART[way], True)
    rank = _RANKS.get(way)
    return plain() if rank is None else by_cublaslt(rank)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b, (n, k) by (k, m): by torch, or where there are many rows by what is the fastest."""

    def plain() -> Tensor:
        return a.mm(b)

    def prepared(rank: int) -> Ready | None:
        out = a.new_empty(a.shape[0], b.shape[1])
        return cublaslt.product(a, b, out, Epilogue.NONE, rank=rank)

    def by_cublaslt(rank: int) -> Tensor:
        ready = prepared(rank)
        if ready is None:
            return plain()
        ready.run()
        return ready.out

    if a.shape[0] < _MANY:
        return plain()
    key = ("product", *_sizes(a, b.shape[1]))
    way = fastest.chosen(key)
    if way is None:
        ways = _ways(a, by_cublaslt, lambda rank: prepared(rank) is not None, plain, key)
        way = fastest.choose(key, ways, a, lambda found: (found[:_COMPARED],))
    rank = _RANKS.get(way)
    return plain() if rank is None else by_cublaslt(rank)


def weight_gradient(dy: Tensor, x: Tensor, out: Tensor, sums: Tensor | None) -> Callable[[], None]:
    """What writes dY' X to ``out`` (out, in) and the column sums of dY to ``sums`` (out,).

    To be called once, on any stream; both outputs are of one dtype.
    """

    def plain() -> None:
        if out.dtype == dy.dtype:
            torch.mm(dy.t(), x, out=out)
        else:
            out.copy_(dy.t().mm(x))
        if sums is not None:
            torch.sum(dy, 0, dtype=sums.dtype, out=sums)

    if sums is None and out.dtype == dy.dtype and dy.shape[0] < _MANY:
        return plain

    def prepared(rank: int) -> Ready | None:
        epilogue = Epilogue.NONE if sums is None else Epilogue.BGRAD
        few = sums is not None and dy.shape[0] < _FEWEST
        return None if few else cublaslt.product(dy.t(), x, out, epilogue, sums, rank=rank)

    def by_cublaslt(rank: int) -> None:
        ready = prepared(rank)
        if ready is None:
            plain()
        else:
            ready.run()

    key = ("weight gradient", sums is None, out.dtype, *_sizes(dy, x.shape[1]))
    way = fastest.chosen(key)
    if way is None:
        ways = _ways(dy, by_cublaslt, lambda rank: prepared(rank) is not None, plain, key)
        way = fastest.choose(
            key, ways, dy, lambda _: (out.clone(), None if sums is None else sums.clone())
        )
    rank = _RANKS.get(way)
    return plain if rank is None else partial(by_cublaslt, rank)


def _ways(
    x: Tensor,
    by_cublaslt: Callable[[int], Any],
    exists: Callable[[int], bool],
    plain: Callable[[], Any],
    key: tuple[object, ...],
) -> dict[str, Callable[[], Any]]:
    """Those that there are; the plain one, which there always is, last."""
    ways: dict[str, Callable[[], Any]] = {}
    if _may(x):
        ways = {name: partial(by_cublaslt, rank) for name, rank in _RANKS.items() if exists(rank)}
        if not ways:
            fastest.leave_out(key, "cublaslt", "it has no algorithm for this")
    return {**ways, "plain": plain}


def _may(x: Tensor) -> bool:
    """Whether cublasLt may multiply for torch: its fp32 sums are what torch's settings ask for."""
    half = x.dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation
    return not half and cublaslt.serves(x)


def _sizes(x: Tensor, width: int) -> tuple[object, ...]:
    """What a choice is remembered for: batches of about as many rows choose alike."""
    rows, columns = x.shape
    return x.get_device(), x.dtype, cublaslt.tf32(x.dtype), rows.bit_length(), columns, width
