"""Tables, pieces of gradients and updates for the host code of rows on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recast.runtime import device
from recast.runtime.rows import cuda as row_cuda
from recast.runtime.rows.grad import RowGrad, row_grad
from recast.runtime.rows.pieces import Piece, merge
from recast.runtime.rows.update import Update

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
CPU = torch.device("cpu")
STATES = {"sgd": 0, "adagrad": 1, "row_wise_adagrad": 1, "adam": 2}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def skewed(g: torch.Generator, rows: int, n: int) -> Tensor:
    """Ids of which few are hot."""
    return (torch.rand(n, generator=g) ** 4 * rows).long()


def lookups(g: torch.Generator, rows: int, dim: int, grad: torch.dtype, table: torch.dtype) -> Any:
    """Pieces of every form: one-hot, fixed, ragged, weights, mean, padding, factors, int32."""

    def upstream(bags: int) -> Tensor:
        return torch.randn(bags, dim + 8, generator=g).to(grad)[:, 8:]

    def weights(n: int) -> Tensor:
        return torch.randn(n, generator=g).to(table)

    starts = torch.tensor([0, 0, 3, 4, 90])
    ends = torch.tensor([0, 7, 7, 60], dtype=torch.int32)
    return [
        Piece(skewed(g, rows, 300), upstream(300), None, 1, None, False, None, None),
        Piece(skewed(g, rows, 60).int(), upstream(20), None, 3, weights(60), False, 1, None),
        Piece(skewed(g, rows, 120), upstream(5), starts, 0, None, True, 0, 0.5),
        Piece(skewed(g, rows, 60), upstream(3), ends, 0, weights(60), True, None, -1.5),
    ]


def table(g: torch.Generator, rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    """A slice of columns, aligned as the whole is."""
    return torch.randn(rows, dim + 8, generator=g).to(dtype)[:, :dim]


def states(action: str, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    shape = weight.shape[:1] if action == "row_wise_adagrad" else weight.shape
    return tuple(torch.full(shape, 0.1, dtype=dtype) for _ in range(STATES[action]))


def grad_of(weight: Tensor, pieces: list[Piece]) -> RowGrad:
    return row_grad(weight.shape, weight.dtype, CPU, pieces)


def in_torch(
    action: str, weight: Tensor, held: Sequence[Tensor], pieces: list[Piece], u: Update,
    compute: torch.dtype,
) -> None:  # fmt: skip
    """The formulas of the updates, by plain torch in ``compute``, on touched rows."""
    with device.use("torch"):
        ids, g = merge(pieces, weight.shape, compute, CPU)
    g = g * u.factor
    w, s = weight[ids].to(compute), [state[ids].to(compute) for state in held]
    if action == "sgd":
        w = w - u.lr * g
    elif action == "adam":
        g = g + u.l2 * w
        w = w - u.decay * w
        s[0] = s[0] + (g - s[0]) * (1 - u.betas[0])
        s[1] = s[1] + (g * g - s[1]) * (1 - u.betas[1])
        w = w - u.lr * s[0] / (s[1].sqrt() + u.eps)
    else:
        s[0] = s[0] + (g * g if action == "adagrad" else (g * g).mean(1))
        root = s[0].sqrt() + u.eps
        w = w - u.lr * g / (root if action == "adagrad" else root.unsqueeze(1))
    weight[ids] = w.to(weight.dtype)
    for state, new in zip(held, s, strict=True):
        state[ids] = new.to(state.dtype)


def changing(u: Update, turn: int) -> Update:
    """Other numbers in each step, as schedules give."""
    return u._replace(lr=0.05 * (1 + turn % 3), factor=(1.0, -0.5)[turn % 2])


def step(
    *, seed: int = 5, dims: Sequence[int] = (8, 20), pieces: Any = None, **more: Any
) -> tuple[list[Tensor], list[Update]]:
    """Adagrad on some tables: what is written to, and the updates."""
    g = generator(seed)
    updates = []
    for k, dim in enumerate(dims):
        weight = table(g, (40, 300, 7)[k % 3], dim, F32)
        found = lookups(g, *weight.shape, F32, F32)
        held = states("adagrad", weight, F32)
        one = Update("adagrad", weight, grad_of(weight, found), held, 0.1, 1e-2)
        updates.append(one._replace(**more))
    return [t for u in updates for t in (u.weight, *u.states)], updates


def results(**how: Any) -> list[Tensor]:
    """What is written to, after a step that kernels took."""
    written, updates = step(**how)
    assert row_cuda.update(updates) == []
    return written


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
