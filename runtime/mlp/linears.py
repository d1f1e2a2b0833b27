"""Linear layers of one input as one product: the first layers of sibling networks, their gates.

    out[k] = x W_kᵀ + b_k        x (..., in), W_k (out_k, in), out[k] (..., out_k)

The weights are concatenated at each call and stay the user's own parameters. One product reads x
once, and so does each of the two in backward; the gradient of x is computed in one go instead of
being added up. In return, the gradients of the results must be concatenated first. So it pays when
x is wide compared with the results: in training, 2048 rows of 336 through four layers to 8 take 0.4
of the time of four products, eight to 128 take 0.92, but 40,960 rows of 64 through four to 64 take
1.46, and of 16 through five 2.6 (one AMD EPYC core).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.errors import InputError
from recast.runtime import device
from recast.runtime.batched_grads import each_of_batch
from recast.runtime.cost import Cost, moved
from recast.runtime.gpu import gpu
from recast.runtime.mlp import gemm
from recast.runtime.mlp import small as mlp_small
from recast.runtime.op import Kernel, Op, Sample, register, wants_grad

SCHEMA = "(Tensor input, Tensor?[] params) -> Tensor[]"
ROWS = 256  # with as many, concatenating the weights costs little next to the product
_WIDER = 2  # columns of x not read again per column concatenated; above, x0.4 to x0.9 measured


def reference(input: Tensor, params: Sequence[Tensor | None]) -> list[Tensor]:
    """Plain torch. ``params``: weight and bias (or None) of each layer in turn."""
    return [F.linear(input, weight, bias) for weight, bias in layers(params)]


def layers(params: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor | None]]:
    """The layers as pairs; raises InputError if a weight is missing."""
    weights, biases = params[::2], params[1::2]
    if len(params) % 2 or any(w is None or w.dim() != 2 for w in weights):
        raise InputError(
            "linears: params are no pairs of a weight and a bias",
            why="each layer has a weight (out, in) and a bias (out,) or None",
        )
    return list(zip(weights, biases, strict=True))  # type: ignore[arg-type]


def fake(input: Tensor, params: Sequence[Tensor | None]) -> list[Tensor]:
    """Shapes and dtypes of the results."""
    return [input.new_empty((*input.shape[:-1], w.shape[0])) for w, _ in layers(params)]


def _pays(input: Tensor, params: Sequence[Tensor | None]) -> bool:
    held = device.held()
    given = [p for p in params if p is not None]
    plain = input.is_cpu and input.dtype in (torch.float32, torch.float64) and len(given) > 1
    if not plain or not input.shape[-1] or any(p.dtype != input.dtype for p in given):
        return False
    if held in ("fused", "torch"):
        return held == "fused"
    if input.numel() < ROWS * input.shape[-1]:
        return False
    return one_product(input.shape[-1], [w.shape[0] for w in params[::2] if w is not None])


def one_product(width: int, results: Sequence[int]) -> bool:
    """Whether layers of ``width`` inputs and ``results`` outputs are faster as one product.

    On a CPU, for ``ROWS`` rows or more.
    """
    return width * (len(results) - 1) >= _WIDER * sum(results)


def _joined(params: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None, list[int]]:
    """``(weight, bias, sizes)`` of all layers as one."""
    pairs = layers(params)
    weight = torch.cat([w for w, _ in pairs])
    sizes = [w.shape[0] for w, _ in pairs]
    if all(b is None for _, b in pairs):
        return weight, None, sizes
    return weight, torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs]), sizes


def _split(whole: Tensor, sizes: list[int], dim: int) -> list[Tensor]:
    """The parts, which do not count as views: each has its own version counter."""
    return list(torch.unsafe_split_with_sizes(whole, sizes, dim))


def forward(input: Tensor, params: Sequence[Tensor | None]) -> list[Tensor]:
    """The results, not recorded by autograd; each with its own storage, as compilers expect."""
    if not _pays(input, params):
        return _of_few_rows(input, params) or reference(input, params)
    weight, bias, sizes = _joined(params)
    return [part.contiguous() for part in gemm.linear(input, weight, bias).split(sizes, -1)]


def _of_few_rows(input: Tensor, params: Sequence[Tensor | None]) -> list[Tensor] | None:
    """The results by the kernel for a few rows (serving); None if it does not support them."""
    if not input.is_cpu or gpu.serving(input) is not None:
        return None
    found = []
    for weight, bias in layers(params):
        result = mlp_small.result(input, (weight, bias), ("linear",), ())
        if result is None:
            return None
        found.append(result)
    return found


class Linears(torch.autograd.Function):
    """Inputs: ``input``, then the params (None where there is none)."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, *params: Tensor | None) -> tuple[Tensor, ...]:
        weight, bias, ctx.sizes = _joined(params)
        ctx.present = [p is not None for p in params]
        ctx.weight = weight if ctx.needs_input_grad[0] else None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, *(p for p in params if p is not None))
        return tuple(_split(gemm.linear(input, weight, bias), ctx.sizes, -1))

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        input, *saved = ctx.saved_tensors
        given = iter(saved)
        params = [next(given) if there else None for there in ctx.present]
        needs: Sequence[bool] = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return _differentiable_backward(input, params, grads, needs)
        x = input.reshape(-1, input.shape[-1])
        parts = [
            x.new_zeros(len(x), size) if g is None else g.reshape(-1, size)
            for g, size in zip(grads, ctx.sizes, strict=True)
        ]
        whole = torch.cat(parts, 1)
        into = None
        if needs[0]:
            into = gemm.of_input(whole, ctx.weight).view(input.shape)
        of_params: list[Tensor | None] = [None] * len(params)
        if any(needs[1::2]):
            of_params[::2] = _split(gemm.of_weight(whole, x), ctx.sizes, 0)
        if any(needs[2::2]):
            of_params[1::2] = _split(whole.sum(0), ctx.sizes, 0)
        # As in torch, a layer whose result got no gradient gives its params none.
        asked = [grads[k // 2] is not None and n for k, n in enumerate(needs[1:])]
        return (into, *(g if n else None for g, n in zip(of_params, asked, strict=True)))


def _differentiable_backward(
    input: Tensor,
    params: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Layer by layer, in torch."""
    into: Tensor | None = None
    of_params: list[Tensor | None] = []
    x = input.reshape(-1, input.shape[-1])
    for (weight, _), grad in zip(layers(params), grads, strict=True):
        if grad is None:
            of_params += [None, None]
            continue
        part, g = grad @ weight, grad.reshape(-1, grad.shape[-1])
        into = part if into is None else into + part
        of_params += [g.t() @ x, g.sum(0)]
    every = [into, *of_params]
    return tuple(g if n else None for g, n in zip(every, needs, strict=True))


def differentiable(input: Tensor, params: list[Tensor | None]) -> list[Tensor]:
    """The results, recorded by autograd."""
    if not wants_grad((input, params)):
        if torch._C._len_torch_dispatch_stack():
            with torch._C._AutoDispatchBelowAutograd():
                found: list[Tensor] = linears.target(input, params)
                return found
        return forward(input, params)
    if not _pays(input, params):
        return reference(input, params)
    return list(Linears.apply(input, *params))


def cost(input: Tensor, params: Sequence[Tensor | None]) -> Cost:
    """The products; weights are read, concatenated and read again."""
    rows = input.numel() // max(input.shape[-1], 1)
    weights = [w for w, _ in layers(params)]
    elements = sum(w.numel() for w in weights)
    written = rows * sum(w.shape[0] for w in weights) * input.element_size()
    return Cost(2 * rows * elements, moved(input, *params) + 2 * moved(*weights) + written)


def samples() -> list[Sample]:
    """Widths alike and not, with bias and without, three dimensions, strides, no rows."""
    g = torch.Generator().manual_seed(37)

    def make(label: str, x: Tensor, *sizes: int, bias: bool = True, mixed: bool = False) -> Sample:
        params: list[Tensor | None] = []
        for k, size in enumerate(sizes):
            params.append(torch.randn(size, x.shape[-1], generator=g) / x.shape[-1] ** 0.5)
            has = bias and not (mixed and k % 2)
            params.append(torch.randn(size, generator=g) if has else None)
        return Sample(label, (x, params))

    x = torch.randn(6, 5, generator=g)
    return [
        make("two", x, 4, 4),
        make("gates", x, 3, 3, 2, 1, bias=False),
        make("mixed bias", x, 7, 2, 5, mixed=True),
        make("one layer", x, 3),
        make("3-d", torch.randn(2, 3, 5, generator=g), 4, 1),
        make("transposed", torch.randn(5, 6, generator=g).t(), 2, 3),
        make("one row", x[:1], 2, 3),
        make("empty batch", x[:0], 2, 3),
    ]


linears = register(
    Op(
        name="linears",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        samples=samples,
        cost=cost,
        casts=True,
        kernels=(
            Kernel("fused", "cpu", "256 rows or more, wide beside the results", lambda: None),
            Kernel("torch", "cpu", "else, and autocast: one after the other", lambda: None),
        ),
        not_worth={"cuda": "there each product is fused with the activation behind it instead"},
    )
)
