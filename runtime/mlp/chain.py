"""Chains of layers as arguments of the op ``mlp``, and what each layer means in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.errors import InputError

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


class NormSaved(NamedTuple):
    """What a batch norm leaves on the tape for aten's backward kernel, or for ours."""

    x: Tensor | None
    mean: Tensor | None  # the running statistics, if they were used
    var: Tensor | None
    saved_mean: Tensor | None  # for ours: (2, C), the mean and 1 / deviation
    saved_var: Tensor | None
    reserve: Tensor | None


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


def chain_of(
    params: Sequence[Tensor | None],
    stats: Sequence[Tensor | None],
    steps: Sequence[str],
    numbers: Sequence[float | None],
    training: Sequence[bool],
) -> Chain:
    """The call as one value; raises InputError if the lists do not fit the steps."""
    program = parse(tuple(steps))
    given = (len(params), len(stats), len(numbers), len(training))
    if program.takes != given:
        raise InputError(
            f"mlp of {', '.join(steps)} takes {program.takes} params, stats, numbers, flags,"
            f" not {given}"
        )
    return Chain(program.steps, params, stats, numbers, training)


def plain(chain: Chain, step: Step, x: Tensor) -> Tensor:
    """One layer as torch.nn computes it."""
    params, k = chain.params, step.param
    if step.name == "linear":
        return F.linear(x, there(params[k]), params[k + 1])
    if step.name == "batch_norm":
        norm = norm_of(chain, step, x)
        return F.batch_norm(
            x, norm.mean, norm.var, params[k], params[k + 1], norm.batch, norm.momentum, norm.eps
        )
    if step.name == "dropout":
        return F.dropout(x, chain.number(step.number), chain.training[step.flag])
    return activation(chain, step, x)


def activation(chain: Chain, step: Step, x: Tensor) -> Tensor:
    """An activation as torch computes it."""
    if step.name == "leaky_relu":
        return F.leaky_relu(x, chain.number(step.number))
    if step.name == "elu":
        return F.elu(x, chain.number(step.number))
    if step.name == "prelu":
        return F.prelu(x, there(chain.params[step.param]))
    return _POINTWISE[step.name](x)


def there(tensor: Tensor | None) -> Tensor:
    """``tensor``; raises InputError if it is None."""
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


def norm_of(chain: Chain, step: Step, x: Tensor) -> Norm:
    """torch.nn.BatchNorm1d's choice of statistics and momentum; counts the batch in training.

    Raises InputError if statistics of a single row are wanted.
    """
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
