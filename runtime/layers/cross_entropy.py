"""Softmax cross entropy with one class for each row, as ``F.cross_entropy`` has it.

With logits x (N, C), classes y (N,) and a label smoothing s::

    loss = (1 - s) (L - x[y]) + s (L - mean(x)),    L = log Σ exp(x)

A row whose class is ``ignore_index`` has no loss and no gradient. ``reduction``: "none", a loss for
each row; "sum"; "mean", over the rows that are not ignored (NaN when all are).

Backward, with g the gradient of a row's loss::

    d x = g (softmax(x) - s / C)        and - g (1 - s) at y

Torch writes log_softmax(x) forward, and backward a gradient of that besides the gradient of x. Here
the logits are read once forward; backward they are read and their gradient is written: 2048 rows of
10,000 classes take 0.4 of the time, one thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.errors import IdError, InputError
from recast.runtime import device
from recast.runtime.batched_grads import each_of_batch
from recast.runtime.cost import Cost, moved
from recast.runtime.op import Kernel, Op, Sample, cpu_kernels, register, wants_grad

SCHEMA = (
    "(Tensor logits, Tensor target, str reduction, int ignore_index, float label_smoothing)"
    " -> Tensor"
)
REDUCTIONS = ("none", "mean", "sum")
FEW = 1 << 17  # logits below which torch is as fast, or faster


def reference(
    logits: Tensor, target: Tensor, reduction: str, ignore_index: int, label_smoothing: float
) -> Tensor:
    """Plain torch. ``logits``: (N, C), floating; ``target``: (N,), int64."""
    check(logits.shape, logits.dtype, target, reduction, label_smoothing)
    return F.cross_entropy(
        logits, target, ignore_index=ignore_index, reduction=reduction,
        label_smoothing=label_smoothing,
    )  # fmt: skip


def fake(
    logits: Tensor, target: Tensor, reduction: str, ignore_index: int, label_smoothing: float
) -> Tensor:
    """Shape and dtype of the result."""
    return logits.new_empty(logits.shape[:1] if reduction == "none" else ())


def check(
    shape: Sequence[int], dtype: torch.dtype, target: Tensor, reduction: str, smoothing: float
) -> None:
    """Raise InputError for arguments that do not fit logits of this shape and dtype."""
    if reduction not in REDUCTIONS:
        raise InputError(f"a reduction {reduction!r}", why=f"one of {', '.join(REDUCTIONS)}")
    if not 0.0 <= smoothing <= 1.0:
        raise InputError(f"a label_smoothing of {smoothing}", why="it is between 0 and 1")
    if len(shape) != 2 or not dtype.is_floating_point:
        raise InputError(
            f"cross entropy of {tuple(shape)} in {dtype}",
            why="rows of floating numbers, one for each class",
        )
    if target.shape != shape[:1]:
        raise InputError(
            f"cross entropy of {tuple(shape)} with targets {tuple(target.shape)}",
            why="the target is one class for each row",
        )


def astray(target: Tensor, row: int, classes: int) -> IdError:
    """What is wrong with ``target``, that of ``row``."""
    return IdError(
        f"target {int(target)} of row {row} is no class",
        why=f"there are {classes} classes",
        tries=("ignore_index, for rows without a class",),
    )


def reduced(losses: Tensor, counted: int, total: float, reduction: str) -> Tensor:
    """The result: ``losses``, or their ``total`` or mean over ``counted`` rows."""
    if reduction == "none":
        return losses
    if reduction == "mean":
        total = total / counted if counted else math.nan
    return losses.new_full((), total)


def shaped_as(loss: Tensor, target: Tensor) -> Tensor:
    """``loss`` in the shape of ``target`` if it has a number for each; itself if it is one."""
    return loss.reshape(target.shape) if loss.dim() else loss


# ---------------------------------------------------------------- forward and backward


def rows_of(x: Tensor) -> Tensor:
    """``x`` (N, C) with contiguous rows."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _native(logits: Tensor, target: Tensor, reduction: str, label_smoothing: float) -> Any:
    """The CPU kernels; None if they do not support this call, or torch is as fast."""
    if logits.numel() < FEW and not device.forced():
        return None
    if logits.dtype is not torch.float32 or target.dtype is not torch.int64:
        return None
    if not logits.is_cpu or not target.is_cpu or not logits.numel():
        return None
    check(logits.shape, logits.dtype, target, reduction, label_smoothing)
    return device.extension()


def _run(
    native: Any, logits: Tensor, target: Tensor, reduction: str, ignored: int, smoothing: float
) -> tuple[Tensor, Tensor, int]:
    """The result, what the backward needs (2, N), and how many rows have a loss."""
    count = logits.shape[0]
    losses, stats = logits.new_empty(count), logits.new_empty(2, count)
    wrong, counted, total = native.cross_entropy_forward(
        rows_of(logits), target.contiguous(), losses, stats, smoothing, ignored, device.threads()
    )
    if wrong >= 0:
        raise astray(target[wrong], wrong, logits.shape[1])
    return reduced(losses, counted, total, reduction), stats, counted


def forward(
    logits: Tensor, target: Tensor, reduction: str, ignore_index: int, label_smoothing: float
) -> Tensor:
    """The result, not recorded by autograd."""
    native = _native(logits, target, reduction, label_smoothing)
    if native is None:
        return reference(logits, target, reduction, ignore_index, label_smoothing)
    return _run(native, logits, target, reduction, ignore_index, label_smoothing)[0]


class CrossEntropy(torch.autograd.Function):
    """Inputs: the kernels, logits, target, reduction, ignore_index, label_smoothing."""

    @staticmethod
    def forward(ctx: Any, native: Any, logits: Tensor, target: Tensor, *setting: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        reduction, ignored, smoothing = setting
        out, stats, counted = _run(native, logits, target, reduction, ignored, smoothing)
        ctx.setting, ctx.counted = setting, counted
        ctx.save_for_backward(logits, target, stats)
        return out

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        logits, target, stats = ctx.saved_tensors
        reduction, ignored, smoothing = ctx.setting
        native = None if torch.is_grad_enabled() else device.extension()
        if native is None:
            out = reference(logits, target, *ctx.setting)
            found = torch.autograd.grad(out, logits, grad, create_graph=True)[0]
            return None, found, None, None, None, None
        into = torch.empty_like(logits, memory_format=torch.contiguous_format)
        native.cross_entropy_backward(
            rows_of(logits), target.contiguous(), stats, grad.contiguous(),
            scale_of(reduction, ctx.counted), into, smoothing, ignored, device.threads(),
        )  # fmt: skip
        return None, into, None, None, None, None


def scale_of(reduction: str, counted: int) -> float:
    """The gradient of a row's loss, as a part of that of the result."""
    return 1.0 / max(counted, 1) if reduction == "mean" else 1.0


def differentiable(
    logits: Tensor, target: Tensor, reduction: str, ignore_index: int, label_smoothing: float
) -> Tensor:
    """The result, recorded by autograd."""
    setting = reduction, ignore_index, label_smoothing
    if not wants_grad((logits,)):
        return forward(logits, target, *setting)
    native = _native(logits, target, reduction, label_smoothing)
    if native is None:
        return reference(logits, target, *setting)
    found: Tensor = CrossEntropy.apply(native, logits, target, *setting)
    return found


# ---------------------------------------------------------------- cost, samples


def cost(
    logits: Tensor, target: Tensor, reduction: str, ignore_index: int, label_smoothing: float
) -> Cost:
    """An exponential is some ten flops; one pass."""
    out = fake(logits, target, reduction, ignore_index, label_smoothing)
    return Cost(12 * logits.numel(), moved(logits, target, out))


def samples() -> list[Sample]:
    """Every reduction, ignored rows, smoothing, odd sizes, far logits, strides, no rows."""
    g = torch.Generator().manual_seed(41)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    def ids(rows: int, classes: int) -> Tensor:
        return torch.randint(0, classes, (rows,), generator=g)

    some = ids(9, 21)
    some[::3] = -100
    zeros = ids(8, 5)
    zeros[0] = 0
    far = 200 * rand(6, 70)
    masked = rand(5, 33)
    masked[:, 2:9] = -math.inf
    return [
        Sample("mean", (rand(6, 9), ids(6, 9), "mean", -100, 0.0)),
        Sample("sum", (rand(7, 130), ids(7, 130), "sum", -100, 0.0)),
        Sample("each", (rand(5, 17), ids(5, 17), "none", -100, 0.0)),
        Sample("ignored", (rand(9, 21), some, "mean", -100, 0.0)),
        Sample("ignored, each", (rand(9, 21), some, "none", -100, 0.0)),
        Sample("a class is ignored", (rand(8, 5), zeros, "mean", 0, 0.1)),
        Sample("all ignored", (rand(3, 4), torch.full((3,), 2), "sum", 2, 0.0)),
        Sample("smoothed", (rand(6, 37), ids(6, 37), "mean", -100, 0.25)),
        Sample("smoothed, each", (rand(9, 21), some, "none", -100, 0.5)),
        Sample("several blocks", (rand(3, 5003), ids(3, 5003), "mean", -100, 0.1)),
        Sample("far logits", (far, ids(6, 70), "mean", -100, 0.0)),
        Sample("masked logits", (masked, torch.tensor([0, 1, 9, 12, 32]), "mean", -100, 0.0)),
        Sample("one class", (rand(4, 1), torch.zeros(4, dtype=torch.int64), "sum", -100, 0.0)),
        Sample("one row", (rand(1, 64), ids(1, 64), "none", -100, 0.0)),
        Sample("empty batch", (rand(0, 8), ids(0, 8), "sum", -100, 0.0)),
        Sample("strided", (rand(8, 40)[::2, 3:20], ids(8, 17)[::2], "mean", -100, 0.0)),
        Sample("transposed", (rand(9, 6).t(), ids(6, 9), "mean", -100, 0.0)),
    ]


cross_entropy = register(
    Op(
        name="cross_entropy",
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
        not_worth={"cuda": "there is no kernel for it, and torch has its own"},
    )
)
