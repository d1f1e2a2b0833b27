"""Cross entropy of a linear layer's result, which is never written as a whole.

With rows x (N, D), the vectors of the classes W (C, D) and a bias b (C,) or none::

    cross_entropy(x Wᵀ + b, y)

as the loss of next-item models, whose classes are all items. ``cross_entropy`` tells of y, the
reductions, ``ignore_index`` and ``label_smoothing``. The logits of a few rows at a time are made in
memory that stays in the cache; for a mean or a sum the gradients are made of them there and then,
as the gradient of the result only scales them. For a loss of each row the logits are made again.

Rows without a class (of BERT4Rec most are) are left out, unless one holds NaN or infinity: those
would reach torch's gradients.

2048 rows of 64 and 50,000 classes train in 0.4 of the time, one thread; 10,000 classes, for 15 % of
the rows, in a fifteenth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.errors import InputError
from recast.runtime import device, partials
from recast.runtime.batched_grads import each_of_batch
from recast.runtime.cost import Cost, moved
from recast.runtime.op import Kernel, Op, Sample, cpu_kernels, register, wants_grad

from . import cross_entropy

SCHEMA = (
    "(Tensor input, Tensor weight, Tensor? bias, Tensor target, str reduction, int ignore_index,"
    " float label_smoothing) -> Tensor"
)
ROOM = 16 << 20  # bytes of logits that are made at once
FEWEST = 16  # rows: products of fewer are slow
FEW = 1 << 18  # logits below which they are made as a whole: it takes no longer


def reference(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, reduction: str,
    ignore_index: int, label_smoothing: float,
) -> Tensor:  # fmt: skip
    """Plain torch. ``input``: (N, D), ``weight``: (C, D), ``bias``: (C,), floating; ``target``:
    (N,), int64.
    """
    check(input, weight, bias, target, reduction, label_smoothing)
    return F.cross_entropy(
        F.linear(input, weight, bias), target, ignore_index=ignore_index, reduction=reduction,
        label_smoothing=label_smoothing,
    )  # fmt: skip


def fake(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, reduction: str,
    ignore_index: int, label_smoothing: float,
) -> Tensor:  # fmt: skip
    """Shape and dtype of the result."""
    return input.new_empty(input.shape[:1] if reduction == "none" else ())


def check(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, reduction: str,
    label_smoothing: float,
) -> None:  # fmt: skip
    """Raise InputError for arguments that do not fit."""
    if input.dim() != 2 or weight.dim() != 2 or input.shape[1] != weight.shape[1]:
        raise InputError(
            f"a linear layer of {tuple(input.shape)} by {tuple(weight.shape)}",
            why="they are rows of one width",
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(
            f"a bias of {tuple(bias.shape)} for {weight.shape[0]} classes", why="one for each"
        )
    shape = torch.Size((input.shape[0], weight.shape[0]))
    cross_entropy.check(shape, input.dtype, target, reduction, label_smoothing)


# ---------------------------------------------------------------- forward and backward


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that take part: x and y of them, and which of ``count`` they are (None: all)."""

    input: Tensor
    target: Tensor
    chosen: Tensor | None
    count: int

    def whole(self, value: Tensor) -> Tensor:
        """``value``, of these rows, for all rows: zeros for the others."""
        if self.chosen is None:
            return value
        return value.new_zeros(self.count, *value.shape[1:]).index_copy_(0, self.chosen, value)


@dataclass(frozen=True, slots=True)
class Layer:
    """The layer, its loss, and the kernels."""

    native: Any
    weight: Tensor
    bias: Tensor | None
    ignored: int
    smoothing: float


def _taking_part(input: Tensor, target: Tensor, ignored: int) -> tuple[Rows, int]:
    """The rows to compute, and how many have a loss."""
    used = target != ignored
    count, counted = input.shape[0], int(torch.count_nonzero(used))
    if counted < count and bool(torch.isfinite(input[~used]).all()):
        (chosen,) = torch.nonzero(used, as_tuple=True)
        return Rows(input[chosen], target[chosen], chosen, count), counted
    return Rows(input, target.contiguous(), None, count), counted


def _pieces(layer: Layer, rows: Rows) -> Iterator[tuple[slice, Tensor]]:
    """Some rows at a time, with their logits; the next ones take the memory of these."""
    count, classes = rows.input.shape[0], layer.weight.shape[0]
    step = max(FEWEST, ROOM // (classes * rows.input.element_size()))
    room = rows.input.new_empty(min(step, count), classes)
    turned = layer.weight.t()
    for first in range(0, count, step):
        piece = slice(first, min(first + step, count))
        x = rows.input[piece]
        logits = room[: x.shape[0]]
        if layer.bias is None:
            torch.mm(x, turned, out=logits)
        else:
            torch.addmm(layer.bias, x, turned, out=logits)
        yield piece, logits


def _losses(layer: Layer, rows: Rows) -> tuple[Tensor, float]:
    """The loss of each row, and their sum."""
    losses, total = rows.input.new_empty(rows.input.shape[0]), 0.0
    for piece, logits in _pieces(layer, rows):
        stats = logits.new_empty(2, logits.shape[0])
        wrong, _, part = layer.native.cross_entropy_forward(
            logits, rows.target[piece], losses[piece], stats, layer.smoothing, layer.ignored,
            device.threads(),
        )  # fmt: skip
        _refuse(wrong, rows, piece, logits)
        total += part
    return losses, total


def _refuse(wrong: int, rows: Rows, piece: slice, logits: Tensor) -> None:
    """Raise for the target of a row of ``piece``, if one is wrong."""
    if wrong >= 0:
        row = piece.start + wrong
        at = row if rows.chosen is None else int(rows.chosen[row])
        raise cross_entropy.astray(rows.target[row], at, logits.shape[1])


@dataclass(slots=True)
class Gradients:
    """Those of the input, the weight and the bias that are wanted; summed up piece by piece."""

    input: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def of(cls, layer: Layer, rows: Rows, wanted: Sequence[bool]) -> Gradients:
        """Room for the ``wanted`` ones; zeros, if no row takes part."""
        make = torch.empty_like if rows.input.shape[0] else torch.zeros_like
        tensors = rows.input, layer.weight, layer.bias
        return cls(*(
            None if t is None or not want else make(t)
            for t, want in zip(tensors, wanted, strict=True)
        ))  # fmt: skip

    def add(self, layer: Layer, rows: Rows, piece: slice, of_logits: Tensor) -> None:
        """Take the gradients of the logits of ``piece``."""
        first = piece.start == 0
        if self.input is not None:
            torch.mm(of_logits, layer.weight, out=self.input[piece])
        if self.weight is not None:
            beta, x = (0 if first else 1), rows.input[piece]
            torch.addmm(self.weight, of_logits.t(), x, beta=beta, out=self.weight)
        if self.bias is not None and first:
            torch.sum(of_logits, 0, out=self.bias)
        elif self.bias is not None:
            self.bias += of_logits.sum(0)

    def whole(self, rows: Rows) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients, of all rows."""
        return None if self.input is None else rows.whole(self.input), self.weight, self.bias


def _gradients(
    layer: Layer, rows: Rows, up: Tensor, scale: float, wanted: Sequence[bool]
) -> tuple[Gradients, float]:
    """Gradients of ``scale`` times the sum of ``up`` times the losses, and the sum of these.

    ``up``: one number for each row, or one for all.
    """
    found, total = Gradients.of(layer, rows, wanted), 0.0
    losses = rows.input.new_empty(rows.input.shape[0])
    for piece, logits in _pieces(layer, rows):
        wrong, _, part = layer.native.cross_entropy_both(
            logits, rows.target[piece], losses[piece], up if up.numel() == 1 else up[piece],
            scale, layer.smoothing, layer.ignored, device.threads(),
        )  # fmt: skip
        _refuse(wrong, rows, piece, logits)
        found.add(layer, rows, piece, logits)
        total += part
    return found, total


def _native(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, reduction: str,
    smoothing: float,
) -> Any:  # fmt: skip
    """The CPU kernels; None if they do not support this call."""
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if not all(t.is_cpu and t.dtype is torch.float32 and t.numel() for t in tensors):
        return None
    if target.dtype is not torch.int64 or not target.is_cpu:
        return None
    check(input, weight, bias, target, reduction, smoothing)
    return device.extension()


def _is_small(input: Tensor, weight: Tensor) -> bool:
    """Whether the logits may be made as a whole."""
    return input.shape[0] * weight.shape[0] < FEW and not device.forced()


def _run(layer: Layer, rows: Rows, counted: int, reduction: str) -> Tensor:
    losses, total = _losses(layer, rows)
    return cross_entropy.reduced(rows.whole(losses), counted, total, reduction)


def forward(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, reduction: str,
    ignore_index: int, label_smoothing: float,
) -> Tensor:  # fmt: skip
    """The result, not recorded by autograd."""
    if _is_small(input, weight):
        logits = F.linear(input, weight, bias)
        return cross_entropy.forward(logits, target, reduction, ignore_index, label_smoothing)
    native = _native(input, weight, bias, target, reduction, label_smoothing)
    if native is None:
        return reference(input, weight, bias, target, reduction, ignore_index, label_smoothing)
    layer = Layer(native, weight, bias, ignore_index, label_smoothing)
    return _run(layer, *_taking_part(input, target, ignore_index), reduction)


class LinearCrossEntropy(torch.autograd.Function):
    """Inputs: the kernels, x, W, b or None, y, reduction, ignore_index, label_smoothing."""

    @staticmethod
    def forward(
        ctx: Any, native: Any, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
        *setting: Any,
    ) -> Tensor:  # fmt: skip
        ctx.set_materialize_grads(False)
        reduction, ignored, smoothing = ctx.setting = setting
        layer = Layer(native, weight, bias, ignored, smoothing)
        rows, counted = _taking_part(input, target, ignored)
        if reduction == "none":
            ctx.save_for_backward(input, weight, bias, target)
            return _run(layer, rows, counted, reduction)
        scale = cross_entropy.scale_of(reduction, counted)
        found, total = _gradients(layer, rows, input.new_ones(()), scale, ctx.needs_input_grad[1:4])
        ctx.save_for_backward(input, weight, bias, target, *found.whole(rows))
        return cross_entropy.reduced(input, counted, total, reduction)

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        rest = (None,) * 4
        if grad is None:
            return None, None, None, None, *rest
        input, weight, bias, target, *of_all = ctx.saved_tensors
        native = None if torch.is_grad_enabled() else device.extension()
        wanted, (reduction, ignored, smoothing) = ctx.needs_input_grad[1:4], ctx.setting
        if native is None:
            return None, *_differentiable_backward(ctx, grad), *rest
        if reduction == "none":
            layer = Layer(native, weight, bias, ignored, smoothing)
            rows, _ = _taking_part(input, target, ignored)
            up = grad if rows.chosen is None else grad[rows.chosen]
            found, _ = _gradients(layer, rows, up.contiguous(), 1.0, wanted)
            return None, *found.whole(rows), *rest
        return None, *(None if g is None else g * grad for g in of_all), *rest


def _differentiable_backward(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """Plain torch over the inputs."""
    *inputs, target = ctx.saved_tensors[:4]
    input, weight, bias = own = partials.apart(inputs)
    out = reference(input, weight, bias, target, *ctx.setting)
    return partials.gradients([out], own, ctx.needs_input_grad[1:4], [grad])


def differentiable(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, reduction: str,
    ignore_index: int, label_smoothing: float,
) -> Tensor:  # fmt: skip
    """The result, recorded by autograd."""
    args = input, weight, bias, target, reduction, ignore_index, label_smoothing
    if not wants_grad(args):
        return forward(*args)
    if _is_small(input, weight):
        logits = F.linear(input, weight, bias)
        return cross_entropy.differentiable(
            logits, target, reduction, ignore_index, label_smoothing
        )
    native = _native(input, weight, bias, target, reduction, label_smoothing)
    if native is None:
        return reference(*args)
    found: Tensor = LinearCrossEntropy.apply(native, *args)
    return found


# ---------------------------------------------------------------- cost, samples


def cost(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, reduction: str,
    ignore_index: int, label_smoothing: float,
) -> Cost:  # fmt: skip
    """The product, and some twelve flops for each logit; no logit is moved."""
    rows, dim = input.shape
    out = fake(input, weight, bias, target, reduction, ignore_index, label_smoothing)
    flops = rows * weight.shape[0] * (2 * dim + 12)
    return Cost(flops, moved(input, weight, bias, target, out))


def samples() -> list[Sample]:
    """Every reduction, with and without bias, ignored rows, smoothing, several pieces, strides."""
    g = torch.Generator().manual_seed(43)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    def ids(rows: int, classes: int) -> Tensor:
        return torch.randint(0, classes, (rows,), generator=g)

    some, few = ids(9, 21), ids(40, 30)
    some[::3], few[4:] = -100, 0
    lone, zero = torch.full((3,), 2), torch.zeros(4, dtype=torch.int64)
    strided = rand(8, 9)[::2, 2:7], rand(5, 6).t(), rand(12)[::2], ids(8, 6)[::2]
    return [
        Sample("mean", (rand(6, 5), rand(9, 5), None, ids(6, 9), "mean", -100, 0.0)),
        Sample("sum", (rand(7, 3), rand(13, 3), rand(13), ids(7, 13), "sum", -100, 0.0)),
        Sample("each", (rand(5, 4), rand(17, 4), rand(17), ids(5, 17), "none", -100, 0.0)),
        Sample("ignored", (rand(9, 4), rand(21, 4), rand(21), some, "mean", -100, 0.0)),
        Sample("ignored, each", (rand(9, 4), rand(21, 4), None, some, "none", -100, 0.0)),
        Sample("few classes known", (rand(40, 3), rand(30, 3), None, few, "mean", 0, 0.0)),
        Sample("all ignored", (rand(3, 2), rand(4, 2), rand(4), lone, "sum", 2, 0.0)),
        Sample("smoothed", (rand(6, 8), rand(37, 8), rand(37), ids(6, 37), "mean", -100, 0.25)),
        Sample("smoothed, each", (rand(9, 4), rand(21, 4), None, some, "none", -100, 0.5)),
        Sample("one class", (rand(4, 2), rand(1, 2), None, zero, "sum", -100, 0.0)),
        Sample("one row", (rand(1, 16), rand(64, 16), None, ids(1, 64), "mean", -100, 0.0)),
        Sample("one column", (rand(5, 1), rand(6, 1), rand(6), ids(5, 6), "mean", -100, 0.0)),
        Sample("empty batch", (rand(0, 8), rand(5, 8), None, ids(0, 5), "sum", -100, 0.0)),
        Sample("strided", (*strided, "mean", -100, 0.0)),
    ]


linear_cross_entropy = register(
    Op(
        name="linear_cross_entropy",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        samples=samples,
        cost=cost,
        casts=True,
        kernels=(
            *cpu_kernels(f"float32; {FEW} logits or more"),
            Kernel("torch", "cpu", "any others", lambda: None),
        ),
        not_worth={"cuda": "there is no kernel for it, and what it would gain is not measured"},
    )
)
