"""A cross network of matrices (DCN-V2): full or of low rank, gated or not.

With x_0 the first features and x_l the value that layer l starts from (Wang et al. 2020, equations
1 and 2; the gate is that of GDCN, Wang et al. 2023)::

    m = W x_l   or   m = U (V x_l + v)                               W: (d, d), U: (d, r), V: (r, d)
    x_{l+1} = x_0 ∘ (m + inner) ∘ σ(G x_l + γ) + outer + x_l         (B, d); biases and gate may be
                                                                     absent

In plain torch everything after the products takes three to seven passes over (B, d) per layer, and
twice as many in backward; here it takes one, and the gradients of x_0 and x_l are added up in the
same pass.

Backward, with g the gradient of x_{l+1} and s = σ(..)::

    dm = g ∘ x_0 ∘ s      dx_0 += g ∘ (m + inner) ∘ s      dz = dm ∘ (m + inner) ∘ (1 - s)
    dx_l = g + dm W + dz G      dW = dmᵀ x_l      dG = dzᵀ x_l      dinner = Σ dm      douter = Σ g
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce as fold
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.errors import InputError
from recast.runtime import device, partials
from recast.runtime.batched_grads import each_of_batch
from recast.runtime.cost import Cost, moved
from recast.runtime.gpu import cuda_launch, gpu
from recast.runtime.interactions.cross_samples import of_matrices
from recast.runtime.interactions.cross_tail import Tail, rows, takes
from recast.runtime.mlp import gemm, products
from recast.runtime.op import Kernel, Op, cpu_kernels, register, wants_grad

SCHEMA = (
    "(Tensor x0, Tensor x, Tensor[] weights, Tensor?[] inner, Tensor?[] gates, Tensor?[] outer,"
    " int[] depths) -> Tensor"
)
Given = Sequence[Tensor | None]
# Elements of x_0 from which one call beats torch's on a CPU: Python costs 100 us per layer.
WORTH = 1 << 17
# The same without gradients, for the tail of a layer.
WORTH_TAIL = 1 << 14


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer; ``first`` and ``first_bias`` are V and v if it has low rank."""

    weight: Tensor
    inner: Tensor | None
    first: Tensor | None
    first_bias: Tensor | None
    gate: Tensor | None
    gate_bias: Tensor | None
    outer: Tensor | None


def layers(
    weights: Sequence[Tensor], inner: Given, gates: Given, outer: Given, depths: Sequence[int]
) -> list[Layer]:
    """The flat lists of a call, layer by layer; raises InputError if they do not fit."""
    count, matrices = len(depths), sum(depths)
    given = (len(weights), len(inner), len(gates), len(outer))
    if any(d not in (1, 2) for d in depths) or given != (matrices, matrices, 2 * count, count):
        raise InputError(
            f"a cross network of depths {list(depths)} with {given} matrices, inner biases, gates"
            " and outer biases",
            why="a layer has one matrix, or two if it is of low rank, each with a bias or None, a"
            " gate's matrix and bias or None, and an outer bias or None",
        )
    found, at = [], 0
    for k, depth in enumerate(depths):
        last = at + depth - 1
        first, first_bias = (weights[at], inner[at]) if depth == 2 else (None, None)
        gate, gate_bias = gates[2 * k], gates[2 * k + 1]
        found.append(
            Layer(weights[last], inner[last], first, first_bias, gate, gate_bias, outer[k])
        )
        at += depth
    return found


# ---------------------------------------------------------------- the definition


def reference(
    x0: Tensor, x: Tensor, weights: Sequence[Tensor], inner: Given, gates: Given, outer: Given,
    depths: Sequence[int],
) -> Tensor:  # fmt: skip
    """Plain torch. ``x0``, ``x``: (..., d).

    ``depths``: one number per layer, 1 for a full matrix (d, d), 2 for V (r, d) and U (d, r).
    ``weights``: the matrices, layer by layer; ``inner``: the bias of each, or None; ``gates``: a
    matrix (d, d) or None and a bias or None for each layer; ``outer``: a bias or None for each.
    Biases have d (or r) elements in any shape. Raises InputError for lists or shapes that do not
    fit.
    """
    found = layers(weights, inner, gates, outer, depths)
    check(x0, x, found)
    return _by_torch(x0, x, found)


def _by_torch(x0: Tensor, x: Tensor, found: Sequence[Layer]) -> Tensor:
    out = x
    for layer in found:
        h = out
        if layer.first is not None:
            h = F.linear(out, layer.first, _flat(layer.first_bias))
        crossed = x0 * F.linear(h, layer.weight, _flat(layer.inner))
        if layer.gate is not None:
            crossed = crossed * torch.sigmoid(F.linear(out, layer.gate, _flat(layer.gate_bias)))
        bias = _flat(layer.outer)
        out = (crossed if bias is None else crossed + bias) + out
    return out.contiguous() if found else x.clone(memory_format=torch.contiguous_format)


def _flat(bias: Tensor | None) -> Tensor | None:
    return bias if bias is None or bias.dim() == 1 else bias.reshape(-1)


def fake(
    x0: Tensor, x: Tensor, weights: Sequence[Tensor], inner: Given, gates: Given, outer: Given,
    depths: Sequence[int],
) -> Tensor:  # fmt: skip
    """Shape and dtype of the result."""
    given = (t.dtype for t in (x0, x, *weights, *inner, *gates, *outer) if t is not None)
    return x0.new_empty(x0.shape, dtype=fold(torch.promote_types, given))


def check(x0: Tensor, x: Tensor, found: Sequence[Layer]) -> None:
    """Raise InputError for shapes that do not fit."""
    if x0.dim() < 1 or x0.shape != x.shape:
        raise InputError(
            f"a cross network from {tuple(x.shape)} with first features {tuple(x0.shape)}",
            why="both are (..., d), of one shape",
        )
    d = x0.shape[-1]
    for k, layer in enumerate(found):
        rank = d if layer.first is None else layer.first.shape[0]
        wanted: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
            ("matrix", layer.weight, (d, rank)),
            ("first matrix", layer.first, (rank, d)),
            ("gate", layer.gate, (d, d)),
        ]
        for name, tensor, shape in wanted:
            if tensor is not None and tuple(tensor.shape) != shape:
                raise InputError(
                    f"the {name} of cross layer {k} has shape {tuple(tensor.shape)}, not {shape}"
                )
        sizes = (layer.inner, d), (layer.first_bias, rank), (layer.gate_bias, d), (layer.outer, d)
        for bias, size in sizes:
            if bias is not None and bias.numel() != size:
                raise InputError(
                    f"a bias of cross layer {k} has shape {tuple(bias.shape)}",
                    why=f"it holds {size} numbers",
                )


# ---------------------------------------------------------------- the kernels


@dataclass(slots=True)
class Tape:
    """What a layer keeps for its backward."""

    x: Tensor
    m: Tensor
    hidden: Tensor | None  # V x + v
    gate: Tensor | None  # σ(G x + γ)


def run(x0: Tensor, x: Tensor, found: Sequence[Layer]) -> tuple[Tensor, list[Tape]]:
    """The result as (B, d), and the tape; ``x0`` and ``x`` as ``rows`` gives them."""
    tape = []
    for layer in found:
        hidden = None
        if layer.first is not None:
            hidden = _linear(x, layer.first, _flat(layer.first_bias))
        m = _linear(x if hidden is None else hidden, layer.weight, None)
        gate = None
        if layer.gate is not None:
            gate = _linear(x, layer.gate, _flat(layer.gate_bias)).sigmoid_()
        tape.append(Tape(x, m, hidden, gate))
        x = Tail.of(x0, m, layer.inner, gate).forward(x, layer.outer)
    return x, tape


@dataclass(slots=True)
class Found:
    """The gradients of one layer's parameters."""

    weight: Tensor | None = None
    inner: Tensor | None = None
    first: Tensor | None = None
    first_bias: Tensor | None = None
    gate: Tensor | None = None
    gate_bias: Tensor | None = None
    outer: Tensor | None = None


def unrun(
    x0: Tensor, found: Sequence[Layer], tape: Sequence[Tape], grad: Tensor, same: bool
) -> tuple[Tensor, Tensor | None, list[Found]]:
    """The gradients of x_0, of x (None if it is x_0: ``same``), and of the parameters."""
    dx0 = torch.empty_like(grad, memory_format=torch.contiguous_format)
    given = grad
    results = []
    # On a GPU the product for a weight's gradient may also sum the columns, which it reads anyway.
    here = gpu.serving(x0) is None
    for k in reversed(range(len(found))):
        layer, left = found[k], tape[k]
        first = same and k == 0
        biases = layer.inner is not None, layer.gate_bias is not None
        wanted = (here and biases[0], layer.outer is not None, here and biases[1])
        of = Tail.of(x0, left.m, layer.inner, left.gate).backward(
            grad, dx0, wanted, fresh=k + 1 == len(found), whole=first
        )
        result = Found(outer=of.outer)
        # The products are added to the gradient of x, or of x_0 if x is x_0.
        total, own = (dx0, True) if first else (grad, grad is not given)
        dm = of.m
        source = left.x if left.hidden is None else left.hidden
        result.weight, inner = _of_weight(dm, source, biases[0] and not here)
        result.inner = of.inner if here else inner
        if layer.first is not None:
            dm = _of_input(dm, layer.weight)
            result.first, result.first_bias = _of_weight(dm, left.x, layer.first_bias is not None)
        total = _add(total, dm, layer.weight if layer.first is None else layer.first, own)
        if layer.gate is not None and of.gate is not None:
            result.gate, bias = _of_weight(of.gate, left.x, biases[1] and not here)
            result.gate_bias = of.of_gate if here else bias
            total = _add(total, of.gate, layer.gate, True)
        grad = total
        results.append(result)
    return dx0, None if same else grad, results[::-1]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x Wᵀ + b``."""
    if gpu.serving(x) is None:
        return gemm.linear(x, weight, bias)
    bias = None if bias is None else bias.contiguous()
    return products.linear(products.rows(x), products.rows(weight), bias)


def _of_input(grad: Tensor, weight: Tensor) -> Tensor:
    """``grad W``."""
    runs = gpu.serving(grad)
    if runs is None:
        return gemm.of_input(grad, weight)
    return products.input_gradient(runs, grad, products.rows(weight), None, None).x


def _of_weight(grad: Tensor, x: Tensor, sums: bool) -> tuple[Tensor, Tensor | None]:
    """``gradᵀ x``, and with ``sums`` the column sums of ``grad``, else None."""
    if gpu.serving(grad) is None:
        return gemm.of_weight(grad, x), grad.sum(0) if sums else None
    found = grad.new_empty(grad.shape[1], x.shape[1])
    bias = grad.new_empty(grad.shape[1]) if sums else None
    products.weight_gradient(grad, products.rows(x), found, bias)()
    return found, bias


def _add(total: Tensor, grad: Tensor, weight: Tensor, own: bool) -> Tensor:
    """``total + grad weight``, in place if ``total`` is our ``own``."""
    if grad.is_cpu and gemm.why_not_onednn() is None and not gemm.in_halves():
        product = gemm.of_input(grad, weight)
        return total.add_(product) if own else product.add_(total)
    return total.addmm_(grad, weight) if own else torch.addmm(total, grad, weight)


# ---------------------------------------------------------------- forward and backward


def forward(x0: Tensor, x: Tensor, *rest: Any) -> Tensor:
    """The result, not recorded by autograd."""
    found = layers(*rest)
    check(x0, x, found)
    *lists, depths = rest
    if not depths or not x0.shape[-1] or not takes([x0, x, *(t for part in lists for t in part)]):
        return _by_torch(x0, x, found)
    start = rows(x0)
    own = start if x is x0 else rows(x)
    if gpu.serving(x0) is not None:
        return run(start, own, found)[0].view(x0.shape)
    out = _without_tape(start, own, found)
    return out if x0.dim() == 2 else out.view(x0.shape)


def _without_tape(x0: Tensor, x: Tensor, found: Sequence[Layer]) -> Tensor:
    """The result as (B, d), on a CPU; each layer's product becomes its value."""
    native = x0.numel() >= WORTH_TAIL or device.forced()
    for layer in found:
        h = x
        if layer.first is not None:
            h = gemm.linear(x, layer.first, _flat(layer.first_bias))
        gate = None
        if layer.gate is not None:
            gate = gemm.linear(x, layer.gate, _flat(layer.gate_bias)).sigmoid_()
        if native:
            m = gemm.linear(h, layer.weight, None)
            x = Tail.of(x0, m, layer.inner, gate).forward(x, layer.outer, into=m)
            continue
        m = gemm.linear(h, layer.weight, _flat(layer.inner)).mul_(x0)
        if gate is not None:
            m.mul_(gate)
        if layer.outer is not None:
            m.add_(layer.outer.reshape(-1))
        x = m.add_(x)
    return x


def _served(x0: Tensor, x: Tensor, rest: tuple[Any, ...]) -> bool:
    *lists, depths = rest
    if not depths or not x0.shape[-1]:
        return False
    if x0.numel() < WORTH and not device.forced() and gpu.serving(x0) is None:
        return False
    return takes([x0, x, *(t for part in lists for t in part)])


class CrossMatrix(torch.autograd.Function):
    """Inputs: depths, x_0, x (None where it is x_0), then weights, inner, gates and outer."""

    @staticmethod
    def forward(
        ctx: Any, depths: list[int], x0: Tensor, x: Tensor | None, *rest: Tensor | None
    ) -> Tensor:
        ctx.depths, ctx.kept = depths, 0
        lists = _lists(rest, depths)
        if torch._C._len_torch_dispatch_stack():
            ctx.save_for_backward(x0, x, *rest)
            return cross_matrix.target(x0, x0 if x is None else x, *lists, depths)
        start = rows(x0)
        out, tape = run(start, start if x is None else rows(x), layers(*lists, depths))
        kept = [t for left in tape for t in (left.x, left.m, left.hidden, left.gate)]
        ctx.kept = len(kept)
        ctx.save_for_backward(x0, x, *rest, *kept)
        return out.view(x0.shape)

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, depths = ctx.saved_tensors, ctx.depths
        kept, (x0, x, *rest) = saved[len(saved) - ctx.kept :], saved[: len(saved) - ctx.kept]
        needs = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            return (None, *_differentiable_backward(needs, (x0, x, *rest), depths, grad))
        found = layers(*_lists(rest, depths), depths)
        start = rows(x0)
        if kept:
            tape = [Tape(*kept[k : k + 4]) for k in range(0, len(kept), 4)]
        else:
            _, tape = run(start, start if x is None else rows(x), found)
        dx0, dx, results = unrun(start, found, tape, rows(grad), x is None)
        grads = [dx0.view(x0.shape), None if dx is None else dx.view(x0.shape)]
        grads += [
            g if g is None or t is None or g.shape == t.shape else g.view(t.shape)
            for g, t in zip(_flattened(results, depths), rest, strict=True)
        ]
        return (None, *(g if need else None for g, need in zip(grads, needs, strict=True)))


_Lists = tuple[list[Any], list[Any], list[Any], list[Any]]


def _lists(rest: Sequence[Any], depths: Sequence[int]) -> _Lists:
    """Weights, inner, gates and outer out of one flat sequence."""
    matrices, count = sum(depths), len(depths)
    outer = 2 * matrices + 2 * count
    return (
        list(rest[:matrices]), list(rest[matrices : 2 * matrices]),
        list(rest[2 * matrices : outer]), list(rest[outer:]),
    )  # fmt: skip


def _flattened(results: Sequence[Found], depths: Sequence[int]) -> Iterator[Tensor | None]:
    """The gradients in the order of the inputs."""
    for low, full in (("first", "weight"), ("first_bias", "inner")):
        for result, depth in zip(results, depths, strict=True):
            yield from ([getattr(result, low)] if depth == 2 else [])
            yield getattr(result, full)
    for result in results:
        yield from (result.gate, result.gate_bias)
    yield from (result.outer for result in results)


def _differentiable_backward(
    needs: tuple[bool, ...], inputs: tuple[Tensor | None, ...], depths: list[int], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """For ``create_graph``: through the reference."""
    own = partials.apart(inputs)
    x0, x, *rest = own
    assert x0 is not None
    out = reference(x0, x0 if x is None else x, *_lists(rest, depths), depths)
    return tuple(partials.gradients([out], own, needs, [grad]))


def differentiable(x0: Tensor, x: Tensor, *rest: Any) -> Tensor:
    """The result, recorded by autograd."""
    *lists, depths = rest
    if not wants_grad((x0, x, *lists)):
        if torch._C._len_torch_dispatch_stack():
            with torch._C._AutoDispatchBelowAutograd():
                return cross_matrix.target(x0, x, *rest)
        return forward(x0, x, *rest)
    found = layers(*rest)
    check(x0, x, found)
    if not _served(x0, x, rest):
        return _by_torch(x0, x, found)
    flat = [t for part in lists for t in part]
    return CrossMatrix.apply(list(depths), x0, None if x is x0 else x, *flat)


def cost(x0: Tensor, x: Tensor, weights: Sequence[Tensor], inner: Given, gates: Given, outer: Given,
         depths: Sequence[int]) -> Cost:  # fmt: skip
    """The products, and three flops per element for what follows them; operands read once."""
    d = max(x0.shape[-1], 1)
    matrices = sum(t.numel() for t in (*weights, *gates) if t is not None and t.dim() == 2)
    flops = x0.numel() // d * 2 * matrices + 3 * x0.numel() * len(depths)
    start = None if x is x0 else x
    return Cost(flops, moved(x0, start, *weights, *inner, *gates, *outer) + moved(x0))


cross_matrix = register(
    Op(
        name="cross_matrix",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        samples=of_matrices,
        cost=cost,
        casts=True,
        devices=("cpu", "cuda"),
        kernels=(
            Kernel("cuda", "cuda", "float32 throughout, no autocast", cuda_launch.why_not),
            *cpu_kernels("float32 throughout, no autocast"),
            Kernel("torch", "cpu", "anything else", lambda: None),
        ),
    )
)
