"""Chains of layers cut into stages: a linear layer with its relu and dropout is one."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from recast.runtime.mlp.chain import Chain, Step
from recast.runtime.mlp.relu_dropout import check as check_probability


class Stage(NamedTuple):
    """Layers that run together."""

    kind: str  # "linear"; "mask": dropout, perhaps after relu, without linear; "step": torch's own
    at: int  # index of its first step in the chain
    relu: bool = False
    p: float = 0.0  # of its dropout; 0: none

    @property
    def masked(self) -> bool:
        return self.relu or self.p > 0


def stages(chain: Chain) -> tuple[Stage, ...]:
    """The chain cut into stages; dropouts that do nothing are left out.

    Raises InputError for a p outside [0, 1].
    """
    drops = tuple(
        (chain.number(step.number), chain.training[step.flag])
        for step in chain.steps
        if step.name == "dropout"
    )
    return _stages(chain.steps, drops)


@lru_cache(maxsize=1024)
def _stages(steps: tuple[Step, ...], drops: tuple[tuple[float, bool], ...]) -> tuple[Stage, ...]:
    found: list[Stage] = []
    left = iter(drops)
    for i, step in enumerate(steps):
        last = found[-1] if found else None
        if step.name == "dropout":
            p, training = next(left)
            check_probability(p)
            if not training or p == 0:
                continue
            if last is not None and last.kind == "step" and steps[last.at].name == "relu":
                found[-1] = Stage("mask", last.at, relu=True, p=p)
            elif last is not None and last.kind == "linear" and not last.p:
                found[-1] = last._replace(p=p)
            else:
                found.append(Stage("mask", i, p=p))
        elif step.name == "relu" and last is not None and last.kind == "linear" and not last.masked:
            found[-1] = last._replace(relu=True)
        else:
            found.append(Stage("linear" if step.name == "linear" else "step", i))
    return tuple(found)
