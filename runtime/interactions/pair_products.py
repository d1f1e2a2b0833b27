"""Products of chosen pairs of feature vectors, element by element, and their sums.

With the vectors of both sides stacked, x (B, F, D) and y (B, G, D)::

    out[b, p, d] = w[b, p] · x[b, li[p], d] · y[b, lj[p], d]        (B, P, D)

``sum``: ``"none"``; ``"dim"``, inner products (B, P); ``"pairs"``, the sum over p (B, D); ``"all"``
(B, 1). Neither the two gathered operands nor, where it is summed, the product is ever written.

Backward, with g the upstream gradient spread over what was summed::

    d x[b, li[p]] += w g y[b, lj[p]]      d y[b, lj[p]] += w g x[b, li[p]]
    d w[b, p] = Σ_d g x[b, li[p]] y[b, lj[p]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from recast.errors import InputError
from recast.runtime import device
from recast.runtime.batched_grads import each_of_batch
from recast.runtime.cost import Cost, moved
from recast.runtime.gpu import cuda_launch, gpu
from recast.runtime.interactions import pair_cuda
from recast.runtime.interactions.features import check_features, stacked
from recast.runtime.op import Kernel, Op, Sample, cpu_kernels, register, wants_grad

SCHEMA = "(Tensor[] left, Tensor[] right, Tensor li, Tensor lj, Tensor? weight, str sum) -> Tensor"
SUMS = ("none", "dim", "pairs", "all")


# ---------------------------------------------------------------- the definition


def reference(
    left: Sequence[Tensor],
    right: Sequence[Tensor],
    li: Tensor,
    lj: Tensor,
    weight: Tensor | None,
    sum: str,
) -> Tensor:
    """Plain torch. ``left, right``: (B, D) or (B, f, D) each, no ``right``: those of the left.

    ``li, lj``: (P,) int64 into the stacked vectors of their side; ``weight``: (B, P).
    """
    check(left, right, li, lj, weight, sum)
    x = stacked(left)
    y = stacked(right) if right else x
    product = x[:, li] * y[:, lj]
    if weight is not None:
        product = weight.unsqueeze(2) * product
    if sum == "none":
        return product
    if sum == "dim":
        return product.sum(2)
    pooled = product.sum(1)
    return pooled if sum == "pairs" else pooled.sum(1, keepdim=True)


def fake(
    left: Sequence[Tensor],
    right: Sequence[Tensor],
    li: Tensor,
    lj: Tensor,
    weight: Tensor | None,
    sum: str,
) -> Tensor:
    """Shape and dtype of the result."""
    first = left[0]
    some = [*left, *right] if weight is None else [*left, *right, weight]
    dtype = reduce(torch.promote_types, (t.dtype for t in some))
    return first.new_empty(_shape(first, li.shape[0], sum), dtype=dtype)


def _shape(first: Tensor, pairs: int, sum: str) -> tuple[int, ...]:
    batch, dim = first.shape[0], first.shape[-1]
    if sum == "none":
        return (batch, pairs, dim)
    return (batch, {"dim": pairs, "pairs": dim, "all": 1}[sum])


def check(
    left: Sequence[Tensor],
    right: Sequence[Tensor],
    li: Tensor,
    lj: Tensor,
    weight: Tensor | None,
    sum: str,
) -> None:
    """Raise InputError for shapes that do not fit; mixed dtypes are promoted, as ``*`` does."""
    check_features([*left, *right] if left else [], "products of pairs")
    if li.dim() != 1 or li.shape != lj.shape:
        raise InputError(f"li and lj have shapes {tuple(li.shape)} and {tuple(lj.shape)}")
    if sum not in SUMS:
        raise InputError(f"sum is {sum!r}", why=f"one of {', '.join(SUMS)}")
    wanted = (left[0].shape[0], li.shape[0])
    if weight is not None and tuple(weight.shape) != wanted:
        raise InputError(f"weight has shape {tuple(weight.shape)}", why=f"(batch, pairs): {wanted}")


# ---------------------------------------------------------------- the kernels


@dataclass(frozen=True, slots=True)
class Call:
    """One call as the kernels read it; the tensors that it was made of must live on."""

    native: Any
    left: list[Tensor]
    right: list[Tensor]
    pairs: int
    sum: str

    def forward(self) -> Tensor:
        """The result."""
        out = self.left[0].new_empty(_shape(self.left[0], self.pairs, self.sum))
        self.native.forward(out, SUMS.index(self.sum), device.threads())
        return out

    def backward(self, grad: Tensor, weighted: bool) -> tuple[list[Tensor], Tensor | None]:
        """The gradients of the features, left ones first, and of the weights."""
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        left = empty_like(self.left)
        right = empty_like(self.right) if self.right else None
        weight = grad.new_empty((grad.shape[0], self.pairs)) if weighted else None
        self.native.backward(
            grad, SUMS.index(self.sum), [left], [] if right is None else [right], weight,
            device.threads(),
        )  # fmt: skip
        parts = split_like(left, self.left)
        return parts + ([] if right is None else split_like(right, self.right)), weight


def ready(features: Sequence[Tensor]) -> list[Tensor]:
    """``features`` with their last dimension contiguous, as the kernels need them."""
    return [f if f.stride(-1) == 1 or not f.is_cpu else f.contiguous() for f in features]


def empty_like(features: Sequence[Tensor]) -> Tensor:
    """(B, F, D) for the gradients of all of ``features``, side by side."""
    count = sum(f.shape[1] if f.dim() == 3 else 1 for f in features)
    first = features[0]
    return first.new_empty((first.shape[0], count, first.shape[-1]))


def split_like(whole: Tensor, features: Sequence[Tensor]) -> list[Tensor]:
    """The parts of ``whole`` (B, F, D) that belong to each of ``features``."""
    if len(features) == 1 and features[0].dim() == 3:
        return [whole]
    parts, start = [], 0
    for f in features:
        count = f.shape[1] if f.dim() == 3 else 1
        parts.append(whole[:, start] if f.dim() == 2 else whole[:, start : start + count])
        start += count
    return parts


def _call(
    left: list[Tensor],
    right: list[Tensor],
    li: Tensor,
    lj: Tensor,
    weight: Tensor | None,
    sum: str,
) -> Call | None:
    """The call for the device's kernels; None if they do not support it."""
    if sum not in SUMS or not left:
        return None
    if weight is not None and tuple(weight.shape) != (left[0].shape[0], li.shape[0]):
        return None  # the definition says what is wrong
    where, native = gpu.serving(left[0]), None
    left, right = ready(left), ready(right)
    if where is not None:
        native = pair_cuda.products(where, left, right, li, lj, weight)
    elif left[0].is_cpu and (extension := device.extension()) is not None:
        native = extension.pair_products(left, right, li, lj, weight)
    return None if native is None else Call(native, left, right, li.shape[0], sum)


# ---------------------------------------------------------------- forward and backward


def forward(
    left: list[Tensor],
    right: list[Tensor],
    li: Tensor,
    lj: Tensor,
    weight: Tensor | None,
    sum: str,
) -> Tensor:
    """The result, not recorded by autograd."""
    call = _call(left, right, li, lj, weight, sum)
    return reference(left, right, li, lj, weight, sum) if call is None else call.forward()


class PairProducts(torch.autograd.Function):
    """Inputs: the call, how many features are left ones, li, lj, weight, sum, then the features."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        lefts: int,
        li: Tensor,
        lj: Tensor,
        weight: Tensor | None,
        sum: str,
        *features: Tensor,
    ) -> Tensor:
        ctx.lefts, ctx.sum = lefts, sum
        ctx.save_for_backward(li, lj, weight, *features)
        if torch._C._len_torch_dispatch_stack():
            left, right = list(features[:lefts]), list(features[lefts:])
            return pair_products.target(left, right, li, lj, weight, sum)
        return call.forward()

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        li, lj, weight, *features = ctx.saved_tensors
        left, right = features[: ctx.lefts], features[ctx.lefts :]
        needs = ctx.needs_input_grad[6:]
        weighted = ctx.needs_input_grad[4]
        call = None if torch.is_grad_enabled() else _call(left, right, li, lj, weight, ctx.sum)
        if call is None:
            found, more = _differentiable_backward(left, right, li, lj, weight, ctx.sum, grad)
        else:
            found, more = call.backward(grad, weighted)
        own = [g if n else None for g, n in zip(found, needs, strict=True)]
        return (None, None, None, None, more if weighted else None, None, *own)


def _differentiable_backward(
    left: list[Tensor],
    right: list[Tensor],
    li: Tensor,
    lj: Tensor,
    weight: Tensor | None,
    sum: str,
    grad: Tensor,
) -> tuple[list[Tensor], Tensor | None]:
    """The formula itself, in torch."""
    x = stacked(left)
    y = stacked(right) if right else x
    spread = grad.unsqueeze(2) if sum in ("dim", "all") else grad
    spread = spread.unsqueeze(1) if sum == "pairs" else spread
    weighed = spread if weight is None else spread * weight.unsqueeze(2)
    li, lj = li % x.shape[1], lj % y.shape[1]  # index_add takes none that count from the end
    p, q = x[:, li], y[:, lj]
    dx = torch.zeros_like(x).index_add(1, li, (weighed * q).expand_as(q))
    dy = torch.zeros_like(y).index_add(1, lj, (weighed * p).expand_as(p))
    found = split_like(dx, left) + split_like(dy, right) if right else split_like(dx + dy, left)
    return found, None if weight is None else (spread * p * q).sum(2)


def differentiable(
    left: list[Tensor],
    right: list[Tensor],
    li: Tensor,
    lj: Tensor,
    weight: Tensor | None,
    sum: str,
) -> Tensor:
    """The result, recorded by autograd."""
    if not wants_grad((left, right, weight)):
        if torch._C._len_torch_dispatch_stack():
            with torch._C._AutoDispatchBelowAutograd():
                return pair_products.target(left, right, li, lj, weight, sum)
        return forward(left, right, li, lj, weight, sum)
    call = _call(left, right, li, lj, weight, sum)
    if call is None:
        return reference(left, right, li, lj, weight, sum)
    return PairProducts.apply(call, len(left), li, lj, weight, sum, *left, *right)


# ---------------------------------------------------------------- cost, samples


def cost(
    left: Sequence[Tensor],
    right: Sequence[Tensor],
    li: Tensor,
    lj: Tensor,
    weight: Tensor | None,
    sum: str,
) -> Cost:
    """A product and an addition an element; features read once, the result written once."""
    first = left[0]
    products = first.shape[0] * li.shape[0] * first.shape[-1]
    written = torch.Size(_shape(first, li.shape[0], sum)).numel() * first.element_size()
    each = 1 + (sum != "none") + (weight is not None)
    return Cost(each * products, moved(*left, *right, weight) + written)


def samples() -> list[Sample]:
    """Every sum, one stack and two, weights, odd sizes, repeated pairs, strides, no rows."""
    g = torch.Generator().manual_seed(37)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    upper = tuple(torch.triu_indices(5, 5, 1))
    pairs = torch.tensor([4, 0, 2, 2, 0, -1]), torch.tensor([0, 4, 2, 1, 0, 3])
    one = torch.tensor([0])
    mixed = [rand(4, 11), rand(4, 3, 11), rand(4, 11)]
    return [
        Sample("triangle", ([rand(6, 5, 16)], [], *upper, None, "none")),
        Sample("triangle inner", ([rand(6, 5, 16)], [], *upper, None, "dim")),
        Sample("triangle pooled", ([rand(6, 5, 16)], [], *upper, None, "pairs")),
        Sample("triangle summed", ([rand(6, 5, 16)], [], *upper, None, "all")),
        Sample("weighted pooled", ([rand(6, 5, 16)], [], *upper, rand(6, 10), "pairs")),
        Sample("weighted odd", ([rand(3, 5, 7)], [rand(3, 5, 7)], *pairs, rand(3, 6), "none")),
        Sample("weighted inner", ([rand(3, 5, 9)], [], *pairs, rand(3, 6), "dim")),
        Sample("weighted all", ([rand(3, 5, 9)], [], *pairs, rand(3, 6), "all")),
        Sample("vectors and stack", (mixed, [], *pairs, None, "none")),
        Sample("two sides", (mixed, [rand(4, 5, 11)], *pairs, None, "dim")),
        Sample("one of each", ([rand(1, 1)], [], one, one, None, "none")),
        Sample("one row", ([rand(1, 5, 33)], [rand(1, 5, 33)], *pairs, None, "pairs")),
        Sample("empty batch", ([rand(0, 5, 8)], [], *upper, rand(0, 10), "none")),
        Sample("transposed", ([rand(6, 9, 5).transpose(1, 2)], [], *upper, None, "all")),
        Sample("strided", ([rand(12, 5, 8)[::2]], [rand(6, 10, 8)[:, ::2]], *pairs, None, "none")),
        Sample("broadcast", ([rand(6, 9), rand(1, 9).expand(6, 9)], [], one, one + 1, None, "dim")),
    ]


pair_products = register(
    Op(
        name="pair_products",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        samples=samples,
        cost=cost,
        casts=True,
        devices=("cpu", "cuda"),
        takes_stacks=True,
        kernels=(
            Kernel("cuda", "cuda", pair_cuda.CONDITION, cuda_launch.why_not),
            *cpu_kernels("float32 features, no autocast"),
            Kernel("torch", "cpu", "any other features", lambda: None),
        ),
    )
)
