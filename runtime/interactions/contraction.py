"""A broadcast product summed over its last dimension, as the matrix product it is.

    out = Σ_z a[..] · b[..]        ``equation`` says which dimension of the product each one is of

In plain torch the product is written out, many times larger than its factors; ``einsum`` never
stores it. The contraction of an outer product network has GPU kernels. Under autocast, a product
and a sum stay in fp32 while ``einsum`` would be cast, so there the op runs its definition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recast.errors import InputError
from recast.runtime.cost import Cost, moved
from recast.runtime.gpu import cuda_launch
from recast.runtime.interactions import outer_cuda
from recast.runtime.op import Kernel, Op, Sample, register

SCHEMA = "(Tensor a, Tensor b, str equation) -> Tensor"


def reference(a: Tensor, b: Tensor, equation: str) -> Tensor:
    """Plain torch. ``equation``: ``"acd,bcd->abc"``, letters in order, the last one summed."""
    first, second, output = _terms(a, b, equation)
    summed = output + first[-1]
    return (_spread(a, first, summed) * _spread(b, second, summed)).sum(-1)


def _terms(a: Tensor, b: Tensor, equation: str) -> tuple[str, str, str]:
    inputs, _, output = equation.partition("->")
    first, _, second = inputs.partition(",")
    ordered = all(term == "".join(sorted(set(term))) for term in (first, second, output))
    last = first[-1:]
    if not ordered or last != second[-1:] or set(output) != {*first, *second} - {last}:
        raise InputError(f"contraction {equation!r}", why="letters in order, the last one summed")
    if (len(first), len(second)) != (a.dim(), b.dim()):
        raise InputError(f"contraction {equation!r} of {a.dim()} and {b.dim()} dimensions")
    return first, second, output


def _spread(factor: Tensor, term: str, letters: str) -> Tensor:
    """``factor`` with a dimension of 1 for every letter it does not have."""
    for k, letter in enumerate(letters):
        if letter not in term:
            factor = factor.unsqueeze(k)
    return factor


def fake(a: Tensor, b: Tensor, equation: str) -> Tensor:
    """Shape and dtype of the result."""
    first, second, output = _terms(a, b, equation)
    sizes = dict(zip(first, a.shape, strict=True))
    for letter, n in zip(second, b.shape, strict=True):
        sizes[letter] = n if sizes.get(letter, 1) == 1 else sizes[letter]  # 1 is broadcast
    return a.new_empty([sizes[letter] for letter in output])


def forward(a: Tensor, b: Tensor, equation: str) -> Tensor:
    """The result; autograd sees the products that ``einsum`` is made of."""
    _terms(a, b, equation)
    if torch.is_autocast_enabled(a.device.type):
        return reference(a, b, equation)
    found = outer_cuda.products(a, b, equation)
    # The letters of `b` may lie outermost: a sum's result does not, and a view of it would raise.
    return torch.einsum(equation, a, b).contiguous() if found is None else found


def cost(a: Tensor, b: Tensor, equation: str) -> Cost:
    """A multiply-add for each element of the product."""
    first, second, output = _terms(a, b, equation)
    sizes = dict(zip(first + second, (*a.shape, *b.shape), strict=True))
    outputs = torch.Size(sizes[letter] for letter in output).numel()
    return Cost(2 * outputs * sizes[first[-1]], moved(a, b) + outputs * a.element_size())


def samples() -> list[Sample]:
    """Batched and not, odd sizes, one of each, strides, no rows."""
    g = torch.Generator().manual_seed(29)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    return [
        Sample("outer product network", (rand(6, 15, 8), rand(8, 15, 8), "acd,bcd->abc")),
        Sample("odd vectors", (rand(6, 5, 7), rand(3, 5, 7), "acd,bcd->abc")),
        Sample("matrix", (rand(7, 5), rand(3, 5), "ac,bc->ab")),
        Sample("batched vectors", (rand(7, 3, 5), rand(5), "abc,c->ab")),
        Sample("of each other", (rand(4, 3, 9), rand(4, 6, 9), "abd,acd->abc")),
        Sample("one of each", (rand(1, 1), rand(1, 1), "ac,bc->ab")),
        Sample("empty batch", (rand(0, 3, 4), rand(2, 3, 4), "acd,bcd->abc")),
        Sample("strided", (rand(6, 8, 5).transpose(1, 2), rand(8, 5, 8), "acd,bcd->abc")),
    ]


contraction = register(
    Op(
        name="contraction",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=forward,
        samples=samples,
        cost=cost,
        devices=("cpu", "cuda"),
        kernels=(
            Kernel("torch", "cpu", "always; einsum but for autocast", lambda: None),
            Kernel("cuda", "cuda", outer_cuda.CONDITION, cuda_launch.why_not),
            Kernel("torch", "cuda", "anything else; einsum but for autocast", lambda: None),
        ),
    )
)
