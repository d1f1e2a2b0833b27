"""A cross layer that is a mixture of nonlinear experts of low rank (DCN-Mix).

With x_0 the first features and x the value that the layer starts from (Wang et al. 2020, equations
3 to 5), φ an activation, and a gate p_e per sample and expert, Σ_e p_e = 1::

    h_e = φ(C_e φ(V_e x))                                V: (E, r, d), C: (E, r, r), U: (E, d, r)
    p = softmax(G x + γ)                                 G: (E, d); absent where E = 1
    out = x_0 ∘ Σ_e p_e (dropout(U_e h_e) + inner) + outer + x                            (B, d)

Plain torch multiplies by each matrix separately, and writes E results of (B, d) to add them up. As
Σ_e p_e U_e h_e = [U_1 .. U_E] [p_1 h_1 .. p_E h_E], all experts are two products here, and gates
weigh r numbers per expert instead of d. With active dropout the experts' results must be written,
so the definition runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce as fold
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.errors import InputError
from recast.runtime import partials
from recast.runtime.batched_grads import each_of_batch
from recast.runtime.cost import Cost, moved
from recast.runtime.gpu import cuda_launch, gpu
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.interactions import mixture_cuda
from recast.runtime.interactions.cross_samples import of_mixtures
from recast.runtime.interactions.cross_tail import Tail, rows, takes
from recast.runtime.layers.as_product import as_product
from recast.runtime.op import Kernel, Op, cpu_kernels, register, wants_grad

SCHEMA = (
    "(Tensor x0, Tensor x, Tensor v, Tensor? core, Tensor u, Tensor? gate, Tensor? gate_bias,"
    " Tensor? inner, Tensor? outer, str activation, float p, bool training,"
    " bool product=False) -> Tensor"
)
ACTIVATIONS = {
    "none": lambda x: x,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


# ---------------------------------------------------------------- the definition


def reference(
    x0: Tensor, x: Tensor, v: Tensor, core: Tensor | None, u: Tensor, gate: Tensor | None,
    gate_bias: Tensor | None, inner: Tensor | None, outer: Tensor | None, activation: str, p: float,
    training: bool, product: bool = False,
) -> Tensor:  # fmt: skip
    """Plain torch, one expert after the other. ``x0``, ``x``: (..., d); biases of any shape.

    ``product``: the mixture is the result of a matrix product, so autocast casts it.
    """
    check(x0, x, v, core, u, gate, activation)
    act = ACTIVATIONS[activation]
    experts = []
    for e in range(v.shape[0]):
        h = act(F.linear(x, v[e]))
        h = h if core is None else act(F.linear(h, core[e]))
        experts.append(F.linear(h, u[e]))
    stacked = F.dropout(torch.stack(experts, -2), p, training)
    stacked = stacked if inner is None else stacked + inner.reshape(-1)
    if gate is None:
        mixed = stacked.squeeze(-2)  # of one expert; a sum would be fp32 under autocast
    else:
        mixed = (stacked * torch.softmax(F.linear(x, gate, gate_bias), -1).unsqueeze(-1)).sum(-2)
    mixed = as_product(mixed) if product else mixed
    crossed = x0 * mixed
    return ((crossed if outer is None else crossed + outer.reshape(-1)) + x).contiguous()


def fake(x0: Tensor, x: Tensor, *rest: Any) -> Tensor:
    """Shape and dtype of the result."""
    given = (t.dtype for t in (x0, x, *rest) if isinstance(t, Tensor))
    return x0.new_empty(x0.shape, dtype=fold(torch.promote_types, given))


def check(
    x0: Tensor, x: Tensor, v: Tensor, core: Tensor | None, u: Tensor, gate: Tensor | None, act: str
) -> None:
    """Raise InputError for shapes that do not fit."""
    if x0.dim() < 1 or x0.shape != x.shape:
        raise InputError(
            f"a cross layer from {tuple(x.shape)} with first features {tuple(x0.shape)}",
            why="both are (..., d), of one shape",
        )
    experts, rank, d = v.shape if v.dim() == 3 else (0, 0, 0)
    fits = d == x0.shape[-1] and tuple(u.shape) == (experts, d, rank)
    fits = fits and (core is None or tuple(core.shape) == (experts, rank, rank))
    if not fits or experts == 0:
        shapes = [tuple(t.shape) for t in (v, core, u) if t is not None]
        raise InputError(
            f"the matrices of a mixture have shapes {', '.join(map(str, shapes))}",
            why=f"V is (E, r, {x0.shape[-1]}), C (E, r, r) and U (E, {x0.shape[-1]}, r)",
        )
    if (gate is None) != (experts == 1) or (gate is not None and tuple(gate.shape) != (experts, d)):
        raise InputError(
            f"a mixture of {experts} experts with a gate of shape"
            f" {None if gate is None else tuple(gate.shape)}",
            why=f"it is ({experts}, {d}), and absent for one expert",
        )
    if act not in ACTIVATIONS:
        raise InputError(f"unknown activation {act!r}", tries=[f"one of {', '.join(ACTIVATIONS)}"])


# ---------------------------------------------------------------- two products for all experts


def forward(
    x0: Tensor, x: Tensor, v: Tensor, core: Tensor | None, u: Tensor, gate: Tensor | None,
    gate_bias: Tensor | None, inner: Tensor | None, outer: Tensor | None, activation: str, p: float,
    training: bool, product: bool = False,
) -> Tensor:  # fmt: skip
    """The result; autograd sees the products that it is made of."""
    check(x0, x, v, core, u, gate, activation)
    lengths = (gate_bias, v.shape[0]), (inner, v.shape[2]), (outer, v.shape[2])
    fits = all(t is None or t.numel() == n for t, n in lengths)  # else torch broadcasts
    fits = fits and takes((x0, x, v, core, u, gate, gate_bias, inner, outer))
    if (training and p > 0) or not fits:
        return reference(
            x0, x, v, core, u, gate, gate_bias, inner, outer, activation, p, training, product
        )
    there = gpu.serving(x0)
    if there is not None and mixture_cuda.takes(x, v):
        first, start = rows(x0), None if x is x0 else rows(x)
        given = (v, core, u, gate, gate_bias, inner, outer)
        return CudaMixture.apply(there, activation, first, start, *given).view(x0.shape)
    act = ACTIVATIONS[activation]
    experts, rank, d = v.shape
    source = rows(x)
    h = act(F.linear(source, v.reshape(experts * rank, d)))
    each = h.unflatten(1, (experts, rank)).transpose(0, 1)  # (E, B, r)
    if core is not None:
        each = act(torch.bmm(each, core.transpose(1, 2)))
    if gate is not None:
        each = each * torch.softmax(F.linear(source, gate, gate_bias), 1).t().unsqueeze(2)
    weighed = each.transpose(0, 1).reshape(-1, experts * rank)
    m = F.linear(weighed, u.transpose(0, 1).reshape(d, experts * rank))
    start = source if x is x0 else rows(x0)
    return MixtureTail.apply(start, m, None if x is x0 else source, inner, outer).view(x0.shape)


class MixtureTail(torch.autograd.Function):
    """Inputs: x_0, the mixture m, x (None where it is x_0), inner, outer."""

    @staticmethod
    def forward(
        ctx: Any,
        x0: Tensor,
        m: Tensor,
        x: Tensor | None,
        inner: Tensor | None,
        outer: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x0, m, inner, outer)
        ctx.same = x is None
        return Tail.of(x0, m, inner, None).forward(x0 if x is None else x, outer)

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x0, m, inner, outer = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable_tail(ctx.same, x0, m, inner, outer, grad)
        wanted = (inner is not None, outer is not None, False)
        dx0 = torch.empty_like(x0, memory_format=torch.contiguous_format)
        grad = rows(grad)
        of = Tail.of(x0, m, inner, None).backward(grad, dx0, wanted, fresh=True, whole=ctx.same)
        dx = None if ctx.same else grad
        found = [(of.inner, inner), (of.outer, outer)]
        sums = (None if s is None else s.view(b.shape) for s, b in found)
        return dx0, of.m, dx, *sums


class CudaMixture(torch.autograd.Function):
    """Inputs: the device, the activation, x_0, x (None where it is x_0), V, C, U, G, γ, biases."""

    @staticmethod
    def forward(
        ctx: Any, there: Gpu, activation: str, x0: Tensor, x: Tensor | None, *rest: Tensor | None
    ) -> Tensor:
        ctx.there, ctx.activation = there, activation
        *experts, inner, outer = rest
        source = x0 if x is None else x
        m, kept = _mixture(there, activation, experts).forward(source)
        ctx.save_for_backward(x0, x, *rest, m, *kept)
        return Tail.of(x0, m, inner, None).forward(source, outer)

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x0, x, *rest, m, z, hidden, weighed = ctx.saved_tensors
        *experts, inner, outer = rest
        if torch.is_grad_enabled():
            needs = ctx.needs_input_grad[2:]
            return None, None, *_differentiable(needs, (x0, x, *rest), ctx.activation, grad)
        same = x is None
        dx0 = torch.empty_like(x0, memory_format=torch.contiguous_format)
        grad = rows(grad)
        wanted = (False, outer is not None, False)
        tail = Tail.of(x0, m, inner, None).backward(grad, dx0, wanted, fresh=True, whole=same)
        mixture = _mixture(ctx.there, ctx.activation, experts)
        kept = mixture_cuda.Kept(z, hidden, weighed)
        of = mixture.backward(x0 if same else x, tail.m, kept, sums=inner is not None)
        first = mixture.first()
        dx = None
        if same:
            dx0.addmm_(of.z, first)
        else:
            dx = torch.addmm(grad, of.z, first)
        v, _, _, gate, gate_bias = experts
        wide = v.shape[0] * v.shape[1]
        dv = of.first[:wide].view(v.shape)
        dgate = None if gate is None else of.first[wide : wide + len(gate)]
        found = [(of.gate_bias, gate_bias), (of.inner, inner), (tail.outer, outer)]
        sums = (None if s is None else s.view(b.shape) for s, b in found)
        return None, None, dx0, dx, dv, of.core, of.u, dgate, *sums


def _mixture(there: Gpu, activation: str, experts: Sequence[Any]) -> mixture_cuda.Mixture:
    parts: list[Any] = [t if t is None else t.contiguous() for t in experts]
    v, core, u, gate, gate_bias = parts
    return mixture_cuda.Mixture(there, v, core, u, gate, gate_bias, activation)


def _differentiable(
    needs: tuple[bool, ...], inputs: tuple[Tensor | None, ...], activation: str, grad: Tensor
) -> tuple[Tensor | None, ...]:
    """For ``create_graph``: through the reference."""
    own = partials.apart(inputs)
    x0, x, *rest = own
    arguments: list[Any] = [x0, x0 if x is None else x, *rest, activation, 0.0, False]
    out = reference(*arguments)
    return tuple(partials.gradients([out], own, needs, [grad]))


def _differentiable_tail(
    same: bool, x0: Tensor, m: Tensor, inner: Tensor | None, outer: Tensor | None, grad: Tensor
) -> tuple[Tensor | None, ...]:
    """For ``create_graph``: the formula itself, in torch."""
    biased = m if inner is None else m + inner.reshape(-1)
    dm = grad * x0
    dx0 = grad * biased + grad if same else grad * biased
    of_inner = None if inner is None else dm.sum(0).view(inner.shape)
    of_outer = None if outer is None else grad.sum(0).view(outer.shape)
    return dx0, dm, None if same else grad, of_inner, of_outer


def differentiable(x0: Tensor, x: Tensor, *rest: Any) -> Tensor:
    """The result, recorded by autograd; to a dispatch mode the op stays a single node."""
    if not wants_grad((x0, x, *rest)) and torch._C._len_torch_dispatch_stack():
        with torch._C._AutoDispatchBelowAutograd():
            return cross_mixture.target(x0, x, *rest)
    return forward(x0, x, *rest)


def cost(
    x0: Tensor,
    x: Tensor,
    v: Tensor,
    core: Tensor | None,
    u: Tensor,
    gate: Tensor | None,
    *rest: Any,
) -> Cost:
    """The products, and three flops per element for what follows them; operands read once."""
    count = x0.numel() // max(x0.shape[-1], 1)
    numbers = sum(t.numel() for t in (v, core, u, gate) if t is not None)
    biases = [t for t in rest if isinstance(t, Tensor)]
    start = None if x is x0 else x
    moves = moved(x0, start, v, core, u, gate, *biases) + moved(x0)
    return Cost(2 * count * numbers + 3 * x0.numel(), moves)


cross_mixture = register(
    Op(
        name="cross_mixture",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        samples=of_mixtures,
        cost=cost,
        casts=True,
        random=True,
        devices=("cpu", "cuda"),
        kernels=(
            Kernel("cuda", "cuda", "float32 throughout, no autocast", cuda_launch.why_not),
            *cpu_kernels("float32 throughout, no autocast"),
            Kernel("torch", "cpu", "anything else, and where dropout draws", lambda: None),
        ),
    )
)
