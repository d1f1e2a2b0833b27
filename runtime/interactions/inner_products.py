"""Inner products of chosen pairs of feature vectors, as in PNN.

With x (B, F, D)::

    out[b, p] = Σ_d x[b, li[p], d] · x[b, lj[p], d]                (B, P)

The kernels are those of ``dot_interaction``. What differs is autocast, which leaves a product and a
sum in fp32 where it would cast a matrix product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recast.errors import InputError
from recast.runtime.cost import Cost, moved
from recast.runtime.interactions import dot_interaction as dot
from recast.runtime.op import Kernel, Op, Sample, cpu_kernels, register

SCHEMA = "(Tensor x, Tensor li, Tensor lj) -> Tensor"


def reference(x: Tensor, li: Tensor, lj: Tensor) -> Tensor:
    """Plain torch. ``x``: (B, F, D); ``li, lj``: (P,)."""
    check(x, li, lj)
    return (x[:, li] * x[:, lj]).sum(2)


def fake(x: Tensor, li: Tensor, lj: Tensor) -> Tensor:
    """Shape and dtype of the result."""
    return x.new_empty((x.shape[0], li.shape[0]))


def check(x: Tensor, li: Tensor, lj: Tensor) -> None:
    """Raise InputError for shapes that do not fit."""
    if x.dim() != 3:
        raise InputError(f"features of shape {tuple(x.shape)}, not (batch, features, dim)")
    if li.dim() != 1 or li.shape != lj.shape:
        raise InputError(f"li and lj have shapes {tuple(li.shape)} and {tuple(lj.shape)}")


def forward(x: Tensor, li: Tensor, lj: Tensor) -> Tensor:
    """The result, not recorded by autograd."""
    check(x, li, lj)
    return reference(x, li, lj) if _casts(x) else dot.forward([x], None, li, lj, 0)


def differentiable(x: Tensor, li: Tensor, lj: Tensor) -> Tensor:
    """The result, recorded by autograd."""
    check(x, li, lj)
    return reference(x, li, lj) if _casts(x) else dot.differentiable([x], None, li, lj, 0)


def _casts(x: Tensor) -> bool:
    """Whether a matrix product of ``x`` would be cast."""
    return torch.is_autocast_enabled(x.device.type)


def cost(x: Tensor, li: Tensor, lj: Tensor) -> Cost:
    """One inner product a pair; features read once, the result written once."""
    products = x.shape[0] * li.shape[0]
    return Cost(2 * products * x.shape[2], moved(x) + products * x.element_size())


def samples() -> list[Sample]:
    """Triangles and any pairs, odd sizes, one of each, strides, no rows."""
    g = torch.Generator().manual_seed(23)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    upper = tuple(torch.triu_indices(7, 7, 1))
    pairs = torch.tensor([4, 0, 2, 2, 0]), torch.tensor([0, 4, 2, 1, 0])
    one = torch.tensor([0])
    return [
        Sample("upper", (rand(6, 7, 16), *upper)),
        Sample("pairs", (rand(5, 5, 9), *pairs)),
        Sample("one of each", (rand(1, 1, 1), one, one)),
        Sample("empty batch", (rand(0, 7, 8), *upper)),
        Sample("transposed", (rand(6, 9, 7).transpose(1, 2), *upper)),
    ]


inner_products = register(
    Op(
        name="inner_products",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        samples=samples,
        cost=cost,
        kernels=(
            *cpu_kernels("float32 features, no autocast"),
            Kernel("torch", "cpu", "any other features", lambda: None),
        ),
    )
)
