"""A convolution over one short axis, as a product with its (Toeplitz) matrix.

With x (B, C, H, W), w (O, C, k, v) and p zeros of padding on both sides of H::

    y[b, o, t, s] = Σ_cju w[o, c, j, u] x[b, c, t + j - p, s + u] + bias[o]

If v = 1 (columns on their own, as in CCPM and Caser's vertical layer) or v = W (windows of whole
rows, as in Caser's horizontal layers), windows move along t only, and a matrix M (O T, C H ...)
with w along its diagonals makes y = M x a single product. It has at most H / k times the flops of
the convolution but takes a third of its time, because torch's convolution of few channels reaches
a small fraction of a core's speed, least of all in backward. The gradient of w is that of M summed
along its diagonals. The zeros of M would turn an infinite x into NaN in other places, so inputs
with non-finite values are left to torch.
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
from recast.runtime.mlp import gemm
from recast.runtime.op import Kernel, Op, Sample, register, wants_grad

SCHEMA = "(Tensor input, Tensor weight, Tensor? bias, int padding) -> Tensor"
FEWEST = 256  # samples: with fewer, making the matrix costs more than it saves
_CHANNELS = 5  # of x, for v = 1: with more, torch's convolution is as fast
_LARGEST = 1 << 18  # entries of M


def reference(input: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """Plain torch: (B, C, H, W) and (O, C, k, v) to (B, O, H + 2 padding - k + 1, W - v + 1)."""
    check(input, weight, bias, padding)
    return F.conv2d(input, weight, bias, padding=(padding, 0))


def check(input: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> None:
    """Raise InputError for shapes that do not fit."""
    fits = input.dim() == weight.dim() == 4 and input.shape[1] == weight.shape[1]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        raise InputError(
            f"window_conv of {tuple(input.shape)} with a weight of {tuple(weight.shape)}",
            why="they are (B, C, H, W) and (O, C, k, v), with a bias of (O,)",
        )
    height, width = input.shape[2] + 2 * padding - weight.shape[2], input.shape[3] - weight.shape[3]
    if padding < 0 or height < 0 or width < 0:
        raise InputError(
            f"window_conv of {tuple(input.shape)} with windows of {tuple(weight.shape[2:])}",
            why=f"with padding {padding} there is no place for a window",
        )


def fake(input: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """Shape and dtype of the result."""
    check(input, weight, bias, padding)
    rows, _, height, width = input.shape
    out, _, k, v = weight.shape
    return input.new_empty((rows, out, height + 2 * padding - k + 1, width - v + 1))


def pays(height: int, width: int, weight: Sequence[int], padding: int) -> bool:
    """Whether the product measured faster for inputs of (height, width)."""
    out, channels, k, v = weight
    whole = height + 2 * padding
    entries = out * (whole - k + 1) * channels * height * (v if v == width else 1)
    if k < 1 or entries > _LARGEST:
        return False
    if v == 1 and width > 1:  # 1.4 to 12 times; with 8 channels 0.76
        return channels <= _CHANNELS and whole <= 5 * k
    return v == width and channels == 1 and whole <= 7 * k  # 2 to 6 times; narrower windows less


# ---------------------------------------------------------------- the matrix


def _matrix(weight: Tensor, height: int, padding: int) -> Tensor:
    """M for inputs of ``height``: (O, T, C, height, v)."""
    k = weight.shape[2]
    whole = height + 2 * padding
    places = whole - k + 1
    rows = F.pad(weight.transpose(2, 3), (0, places))  # whole + 1 long, rows take whole: a shift
    turned = rows.unsqueeze(-2).expand(*rows.shape[:-1], places, whole + 1).flatten(-2)
    matrix = turned[..., : places * whole].unflatten(-1, (places, whole))
    return matrix[..., padding : padding + height].permute(0, 3, 1, 4, 2)


def _diagonals(grad: Tensor, k: int, padding: int) -> Tensor:
    """The gradient of the weight, from the gradient of M (O, T, C, height, v)."""
    places, height = grad.shape[1], grad.shape[3]
    whole = height + 2 * padding
    rows = F.pad(grad.permute(0, 2, 4, 1, 3), (padding, padding)).flatten(-2)
    lined = F.pad(rows, (0, places)).unflatten(-1, (places, whole + 1))
    return lined.sum(-2)[..., :k].transpose(2, 3)


def _product(input: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """y, as a product with M."""
    rows, channels, height, width = input.shape
    out, v = weight.shape[0], weight.shape[3]
    matrix = _matrix(weight, height, padding)
    places = matrix.shape[1]
    if v == width:
        flat = matrix.reshape(out * places, channels * height * width)
        shift = None if bias is None else bias.repeat_interleave(places)
        found = gemm.linear(input.reshape(rows, -1), flat, shift)
        return found.view(rows, out, places, 1)
    flat = matrix.reshape(out * places, channels * height)
    columns = input.reshape(rows, channels * height, width)
    each = flat.expand(rows, -1, -1)
    if bias is None:
        return torch.bmm(each, columns).view(rows, out, places, width)
    shift = bias.repeat_interleave(places).view(1, -1, 1)
    return torch.baddbmm(shift, each, columns).view(rows, out, places, width)


def _gradients(
    input: Tensor, weight: Tensor, grad: Tensor, padding: int, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of input, weight and bias."""
    rows, channels, height, width = input.shape
    out, _, k, v = weight.shape
    places = grad.shape[2]
    of_input = of_matrix = None
    flat = _matrix(weight, height, padding).reshape(out * places, -1) if needs[0] else None
    if v == width:
        columns, back = input.reshape(rows, -1), grad.reshape(rows, out * places)
        if flat is not None:
            of_input = gemm.of_input(back, flat).view(input.shape)
        of_matrix = gemm.of_weight(back, columns) if needs[1] else None
    else:
        back = grad.reshape(rows, out * places, width)
        if flat is not None:
            of_input = torch.bmm(flat.t().expand(rows, -1, -1), back).view(input.shape)
        if needs[1]:
            columns = input.reshape(rows, channels * height, width).transpose(0, 1)
            of_matrix = gemm.of_weight(
                back.transpose(1, 2).reshape(rows * width, -1),
                columns.permute(1, 2, 0).reshape(rows * width, -1),
            )
    of_weight = None
    if of_matrix is not None:
        of_weight = _diagonals(of_matrix.view(out, places, channels, height, v), k, padding)
    return [of_input, of_weight, grad.sum((0, 2, 3)) if needs[2] else None]


# ---------------------------------------------------------------- the op


def _takes(input: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> bool:
    """Whether to use the product. Raises InputError for shapes that do not fit."""
    check(input, weight, bias, padding)
    if device.held() == "torch" or weight.shape[3] not in (1, input.shape[3]):
        return False
    given = [t for t in (input, weight, bias) if t is not None]
    if not all(t.is_cpu and t.dtype is torch.float32 for t in given) or not input.numel():
        return False
    if device.held() != "fused":
        few = len(input) < FEWEST
        if few or not pays(input.shape[2], input.shape[3], weight.shape, padding):
            return False
    return _finite(input)


def _finite(values: Tensor) -> bool:
    return bool(values.detach().sum().isfinite())


def forward(input: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """The result, not recorded by autograd."""
    if not _takes(input, weight, bias, padding):
        return reference(input, weight, bias, padding)
    return _product(input, weight, bias, padding)


class WindowConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, padding: int
    ) -> Tensor:
        ctx.padding, ctx.biased = padding, bias is not None
        ctx.save_for_backward(input, weight)
        return _product(input, weight, bias, padding)

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:3])
        if torch.is_grad_enabled() or not _finite(grad):
            found = torch.ops.aten.convolution_backward(
                grad, input, weight, [len(weight)] if ctx.biased else None, [1, 1],
                [ctx.padding, 0], [1, 1], False, [0, 0], 1, needs,
            )  # fmt: skip
        else:
            found = _gradients(input, weight, grad, ctx.padding, needs)
        return (*found, None)


def differentiable(input: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """The result, recorded by autograd."""
    if not wants_grad((input, weight, bias)):
        return forward(input, weight, bias, padding)
    if not _takes(input, weight, bias, padding):
        return reference(input, weight, bias, padding)
    return WindowConv.apply(input, weight, bias, padding)


def cost(input: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Cost:
    """The flops of the convolution; x and w read once, y written once."""
    rows, _, height, width = input.shape
    out, _, k, v = weight.shape
    results = rows * out * (height + 2 * padding - k + 1) * (width - v + 1)
    flops = 2 * results * weight[0].numel()
    return Cost(flops, moved(input, weight, bias) + results * input.element_size())


def samples() -> list[Sample]:
    """Windows of columns and of whole rows, padding, no bias, odd sizes, strides, no samples."""
    g = torch.Generator().manual_seed(47)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    return [
        Sample("columns", (rand(3, 2, 4, 3), rand(2, 2, 2, 1), rand(2), 0)),
        Sample("columns, padded", (rand(2, 1, 3, 2), rand(3, 1, 3, 1), rand(3), 2)),
        Sample("rows", (rand(3, 1, 4, 3), rand(2, 1, 2, 3), rand(2), 0)),
        Sample("rows of channels, padded", (rand(2, 2, 3, 2), rand(2, 2, 2, 2), None, 1)),
        Sample("whole", (rand(3, 1, 5, 3), rand(2, 1, 5, 3), rand(2), 0)),
        Sample("one row", (rand(1, 3, 7, 5), rand(4, 3, 3, 1), None, 0)),
        Sample("odd sizes", (rand(9, 3, 11, 7), rand(5, 3, 5, 1), rand(5), 4)),
        Sample("windows of one", (rand(4, 1, 5, 6), rand(3, 1, 1, 6), rand(3), 0)),
        Sample("one column", (rand(5, 2, 6, 1), rand(3, 2, 2, 1), rand(3), 1)),
        Sample("neither", (rand(3, 2, 5, 5), rand(3, 2, 3, 3), rand(3), 1)),
        Sample("channels last", (rand(3, 6, 4, 2).permute(0, 3, 1, 2),
                                 rand(3, 2, 3, 1), rand(6)[::2], 1)),
        Sample("empty batch", (rand(0, 1, 4, 3), rand(2, 1, 2, 1), rand(2), 0)),
    ]  # fmt: skip


window_conv = register(
    Op(
        name="window_conv",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        samples=samples,
        cost=cost,
        casts=True,
        kernels=(
            Kernel("fused", "cpu", f"float32, {FEWEST} samples or more, where it pays",
                   lambda: None),
            Kernel("torch", "cpu", "any others", lambda: None),
        ),
        not_worth={"cuda": "there torch's own takes cuDNN's"},
    )
)  # fmt: skip
