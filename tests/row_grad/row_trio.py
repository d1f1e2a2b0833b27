"""A table stepped by rows beside torch's own and a judge, for the tests of optimizers that step all
rows; and those optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from row_lookup import piece
from row_optimizers import Make
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Adam, Optimizer, RMSprop

from recast.runtime.rows.grad import counters, row_grad
from recast.runtime.rows.optimizer import attach

ROWS = 200


class Trio:
    """A table stepped by rows, the same in torch, and in float64, with the same gradients."""

    def __init__(self, make: Make, width: int = 5, rows: int = ROWS) -> None:
        self.draws = torch.Generator().manual_seed(7)
        start = 0.1 * torch.randn(rows, width, generator=self.draws)
        self.tables = [Parameter(start.to(dtype, copy=True)) for dtype in _DTYPES]
        self.optimizers = [make([table]) for table in self.tables]
        attach(self.optimizers[0])

    @property
    def ours(self) -> Optimizer:
        return self.optimizers[0]

    @property
    def table(self) -> Parameter:
        return self.tables[0]

    def names(self) -> list[str]:
        state = self.ours.state[self.table]
        return [name for name, held in state.items() if isinstance(held, Tensor) and held.dim()]

    def state(self, name: str) -> Tensor:
        found: Tensor = self.ours.state[self.table][name]
        return found

    def ids(self) -> Tensor:
        """Twelve: those near 0 are looked up often, others once in a hundred steps, or never."""
        drawn = torch.rand(12, generator=self.draws) ** 4 * (len(self.table) - 20)
        return drawn.long()

    def give(self, ids: Tensor, by: float = 1.0) -> None:
        """Give all three the same gradient, in rows or dense."""
        rows = by * torch.randn(len(ids), self.table.shape[1], generator=self.draws)
        like = self.table
        self.table.grad = row_grad(like.shape, like.dtype, like.device, [piece(ids, rows)])
        for table in self.tables[1:]:
            dense = torch.zeros_like(table)
            table.grad = dense.index_add_(0, ids, rows.to(table.dtype))

    def step(self, ids: Tensor | None = None, by: float = 1.0) -> None:
        self.give(self.ids() if ids is None else ids, by)
        for optimizer in self.optimizers:
            optimizer.step()

    def steps_to_come(self, steps: int) -> int:
        """``train``; returns how many of them took a dense gradient."""
        key = f"dense-step:{type(self.ours).__name__}"
        before = counters().get(key, 0)
        self.train(steps)
        return counters().get(key, 0) - before

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def check(self, *, state: bool = True) -> None:
        """Our error is at most a little more than torch's own."""
        ours, plain, judge = (
            {"table": table.detach(), **(o.state_dict()["state"].get(0, {}) if state else {})}
            for table, o in zip(self.tables, self.optimizers, strict=True)
        )
        assert ours.keys() == plain.keys()
        for name, exact in judge.items():
            assert type(ours[name]) is Tensor and ours[name].dtype == plain[name].dtype
            own = (plain[name].double() - exact).abs().max()
            error = (ours[name].double() - exact).abs().max()
            assert error <= 2 * own + 1e-7 * exact.abs().max(), (name, float(error), float(own))


_DTYPES = (torch.float32, torch.float32, torch.float64)


Way = Callable[..., Make]


def by_adam(**how: Any) -> Make:
    return lambda p: Adam(p, **{"lr": 1e-2, **how})


def by_momentum(**how: Any) -> Make:
    return lambda p: SGD(p, **{"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, **how})


def by_sgd(**how: Any) -> Make:
    return lambda p: SGD(p, **{"lr": 1e-2, **how})


def by_adagrad(**how: Any) -> Make:
    return lambda p: Adagrad(p, **{"lr": 1e-2, "lr_decay": 0.01, "eps": 1e-6, **how})


def by_nesterov(**how: Any) -> Make:
    return lambda p: SGD(p, **{"lr": 1e-2, "momentum": 0.9, "nesterov": True, **how})


def by_rmsprop(**how: Any) -> Make:
    return lambda p: RMSprop(p, **{"lr": 1e-2, "eps": 1e-3, **how})


def by_rmsprop_momentum(**how: Any) -> Make:
    return by_rmsprop(**{"momentum": 0.9, **how})


MOVING: dict[str, Way] = {
    "adam": by_adam,
    "momentum": by_momentum,
    "nesterov": by_nesterov,
    "rmsprop-momentum": by_rmsprop_momentum,
}
DECAYING: dict[str, Way] = {
    "adam-decay": partial(by_adam, weight_decay=0.1),
    "momentum-decay": partial(by_momentum, weight_decay=0.1),
    "rmsprop-decay": partial(by_rmsprop, weight_decay=0.1, momentum=0.9),
    "adagrad-decay": partial(by_adagrad, weight_decay=0.1),
}
STATELESS: dict[str, Way] = {"sgd-decay": partial(by_sgd, weight_decay=0.1)}
WAYS: dict[str, Way] = {**MOVING, "rmsprop": by_rmsprop, **DECAYING}
