"""Optimizers that step all rows of a table, without a dense gradient.

A row without gradient has g = 0. So k steps after its last gradient, at step t of its table,

    SGD        b = momentumᵏ b₀,             w ← w - lr·b       (Nesterov: w - lr·momentum·b)
    Adam(W)    m = β₁ᵏ m₀,  v = β₂ᵏ v₀,      w ← (1 - lr·weight_decay)·w
                                                 - lr/(1 - β₁ᵗ) · m / (√v/√(1 - β₂ᵗ) + eps)
    RMSprop    v = alphaᵏ v₀,                w stays; with momentum it moves as SGD's

with the moments b₀, m₀ and v₀ that the gradient left. A row that never had a gradient does not
move; any other moves by ``shrinks`` (momentum, or about β₁/√β₂) times as much as at the step
before, until that is too little to change the weight in fp32: with 0.9, after some 150 steps.
``ages`` keeps how old the moments of each row are.

Small tables are stepped whole, row by row, by the optimizer's own formula with g = 0 (``whole``).
So are all tables under a weight decay that is part of the gradient (all but AdamW's), which moves
every row under SGD without momentum and under Adagrad too; all whose betas have changed since the
last step; and all whose rows would move for thousands of steps.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer, RMSprop

from recast.runtime.rows.rules import (
    Adagrad,
    Group,
    LazyAdam,
    Numbers,
    Rule,
    State,
    never,
    no_eps,
    step_count,
    step_of,
)

# A row is at rest when its moves have shrunk by this factor, if it has not come to rest before; and
# factors with which that takes too many steps are left to the dense step.
_REST, _MOST_STEPS = 2.0**-64, 8192


class Fading(Rule):
    """How one kind of optimizer steps a table. Its ``numbers`` are for the rows with a gradient.

    moves: why a dense gradient is asked for where it is.
    lerps: whether the first moment goes to 0 by differences, which make NaN of infinity.
    """

    moves = ""
    lerps = False

    def betas(self, group: Group) -> tuple[float, ...]:
        """What a step without gradient multiplies the moments by."""
        raise NotImplementedError

    def shrinks(self, *betas: float) -> float:
        """What it multiplies the move of a row by."""
        raise NotImplementedError

    def steps(self, state: State) -> float:
        """How many steps a table has done: from 1 on, any number is right if none is kept."""
        return float(state["step"])

    def moments(self, state: State, weight: Tensor, count: int) -> dict[str, Any]:
        """``count`` moments of a table by their names in ``state``; what is missing is None."""
        return {name: state.get(name) for name in self.states[:count]}

    def note(self, group: Group) -> str:
        """What happens to rows without gradient, for the report."""
        if group["weight_decay"] != 0 and not group.get("decoupled_weight_decay"):
            return "weight_decay moves every row at every step; no dense gradient"
        return (
            "rows that a step does not look up move by their moments alone, while that changes"
            " them; no dense gradient"
        )

    def why_not(self, group: Group) -> str | None:
        if group.get("capturable"):
            return "capturable=True needs torch's own step"
        if any(isinstance(n, Tensor) and not n.is_cpu for n in _numbers_of(group)):
            return "its learning rate or betas are on a device, which is not waited for"
        if (why := never(group)) is not None:
            return why
        if not math.isfinite(group["lr"]):
            return "a learning rate of infinity or NaN makes every row NaN"
        return None


class Momentum(Fading):
    """SGD with momentum; without, under weight decay only, when it has no state."""

    kind = SGD
    action = "momentum"
    states = ("momentum_buffer",)
    moves = "momentum or weight decay moves every row at every step"

    def why_not(self, group: Group) -> str | None:
        if group["nesterov"] and group["foreach"]:
            return "nesterov with foreach=True adds the momentum to the gradients that it is given"
        return super().why_not(group)

    def betas(self, group: Group) -> tuple[float, ...]:
        momentum = float(group["momentum"])
        return (momentum,) if momentum != 0 else ()

    def shrinks(self, *betas: float) -> float:
        return betas[0] if betas else 0.0

    def steps(self, state: State) -> float:
        return 0.0 if state.get(self.states[0]) is None else 1.0

    def moments(self, state: State, weight: Tensor, count: int) -> dict[str, Any]:
        if count == 0:
            return {}
        held = state.get(self.states[0])
        return {self.states[0]: torch.zeros_like(weight) if held is None else held}

    def counts(self, group: Group) -> bool:
        return group["dampening"] != 0 and group["momentum"] != 0

    def numbers(self, group: Group, steps: float) -> Numbers:
        # torch's first is the gradient.
        dampening = float(group["dampening"]) if steps > 0 and group["momentum"] != 0 else 0.0
        ahead = float(group["momentum"]) if group["nesterov"] else 0.0
        lr, l2 = float(group["lr"]), float(group["weight_decay"])
        return Numbers(lr, betas=(dampening, 0.0), l2=l2, ahead=ahead)


class WholeAdam(LazyAdam, Fading):
    """Adam and AdamW. Its eps is not divided by the correction of v, as SparseAdam's is."""

    exact = True
    moves = 'Adam moves every row at every step (sparse_semantics="lazy" does not)'
    lerps = True

    def why_not(self, group: Group) -> str | None:
        if group["amsgrad"]:
            return "amsgrad keeps a maximum for every row"
        if group["eps"] < 2.0**-100:  # in fp32 close to zero, times the correction of v
            return "eps is 0, and 0/0 makes every untouched row NaN"
        return Fading.why_not(self, group)

    def betas(self, group: Group) -> tuple[float, ...]:
        beta1, beta2 = group["betas"]
        return float(beta1), float(beta2)

    def shrinks(self, *betas: float) -> float:
        beta1, beta2 = betas
        if beta1 == 0.0:
            return 0.0
        return beta1 / math.sqrt(beta2) if beta2 > 0.0 else 1.0

    def numbers(self, group: Group, steps: float) -> Numbers:
        beta1, beta2 = self.betas(group)
        root = math.sqrt(1 - beta2 ** (steps + 1))
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        by = lr * root / (1 - beta1 ** (steps + 1))
        numbers = Numbers(by, float(group["eps"]) * root, (beta1, beta2))
        if group["decoupled_weight_decay"]:
            return numbers._replace(decay=lr * decay)
        return numbers._replace(l2=decay)


class WholeRMSprop(Fading):
    """RMSprop, with momentum or without."""

    kind = RMSprop
    action = "rmsprop"
    states = "square_avg", "momentum_buffer"
    moves = "RMSprop scales the square_avg of every row at every step"

    def why_not(self, group: Group) -> str | None:
        if group["centered"]:
            return "centered=True subtracts what may leave a root of less than 0"
        if group["eps"] <= 2.0**-150:  # zero in fp32
            return "eps is 0, and 0/0 makes every untouched row NaN"
        if group["alpha"] > 1:
            return "alpha is larger than 1, and square_avg grows without gradients"
        return super().why_not(group)

    def betas(self, group: Group) -> tuple[float, ...]:
        alpha, momentum = float(group["alpha"]), float(group["momentum"])
        return (alpha, momentum) if momentum > 0 else (alpha,)

    def shrinks(self, *betas: float) -> float:
        return betas[1] if len(betas) > 1 else 0.0

    def note(self, group: Group) -> str:
        if group["momentum"] > 0 or group["weight_decay"] != 0:
            return super().note(group)
        return (
            "rows that a step does not look up stay, and their square_avg fades when it is read; no"
            " dense gradient"
        )

    def start(self, optimizer: Optimizer, group: Group, weight: Tensor) -> State:
        names = self.states[: len(self.betas(group))]
        return {"step": step_count(None, weight), **{n: torch.zeros_like(weight) for n in names}}

    def numbers(self, group: Group, steps: float) -> Numbers:
        lr, eps, alpha, l2 = (float(group[n]) for n in ("lr", "eps", "alpha", "weight_decay"))
        return Numbers(lr, eps, (alpha, 0.0), l2=l2)


class WholeAdagrad(Adagrad, Fading):
    """Adagrad under weight decay."""

    moves = "weight_decay moves every row at every step"

    def why_not(self, group: Group) -> str | None:
        return Fading.why_not(self, group) or no_eps(group)

    def betas(self, group: Group) -> tuple[float, ...]:
        return (1.0,)

    def shrinks(self, *betas: float) -> float:
        return 0.0

    def numbers(self, group: Group, steps: float) -> Numbers:
        return super().numbers(group, steps)._replace(l2=float(group["weight_decay"]))


_RULES = (Momentum(), WholeAdam(), WholeRMSprop(), WholeAdagrad())


def rule_of(optimizer: Optimizer) -> Fading | None:
    """The rule for an optimizer whose step is torch's own."""
    for rule in _RULES:
        if isinstance(optimizer, rule.kind):
            return rule if step_of(type(optimizer)) is step_of(rule.kind) else None
    return None


def steps_to_rest(shrinks: float) -> int | None:
    """After how many steps without gradient rows are at rest; None: too many."""
    if shrinks == 0.0:
        return 2
    if shrinks >= 1.0:
        return None
    steps = math.ceil(math.log(_REST) / math.log(shrinks))
    return max(2, steps) if steps <= _MOST_STEPS else None


def _numbers_of(group: Group) -> list[object]:
    named = [group.get(name) for name in ("lr", "momentum", "alpha", "weight_decay")]
    return [*named, *group.get("betas", ())]
