"""``dropout(relu(x), p)`` with one saved tensor.

The result itself is the mask: it is positive exactly where x is positive and was kept. So neither a
mask nor x is saved::

    dx = grad / (1 - p)   where out > 0,   else 0

On CPU the mask is torch's own for the same seed: see :mod:`~recast.runtime.mlp.torch_draws`.
On a GPU a kernel draws it (:mod:`~recast.runtime.mlp.mask`), and one bit an element is all that is
saved.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.errors import InputError
from recast.runtime import device
from recast.runtime.batched_grads import each_of_batch
from recast.runtime.cost import Cost, moved
from recast.runtime.gpu import cuda_launch, gpu
from recast.runtime.mlp import mask as mlp_mask
from recast.runtime.mlp import torch_draws
from recast.runtime.op import Kernel, Op, Sample, register, wants_grad

SCHEMA = "(Tensor input, float p, bool training) -> Tensor"


def reference(input: Tensor, p: float, training: bool) -> Tensor:
    """Plain torch; ``input`` of any shape."""
    check(p)
    return F.dropout(F.relu(input), p, training)


def fake(input: Tensor, p: float, training: bool) -> Tensor:
    """Shape and dtype of the result."""
    return torch.empty_like(input)


def check(p: float) -> None:
    """Raise InputError if ``p`` is not a probability."""
    if not 0.0 <= p <= 1.0:
        raise InputError(f"dropout probability {p}", why="it must be between 0 and 1")


def forward(input: Tensor, p: float, training: bool) -> Tensor:
    """The result, not recorded by autograd."""
    check(p)
    if (runs := _gpu(input, p, training)) is not None:
        seed = mlp_mask.seed_for(input)
        return mlp_mask.dropout(runs, input, False, True, p, seed, 0, False)[0]
    if input.is_cuda:
        return reference(input, p, training)
    out = F.relu(input)
    if not training or p == 0 or out.numel() == 0:
        return out
    return torch_draws.drop_(out, p)


class ReluDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, p: float, training: bool) -> Tensor:
        out = forward(input, p, training)
        ctx.save_for_backward(out)
        ctx.scale = 1.0 / (1.0 - p) if training and p < 1 else 1.0
        return out

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (out,) = ctx.saved_tensors
        kept = torch.ops.aten.threshold_backward(grad, out.detach(), 0)
        # Out of place if a graph of the gradient is wanted; otherwise the buffer is ours.
        if torch.is_grad_enabled():
            return kept * ctx.scale, None, None
        return kept if ctx.scale == 1.0 else kept.mul_(ctx.scale), None, None


class ReluDropoutCuda(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, runs: gpu.Gpu, input: Tensor, p: float) -> Tensor:
        seed = mlp_mask.seed_for(input)
        out, bits = mlp_mask.dropout(runs, input, False, True, p, seed, 0, True)
        ctx.runs, ctx.scale, ctx.shape = runs, mlp_mask.scale_of(p), input.shape
        ctx.save_for_backward(bits)
        return out

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        if torch.is_grad_enabled():
            return None, grad * ReluDropoutCuda.masks(ctx)[0].to(grad.dtype) * ctx.scale, None
        dense = grad.contiguous()
        out = dense if dense is not grad else torch.empty_like(dense)
        (bits,) = ctx.saved_tensors
        gate = mlp_mask.Gate(bits, scale=ctx.scale)
        mlp_mask.gradient(ctx.runs, mlp_mask.flat(dense), gate, mlp_mask.flat(out))
        return None, out, None

    @staticmethod
    def masks(ctx: Any) -> list[Tensor]:
        """See :func:`.mask.masks`."""
        width = ctx.shape[-1] if ctx.shape else 1
        return [mlp_mask.unpack(ctx.saved_tensors[0], width).view(ctx.shape)]


def _gpu(input: Tensor, p: float, training: bool) -> gpu.Gpu | None:
    """The GPU to run the kernel on; None if it cannot or need not run."""
    known = input.dtype in mlp_mask.CODES and device.held() != "torch"
    takes = known and training and p > 0 and input.numel() and mlp_mask.fits(input)
    return gpu.serving(input) if takes else None


def differentiable(input: Tensor, p: float, training: bool) -> Tensor:
    """The result, recorded by autograd."""
    if not wants_grad((input,)):
        return forward(input, p, training)
    check(p)
    if (runs := _gpu(input, p, training)) is not None:
        return ReluDropoutCuda.apply(runs, input, p)
    if input.is_cuda or not _pays(input, training):
        return reference(input, p, training)
    return ReluDropout.apply(input, p, training)


def _pays(input: Tensor, training: bool) -> bool:
    """Whether, on a CPU, masks drawn by our kernel are worth an autograd node of our own."""
    held = device.held()
    return held == "fused" if held in ("fused", "torch") else training and torch_draws.pays(input)


def cost(input: Tensor, p: float, training: bool) -> Cost:
    """One pass."""
    return Cost(2 * input.numel(), 2 * moved(input))


def samples() -> list[Sample]:
    """Odd sizes, no rows, strides, and the two ends of p."""
    g = torch.Generator().manual_seed(13)
    x = torch.randn(7, 13, generator=g)
    return [
        Sample("train", (x, 0.3, True)),
        Sample("eval", (x, 0.3, False)),
        Sample("p 0", (x, 0.0, True)),
        Sample("p 1", (x, 1.0, True)),
        Sample("zeros", (torch.zeros(4, 5), 0.5, True)),
        Sample("transposed", (x.t(), 0.5, True)),
        Sample("3-d", (torch.randn(3, 1, 17, generator=g), 0.1, True)),
        Sample("empty batch", (x[:0], 0.5, True)),
        Sample("one element", (x[0, 0], 0.5, True)),
    ]


relu_dropout = register(
    Op(
        name="relu_dropout",
        random=True,
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        samples=samples,
        cost=cost,
        devices=("cpu", "cuda"),
        kernels=(
            Kernel(
                "cuda", "cuda", "float32, float16 and bfloat16, in training", cuda_launch.why_not
            ),
            Kernel("fused", "cpu", "in training, 4096 elements or more", torch_draws.why_not),
            Kernel("torch", "cpu", "anything else; torch's own masks", lambda: None),
        ),
    )
)
