"""Pairwise dot products of feature vectors, as in DLRM.

With T = the features stacked along dim 1, (B, F, D), and Z = T Tᵀ, (B, F, F)::

    out = [ dense | Z[:, li, lj] | zeros(pad) ]                 (B, d + P + pad)

``li, lj`` are any P pairs of rows; a lower triangle, a lower triangle with the diagonal or an upper
triangle in row-major order takes the fast path. No concatenation of the features is ever written.

Backward, with G (B, F, F) zero but ``G[:, li, lj] += grad`` of the P columns::

    dT = (G + Gᵀ) T        d dense = the first d columns of grad

``aligned`` promises that all readers of the result take rows of any stride: on a GPU rows then
start at multiples of 16 bytes (see :mod:`~recast.runtime.aligned`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from recast.errors import InputError
from recast.runtime import device, kept_memory, partials
from recast.runtime.batched_grads import each_of_batch
from recast.runtime.cost import Cost, moved
from recast.runtime.embedding.unread_rows import UnreadRows
from recast.runtime.gpu import cuda_launch, gpu
from recast.runtime.interactions import dot_cuda
from recast.runtime.interactions.features import check_features, stacked
from recast.runtime.op import Kernel, Op, Sample, cpu_kernels, register, wants_grad

SCHEMA = (
    "(Tensor[] features, Tensor? dense, Tensor li, Tensor lj, int pad, bool aligned=False)"
    " -> Tensor"
)


# ---------------------------------------------------------------- the definition


def reference(
    features: Sequence[Tensor],
    dense: Tensor | None,
    li: Tensor,
    lj: Tensor,
    pad: int,
    aligned: bool = False,
) -> Tensor:
    """Plain torch. ``features``: (B, D) or (B, f, D) each; ``dense``: (B, d); ``li, lj``: (P,)."""
    check(features, dense, li, lj, pad)
    vectors = stacked(features)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    parts = [] if dense is None else [dense]
    parts.append(products[:, li, lj])
    if pad:
        parts.append(products.new_zeros(products.shape[0], pad))
    return torch.cat(parts, 1)


def fake(
    features: Sequence[Tensor],
    dense: Tensor | None,
    li: Tensor,
    lj: Tensor,
    pad: int,
    aligned: bool = False,
) -> Tensor:
    """Shape and dtype of the result."""
    width = (0 if dense is None else dense.shape[1]) + li.shape[0] + pad
    some = [*features] if dense is None else [*features, dense]
    dtype = reduce(torch.promote_types, (t.dtype for t in some))
    return features[0].new_empty((features[0].shape[0], width), dtype=dtype)


def check(
    features: Sequence[Tensor], dense: Tensor | None, li: Tensor, lj: Tensor, pad: int
) -> None:
    """Raise InputError for shapes that do not fit; mixed dtypes (as in autocast) are promoted."""
    check_features(features, "dot_interaction")
    batch = features[0].shape[0]
    if dense is not None and (dense.dim() != 2 or dense.shape[0] != batch):
        raise InputError(
            f"dense has shape {tuple(dense.shape)}, the batch size is {batch}",
            why="dense is (B, d)",
        )
    if li.dim() != 1 or li.shape != lj.shape:
        raise InputError(f"li and lj have shapes {tuple(li.shape)} and {tuple(lj.shape)}")
    if pad < 0:
        raise InputError(f"pad is {pad}")


# ---------------------------------------------------------------- the kernels


class Call(Protocol):
    """One call as kernels read it; the tensors that it was made of must live on."""

    def forward(self) -> Tensor:
        """The result."""

    def backward(self, grad: Tensor, same: int, needs: Sequence[bool]) -> Sequence[Tensor | None]:
        """The gradients of the features, at least of those that ``needs`` one.

        ``grad`` has its columns side by side. The dense part is feature ``same``, whose gradient
        includes that of the first columns, or none of them (-1).
        """


@dataclass(frozen=True, slots=True)
class _OnCpu:
    """A call of the C++ kernels."""

    native: Any
    features: Sequence[Tensor]
    dense: Tensor | None
    li: Tensor
    pad: int

    def forward(self) -> Tensor:
        first, dense = self.features[0], self.dense  # all float32
        width = (0 if dense is None else dense.shape[1]) + self.li.shape[0] + self.pad
        out = kept_memory.empty((first.shape[0], width), first.dtype)
        self.native.forward(out, device.threads())
        return out

    def backward(self, grad: Tensor, same: int, needs: Sequence[bool]) -> Sequence[Tensor | None]:
        rows = [f.shape[1] if f.dim() == 3 else 1 for f in self.features]
        first = self.features[0]
        whole = kept_memory.empty((first.shape[0], sum(rows), first.shape[-1]), grad.dtype)
        at = sum(rows[:same]) if same >= 0 else -1
        self.native.backward(grad, [whole], at, device.threads())
        if all(f.dim() == 2 for f in self.features):
            return whole.unbind(1)  # a third of the time of as many slices
        parts, start = [], 0
        for f, count in zip(self.features, rows, strict=True):
            parts.append(whole[:, start] if f.dim() == 2 else whole[:, start : start + count])
            start += count
        return parts


class Given(NamedTuple):
    """Features and dense part as the kernels at hand take them."""

    features: Sequence[Tensor]
    dense: Tensor | None
    call: Call | None  # None if no kernels support them


def _given(
    features: Sequence[Tensor],
    dense: Tensor | None,
    li: Tensor,
    lj: Tensor,
    pad: int,
    cast: torch.dtype | None,
    aligned: bool = False,
) -> Given:
    there = gpu.serving(features[0]) if features else None
    if there is not None:
        ready = dot_cuda.prepared(features, dense, cast)
        made = dot_cuda.interaction(there, ready, li, lj, pad, aligned)
        return Given(ready.features, ready.dense, made)
    extension = device.extension()
    if extension is None or pad < 0 or not features or not features[0].is_cpu:
        return Given(features, dense, None)
    native = extension.dot_interaction(features, dense, li, lj)
    call = None if native is None else _OnCpu(native, features, dense, li, pad)
    return Given(features, dense, call)


# ---------------------------------------------------------------- forward and backward


def forward(
    features: Sequence[Tensor],
    dense: Tensor | None,
    li: Tensor,
    lj: Tensor,
    pad: int,
    aligned: bool = False,
) -> Tensor:
    """The result, no autograd; contiguous, as compilers expect."""
    return _forward(features, dense, li, lj, pad, None)


def _forward(
    features: Sequence[Tensor],
    dense: Tensor | None,
    li: Tensor,
    lj: Tensor,
    pad: int,
    cast: torch.dtype | None,
    aligned: bool = False,
) -> Tensor:
    # Alive until the kernels are launched.
    given = _given(features, dense, li, lj, pad, cast, aligned)
    if given.call is None:
        return reference(_to(features, cast), dense, li, lj, pad)
    return given.call.forward()


def _to(features: Sequence[Tensor], dtype: torch.dtype | None) -> Sequence[Tensor]:
    """As autocast to ``dtype`` makes them for a product; as they are where it is None."""
    if dtype is None:
        return features
    return [f.to(dtype) if f.is_floating_point() and f.dtype != torch.float64 else f
            for f in features]  # fmt: skip


class DotInteraction(torch.autograd.Function):
    """Inputs: the call, autocast's dtype, li, lj, pad, dense, then the features."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        cast: torch.dtype | None,
        li: Tensor,
        lj: Tensor,
        pad: int,
        dense: Tensor | None,
        *features: Tensor,
    ) -> Tensor:
        ctx.pad, ctx.cast, ctx.has_dense = pad, cast, dense is not None
        # It holds addresses, no tensors: those may come back from elsewhere, through saved hooks.
        ctx.call = call if isinstance(call, dot_cuda.Interaction) else None
        # A dense part that is one of the features gets its gradient in the same pass.
        ctx.same = next((k for k, f in enumerate(features) if f is dense), -1)
        ctx.save_for_backward(li, lj, *(() if dense is None else (dense,)), *features)
        if torch._C._len_torch_dispatch_stack():
            return dot_interaction.target(list(_to(features, ctx.cast)), dense, li, lj, pad)
        return call.forward()

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        li, lj, *rest = ctx.saved_tensors
        dense = rest.pop(0) if ctx.has_dense else None
        if torch.is_grad_enabled():
            return _differentiable_backward(ctx, li, lj, dense, rest, grad)
        given = Given(rest, dense, ctx.call)
        if ctx.call is None or not ctx.call.reads(rest):
            given = _given(rest, dense, li, lj, ctx.pad, ctx.cast)
        assert given.call is not None, "such tensors were taken in forward"
        width = 0 if dense is None else dense.shape[1]
        if width + li.shape[0] and grad.stride(1) != 1:
            grad = grad.contiguous()
        needs = ctx.needs_input_grad
        parts = given.call.backward(grad, ctx.same, needs[6:])
        apart = dense is not None and ctx.same < 0 and needs[5]
        of_dense = grad[:, :width] if apart else None
        found = [p if need else None for p, need in zip(parts, needs[6:], strict=True)]
        return (None, None, None, None, None, of_dense, *found)


def _differentiable_backward(
    ctx: Any, li: Tensor, lj: Tensor, dense: Tensor | None, features: list[Tensor], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """For ``create_graph``: through the reference."""
    (dense,), features = partials.apart([dense]), partials.apart(features)
    out = reference(_to(features, ctx.cast), dense, li, lj, ctx.pad)
    found = partials.gradients([out], [dense, *features], ctx.needs_input_grad[5:], [grad])
    return (None, None, None, None, None, *found)


def differentiable(
    features: Sequence[Tensor],
    dense: Tensor | None,
    li: Tensor,
    lj: Tensor,
    pad: int,
    aligned: bool = False,
) -> Tensor:
    """The result, recorded by autograd."""
    return _differentiable(features, dense, li, lj, pad, None, aligned)


def _differentiable(
    features: Sequence[Tensor],
    dense: Tensor | None,
    li: Tensor,
    lj: Tensor,
    pad: int,
    cast: torch.dtype | None,
    aligned: bool,
) -> Tensor:
    if not wants_grad((features, dense)):
        if torch._C._len_torch_dispatch_stack():
            with torch._C._AutoDispatchBelowAutograd():
                return dot_interaction.target(list(_to(features, cast)), dense, li, lj, pad)
        return _forward(features, dense, li, lj, pad, cast, aligned)
    given = _given(features, dense, li, lj, pad, cast, aligned)
    if given.call is None:
        return reference(_to(features, cast), dense, li, lj, pad)
    return DotInteraction.apply(given.call, cast, li, lj, pad, given.dense, *given.features)


def autocast(
    dtype: torch.dtype,
    features: Sequence[Tensor],
    dense: Tensor | None,
    li: Tensor,
    lj: Tensor,
    pad: int,
    aligned: bool = False,
) -> Tensor:
    """The result under autocast to ``dtype``, as bmm and cat give it there.

    On a CPU the kernels take float32: faster than to stack and multiply in ``dtype``, and closer.
    """
    if gpu.serving(features[0]) is None:
        some = features if dense is None else [*features, dense]
        if any(t.dtype not in (dtype, torch.float32) for t in some):
            with torch.autocast(features[0].device.type, dtype):
                return reference(features, dense, li, lj, pad)
        out = torch.promote_types(dtype, dtype if dense is None else dense.dtype)
        same = next((k for k, f in enumerate(features) if f is dense), None)
        wide = [f.float() for f in features]
        also = wide[same] if same is not None else None if dense is None else dense.float()
        return differentiable(wide, also, li, lj, pad).to(out)
    return _differentiable(features, dense, li, lj, pad, dtype, aligned)


def of_unread(features: Sequence[Any], *rest: Any) -> Tensor | None:
    """The result, no autograd; UnreadRows are read in their tables. None: not for the kernels."""
    dense, li, lj, pad, *_ = rest
    given = [f for f in features if type(f) is not UnreadRows]
    plain = {torch.Tensor, torch.nn.Parameter}.issuperset(map(type, given))
    extension = device.extension() if plain and pad >= 0 else None
    if extension is None:
        return None
    steps = [f.step if type(f) is UnreadRows else f for f in features]
    native = extension.dot_interaction(steps, dense, li, lj)
    if native is None:
        return None
    bags = next(f.bags for f in features if type(f) is UnreadRows)
    width = (0 if dense is None else dense.shape[1]) + li.shape[0] + pad
    out = kept_memory.empty((bags, width), torch.float32)
    native.forward(out, device.threads())
    return out


# ---------------------------------------------------------------- cost, samples


def cost(
    features: Sequence[Tensor],
    dense: Tensor | None,
    li: Tensor,
    lj: Tensor,
    pad: int,
    aligned: bool = False,
) -> Cost:
    """One dot product per pair; features read once, the result written once."""
    batch, dim = features[0].shape[0], features[0].shape[-1]
    out = fake(features, dense, li, lj, pad) if features[0].is_meta else None
    width = (0 if dense is None else dense.shape[1]) + li.shape[0] + pad
    written = moved(out) if out is not None else batch * width * features[0].element_size()
    return Cost(2 * batch * li.shape[0] * dim, moved(*features, dense) + written)


def samples() -> list[Sample]:
    """Odd sizes, triangles, generic pairs, strided features, with and without dense and pad."""
    g = torch.Generator().manual_seed(11)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    def lower(n: int, diagonal: int = -1) -> tuple[Tensor, Tensor]:
        li, lj = torch.tril_indices(n, n, diagonal)
        return li, lj

    li, lj = torch.triu_indices(5, 5, 1)
    pairs = torch.tensor([4, 0, 2, 2, 0, 0, 1]), torch.tensor([0, 4, 2, 1, 0, 0, 3])
    many = [rand(6, 16) for _ in range(27)]
    wide = rand(6, 5, 9)
    return [
        Sample("dlrm", (many, many[0], *lower(27), 0)),
        Sample("dlrm padded", ([*many], rand(6, 16), *lower(27), 1)),
        Sample("stack", ([wide], None, *lower(5), 0)),
        Sample("stack with self", ([wide], rand(6, 3), *lower(5, 0), 2)),
        Sample("vector and stack", ([rand(6, 9), rand(6, 4, 9)], rand(6, 9), *lower(5), 3)),
        Sample("upper", ([wide], None, li, lj, 0)),
        Sample("pairs", ([wide], rand(6, 2), *pairs, 1)),
        Sample("one pair", ([rand(3, 1), rand(3, 1)], None, *lower(2), 0)),
        Sample("no pair", ([rand(3, 8)], rand(3, 4), *lower(1), 2)),
        Sample("one row", ([rand(1, 7, 130)], None, *lower(7), 0)),
        Sample("empty batch", ([rand(0, 4, 8)], rand(0, 8), *lower(4), 0)),
        Sample(
            "strided batch", ([rand(12, 4, 8)[::2], rand(6, 8, 3)[:, :, 1]], None, *lower(5), 0)
        ),
        Sample("transposed", ([rand(6, 9, 5).transpose(1, 2)], rand(9, 6).t(), *lower(5), 0)),
        Sample("broadcast", ([rand(6, 9), rand(1, 9).expand(6, 9)], None, *lower(2), 0)),
        Sample("wide", ([rand(3, 40, 67)], rand(3, 67), *lower(40), 0)),
        Sample("aligned", ([rand(6, 9), rand(6, 4, 9)], rand(6, 9), *lower(5), 0, True)),
    ]


dot_interaction = register(
    Op(
        name="dot_interaction",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        takes_stacks=True,
        takes_unread=of_unread,
        samples=samples,
        cost=cost,
        devices=("cpu", "cuda"),
        casts=True,
        autocast=autocast,
        autocast_on=("cpu", "cuda"),
        kernels=(
            Kernel("cuda", "cuda", dot_cuda.CONDITION, cuda_launch.why_not),
            *cpu_kernels("float32 features; under autocast too"),
            Kernel("torch", "cpu", "any other features", lambda: None),
        ),
    )
)
