"""Sums of vectors under gates: the mixtures of MMoE and PLE, and attention pooling.

With E vectors h_e of length D per sample, and a gate t whose n_t columns weigh the vectors
``c = chosen[t]`` (Ma et al. 2018, equation 6)::

    w = gates[t], or its softmax          (B, n_t)
    out[t] = Σ_k w_k h_c[k]               (B, D)

One call serves all gates over a set of experts: it writes neither a stack of the experts nor a
product of that size, and it sums an expert's gradient over its gates in one go.

Backward, with g_t the gradient of out[t]::

    d h_e = Σ_t w_k g_t   where c[k] = e         d w_k = g_t · h_c[k]
    d logit_k = w_k (d w_k - Σ_j w_j d w_j)      under a softmax
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce as fold
from typing import Any

import torch
from torch import Tensor

from recast.errors import InputError
from recast.runtime import device
from recast.runtime.batched_grads import each_of_batch
from recast.runtime.cost import Cost, moved
from recast.runtime.gpu import cuda_launch, gpu
from recast.runtime.layers import gated_cuda
from recast.runtime.op import Kernel, Op, Sample, cpu_kernels, register, wants_grad

# Where torch's own calls train a stack under one gate faster, on one core of an AMD EPYC (Zen 4):
# products and sums of up to so many numbers in vectors of up to so many (0.7 to 0.97 of our time),
_MOST_NUMBERS, _WIDEST = 500_000, 32
# and matrix products of so many vectors, of so many numbers a sample, which torch leaves to its
# BLAS (0.5 to 0.9).
_BLAS_VECTORS, _BLAS_NUMBERS = 20, 400

SCHEMA = "(Tensor[] experts, Tensor[] gates, int[] chosen, bool softmax, bool product) -> Tensor[]"


def reference(
    experts: Sequence[Tensor],
    gates: Sequence[Tensor],
    chosen: Sequence[int],
    softmax: bool,
    product: bool,
) -> list[Tensor]:
    """Plain torch. ``experts``: (B, D) or (B, f, D) each; ``gates``: (B, n) each.

    ``chosen``: the index of the vector that each column weighs, gate after gate.
    ``product``: use a matrix product, which autocast casts, instead of a product and a sum.
    Raises InputError for arguments that do not fit together.
    """
    check(experts, gates, chosen)
    places = [(h, k) for h in experts for k in range(1 if h.dim() == 2 else h.shape[1])]
    outs, first = [], 0
    for gate in gates:
        some = _stacked([places[k] for k in chosen[first : first + gate.shape[1]]])
        first += gate.shape[1]
        weights = gate.softmax(1) if softmax else gate
        if product:
            outs.append(torch.matmul(weights.unsqueeze(1), some).squeeze(1))
        else:
            outs.append((weights.unsqueeze(2) * some).sum(1))
    return outs


def _stacked(vectors: Sequence[tuple[Tensor, int]]) -> Tensor:
    """The chosen vectors as (B, n, D), without the others, which must get no gradient."""
    whole, _ = vectors[0]
    if whole.dim() == 3 and [(id(h), k) for h, k in vectors] == [
        (id(whole), k) for k in range(whole.shape[1])
    ]:
        return whole
    return torch.stack([h if h.dim() == 2 else h[:, k] for h, k in vectors], 1)


def fake(
    experts: Sequence[Tensor],
    gates: Sequence[Tensor],
    chosen: Sequence[int],
    softmax: bool,
    product: bool,
) -> list[Tensor]:
    """Shapes and dtypes of the results."""
    first = experts[0]
    dtype = fold(torch.promote_types, (h.dtype for h in experts))
    return [
        first.new_empty(
            (first.shape[0], first.shape[-1]), dtype=torch.promote_types(dtype, gate.dtype)
        )
        for gate in gates
    ]


def check(experts: Sequence[Tensor], gates: Sequence[Tensor], chosen: Sequence[int]) -> None:
    """Raise InputError for arguments that do not fit together."""
    if not experts:
        raise InputError("gated_sums of no experts")
    first, count = experts[0], 0
    for k, h in enumerate(experts):
        if h.dim() not in (2, 3) or (h.shape[0], h.shape[-1]) != (first.shape[0], first.shape[-1]):
            raise InputError(
                f"expert {k} has shape {tuple(h.shape)}, expert 0 {tuple(first.shape)}",
                why="experts are (B, D) or (B, f, D), of one batch size and one length",
            )
        count += 1 if h.dim() == 2 else h.shape[1]
    for t, gate in enumerate(gates):
        if gate.dim() != 2 or gate.shape[0] != first.shape[0]:
            raise InputError(
                f"gate {t} has shape {tuple(gate.shape)}",
                why=f"a gate is (B, n), and B is {first.shape[0]} for the experts",
            )
    columns = sum(gate.shape[1] for gate in gates)
    if len(chosen) != columns or (chosen and not 0 <= min(chosen) <= max(chosen) < count):
        raise InputError(
            f"{len(chosen)} vectors chosen for gates of {columns} columns in all",
            why=f"each column weighs one of the {count} vectors, named by its number",
        )


# ---------------------------------------------------------------- kernels


def _native(
    experts: list[Tensor], gates: list[Tensor], chosen: Sequence[int], softmax: bool
) -> Any:
    """The call for the device's kernels; None if they do not support it."""
    there = gpu.serving(experts[0]) if experts else None
    if there is not None:
        check(experts, gates, chosen)
        return gated_cuda.sums(there, experts, gates, chosen, softmax)
    extension = device.extension()
    if extension is None or not experts or not all(t.is_cpu for t in (*experts, *gates)):
        return None
    check(experts, gates, chosen)
    whole = experts[0] if len(experts) == len(gates) == 1 else None
    if whole is not None and whole.dim() == 3 and whole.shape[2] == 1 and not device.forced():
        return None  # an inner product: torch's matrix product takes half the time
    return extension.gated_sums(experts, gates, list(chosen), softmax)


def _results(native: Any, experts: list[Tensor], gates: list[Tensor]) -> list[Tensor]:
    first = experts[0]
    outs = [first.new_empty((first.shape[0], first.shape[-1])) for _ in gates]
    native.forward(outs, device.threads())
    return outs


def forward(
    experts: list[Tensor],
    gates: list[Tensor],
    chosen: Sequence[int],
    softmax: bool,
    product: bool,
) -> list[Tensor]:
    """The results, not recorded by autograd."""
    native = _native(experts, gates, chosen, softmax)
    if native is None:
        return reference(experts, gates, chosen, softmax, product)
    return _results(native, experts, gates)


class GatedSums(torch.autograd.Function):
    """Inputs: the call, how many experts, the choice, softmax, experts, then gates."""

    @staticmethod
    def forward(
        ctx: Any, native: Any, count: int, chosen: Sequence[int], softmax: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.count, ctx.chosen, ctx.softmax = count, chosen, softmax
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        experts, gates = list(tensors[:count]), list(tensors[count:])
        if torch._C._len_torch_dispatch_stack():
            with torch._C._AutoDispatchBelowAutograd():
                return tuple(gated_sums.target(experts, gates, list(chosen), softmax, False))
        return tuple(_results(native, experts, gates))

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        experts, gates = list(saved[: ctx.count]), list(saved[ctx.count :])
        live = [t for t, grad in enumerate(grads) if grad is not None]
        chosen = _chosen_of(live, gates, ctx.chosen)
        some = [gates[t] for t in live]
        upstream = [grad for grad in grads if grad is not None]
        if torch.is_grad_enabled():
            found = _differentiable_backward(experts, some, chosen, ctx.softmax, upstream)
        else:
            found = _backward(experts, some, chosen, ctx.softmax, upstream)
        of_gates: list[Tensor | None] = [None] * len(gates)
        for t, grad in zip(live, found[1], strict=True):
            of_gates[t] = grad
        # As in torch, a vector gets no gradient if no gate that weighs it has one.
        every = [*_of_chosen(found[0], chosen), *of_gates]
        needs = ctx.needs_input_grad[4:]
        return (
            None,
            None,
            None,
            None,
            *(g if n else None for g, n in zip(every, needs, strict=True)),
        )


def _of_chosen(grads: Sequence[Tensor], chosen: Sequence[int]) -> list[Tensor | None]:
    """The gradients, with None for tensors that hold no chosen vector."""
    found: list[Tensor | None] = []
    used, first = set(chosen), 0
    for grad in grads:
        count = 1 if grad.dim() == 2 else grad.shape[1]
        found.append(grad if used & set(range(first, first + count)) else None)
        first += count
    return found


def _chosen_of(live: Sequence[int], gates: Sequence[Tensor], chosen: Sequence[int]) -> list[int]:
    """The choice of the gates whose results got a gradient."""
    found: list[int] = []
    first = 0
    for t, gate in enumerate(gates):
        if t in live:
            found += chosen[first : first + gate.shape[1]]
        first += gate.shape[1]
    return found


def _backward(
    experts: list[Tensor],
    gates: list[Tensor],
    chosen: Sequence[int],
    softmax: bool,
    upstream: Sequence[Tensor],
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    native = _native(experts, gates, chosen, softmax)
    if native is None:
        return _differentiable_backward(experts, gates, chosen, softmax, upstream)
    dense = [g if g.stride(1) == 1 else g.contiguous() for g in upstream]
    of_experts = [h.new_empty(h.shape) for h in experts]
    of_gates = [gate.new_empty(gate.shape) for gate in gates]
    native.backward(dense, of_experts, of_gates, device.threads())
    return of_experts, of_gates


def _differentiable_backward(
    experts: list[Tensor],
    gates: list[Tensor],
    chosen: Sequence[int],
    softmax: bool,
    upstream: Sequence[Tensor],
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The formulas themselves, in torch."""
    stacked = torch.cat([h.unsqueeze(1) if h.dim() == 2 else h for h in experts], 1)
    whole = torch.zeros_like(stacked)
    of_gates, first = [], 0
    for gate, grad in zip(gates, upstream, strict=True):
        index = torch.tensor(chosen[first : first + gate.shape[1]], device=gate.device).long()
        first += gate.shape[1]
        weights = gate.softmax(1) if softmax else gate
        along = (grad.unsqueeze(1) * stacked.index_select(1, index)).sum(2)
        whole = whole.index_add(1, index, weights.unsqueeze(2) * grad.unsqueeze(1))
        if softmax:
            along = weights * (along - (weights * along).sum(1, keepdim=True))
        of_gates.append(along)
    parts = torch.split(whole, [1 if h.dim() == 2 else h.shape[1] for h in experts], 1)
    pairs = zip(parts, experts, strict=True)
    return [part.squeeze(1) if h.dim() == 2 else part for part, h in pairs], of_gates


def differentiable(
    experts: list[Tensor],
    gates: list[Tensor],
    chosen: Sequence[int],
    softmax: bool,
    product: bool,
) -> list[Tensor]:
    """The results, recorded by autograd."""
    if not wants_grad((experts, gates)):
        if torch._C._len_torch_dispatch_stack():
            with torch._C._AutoDispatchBelowAutograd():
                found: list[Tensor] = gated_sums.target(experts, gates, chosen, softmax, product)
                return found
        return forward(experts, gates, chosen, softmax, product)
    native = None
    if not _is_torchs(experts, gates, chosen, softmax, product):
        native = _native(experts, gates, chosen, softmax)
    if native is None:
        return reference(experts, gates, chosen, softmax, product)
    return list(GatedSums.apply(native, len(experts), chosen, softmax, *experts, *gates))


def _is_torchs(
    experts: list[Tensor],
    gates: list[Tensor],
    chosen: Sequence[int],
    softmax: bool,
    product: bool,
) -> bool:
    """Whether torch's own calls train this faster."""
    whole = experts[0] if len(experts) == len(gates) == 1 else None
    if whole is None or whole.dim() != 3 or device.forced() or not whole.is_cpu:
        return False
    _, count, width = whole.shape
    if gpu.serving(whole) is not None or [*chosen] != [*range(count)]:
        return False
    if product:
        return count >= _BLAS_VECTORS and count * width >= _BLAS_NUMBERS
    return not softmax and whole.numel() <= _MOST_NUMBERS and width <= _WIDEST


def autocast(
    dtype: torch.dtype,
    experts: list[Tensor],
    gates: list[Tensor],
    chosen: Sequence[int],
    softmax: bool,
    product: bool,
) -> list[Tensor]:
    """The call under autocast on a GPU: by the kernels if ``product`` and all inputs already have
    autocast's dtype.
    """
    if product and all(t.dtype == dtype for t in (*experts, *gates)):
        return differentiable(experts, gates, chosen, softmax, product)
    with torch.autocast(experts[0].device.type, dtype):
        return reference(experts, gates, chosen, softmax, product)


# ---------------------------------------------------------------- cost, samples


def cost(
    experts: Sequence[Tensor],
    gates: Sequence[Tensor],
    chosen: Sequence[int],
    softmax: bool,
    product: bool,
) -> Cost:
    """Two flops per element of a chosen vector; inputs read once, results written once."""
    first = experts[0]
    rows, width = first.shape[0], first.shape[-1]
    written = sum(
        o.numel() * o.element_size() for o in fake(experts, gates, chosen, softmax, product)
    )
    return Cost(2 * rows * len(chosen) * width, moved(*experts, *gates) + written)


def samples() -> list[Sample]:
    """One gate and several, shared and own experts, stacks, odd widths, strides, no rows."""
    g = torch.Generator().manual_seed(19)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    three = [rand(6, 8) for _ in range(3)]
    many = [rand(5, 37) for _ in range(4)]
    strided = [rand(12, 8)[::2], rand(6, 16)[:, 3:11]]
    return [
        Sample("one gate", (three, [rand(6, 3)], [0, 1, 2], True, True)),
        Sample("given weights", (three, [rand(6, 3)], [0, 1, 2], False, False)),
        Sample("two gates", (many, [rand(5, 4), rand(5, 4)], [0, 1, 2, 3] * 2, True, False)),
        Sample("own and shared", (many, [rand(5, 3), rand(5, 2)], [0, 2, 3, 1, 3], True, True)),
        Sample("one twice", (three, [rand(6, 4)], [2, 0, 2, 2], True, False)),
        Sample("stack", ([rand(4, 5, 67)], [rand(4, 5)], [0, 1, 2, 3, 4], False, True)),
        Sample("mixed", ([rand(4, 2, 3), rand(4, 3)], [rand(4, 3)], [2, 0, 1], True, False)),
        Sample("one expert", ([rand(3, 1)], [rand(3, 1)], [0], True, True)),
        Sample("unused expert", (three, [rand(6, 2)], [2, 1], False, True)),
        Sample("one row", ([rand(1, 9), rand(1, 9)], [rand(1, 2)], [0, 1], True, True)),
        Sample("empty batch", ([rand(0, 9), rand(0, 9)], [rand(0, 2)], [0, 1], True, True)),
        Sample("strided", (strided, [rand(6, 5)[:, 1:3]], [0, 1], True, True)),
        Sample("transposed", ([rand(9, 6).t(), rand(6, 9)], [rand(2, 6).t()], [0, 1], True, False)),
        Sample("far logits", (three, [100 * rand(6, 3)], [0, 1, 2], True, True)),
    ]  # fmt: skip


gated_sums = register(
    Op(
        name="gated_sums",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        samples=samples,
        cost=cost,
        casts=True,
        devices=("cpu", "cuda"),
        autocast=autocast,
        kernels=(
            Kernel("cuda", "cuda", gated_cuda.CONDITION, cuda_launch.why_not),
            *cpu_kernels(
                "float32 vectors and gates, where torch's calls are no faster; no autocast"
            ),
            Kernel("torch", "cpu", "any others", lambda: None),
        ),
    )
)
