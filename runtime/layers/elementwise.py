"""A chain of functions of single numbers as one node: logarithms, exponentials, bounds.

    x -> f_n(.. f_2(f_1(x)))        d x = g f_n'(..) .. f_1'(x)

``steps`` names the functions in order; ``numbers`` is a flat list that they consume from the left:

=================================  ==========================
step                               numbers
=================================  ==========================
abs log log1p exp expm1
relu sigmoid tanh
add mul                            what is added or a factor
clamp                              the least, the greatest;
                                   infinite: there is none
=================================  ==========================

In plain torch each function reads and writes memory, and each keeps a tensor for its backward. Here
torch's own kernels run over blocks that stay in the cache; a chain keeps one tensor. What backward
needs in between is computed anew: at most what forward did, and nothing where all slopes follow
from the result, as for relu(expm1(x)). On one AMD EPYC core a step of AFN takes 0.75 to 0.95 of its
time with torch's functions; forward alone gains nothing, and stays with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from math import inf
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from recast.errors import InputError
from recast.runtime import device, kept_memory
from recast.runtime.batched_grads import each_of_batch
from recast.runtime.cost import Cost, moved
from recast.runtime.op import Kernel, Op, Sample, register, wants_grad

SCHEMA = "(Tensor input, str[] steps, float[] numbers) -> Tensor"
aten = torch.ops.aten

# Numbers of x from which one node beats torch's functions: 0.8 to 1.0 of their time, and half where
# the system would have to give them memory anew; with half as many 0.8 to 1.15.
WORTH = 1 << 19
_BLOCK = 1 << 17  # numbers of one thread: of less, the calls cost more than the caches gain

Numbers = tuple[float, ...]
_Into = Callable[[Tensor, Numbers, Tensor], Any]
FUNCTIONS: dict[str, tuple[int, _Into]] = {
    "abs": (0, lambda x, n, out: torch.abs(x, out=out)),
    "log": (0, lambda x, n, out: torch.log(x, out=out)),
    "log1p": (0, lambda x, n, out: torch.log1p(x, out=out)),
    "exp": (0, lambda x, n, out: torch.exp(x, out=out)),
    "expm1": (0, lambda x, n, out: torch.expm1(x, out=out)),
    "relu": (0, lambda x, n, out: torch.clamp_min(x, 0, out=out)),
    "sigmoid": (0, lambda x, n, out: torch.sigmoid(x, out=out)),
    "tanh": (0, lambda x, n, out: torch.tanh(x, out=out)),
    "add": (1, lambda x, n, out: torch.add(x, n[0], out=out)),
    "mul": (1, lambda x, n, out: torch.mul(x, n[0], out=out)),
    "clamp": (2, lambda x, n, out: torch.clamp(x, *_bounds(n), out=out)),
}
BY_INPUT = ("abs", "log", "log1p", "clamp")  # what their slopes are told from
_BY_OUTPUT = ("exp", "expm1", "relu", "sigmoid", "tanh")


def _bounds(numbers: Numbers) -> tuple[float | None, float | None]:
    """Those of a clamp, as torch is to be told; an infinite one is none. (To torch 2.15 it is one,
    with another gradient of what is infinite itself.)
    """
    least, most = numbers
    return (None if least == -inf else least), (None if most == inf else most)


class Named(Protocol):
    """What has the name of a function."""

    @property
    def name(self) -> str: ...


class Step(NamedTuple):
    """One function, with its numbers."""

    name: str
    numbers: Numbers


@lru_cache(maxsize=256)
def chain_of(steps: tuple[str, ...], numbers: Numbers) -> tuple[Step, ...]:
    """The steps with their numbers; raises InputError if there are none or they do not fit."""
    left, found = list(numbers), []
    for name in steps:
        if name not in FUNCTIONS:
            raise InputError(f"unknown function {name!r}", tries=[f"one of {', '.join(FUNCTIONS)}"])
        count = FUNCTIONS[name][0]
        found.append(Step(name, tuple(left[:count])))
        del left[:count]
    if not steps or left or any(len(s.numbers) != FUNCTIONS[s.name][0] for s in found):
        raise InputError(
            f"a chain of {', '.join(steps) or 'no functions'} with {len(numbers)} numbers",
            why="add and mul take one number each, clamp two, the others none",
        )
    return tuple(found)


def reference(input: Tensor, steps: Sequence[str], numbers: Sequence[float]) -> Tensor:
    """Plain torch, step by step. ``input``: any shape, floating; the result has its shape.

    Raises InputError for steps or numbers that do not fit.
    """
    x = input
    for name, given in chain_of(tuple(steps), tuple(numbers)):
        if name == "add":
            x = x + given[0]
        elif name == "mul":
            x = x * given[0]
        elif name == "clamp":
            x = torch.clamp(x, *_bounds(given))
        else:
            x = getattr(torch, name)(x, *given)
    return x


def fake(input: Tensor, steps: Sequence[str], numbers: Sequence[float]) -> Tensor:
    """Shape, dtype and strides of the result."""
    chain_of(tuple(steps), tuple(numbers))
    return torch.empty_like(input)


# ---------------------------------------------------------------- blocks


def _takes(x: Tensor) -> bool:
    """Whether blocks pay: numbers without gaps between them, in float32, and enough of them."""
    held = device.held()
    if held == "torch" or not x.is_cpu or x.dtype is not torch.float32 or not x.numel():
        return False
    if torch._C._len_torch_dispatch_stack() or (held != "fused" and x.numel() < WORTH):
        return False
    return x.is_contiguous() or _dense(x)


def _dense(x: Tensor) -> bool:
    """Whether the numbers of ``x`` lie in memory without gaps, in whatever order."""
    size = 1
    for stride, length in sorted((x.stride(k), n) for k, n in enumerate(x.shape) if n != 1):
        if stride != size:
            return False
        size *= length
    return True


def _flat(x: Tensor) -> Tensor:
    """The numbers of ``x`` as they lie in memory."""
    return x.view(-1) if x.is_contiguous() else x.as_strided((x.numel(),), (1,))


def _like(x: Tensor) -> Tensor:
    return kept_memory.empty(x.shape, x.dtype) if x.is_contiguous() else torch.empty_like(x)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same places of all of them, as many at a time as stay in the caches."""
    size = _BLOCK * device.threads()
    yield from zip(*(_flat(t).split(size) for t in tensors), strict=True)


def _run(x: Tensor, chain: Sequence[Step]) -> Tensor:
    out = _like(x)
    for source, into in _blocks(x, out):
        for name, numbers in chain:
            FUNCTIONS[name][1](source, numbers, into)
            source = into
    return out


# ---------------------------------------------------------------- backward


def from_output(chain: Sequence[Named]) -> bool:
    """Whether the result tells all slopes: relus of at most one exponential of a linear function.

    Where a relu is zero, so is the gradient, and the slopes before it do not matter.
    """
    left = list(chain)
    while left and left[-1].name == "relu":
        left.pop()
    if left and left[-1].name in _BY_OUTPUT:
        left.pop()
    return all(step.name in ("add", "mul") for step in left)


def anew(chain: Sequence[Named]) -> int:
    """How many steps, from the first on, backward computes once more."""
    if from_output(chain):
        return 0
    last = max((k for k, step in enumerate(chain) if step.name in _BY_OUTPUT), default=-1)
    inner = max((k - 1 for k, step in enumerate(chain) if step.name in BY_INPUT), default=-1)
    return max(last, inner) + 1


class Elementwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, chain: tuple[Step, ...]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.chain, ctx.by_output = chain, from_output(chain)
        out = _run(input, chain)
        ctx.save_for_backward(out if ctx.by_output else input)
        return out

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        (kept,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable_backward(ctx.chain, ctx.by_output, kept, grad), None
        of_input = _like(kept)
        given = grad
        if grad.stride() != of_input.stride():
            given = of_input.copy_(grad)
        between = _between(ctx.chain, ctx.by_output, kept)
        for part, source, g in _blocks(of_input, kept, given):
            _backward_block(ctx.chain, ctx.by_output, part, source, g, between)
        return of_input, None


def _between(chain: Sequence[Step], by_output: bool, kept: Tensor) -> list[Tensor]:
    """Room for the values that backward computes anew, and for one more."""
    size = min(_BLOCK * device.threads(), kept.numel())
    return [kept.new_empty(size) for _ in range(1 + (0 if by_output else anew(chain)))]


def _backward_block(
    chain: Sequence[Step], by_output: bool, into: Tensor, kept: Tensor, grad: Tensor,
    between: Sequence[Tensor],
) -> None:  # fmt: skip
    """``into``: the gradient of the input, from that of the output; both may be one."""
    size = into.numel()
    *rooms, room = (t[:size] for t in between)
    values = [kept]  # of the input, and of the steps as far as they are needed
    for (name, numbers), out in zip(chain, rooms, strict=False):
        FUNCTIONS[name][1](values[-1], numbers, out)
        values.append(out)
    g = grad
    for k in reversed(range(len(chain))):
        name, numbers = chain[k]
        if name == "add":
            continue
        if name == "mul":
            g = torch.mul(g, numbers[0], out=into)
        elif name in _BY_OUTPUT:
            g = _SLOPES[name](g, kept if by_output else values[k + 1], room, into)
        elif name == "clamp":
            g = _of_clamp(g, values[k], numbers, room, into)
        else:
            g = _SLOPES[name](g, values[k], room, into)
    if g is grad and grad.data_ptr() != into.data_ptr():
        into.copy_(grad)


def _of_clamp(g: Tensor, x: Tensor, numbers: Numbers, room: Tensor, into: Tensor) -> Tensor:
    """The gradient where ``x`` is between the bounds, else zero, whatever it is there.

    Marks as floats: torch compares into booleans, and chooses by them, at a quarter of the speed.
    """
    least, most = _bounds(numbers)
    above, below = (torch.ge, torch.le) if _at_bounds() else (torch.gt, torch.lt)
    for compare, bound in ((above, least), (below, most)):
        if bound is not None:
            compare(x, bound, out=room)
            aten.threshold_backward.grad_input(g, room, 0, grad_input=into)
            g = into
    return g


@cache
def _at_bounds() -> bool:
    """Whether torch gives a gradient to what is at a bound: it did up to 2.14."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros((), device="cpu", requires_grad=True)
        return bool(torch.autograd.grad(x.clamp(min=0.0), x)[0])


# (gradient, input or output, room for one more value, result) -> result
_SLOPES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "abs": lambda g, x, room, into: torch.mul(g, torch.sgn(x, out=room), out=into),
    "log": lambda g, x, room, into: torch.div(g, x, out=into),
    "log1p": lambda g, x, room, into: torch.div(g, torch.add(x, 1, out=room), out=into),
    "exp": lambda g, y, room, into: torch.mul(g, y, out=into),
    "expm1": lambda g, y, room, into: torch.mul(g, torch.add(y, 1, out=room), out=into),
    "relu": lambda g, y, room, into: aten.threshold_backward.grad_input(g, y, 0, grad_input=into),
    "sigmoid": lambda g, y, room, into: aten.sigmoid_backward.grad_input(g, y, grad_input=into),
    "tanh": lambda g, y, room, into: aten.tanh_backward.grad_input(g, y, grad_input=into),
}


def _differentiable_backward(
    chain: Sequence[Step], by_output: bool, kept: Tensor, grad: Tensor
) -> Tensor:
    """Plain torch, over the input; or over the result, which autograd knows by this node."""
    if not by_output:
        names = [step.name for step in chain]
        flat = [n for step in chain for n in step.numbers]
        out = reference(kept, names, flat)
        (found,) = torch.autograd.grad(out, kept, grad, create_graph=True)
        return found
    g = grad
    for name, numbers in reversed(chain):
        if name == "relu":
            g = aten.threshold_backward(g, kept, 0)
        elif name == "exp":
            g = g * kept
        elif name == "expm1":
            g = g * (kept + 1)
        elif name == "sigmoid":
            g = aten.sigmoid_backward(g, kept)
        elif name == "tanh":
            g = aten.tanh_backward(g, kept)
        elif name == "mul":
            g = g * numbers[0]
    return g


def differentiable(input: Tensor, steps: Sequence[str], numbers: Sequence[float]) -> Tensor:
    """The result, recorded by autograd."""
    if not wants_grad((input,)) or not _takes(input):
        return reference(input, steps, numbers)
    chain = chain_of(tuple(steps), tuple(numbers))
    found: Tensor = Elementwise.apply(input, chain)
    return found


# ---------------------------------------------------------------- cost, samples


def cost(input: Tensor, steps: Sequence[str], numbers: Sequence[float]) -> Cost:
    """A flop per number and step; one pass."""
    return Cost(len(steps) * input.numel(), 2 * moved(input))


def samples() -> list[Sample]:
    """Every function, the chains of public models, strides, no rows, more than one block."""
    g = torch.Generator().manual_seed(41)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    return [
        Sample("bounded log", (rand(6, 3, 5), ["abs", "clamp", "log"], [1e-7, inf])),
        Sample("log1p of sizes", (rand(7, 5), ["abs", "add", "log1p"], [1e-7])),
        Sample("relu of expm1", (rand(5, 4, 3), ["expm1", "relu"], [])),
        Sample("exp of a linear", (rand(9, 4), ["mul", "add", "exp"], [-0.5, 0.25])),
        Sample("smooth", (rand(8, 3), ["tanh", "add", "sigmoid", "log"], [0.5])),
        Sample("between bounds", (rand(30, 7), ["clamp", "mul", "tanh"], [-0.7, 0.4, 2.0])),
        Sample("an exponential inside", (rand(6, 7), ["exp", "log1p", "relu"], [])),
        Sample("linear", (rand(6, 7), ["add", "mul", "add"], [1.0, 3.0, -2.0])),
        Sample("sigmoid alone", (rand(6, 7), ["sigmoid"], [])),
        Sample("relu twice", (rand(6, 7), ["add", "relu", "relu"], [0.1])),
        Sample("more than a block", (rand(70_001), ["abs", "add", "log1p"], [0.5])),
        Sample("one number", (rand(1), ["exp", "log1p"], [])),
        Sample("no rows", (rand(0, 8), ["exp", "log1p"], [])),
        Sample("transposed", (rand(9, 6).t(), ["abs", "clamp", "log"], [1e-3, 1.0])),
        Sample("turned", (rand(3, 5, 4).transpose(1, 2), ["mul", "expm1", "relu"], [0.3])),
        Sample("strided", (rand(8, 6)[::2], ["exp", "log1p"], [])),
    ]


elementwise = register(
    Op(
        name="elementwise",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        differentiable=differentiable,
        samples=samples,
        cost=cost,
        casts=True,
        kernels=(
            Kernel("fused", "cpu", "float32, many numbers without gaps, trained", lambda: None),
            Kernel("torch", "cpu", "any others: one function after the other", lambda: None),
        ),
        not_worth={
            "cuda": "there is no kernel for it, and torch's functions are bound by launches"
        },
    )
)
