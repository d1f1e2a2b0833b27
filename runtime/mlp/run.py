"""Runs chains of layers on torch's own kernels: in place where possible, as one autograd node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.runtime import device, partials
from recast.runtime.batched_grads import each_of_batch
from recast.runtime.layers import prelu_backward
from recast.runtime.mlp import batch_norm, gemm, torch_draws
from recast.runtime.mlp.chain import ARITY, Chain, NormSaved, Step, activation, norm_of, there
from recast.runtime.mlp.relu_dropout import check as check_probability

aten = torch.ops.aten


class Info(NamedTuple):
    """What a step keeps for backward besides tensors."""

    scale: float = 1.0  # dropout after a relu: 1 / (1 - p); the output serves as the mask
    masked: bool = False  # dropout after a relu: the tape holds the output, not the noise
    result: bool = False  # activation: the tape holds the output, not the input
    batch: bool = False  # batch norm: statistics of the batch
    impl: int = 0  # batch norm: which aten implementation ran


Tensors = tuple[Tensor | None, ...]
_INPUT, _RESULT = Info(), Info(result=True)


class State(NamedTuple):
    """A value on its way through the chain."""

    x: Tensor
    ours: bool  # a buffer of this call that the tape does not need: may be overwritten
    relu: bool  # the output of a relu, in a buffer of this call
    tape: Tensors = ()  # what its step keeps for backward, `slots` tensors
    info: Info = _INPUT


def run(chain: Chain, input: Tensor) -> tuple[Tensor, list[Tensor | None], list[Info]]:
    """The result, the tape, and the info of each step."""
    state = State(input, False, False)
    tape: list[Tensor | None] = []
    infos = []
    for step, after in zip_longest(chain.steps, chain.steps[1:]):
        if step.name == "linear" and after is not None and after.name == "relu":
            state = _run_linear(chain, step, state, relu=True)
        else:
            state = RUN.get(step.name, run_activation)(chain, step, state)
        tape += state.tape
        infos.append(state.info)
    # The result of an op never aliases its input.
    return (input.clone() if state.x is input else state.x), tape, infos


def result(chain: Chain, input: Tensor) -> Tensor:
    """The result of :func:`run`, bit for bit, without a tape: half the Python of a small batch."""
    x, steps, k = input, chain.steps, 0
    while k < len(steps):
        step, k = steps[k], k + 1
        name = step.name
        if name == "linear":
            relu = k < len(steps) and steps[k].name == "relu"
            weight, bias = chain.params[step.param : step.param + 2]
            x = gemm.linear(x, there(weight), bias, relu)
            k += relu
        elif name == "batch_norm" and _is_fixed(chain, step):
            mean, var = chain.stats[step.stat : step.stat + 2]
            weight, bias = chain.params[step.param : step.param + 2]
            eps = chain.number(step.number + 1)
            x = torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, False)
        elif name == "dropout" and not chain.training[step.flag]:
            check_probability(chain.number(step.number))
        elif name in RUN:
            x = RUN[name](chain, step, State(x, False, False)).x
        elif x is input or name not in _IN_PLACE:
            x = activation(chain, step, x)
        else:
            x = _in_place(chain, step, x)
    return input.clone() if x is input else x


def _is_fixed(chain: Chain, step: Step) -> bool:
    """Whether a batch norm uses its running statistics."""
    return not chain.training[step.flag] and chain.stats[step.stat] is not None


def _run_linear(chain: Chain, step: Step, state: State, relu: bool = False) -> State:
    """``relu``: the next step is one, and is done in the same call."""
    weight, bias = chain.params[step.param], chain.params[step.param + 1]
    return State(gemm.linear(state.x, there(weight), bias, relu), True, relu, (state.x,))


def _run_batch_norm(chain: Chain, step: Step, state: State) -> State:
    x, norm = state.x, norm_of(chain, step, state.x)
    weight, bias = chain.params[step.param : step.param + 2]
    native = batch_norm.takes(x, weight, bias, norm.mean, norm.var) if norm.batch else None
    if native is not None:
        running = (norm.mean, norm.var)
        x = x if x.dim() == 2 else x.contiguous()
        out, saved = batch_norm.forward(native, x, weight, bias, running, norm.momentum, norm.eps)
        tape = NormSaved(x, None, None, saved, None, None)
        return State(out, True, False, tape, Info(batch=True, impl=batch_norm.OURS))
    out, mean, var, reserve, impl = aten._batch_norm_impl_index(
        x, weight, bias, norm.mean, norm.var, norm.batch, norm.momentum, norm.eps, False
    )
    # Backward reads running statistics only if they were used; training overwrites them.
    running = (None, None) if norm.batch else (norm.mean, norm.var)
    tape = NormSaved(x, *running, mean, var, reserve)
    return State(out, True, False, tape, Info(batch=norm.batch, impl=impl))


def _run_dropout(chain: Chain, step: Step, state: State) -> State:
    p, x = chain.number(step.number), state.x
    check_probability(p)
    if not chain.training[step.flag] or p == 0 or x.numel() == 0:
        return State(x, state.ours, state.relu, (None,))
    if state.relu:
        # relu(x) * noise > 0 exactly where x > 0 and kept: the relu's backward masks for both.
        scale = 1 / (1 - p) if p < 1 else 0.0
        dropped = torch_draws.drop_(x, p)
        return State(dropped, False, False, (dropped,), Info(scale=scale, masked=True))
    noise = torch_draws.noise_like(x, p)
    out = x.mul_(noise) if state.ours else x * noise
    return State(out, True, False, (noise,))


def run_activation(chain: Chain, step: Step, state: State) -> State:
    x = state.x
    if step.name == "relu" and state.relu:  # done already, or twice
        return State(x, False, True, (x,), _RESULT)
    if not from_output(chain, step):
        return State(activation(chain, step, x), True, False, (x,))
    out = (_in_place if state.ours else activation)(chain, step, x)
    return State(out, False, step.name == "relu", (out,), _RESULT)


RUN = {"linear": _run_linear, "batch_norm": _run_batch_norm, "dropout": _run_dropout}


def from_output(chain: Chain, step: Step) -> bool:
    """Whether the gradient of an activation can be told from its output alone."""
    if step.name in ("leaky_relu", "elu"):  # the sign must survive
        return chain.number(step.number) > 0
    return step.name in ("relu", "sigmoid", "tanh")


def _in_place(chain: Chain, step: Step, x: Tensor) -> Tensor:
    call = _IN_PLACE[step.name]
    if step.name in ("leaky_relu", "elu"):
        return call(x, chain.number(step.number))
    return call(x)


_IN_PLACE: dict[str, Callable[..., Tensor]] = {
    "relu": torch.relu_,
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
    "leaky_relu": F.leaky_relu_,
    "elu": F.elu_,
}


# ---------------------------------------------------------------- backward


class Mlp(torch.autograd.Function):
    """Inputs: the chain, ``input``, then all params in order (None where there is none)."""

    @staticmethod
    def forward(ctx: Any, chain: Chain, input: Tensor, *params: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)  # what a loss does not reach gets no gradient
        out, tape, ctx.infos = run(chain, input)
        # Only for create_graph, which checks that nothing has written to the params since.
        ctx.chain = chain
        ctx.versions = versions(chain)
        ctx.needs = needs_of(chain.steps, ctx.needs_input_grad)
        tensors = [input, *tape]
        for step, need in zip(chain.steps, ctx.needs, strict=True):
            if not need.keeps:
                tensors[1 + step.slot] = None
            weight = chain.params[step.param] if need.weight else None
            if weight is not None and step.name in ("linear", "prelu"):
                weight = weight.detach()  # of torch's own a view is kept: ``.data =`` leaves it
            tensors.append(weight)
        ctx.present = [t is not None for t in tensors]
        ctx.save_for_backward(*(t for t in tensors if t is not None))
        return no_view(out)

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * (2 + len(ctx.versions))
        saved = iter(ctx.saved_tensors)
        tensors = [next(saved) if there else None for there in ctx.present]
        if torch.is_grad_enabled():
            return _differentiable_backward(ctx, tensors, grad)
        chain: Chain = ctx.chain
        weights = tensors[len(tensors) - len(chain.steps) :]
        grads: list[Tensor | None] = [None] * len(ctx.versions)
        g: Tensor | None = grad
        ours = False  # whether g is a buffer of this call
        for i in range(len(chain.steps) - 1, -1, -1):
            step, need = chain.steps[i], ctx.needs[i]
            if g is None or not need.any:
                g = None
                break
            tape = tensors[1 + step.slot : 1 + step.slot + step.slots]
            call = BACKWARD.get(step.name, backward_activation)
            before = g
            g, found = call(chain, step, tape, ctx.infos[i], weights[i], need, g, ours)
            ours = ours or g is not before
            grads[step.param : step.param + len(found)] = found
        return (None, g if ctx.needs_input_grad[1] else None, *grads)


class Need(NamedTuple):
    """Which gradients a step must compute, and what it keeps for them."""

    input: bool
    params: tuple[bool, ...]
    any: bool
    keeps: bool  # the first tensor it left on the tape
    weight: bool  # its first parameter


@lru_cache(maxsize=1024)
def needs_of(steps: tuple[Step, ...], wanted: tuple[bool, ...]) -> list[Need]:
    flows = wanted[1]
    needs = []
    for step in steps:
        count = ARITY[step.name][0]
        params = tuple(wanted[2 + step.param : 2 + step.param + count])
        some = flows or any(params)
        if step.name == "linear":
            keeps, weight = params[0], flows
        else:
            # create_graph needs dropout masks and the batch norms' running statistics too.
            keeps = some or step.name == "dropout"
            weight = some and step.name in ("batch_norm", "prelu")
        needs.append(Need(flows, params, some, keeps, weight))
        flows = some
    return needs


def no_view(out: Tensor) -> Tensor:
    """``out``, which does not count as a view: torch's linear of more than two dimensions gives
    one, and what a Function returns as a view may not be written to (``mlp(x) += x``).
    """
    return out.detach() if out._is_view() else out


Gradients = tuple[Tensor | None, Sequence[Tensor | None]]


# Each returns the gradient of its input, computed in place in ``g`` if ``ours``, and its params'.


def _backward_norm(
    chain: Chain,
    step: Step,
    tape: Sequence[Tensor | None],
    info: Info,
    weight: Tensor | None,
    need: Need,
    g: Tensor,
    ours: bool,
) -> Gradients:
    mask, eps = [need.input, *need.params], chain.number(step.number + 1)
    x, mean, var, saved_mean, saved_var, reserve = tape
    native = device.extension() if info.impl == batch_norm.OURS else None
    if native is not None:
        into, *both = batch_norm.backward(
            native, g.contiguous(), there(x), weight, there(saved_mean), need.input
        )
        return into, [t if wanted else None for t, wanted in zip(both, need.params, strict=True)]
    reserve = there(x).new_empty(0, dtype=torch.uint8) if reserve is None else reserve
    found = aten._batch_norm_impl_index_backward(
        max(info.impl, 0), x, g.contiguous(), weight, mean, var, saved_mean, saved_var, info.batch,
        eps, mask, reserve,
    )  # fmt: skip
    into, *params = (t if wanted else None for t, wanted in zip(found, mask, strict=True))
    return into, params


def _backward_dropout(
    chain: Chain,
    step: Step,
    tape: Sequence[Tensor | None],
    info: Info,
    weight: Tensor | None,
    need: Need,
    g: Tensor,
    ours: bool,
) -> Gradients:
    factor = info.scale if info.masked else tape[0]
    if factor is None:
        return g, ()
    return (g.mul_(factor) if ours else g * factor), ()


def _backward_linear(
    chain: Chain,
    step: Step,
    tape: Sequence[Tensor | None],
    info: Info,
    weight: Tensor | None,
    need: Need,
    g: Tensor,
    ours: bool,
) -> Gradients:
    flat = g if g.dim() == 2 else g.reshape(-1, g.shape[-1])
    into = of_weight = None
    if need.input:
        into = gemm.of_input(flat, there(weight))
        into = into if g.dim() == 2 else into.view(*g.shape[:-1], into.shape[1])
    if need.params[0]:
        x = there(tape[0])
        of_weight = gemm.of_weight(flat, x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))
    return into, (of_weight, flat.sum(0) if need.params[1] else None)


def _backward_prelu(
    chain: Chain,
    step: Step,
    tape: Sequence[Tensor | None],
    info: Info,
    weight: Tensor | None,
    need: Need,
    g: Tensor,
    ours: bool,
) -> Gradients:
    into, of_weight = prelu_backward.gradients(g, there(tape[0]), there(weight))
    return into if need.input else None, (of_weight if need.params[0] else None,)


def backward_activation(
    chain: Chain,
    step: Step,
    tape: Sequence[Tensor | None],
    info: Info,
    weight: Tensor | None,
    need: Need,
    g: Tensor,
    ours: bool,
) -> Gradients:
    name, kept = step.name, there(tape[0])
    if name == "relu":
        kernel = aten.threshold_backward
        return (kernel.grad_input(g, kept, 0, grad_input=g) if ours else kernel(g, kept, 0)), ()
    if name in ("sigmoid", "tanh"):
        kernel = aten.sigmoid_backward if name == "sigmoid" else aten.tanh_backward
        return (kernel.grad_input(g, kept, grad_input=g) if ours else kernel(g, kept)), ()
    if name == "elu":
        return aten.elu_backward(g, chain.number(step.number), 1, 1, info.result, kept), ()
    if name == "leaky_relu":
        return aten.leaky_relu_backward(g, kept, chain.number(step.number), info.result), ()
    return (aten.gelu_backward if name == "gelu" else aten.silu_backward)(g, kept), ()


BACKWARD = {
    "linear": _backward_linear,
    "batch_norm": _backward_norm,
    "dropout": _backward_dropout,
    "prelu": _backward_prelu,
}


def _differentiable_backward(
    ctx: Any, tensors: Sequence[Tensor | None], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """For ``create_graph``: recompute the layers in plain torch, with the masks already drawn."""
    chain, source = apart(ctx, there(tensors[0]))
    x = source
    for step, info in zip(chain.steps, ctx.infos, strict=True):
        x = again(chain, step, tensors[1 + step.slot : 1 + step.slot + step.slots], info, x)
    own = [source, *chain.params]
    return (None, *partials.gradients([x], own, ctx.needs_input_grad[1:], [grad]))


def versions(chain: Chain) -> list[int | None]:
    """What :func:`apart` compares, at the time of the forward."""
    return [None if p is None else p._version for p in chain.params]


def apart(ctx: Any, input: Tensor) -> tuple[Chain, Tensor]:
    """``ctx.chain`` and its input as ``partials`` wants them: to be computed again.

    Raises RuntimeError if one of the params was written to after ``ctx.versions`` was taken.
    """
    chain: Chain = ctx.chain
    if versions(chain) != ctx.versions:
        raise RuntimeError(
            "a parameter of an mlp was modified by an inplace operation between the forward"
            " and a backward with create_graph=True"
        )
    return replace(chain, params=partials.apart(chain.params)), input.view_as(input)


def again(chain: Chain, step: Step, tape: Sequence[Tensor | None], info: Info, x: Tensor) -> Tensor:
    """One layer in plain torch, with what its first run left on the tape."""
    params = chain.params[step.param :]
    if step.name == "dropout":
        if tape[0] is None:
            return x
        noise = (tape[0].detach() > 0).to(x.dtype).mul_(info.scale) if info.masked else tape[0]
        return x * noise
    if step.name == "batch_norm":
        eps = chain.number(step.number + 1)
        return F.batch_norm(x, tape[1], tape[2], params[0], params[1], info.batch, 0.0, eps)
    if step.name == "linear":
        return F.linear(x, there(params[0]), params[1])
    return activation(chain, step, x)
