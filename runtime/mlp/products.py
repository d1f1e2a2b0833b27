"""The products of a linear layer on the GPU, each with what follows it, in one of two ways.

"cublaslt" lets cublasLt's epilogue do relu, mask, bias and bias gradient, by one of the algorithms
that it proposes; "plain" is torch's own product followed by a kernel. They differ in rounding only,
so each product takes the fastest way. cublasLt ranks its proposals by an estimate, so they are
timed: up to eight that may use workspace and four that may not. With Z the mask of relu and
dropout,

    forward          Y = dropout(relu(X W' + b)), Z     RELU_AUX_BIAS; RELU_BIAS and a kernel for Z;
                                                        or BIAS and a kernel for all behind it
    input gradient   dX = scale * (dY W) * Z, db        DRELU_BGRAD, or DRELU and a sum of columns;
                                                        Z and db of the layer below
    weight gradient  dW = dY' X, db                     BGRAD; db where no mask was applied above

Without dropout, if Y is kept anyway, Y can serve as Z: forward is RELU_BIAS alone, and backward a
product and a kernel that reads Y. Which of the two is faster, forward and backward together, is
timed as well (:func:`by_output`).

In TF32 the tensor cores read operands along the summed dimension, as they lie in forward. So with
many rows both gradients are also timed with transposed copies: of W for dX, of dY for dW. The copy
is made at every call (:mod:`~recast.runtime.mlp.turned`), and its time counts.

As in torch, the gradient at a pre-activation of exactly 0 is 0, and relu of NaN is NaN:
:mod:`~recast.runtime.mlp.relu_trust` says which algorithms may compute them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.runtime import device, fastest
from recast.runtime.gpu import cublaslt
from recast.runtime.gpu.cublaslt import Epilogue, Ready
from recast.runtime.gpu.gpu import Gpu, serving
from recast.runtime.mlp import mask as mlp_mask
from recast.runtime.mlp import turned as mlp_turned
from recast.runtime.mlp.mask import Finish, Gate
from recast.runtime.mlp.product_ways import APART, COPY, HOW, RANKS, proposed_product, ways_of
from recast.runtime.mlp.relu_trust import note_trust, run_trusted

_BY_MASK, _BY_OUTPUT = "mask", "output"  # what the gradient of a relu is masked by
MANY = 4096  # rows from which it pays to time ways for products without an epilogue
_COMPARED = 4096  # rows of a result to compare, to check that two ways agree
# Rows from which cublasLt may sum a bias gradient. Some versions write a wrong one for one row, and
# one does for seven under compute-sanitizer; for so few rows the plain way takes no time.
# A power of two, like the row counts in the keys of choices.
_FEWEST = 64
_MASK, _RELU, _AFFINE = range(3)  # how much the epilogue does: less and less
_begins: dict[tuple[object, ...], int] = {}  # the first of these to try: the earlier failed


class ReluDropout(NamedTuple):
    """What follows the product of a linear layer."""

    relu: bool
    p: float  # of the dropout; 0: none
    number: int  # of the layer, for its own random numbers


def rows(x: Tensor) -> Tensor:
    """(rows, features) from any (..., features), with contiguous rows."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    if x.is_contiguous():
        return x
    n, width = x.shape
    dense = (width == 1 or x.stride(1) == 1) and (n == 1 or x.stride(0) >= width)
    return x if dense else x.contiguous()


# ---------------------------------------------------------------- forward


def forward(
    gpu: Gpu,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    after: ReluDropout,
    seed: Tensor | None,
    keeps: bool,
) -> tuple[Tensor, Tensor | None]:
    """(rows, out) and, with ``keeps`` and a relu or dropout, its mask, else None.

    ``x`` (rows, in), ``weight`` (out, in), as :func:`rows` gives them; ``bias`` (out,), contiguous;
    all of one dtype. ``seed``: from :func:`.mask.seed_for`, if there is dropout.
    """
    if not after.relu and not after.p:
        return linear(x, weight, bias), None
    bits = mlp_mask.empty(x.shape[0], weight.shape[0], x) if keeps else None

    def plain() -> Tensor:
        y = F.linear(x, weight, bias)
        _activate(gpu, y, y, bits, after, seed)
        return y

    if not after.relu or not _may(x):
        return plain(), bits
    key = ("forward", bias is None, bool(after.p), keeps, *_sizes(x, weight.shape[0]))

    def by_cublaslt(rank: int) -> Tensor:
        y = x.new_empty(x.shape[0], weight.shape[0])
        # In a kernel that does dropout, relu is free.
        first = _AFFINE if after.p else _begins.get((key, rank), _MASK if keeps else _RELU)
        for means in range(first, _AFFINE):
            mask = bits if means == _MASK else None
            trusted = run_trusted(_relu(x, weight, bias, y, mask, rank), x, mask)
            if trusted:
                if bits is not None and mask is None:
                    _activate(gpu, y, None, bits, after, seed)
                return y
            if trusted is False:
                _begins[key, rank] = means + 1
        ready = _affine(x, weight, bias, y, rank)
        if ready is None:
            return plain()
        ready.run()
        _activate(gpu, y, y, bits, after, seed)
        return y

    way = fastest.chosen(key)
    if way is None:
        columns = weight.shape[0]
        like = x.new_empty(x.shape[0], columns)

        def proposed(rank: int) -> Ready | None:
            found = None if after.p else _relu(x, weight, bias, like, None, rank)
            return found or _affine(x, weight, bias, like, rank)

        def results(y: Tensor) -> tuple[Tensor | None, ...]:
            mask = None if bits is None else mlp_mask.unpack(bits[:_COMPARED], columns)
            return y[:_COMPARED], mask

        way = fastest.choose(key, ways_of(by_cublaslt, proposed, plain, key), x, results)
        if not after.p and fastest.chosen(key) is not None:
            for mask in (None,) if bits is None else (bits, None):
                note_trust(key, [_relu(x, weight, bias, like, mask, r) for r in RANKS.values()])
    rank = RANKS.get(way)
    return (plain() if rank is None else by_cublaslt(rank)), bits


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W' + b by torch or, with many rows, by the fastest way.

    Operands as for :func:`forward`.
    """

    def plain() -> Tensor:
        return F.linear(x, weight, bias)

    def prepared(rank: int) -> Ready | None:
        return _affine(x, weight, bias, x.new_empty(x.shape[0], weight.shape[0]), rank)

    def by_cublaslt(rank: int) -> Tensor:
        ready = prepared(rank)
        if ready is None:
            return plain()
        ready.run()
        return ready.out

    if x.shape[0] < MANY or not _may(x):
        return plain()
    key = ("linear", bias is None, *_sizes(x, weight.shape[0]))
    way = fastest.chosen(key)
    if way is None:
        ways = ways_of(by_cublaslt, prepared, plain, key)
        way = fastest.choose(key, ways, x, lambda found: (found[:_COMPARED],))
    rank = RANKS.get(way)
    return plain() if rank is None else by_cublaslt(rank)


def _activate(
    gpu: Gpu,
    y: Tensor,
    out: Tensor | None,
    bits: Tensor | None,
    after: ReluDropout,
    seed: Tensor | None,
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
    return proposed_product(x, weight.t(), y, epilogue, bias, bits, rank)


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, rank: int) -> Ready | None:
    epilogue = Epilogue.NONE if bias is None else Epilogue.BIAS
    return proposed_product(x, weight.t(), y, epilogue, bias, None, rank)


# ---------------------------------------------------------------- backward


class InputGradient(NamedTuple):
    """The gradient of a layer's input, with the gate of the layer below applied."""

    x: Tensor  # (rows, in)
    sums: Tensor | None  # (in,), its column sums: the bias gradient of the layer below
    finish: Finish | None  # writes ``sums``; call once, on a stream that waits for this one


def input_gradient(
    gpu: Gpu, dy: Tensor, weight: Tensor, gate: Gate | None, sums: torch.dtype | None
) -> InputGradient:
    """dX, with the ``gate`` of the layer below applied; ``sums``: the dtype of column sums."""
    if gate is None:
        return InputGradient(_product(gpu, dy, weight), None, None)
    bits, scale, width = gate.bits, gate.scale, weight.shape[1]

    def plain() -> InputGradient:
        dx = _product(gpu, dy, weight)
        found = None if sums is None else dx.new_empty(width, dtype=sums)
        return InputGradient(dx, found, mlp_mask.gradient(gpu, dx, gate, dx, found))

    # Dropout with p = 1: a product scaled by 0 may skip its epilogue.
    if bits is None or not scale or not _may(dy):
        return plain()

    few = dy.shape[0] < _FEWEST

    def room(apart: bool) -> Tensor | None:
        return None if sums is None or apart or few else dy.new_empty(width)

    def into(by: Tensor, rank: int, found: Tensor | None) -> Ready | None:
        epilogue = Epilogue.DRELU if found is None else Epilogue.DRELU_BGRAD
        dx = dy.new_empty(dy.shape[0], width)
        return proposed_product(dy, by, dx, epilogue, found, bits, rank)

    def prepared(by: Tensor, rank: int, apart: bool = False) -> Ready | None:
        return into(by, rank, room(apart))

    def by_cublaslt(rank: int, apart: bool = False, turned: bool = False) -> InputGradient:
        by, found = mlp_turned.turned(gpu, weight) if turned else weight, room(apart)
        ready = into(by, rank, found)
        if ready is None:
            return plain()
        ready.run(scale)
        if sums is not None and found is None:
            return InputGradient(ready.out, ready.out.sum(0, dtype=sums), None)
        summed = None if found is None or sums is None else found.to(sums)
        return InputGradient(ready.out, summed, None)

    key = ("input gradient", sums, *_sizes(dy, width))
    way = fastest.chosen(key)
    if way is None:
        of_turned = _of_turned(prepared, dy, weight)
        ways = ways_of(by_cublaslt, partial(prepared, weight), plain, key, of_turned)
        if sums is not None and not few:  # for few rows all ways sum apart
            last = ways.pop("plain")
            for name, number in APART.items():
                if prepared(weight, number, True) is not None:
                    ways[name] = partial(by_cublaslt, number, True)
                if of_turned is not None and of_turned(number, True) is not None:
                    ways[f"{name}, {COPY}"] = partial(by_cublaslt, number, True, turned=True)
            ways["plain"] = last
        way = fastest.choose(key, ways, dy, _compared)
    how = HOW.get(way)
    return plain() if how is None else by_cublaslt(*how)


def _compared(found: InputGradient) -> tuple[Tensor | None, ...]:
    if found.finish is not None:
        found.finish()
    return found.x[:_COMPARED], beside_terms(found.sums, found.x)


def beside_terms(sums: Tensor | None, *factors: Tensor) -> Tensor | None:
    """Sums over the rows of the product of ``factors``, followed by the size they would have if
    the signs of their terms were random.

    This allows two ways to be compared even if the terms cancel, as the gradients of a softmax do:
    then only rounding is left, which differs between them.
    """
    if sums is None:
        return None
    terms = factors[0]
    for factor in factors[1:]:
        terms = terms.float() * factor
    return torch.cat([sums.float(), torch.linalg.vector_norm(terms, dim=0, dtype=torch.float32)])


def by_output(
    gpu: Gpu,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    above: Tensor | None,
    sums: torch.dtype | None,
) -> bool:
    """Whether the gradient of y = relu(x weight' + bias) should be masked by y, which is kept
    anyway, instead of by saved bits.

    Operands as for :func:`forward`. ``above``: the weight of the layer that reads the result, or
    None. ``sums``: as for :func:`input_gradient`.
    """
    held = device.held()
    if held in device.WAYS:
        return held != "cublaslt"
    # A layer of one output reads the result in its own kernel, and few rows take no time.
    if (above is not None and len(above) == 1) or len(x) < _FEWEST or not _may(x):
        return True
    key = (
        "relu",
        bias is None,
        None if above is None else len(above),
        sums,
        *_sizes(x, len(weight)),
    )
    way = fastest.chosen(key)
    if way is None:
        after = ReluDropout(relu=True, p=0.0, number=0)

        @cache
        def upstream() -> Tensor:  # stands for the gradient that will come
            y = F.linear(x, weight, bias)
            return y if above is None else F.linear(y, above)

        def there_and_back(keeps: bool) -> InputGradient:
            dy = upstream()
            y, bits = forward(gpu, x, weight, bias, after, None, keeps)
            gate = Gate(bits, None if keeps else y)
            if above is not None:
                return input_gradient(gpu, dy, above, gate, sums)
            found = None if sums is None else y.new_empty(y.shape[1], dtype=sums)
            dx = torch.empty_like(dy)
            return InputGradient(dx, found, mlp_mask.gradient(gpu, dy, gate, dx, found))

        ways = {_BY_MASK: partial(there_and_back, True), _BY_OUTPUT: partial(there_and_back, False)}
        way = fastest.choose(key, ways, x, _compared)
    return way == _BY_OUTPUT


def _product(gpu: Gpu, a: Tensor, b: Tensor) -> Tensor:
    """a b, (n, k) by (k, m): by torch or, with many rows, by the fastest way."""

    def plain() -> Tensor:
        return a.mm(b)

    def prepared(by: Tensor, rank: int) -> Ready | None:
        out = a.new_empty(a.shape[0], b.shape[1])
        return proposed_product(a, by, out, Epilogue.NONE, None, None, rank)

    def by_cublaslt(rank: int, turned: bool = False) -> Tensor:
        by = mlp_turned.turned(gpu, b) if turned else b
        ready = prepared(by, rank)
        if ready is None:
            return plain()
        ready.run()
        return ready.out

    if a.shape[0] < MANY or not _may(a):
        return plain()
    key = ("product", *_sizes(a, b.shape[1]))
    way = fastest.chosen(key)
    if way is None:
        of_turned = _of_turned(prepared, a, b)
        ways = ways_of(by_cublaslt, partial(prepared, b), plain, key, of_turned)
        way = fastest.choose(key, ways, a, lambda found: (found[:_COMPARED],))
    how = HOW.get(way)
    return plain() if how is None else by_cublaslt(how[0], turned=how[2])


def weight_gradient(dy: Tensor, x: Tensor, out: Tensor, sums: Tensor | None) -> Callable[[], None]:
    """A function that writes dY' X to ``out`` (out, in) and dY's column sums to ``sums`` (out,).

    Call it once, on any stream. Both outputs have the same dtype.
    """

    def plain() -> None:
        if out.dtype == dy.dtype:
            torch.mm(dy.t(), x, out=out)
        else:
            out.copy_(dy.t().mm(x))
        if sums is not None:
            torch.sum(dy, 0, dtype=sums.dtype, out=sums)

    if (sums is None and out.dtype == dy.dtype and dy.shape[0] < MANY) or not _may(dy):
        return plain

    gpu = serving(dy)

    def prepared(by: Tensor, rank: int) -> Ready | None:
        epilogue = Epilogue.NONE if sums is None else Epilogue.BGRAD
        few = sums is not None and dy.shape[0] < _FEWEST
        return None if few else proposed_product(by.t(), x, out, epilogue, sums, None, rank)

    def by_cublaslt(rank: int, turned: bool = False) -> None:
        by = mlp_turned.turned(gpu, dy) if turned and gpu is not None else dy
        ready = prepared(by, rank)
        if ready is None:
            plain()
        else:
            ready.run()

    key = ("weight gradient", sums is None, out.dtype, *_sizes(dy, x.shape[1]))
    way = fastest.chosen(key)
    if way is None:
        ways = ways_of(
            by_cublaslt, partial(prepared, dy), plain, key,
            None if gpu is None else _of_turned(prepared, dy, dy),  # as large as dY: not kept
        )  # fmt: skip
        way = fastest.choose(key, ways, dy, lambda _: (out.clone(), beside_terms(sums, dy)))
    how = HOW.get(way)
    return plain if how is None else partial(by_cublaslt, how[0], turned=how[2])


def _of_turned(
    prepared: Callable[..., Ready | None], dy: Tensor, operand: Tensor
) -> Callable[..., Ready | None] | None:
    """``prepared`` for an unwritten transposed copy of ``operand``; None if it is of no use."""
    if dy.shape[0] < MANY or not mlp_turned.takes(operand):
        return None
    return partial(prepared, mlp_turned.like(operand))


def _may(x: Tensor) -> bool:
    """Whether cublasLt may multiply: not if torch's settings ask for sums other than fp32."""
    half = x.dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation
    return not half and cublaslt.serves(x)


def _sizes(x: Tensor, width: int) -> tuple[object, ...]:
    """The key of a choice: batches of similar size share one."""
    rows, columns = x.shape
    return x.get_device(), x.dtype, arithmetic(x.dtype), rows.bit_length(), columns, width


def arithmetic(dtype: torch.dtype) -> bool:
    """Whether torch's settings allow TF32 or reduced sums for ``dtype``, which changes timings."""
    if dtype == torch.float32:
        return cublaslt.tf32(dtype)
    return cublaslt.any_reduction(dtype)
