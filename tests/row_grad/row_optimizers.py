"""Optimizers that step touched rows, each with its plain twin, for the tests here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from row_lookup import ours, plain, same, twins, weigh
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop, SparseAdam
from torch.optim._functional import sparse_adam

from recast.optim import RowWiseAdagrad
from recast.runtime.rows.grad import counters
from recast.runtime.rows.optimizer import attach

Make = Callable[[list[Parameter]], Optimizer]


@dataclass(frozen=True)
class Kind:
    """How to make an optimizer.

    reference: a lazy one's twin in plain torch; None: the same optimizer.
    sparse: it accepts only sparse gradients.
    """

    make: Make
    reference: Make | None = None
    sparse: bool = False

    @property
    def lazy(self) -> bool:
        return self.reference is not None


class _Lazy:
    """Steps sparse gradients by torch's own SparseAdam, the others as its base class does."""

    def step(self: Any, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        hidden = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.is_sparse:
                    self._touched(group, p)
                    hidden.append((p, p.grad))
                    p.grad = None
        super().step()  # type: ignore[misc]
        for p, grad in hidden:
            p.grad = grad
        return loss

    @torch.no_grad()
    def _touched(self: Any, group: dict[str, Any], p: Tensor) -> None:
        grad = p.grad.coalesce()
        ids, rows = grad.indices()[0], grad.values()
        if getattr(self, "grad_scale", None) is not None:
            grad.values().div_(self.grad_scale)
            p.grad = grad
        if getattr(self, "found_inf", None) is not None and self.found_inf != 0:
            return
        lr, decay = float(group["lr"]), group["weight_decay"]
        if group["decoupled_weight_decay"]:
            p[ids] *= 1 - lr * decay
        rows = -rows if group["maximize"] else rows
        if not group["decoupled_weight_decay"]:
            rows = rows + decay * p[ids]
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        sparse_adam(
            [p], [torch.sparse_coo_tensor(ids.unsqueeze(0), rows, p.shape)], [state["exp_avg"]],
            [state["exp_avg_sq"]], [int(state["step"])], eps=group["eps"], beta1=beta1,
            beta2=beta2, lr=lr, maximize=False,
        )  # fmt: skip


class LazyAdam(_Lazy, Adam):
    pass


class LazyAdamW(_Lazy, AdamW):
    pass


def _lazy(kind: type[Optimizer], reference: type[Optimizer], **how: Any) -> Kind:
    return Kind(lambda p: kind(p, **how), lambda p: reference(p, **how))


def adam(**how: Any) -> Kind:
    return _lazy(Adam, LazyAdam, **{"lr": 0.1, **how})


def adamw(**how: Any) -> Kind:
    return _lazy(AdamW, LazyAdamW, **{"lr": 0.1, **how})


def _sparse_adam(**how: Any) -> Kind:
    return Kind(lambda p: SparseAdam(p, **{"lr": 0.1, **how}), sparse=True)


def _row_wise(**how: Any) -> Kind:
    return Kind(lambda p: RowWiseAdagrad(p, **{"lr": 0.1, **how}))


FUSED: dict[str, Kind] = {
    "sgd": Kind(lambda p: SGD(p, lr=0.1)),
    "sgd-foreach": Kind(lambda p: SGD(p, lr=0.1, foreach=True)),
    "sgd-loop": Kind(lambda p: SGD(p, lr=0.1, foreach=False)),
    "sgd-fused": Kind(lambda p: SGD(p, lr=0.1, fused=True)),
    "sgd-maximize": Kind(lambda p: SGD(p, lr=0.1, maximize=True)),
    "sgd-tensor-lr": Kind(lambda p: SGD(p, lr=torch.tensor(0.1))),
    "adagrad": Kind(lambda p: Adagrad(p, lr=0.1)),
    "adagrad-foreach": Kind(lambda p: Adagrad(p, lr=0.1, foreach=True)),
    "adagrad-loop": Kind(lambda p: Adagrad(p, lr=0.1, foreach=False)),
    "adagrad-fused": Kind(lambda p: Adagrad(p, lr=0.1, fused=True)),
    "adagrad-decay": Kind(lambda p: Adagrad(p, lr=0.1, lr_decay=0.3)),
    "adagrad-eps": Kind(lambda p: Adagrad(p, lr=0.1, eps=0.5)),
    "adagrad-initial": Kind(lambda p: Adagrad(p, lr=0.1, initial_accumulator_value=2.0)),
    "adagrad-maximize": Kind(lambda p: Adagrad(p, lr=0.1, maximize=True)),
    "adagrad-tensor-lr": Kind(lambda p: Adagrad(p, lr=torch.tensor(0.1))),
    "adagrad-groups": Kind(
        lambda p: Adagrad([{"params": p[:1], "lr": 0.3, "eps": 0.1}, {"params": p[1:]}], lr=0.1)
    ),
    "row-wise": _row_wise(),
    "row-wise-decay": _row_wise(lr_decay=0.3, eps=0.5),
    "row-wise-initial": _row_wise(initial_accumulator_value=2.0),
    "row-wise-maximize": _row_wise(maximize=True, lr=torch.tensor(0.1)),
    "sparse-adam": _sparse_adam(),
    "sparse-adam-betas": _sparse_adam(betas=(0.5, 0.8), eps=0.01),
    "sparse-adam-maximize": _sparse_adam(maximize=True),
    "sparse-adam-tensor-lr": _sparse_adam(lr=torch.tensor(0.1)),
    "lazy-adam": adam(),
    "lazy-adam-loop": adam(foreach=False, betas=(0.5, 0.8), eps=0.01),
    "lazy-adam-foreach": adam(foreach=True, maximize=True),
    "lazy-adam-fused": adam(fused=True),
    "lazy-adam-decay": adam(weight_decay=0.3, maximize=True, eps=0.01),
    "lazy-adam-tensor-lr": adam(lr=torch.tensor(0.1), foreach=False),
    "lazy-adamw": adamw(weight_decay=0.3),
    "lazy-adamw-maximize": adamw(weight_decay=0.3, maximize=True),
    "lazy-adamw-fused": adamw(fused=True),
}
# Those that step all rows, but need no dense gradient where the kernels are.
WHOLE: dict[str, Kind] = {
    "adam": Kind(lambda p: Adam(p, lr=0.1)),
    "adam-foreach": Kind(lambda p: Adam(p, lr=0.1, foreach=True, betas=(0.5, 0.8), eps=0.01)),
    "adam-fused": Kind(lambda p: Adam(p, lr=0.1, fused=True)),
    "adam-loop": Kind(lambda p: Adam(p, lr=0.1, foreach=False, betas=(0.0, 0.9))),
    "adam-maximize": Kind(lambda p: Adam(p, lr=0.1, maximize=True)),
    "adam-tensor-lr": Kind(lambda p: Adam(p, lr=torch.tensor(0.1), foreach=False)),
    "adamw": Kind(lambda p: AdamW(p, lr=0.1, weight_decay=0.3)),
    "adamw-fused": Kind(lambda p: AdamW(p, lr=0.1, fused=True)),
    "adam-decay": Kind(lambda p: Adam(p, lr=0.1, weight_decay=0.3, maximize=True)),
    "momentum-decay": Kind(lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1)),
    "nesterov-decay": Kind(
        lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True, fused=True)
    ),
    "rmsprop-decay": Kind(lambda p: RMSprop(p, lr=0.1, eps=0.1, weight_decay=0.1)),
    "rmsprop-momentum-decay": Kind(
        lambda p: RMSprop(p, lr=0.1, eps=0.1, momentum=0.9, weight_decay=0.1)
    ),
    "adamw-maximize": Kind(lambda p: AdamW(p, lr=0.1, maximize=True)),
    "adam-groups": Kind(
        lambda p: Adam([{"params": p[:1], "lr": 0.3, "eps": 0.1}, {"params": p[1:]}], lr=0.1)
    ),
    "momentum": Kind(lambda p: SGD(p, lr=0.1, momentum=0.9)),
    "momentum-foreach": Kind(lambda p: SGD(p, lr=0.1, momentum=0.5, foreach=True)),
    "momentum-fused": Kind(lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True, maximize=True)),
    "momentum-dampening": Kind(lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.4)),
    "momentum-tensor-lr": Kind(lambda p: SGD(p, lr=torch.tensor(0.1), momentum=0.9)),
    "momentum-nesterov": Kind(lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    "momentum-nesterov-fused": Kind(
        lambda p: SGD(p, lr=0.1, momentum=0.7, nesterov=True, fused=True)
    ),
    "rmsprop": Kind(lambda p: RMSprop(p, lr=0.1, eps=0.1)),
    "rmsprop-foreach": Kind(lambda p: RMSprop(p, lr=0.1, alpha=0.5, eps=0.01, foreach=True)),
    "rmsprop-maximize": Kind(lambda p: RMSprop(p, lr=0.1, eps=0.1, alpha=0.0, maximize=True)),
    "rmsprop-momentum": Kind(lambda p: RMSprop(p, lr=0.1, eps=0.1, momentum=0.9)),
    "rmsprop-tensor-lr": Kind(lambda p: RMSprop(p, lr=torch.tensor(0.1), eps=0.1, momentum=0.5)),
    "rmsprop-groups": Kind(
        lambda p: RMSprop([{"params": p[:1], "momentum": 0.8}, {"params": p[1:]}], lr=0.1, eps=0.1)
    ),
    "momentum-groups": Kind(
        lambda p: SGD([{"params": p[:1], "momentum": 0.8}, {"params": p[1:]}], lr=0.1)
    ),
}
# One for each formula, for tests of what all of them share.
ONE_EACH = ["sgd", "adagrad", "row-wise", "sparse-adam", "lazy-adam-decay", "lazy-adamw"]


def fused() -> int:
    return counters().get("fused-step", 0)


def densified() -> int:
    return sum(times for key, times in counters().items() if key.startswith("dense-"))


class Pair:
    """A table and a dense layer, ours and plain, each with its own optimizer.

    SparseAdam has the table alone.
    """

    def __init__(self, kind: Kind, *, attached: bool = True, width: int = 4) -> None:
        self.sparse = kind.sparse or kind.lazy  # of the plain gradient
        self.a, self.b = twins(width=width)
        self.head_a, self.head_b = twins(width, 1, seed=9)
        heads = ([], []) if kind.sparse else ([self.head_a], [self.head_b])
        self.ours = kind.make([self.a, *heads[0]])
        self.plain = (kind.reference or kind.make)([self.b, *heads[1]])
        if attached:
            attach(self.ours, lazy=kind.lazy)

    def optimizers(self) -> tuple[Optimizer, Optimizer]:
        return self.ours, self.plain

    def sides(self) -> Iterable[tuple[Optimizer, Callable[[Tensor], Tensor]]]:
        yield self.ours, lambda ids: weigh(ours(self.a, ids, self.sparse) @ self.head_a)
        yield self.plain, lambda ids: weigh(plain(self.b, ids, self.sparse) @ self.head_b)

    def train(self, steps: int = 4) -> None:
        for turn in range(steps):
            ids = batch(turn)
            for optimizer, loss in self.sides():
                optimizer.zero_grad()
                loss(ids).backward()
                optimizer.step()
            same(self.a.grad, self.b.grad)

    def train_by_closure(self, steps: int = 4, *, by_name: bool = False) -> None:
        """All of it inside of ``step(closure)``, as Lightning does."""
        for turn in range(steps):
            losses = []
            for optimizer, loss in self.sides():

                def closure(optimizer: Any = optimizer, loss: Any = loss, turn: int = turn) -> Any:
                    optimizer.zero_grad()
                    value = loss(batch(turn))
                    value.backward()
                    return value

                given: Any = {"closure": closure} if by_name else {}
                losses.append(optimizer.step(**given) if by_name else optimizer.step(closure))
            torch.testing.assert_close(losses[0], losses[1])
            same(self.a.grad, self.b.grad)

    def check(self) -> None:
        same(self.a, self.b)
        same(self.head_a, self.head_b)
        same_state(self.ours, self.plain)


def same_state(ours: Optimizer, plain: Optimizer) -> None:
    """Equal state dicts: names, types, and numbers to the rounding of fp32."""
    mine, theirs = ours.state_dict(), plain.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        assert mine["state"][index].keys() == state.keys()
        for name, value in state.items():
            assert type(mine["state"][index][name]) is type(value)
            torch.testing.assert_close(mine["state"][index][name], value)


def batch(turn: int) -> Tensor:
    return torch.randint(0, 20, (16,), generator=torch.Generator().manual_seed(turn))


def clip_plain(parameters: Iterable[Tensor], limit: float) -> None:
    """``clip_grad_norm_``, of sparse gradients too."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norms = [(g.coalesce().values() if g.is_sparse else g).norm() for g in grads]
    factor = min(1.0, limit / (float(torch.stack(norms).norm()) + 1e-6))
    for grad in grads:
        grad.mul_(factor)
