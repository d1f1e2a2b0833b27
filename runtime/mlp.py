"""A chain of Linear, BatchNorm1d, activations and Dropout as one node.

``steps`` names the layers in order; ``params``, ``stats``, ``numbers`` and ``training`` are flat
lists that the steps consume from the left:

=============  =============================  ==========================================  =========
step           params                         numbers; stats                              training
=============  =============================  ==========================================  =========
linear         weight (out, in), bias?
batch_norm     weight?, bias?                 momentum?, eps; running_mean?,              one flag
                                              running_var?, num_batches_tracked?
relu sigmoid
tanh gelu silu
leaky_relu                                    slope
prelu          weight
elu                                           alpha
dropout                                       p                                           one flag
=============  =============================  ==========================================  =========

Each step means what its ``torch.nn`` module means, dropout masks included (CPU, same seed). What it
saves over separate modules: activations are written in place into buffers of our own (never into
the caller's input), relu followed by dropout keeps no mask, and one autograd node stands for all.

The input is (N, features), or any shape (..., features) where no batch_norm reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.errors import InputError
from recast.runtime import device
from recast.runtime.cost import Cost, moved
from recast.runtime.op import Kernel, Op, Sample, register, wants_grad
from recast.runtime.relu_dropout import check as check_probability
from recast.runtime.relu_dropout import noise_like

SCHEMA = (
    "(Tensor input, Tensor?[] params, Tensor(a!)?[] stats, str[] steps, float?[] numbers,"
    " bool[] training) -> Tensor"
)
aten = torch.ops.aten

# Flops of a forward from which one node is faster than torch's layers in training, measured on an
# AMD EPYC core: x0.65 to x0.98 below, x1.01 to x1.09 above; python costs 30 to 100 us a call.
FUSED_FROM = 3e8

# step: how many params, stats, numbers, training flags it consumes
ARITY: dict[str, tuple[int, int, int, int]] = {
    "linear": (2, 0, 0, 0),
    "batch_norm": (2, 3, 2, 1),
    "relu": (0, 0, 0, 0),
    "sigmoid": (0, 0, 0, 0),
    "tanh": (0, 0, 0, 0),
    "leaky_relu": (0, 0, 1, 0),
    "prelu": (1, 0, 0, 0),
    "elu": (0, 0, 1, 0),
    "gelu": (0, 0, 0, 0),
    "silu": (0, 0, 0, 0),
    "dropout": (0, 0, 1, 1),
}


class Step(NamedTuple):
    """One layer: its name, where its operands start in the flat lists, its slots on the tape."""

    name: str
    param: int
    stat: int
    number: int
    flag: int
    slot: int
    slots: int


class Program(NamedTuple):
    """A chain without its operands."""

    steps: tuple[Step, ...]
    takes: tuple[int, int, int, int]  # how many params, stats, numbers, flags


@lru_cache(maxsize=256)
def parse(names: tuple[str, ...]) -> Program:
    """The steps with the places of their operands; raises InputError for an unknown name."""
    at, slot = (0, 0, 0, 0), 0
    steps = []
    for name in names:
        if name not in ARITY:
            raise InputError(f"unknown mlp step {name!r}", tries=[f"one of {', '.join(ARITY)}"])
        slots = len(NormSaved._fields) if name == "batch_norm" else 1
        steps.append(Step(name, *at, slot, slots))
        p, q, n, f = ARITY[name]
        at = (at[0] + p, at[1] + q, at[2] + n, at[3] + f)
        slot += slots
    return Program(tuple(steps), at)


@dataclass(slots=True)
class Chain:
    """One call: the steps and their operands."""

    steps: tuple[Step, ...]
    params: Sequence[Tensor | None]
    stats: Sequence[Tensor | None]
    numbers: Sequence[float | None]
    training: Sequence[bool]

    def number(self, index: int) -> float:
        value = self.numbers[index]
        assert value is not None
        return value


def _chain(
    params: Sequence[Tensor | None],
    stats: Sequence[Tensor | None],
    steps: Sequence[str],
    numbers: Sequence[float | None],
    training: Sequence[bool],
) -> Chain:
    program = parse(tuple(steps))
    given = (len(params), len(stats), len(numbers), len(training))
    if program.takes != given:
        raise InputError(
            f"mlp of {', '.join(steps)} takes {program.takes} params, stats, numbers, flags,"
            f" not {given}"
        )
    return Chain(program.steps, params, stats, numbers, training)


# ---------------------------------------------------------------- the definition


def reference(
    input: Tensor,
    params: Sequence[Tensor | None],
    stats: Sequence[Tensor | None],
    steps: Sequence[str],
    numbers: Sequence[float | None],
    training: Sequence[bool],
) -> Tensor:
    """Plain torch, one layer after the other."""
    chain = _chain(params, stats, steps, numbers, training)
    x = input
    for step in chain.steps:
        x = _plain(chain, step, x)
    # The result of an op never aliases its input.
    return x.clone() if x is input else x


def _plain(chain: Chain, step: Step, x: Tensor) -> Tensor:
    """One layer as torch.nn computes it."""
    params = chain.params[step.param :]
    if step.name == "linear":
        return F.linear(x, _there(params[0]), params[1])
    if step.name == "batch_norm":
        norm = _norm(chain, step, x)
        return F.batch_norm(
            x, norm.mean, norm.var, params[0], params[1], norm.batch, norm.momentum, norm.eps
        )
    if step.name == "dropout":
        return F.dropout(x, chain.number(step.number), chain.training[step.flag])
    return _activation(chain, step, x)


def _activation(chain: Chain, step: Step, x: Tensor) -> Tensor:
    if step.name == "leaky_relu":
        return F.leaky_relu(x, chain.number(step.number))
    if step.name == "elu":
        return F.elu(x, chain.number(step.number))
    if step.name == "prelu":
        return F.prelu(x, _there(chain.params[step.param]))
    return _POINTWISE[step.name](x)


def _there(tensor: Tensor | None) -> Tensor:
    """``tensor``, which its step cannot do without."""
    if tensor is None:
        raise InputError("mlp: the weight of a linear or prelu step is None")
    return tensor


_POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "silu": F.silu,
}


class Norm(NamedTuple):
    """What a batch norm uses in this call."""

    mean: Tensor | None
    var: Tensor | None
    batch: bool  # statistics of the batch, not the running ones
    momentum: float
    eps: float


def _norm(chain: Chain, step: Step, x: Tensor) -> Norm:
    """torch.nn.BatchNorm1d's choice of statistics and momentum; counts the batch when training."""
    mean, var, count = chain.stats[step.stat : step.stat + 3]
    training = chain.training[step.flag]
    momentum, eps = chain.numbers[step.number], chain.number(step.number + 1)
    batch = training or (mean is None and var is None)
    factor = 0.0 if momentum is None else momentum
    if training and mean is not None and count is not None:
        count.add_(1)
        if momentum is None:
            factor = 1.0 / float(count)  # cumulative moving average
    if batch and x.shape[0] * x.shape[2:].numel() == 1:
        raise InputError(
            f"Expected more than 1 value per channel when training, got input size {x.shape}",
            why="a batch norm in training mode needs two rows to have a variance",
            tries=["drop_last=True in the data loader", "model.eval()"],
        )
    return Norm(mean, var, batch, factor, eps)


def fake(
    input: Tensor,
    params: Sequence[Tensor | None],
    stats: Sequence[Tensor | None],
    steps: Sequence[str],
    numbers: Sequence[float | None],
    training: Sequence[bool],
) -> Tensor:
    """Shape and dtype of the result."""
    width = input.shape[-1]
    for step in parse(tuple(steps)).steps:
        weight = params[step.param] if step.name == "linear" else None
        width = width if weight is None else weight.shape[0]
    return input.new_empty((*input.shape[:-1], width))


# ---------------------------------------------------------------- forward


class NormSaved(NamedTuple):
    """What a batch norm leaves on the tape, as the aten kernel wants it back."""

    x: Tensor | None
    mean: Tensor | None  # the running statistics, where they were used
    var: Tensor | None
    saved_mean: Tensor | None
    saved_var: Tensor | None
    reserve: Tensor | None


class Info(NamedTuple):
    """The numbers that go with the tensors of a step."""

    scale: float = 1.0  # dropout behind a relu: 1 / (1 - p), the mask is in the relu's output
    masked: bool = False  # that case: the tape holds the output, not the noise
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
    tape: Tensors = ()  # what the step that made it leaves for backward, `slots` tensors
    info: Info = _INPUT


def _run(chain: Chain, input: Tensor) -> tuple[Tensor, list[Tensor | None], list[Info]]:
    """The result, and the tape."""
    state = State(input, False, False)
    tape: list[Tensor | None] = []
    infos = []
    for step in chain.steps:
        state = _STEP.get(step.name, _run_activation)(chain, step, state)
        tape += state.tape
        infos.append(state.info)
    # The result of an op never aliases its input.
    return (input.clone() if state.x is input else state.x), tape, infos


def _run_linear(chain: Chain, step: Step, state: State) -> State:
    weight, bias = chain.params[step.param], chain.params[step.param + 1]
    return State(F.linear(state.x, _there(weight), bias), True, False, (state.x,))


def _run_batch_norm(chain: Chain, step: Step, state: State) -> State:
    x, norm = state.x, _norm(chain, step, state.x)
    weight, bias = chain.params[step.param : step.param + 2]
    out, mean, var, reserve, impl = aten._batch_norm_impl_index(
        x, weight, bias, norm.mean, norm.var, norm.batch, norm.momentum, norm.eps, False
    )
    # Running statistics are read in backward only where they were used; training rewrites them.
    running = (None, None) if norm.batch else (norm.mean, norm.var)
    tape = NormSaved(x, *running, mean, var, reserve)
    return State(out, True, False, tape, Info(batch=norm.batch, impl=impl))


def _run_dropout(chain: Chain, step: Step, state: State) -> State:
    p, x = chain.number(step.number), state.x
    check_probability(p)
    if not chain.training[step.flag] or p == 0 or x.numel() == 0:
        return State(x, state.ours, state.relu, (None,))
    noise = noise_like(x, p)
    if state.relu:
        # relu(x) * noise > 0 exactly where x > 0 and kept: the relu's backward masks for both.
        scale = 1 / (1 - p) if p < 1 else 0.0
        return State(x.mul_(noise), False, False, (x,), Info(scale=scale, masked=True))
    out = x.mul_(noise) if state.ours else x * noise
    return State(out, True, False, (noise,))


def _run_activation(chain: Chain, step: Step, state: State) -> State:
    x = state.x
    if not _from_output(chain, step):
        return State(_activation(chain, step, x), True, False, (x,))
    out = (_in_place if state.ours else _activation)(chain, step, x)
    return State(out, False, step.name == "relu", (out,), _RESULT)


_STEP = {"linear": _run_linear, "batch_norm": _run_batch_norm, "dropout": _run_dropout}


def _from_output(chain: Chain, step: Step) -> bool:
    """Whether the gradient of an activation can be told from its output alone."""
    if step.name in ("leaky_relu", "elu"):  # the sign must survive
        return chain.number(step.number) > 0
    return step.name in ("relu", "sigmoid", "tanh")


def _in_place(chain: Chain, step: Step, x: Tensor) -> Tensor:
    if step.name == "leaky_relu":
        return F.leaky_relu_(x, chain.number(step.number))
    if step.name == "elu":
        return F.elu_(x, chain.number(step.number))
    return {"relu": torch.relu_, "sigmoid": torch.sigmoid_, "tanh": torch.tanh_}[step.name](x)


def forward(
    input: Tensor,
    params: Sequence[Tensor | None],
    stats: Sequence[Tensor | None],
    steps: Sequence[str],
    numbers: Sequence[float | None],
    training: Sequence[bool],
) -> Tensor:
    """The result, no autograd."""
    return _run(_chain(params, stats, steps, numbers, training), input)[0]


# ---------------------------------------------------------------- backward


class Mlp(torch.autograd.Function):
    """Inputs: the chain, ``input``, then all params in order (None where there is none)."""

    @staticmethod
    def forward(ctx: Any, chain: Chain, input: Tensor, *params: Tensor | None) -> Tensor:
        out, tape, ctx.infos = _run(chain, input)
        # Read by create_graph alone, which checks that nothing wrote to them since.
        ctx.chain = chain
        ctx.versions = [None if p is None else p._version for p in params]
        ctx.needs = _needs(chain.steps, ctx.needs_input_grad)
        tensors = [input, *tape]
        for step, need in zip(chain.steps, ctx.needs, strict=True):
            if not need.keeps:
                tensors[1 + step.slot] = None
            tensors.append(chain.params[step.param] if need.weight else None)
        ctx.present = [t is not None for t in tensors]
        ctx.save_for_backward(*(t for t in tensors if t is not None))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
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
            call = _BACKWARD.get(step.name, _backward_activation)
            before = g
            g, found = call(chain, step, tape, ctx.infos[i], weights[i], need, g, ours)
            ours = ours or g is not before
            grads[step.param : step.param + len(found)] = found
        return (None, g if ctx.needs_input_grad[1] else None, *grads)


class Need(NamedTuple):
    """Which gradients a step has to give, and what it keeps for them."""

    input: bool
    params: tuple[bool, ...]
    any: bool
    keeps: bool  # the first tensor it left on the tape
    weight: bool  # its first parameter


@lru_cache(maxsize=1024)
def _needs(steps: tuple[Step, ...], wanted: tuple[bool, ...]) -> list[Need]:
    flows = wanted[1]
    needs = []
    for step in steps:
        count = ARITY[step.name][0]
        params = tuple(wanted[2 + step.param : 2 + step.param + count])
        some = flows or any(params)
        if step.name == "linear":
            keeps, weight = params[0], flows
        else:
            # Dropout masks and the running statistics of batch norms serve create_graph too.
            keeps = some or step.name == "dropout"
            weight = some and step.name in ("batch_norm", "prelu")
        needs.append(Need(flows, params, some, keeps, weight))
        flows = some
    return needs


Gradients = tuple[Tensor | None, Sequence[Tensor | None]]


# Each gives the gradient of its input, in place of ``g`` where ``ours``, and of its params.


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
    found = aten._batch_norm_impl_index_backward(
        info.impl, x, g.contiguous(), weight, mean, var, saved_mean, saved_var, info.batch, eps,
        mask, reserve,
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
        into = flat.mm(_there(weight))
        into = into if g.dim() == 2 else into.view(*g.shape[:-1], into.shape[1])
    if need.params[0]:
        x = _there(tape[0])
        of_weight = flat.t().mm(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))
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
    x, weight = _there(tape[0]), _there(weight)
    shape = [1] * x.dim()
    if x.dim() > 1:
        shape[1] = weight.numel()
    slope = weight.reshape(shape if weight.numel() > 1 else [1] * x.dim())
    into, elementwise = aten._prelu_kernel_backward(g, x, slope)
    of_weight = elementwise.sum_to_size(slope.shape).reshape(weight.shape)
    return into if need.input else None, (of_weight if need.params[0] else None,)


def _backward_activation(
    chain: Chain,
    step: Step,
    tape: Sequence[Tensor | None],
    info: Info,
    weight: Tensor | None,
    need: Need,
    g: Tensor,
    ours: bool,
) -> Gradients:
    name, kept = step.name, _there(tape[0])
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


_BACKWARD = {
    "linear": _backward_linear,
    "batch_norm": _backward_norm,
    "dropout": _backward_dropout,
    "prelu": _backward_prelu,
}


def _differentiable_backward(
    ctx: Any, tensors: Sequence[Tensor | None], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """With ``create_graph``: the layers again in plain torch, under the masks that were drawn."""
    chain: Chain = ctx.chain
    for param, version in zip(chain.params, ctx.versions, strict=True):
        if param is not None and param._version != version:
            raise RuntimeError(
                "a parameter of an mlp was modified by an inplace operation between the forward"
                " and a backward with create_graph=True"
            )
    x = source = _there(tensors[0])
    for step, info in zip(chain.steps, ctx.infos, strict=True):
        x = _again(chain, step, tensors[1 + step.slot : 1 + step.slot + step.slots], info, x)
    inputs = [source, *(p for p in chain.params if p is not None)]
    wanted = [t for t in inputs if t.requires_grad]
    found = torch.autograd.grad(x, wanted, grad, create_graph=True, allow_unused=True)
    grads = {id(t): g for t, g in zip(wanted, found, strict=True)}
    given: list[Tensor | None] = []
    for t, need in zip([source, *chain.params], ctx.needs_input_grad[1:], strict=True):
        # A parameter in two places gets its whole gradient once.
        given.append(grads.pop(id(t), None) if t is not None and need else None)
    return (None, *given)


def _again(
    chain: Chain, step: Step, tape: Sequence[Tensor | None], info: Info, x: Tensor
) -> Tensor:
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
        return F.linear(x, _there(params[0]), params[1])
    return _activation(chain, step, x)


def differentiable(
    input: Tensor,
    params: Sequence[Tensor | None],
    stats: Sequence[Tensor | None],
    steps: Sequence[str],
    numbers: Sequence[float | None],
    training: Sequence[bool],
) -> Tensor:
    """The result, recorded by autograd."""
    chain = _chain(params, stats, steps, numbers, training)
    if not wants_grad((input, params)):
        return _run(chain, input)[0]
    if not _pays(chain, input):
        return reference(input, params, stats, steps, numbers, training)
    return Mlp.apply(chain, input, *params)


def _pays(chain: Chain, input: Tensor) -> bool:
    """Whether the products are large enough for one node to be worth its price."""
    held = device.held()
    if held is not None:
        return held == "fused"
    weights = (chain.params[s.param] for s in chain.steps if s.name == "linear")
    per_row = 2 * sum(w.numel() for w in weights if w is not None)
    return per_row * input.numel() >= FUSED_FROM * input.shape[-1]


# ---------------------------------------------------------------- cost, samples


def cost(
    input: Tensor,
    params: Sequence[Tensor | None],
    stats: Sequence[Tensor | None],
    steps: Sequence[str],
    numbers: Sequence[float | None],
    training: Sequence[bool],
) -> Cost:
    """Products of the linears; activations are counted as free and fused."""
    width = input.shape[-1]
    rows = input.numel() // max(width, 1)
    found = Cost(0, moved(input, *params))
    for step in parse(tuple(steps)).steps:
        if step.name == "linear":
            weight = _there(params[step.param])
            width = weight.shape[0]
            found += Cost(2 * rows * weight.numel(), 0)
    return found + Cost(0, rows * width * input.element_size())


def samples() -> list[Sample]:
    """Every step, and the orders found in public models; odd sizes, empty batch, 3-d, eval."""
    g = torch.Generator().manual_seed(17)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    def make(label: str, x: Tensor, *layers: Any, train: bool = True) -> Sample:
        """``layers``: widths stand for linears, strings for the others."""
        params: list[Tensor | None] = []
        stats: list[Tensor | None] = []
        numbers: list[float | None] = []
        steps, flags, width = [], [], x.shape[-1]
        for layer in layers:
            name, *options = layer if isinstance(layer, tuple) else (layer,)
            if isinstance(name, int):
                steps.append("linear")
                params += [rand(name, width) / width**0.5, None if options else rand(name)]
                width = name
                continue
            steps.append(name)
            if name == "batch_norm":
                given = dict(zip(("plain", "momentum", "tracks"), options, strict=False))
                plain, tracks = given.get("plain", False), given.get("tracks", True)
                momentum = given.get("momentum", 0.1)
                params += [None, None] if plain else [rand(width), rand(width)]
                count = torch.tensor(3)
                stats += [rand(width), rand(width).abs() + 0.5, count] if tracks else [None] * 3
                numbers += [momentum, 1e-5]
                flags.append(train)
            elif name == "dropout":
                numbers.append(*options)
                flags.append(train)
            elif name == "prelu":
                params.append(rand(width if options else 1).abs())
            elif name in ("leaky_relu", "elu"):
                numbers.append(*options)
        return Sample(label, (x, params, stats, steps, numbers, flags))

    x, drop = rand(6, 5), ("dropout", 0.4)
    return [
        make("linear", x, 7),
        make("linear no bias", x, (7, False)),
        make("dlrm bottom", x, 9, "relu", 4, "relu", 3, "relu"),
        make("dlrm top", x, 9, "relu", 4, "relu", 1, "sigmoid"),
        make("norm relu drop", x, 9, "batch_norm", "relu", drop, 4, "batch_norm", "relu", drop, 1),
        make("norm relu drop eval", x, 9, "batch_norm", "relu", drop, 4, "relu", drop, train=False),
        make("relu norm drop", x, 9, "relu", "batch_norm", drop, 4, "relu", drop, "batch_norm"),
        make("drop first", x, drop, 4, drop, "relu", 3, "sigmoid", drop),
        make("tanh twice", x, 4, "tanh", "tanh", "relu", "relu", 3),
        make("relu first", x, "relu", 4, "relu", "sigmoid"),
        make("activation alone", x, "relu", drop),
        make("dropout in eval alone", x, drop, train=False),
        make("dropout of all", x, 4, "relu", ("dropout", 1.0), 3),
        make("smooth", x, 8, "gelu", 7, "silu", 6, ("elu", 0.7), 5, ("leaky_relu", 0.2), 3, "tanh"),
        make("negative slopes", x, 8, ("elu", -0.5), 5, ("leaky_relu", -0.2), ("leaky_relu", 0.0)),
        make("prelu", x, 8, "prelu", 5, ("prelu", True), 3),
        make("norm without stats", x, 8, ("batch_norm", True, 0.1, False), "relu", train=False),
        make("norm cumulative", x, 8, ("batch_norm", False, None), "relu", 2),
        make("norm first", x, "batch_norm", 8, "relu"),
        make("3-d", rand(2, 3, 5), 8, "relu", drop, (2, False), "prelu"),
        make("one row", x[:1], 8, "relu", 2),
        make("empty batch", x[:0], 8, "relu", drop, 2),
        make("empty batch norm", x[:0], 8, "batch_norm", "relu", 2),
        make("transposed", rand(5, 6).t(), 8, "relu", 2),
    ]  # fmt: skip


mlp = register(
    Op(
        name="mlp",
        random=True,
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        samples=samples,
        cost=cost,
        casts=True,
        kernels=(
            Kernel(
                "fused", "cpu", f"from {FUSED_FROM:.1g} flops forward; no autocast", lambda: None
            ),
            Kernel("torch", "cpu", "less work: the layers one after the other", lambda: None),
        ),
    )
)
