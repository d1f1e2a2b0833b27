"""Calls of ``embedding_bags`` for the tests of its host code on the emulator, and their judge."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recast.runtime import OPS
from recast.runtime.gpu import cuda_launch
from recast.runtime.tolerances import excess

BAGS = OPS["embedding_bags"]
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
WHY_NOT = cuda_launch.why_not()
FORWARD, WEIGHT_GRAD = "embedding_forward", "embedding_weight_grad"


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def arguments(lookups: list[dict[str, Any]]) -> tuple[Any, ...]:
    """The arguments of the op for lookups of a table each."""
    full = [
        {"offsets": None, "weights": None, "mode": "sum", "padding": None, "last": False} | x
        for x in lookups
    ]
    columns = [[x[key] for x in full] for key in ("table", "ids", "offsets", "weights")]
    rest = [[x[key] for x in full] for key in ("mode", "padding", "last")]
    return (*columns, [*range(len(full))], *rest, [False] * len(full))


def call(lookups: list[dict[str, Any]], *more: Any) -> list[Tensor]:
    found: list[Tensor] = BAGS.target(*arguments(lookups), *more)
    return found


def widened(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def check(lookups: list[dict[str, Any]], outs: list[Tensor]) -> None:
    plain = BAGS.reference(*arguments(lookups))
    truth = BAGS.reference(
        *arguments([{key: widened(value) for key, value in x.items()} for x in lookups])
    )
    for x, a, b, c in zip(lookups, outs, plain, truth, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert excess(a, b, c, scale=float(x["table"].detach().abs().max())) <= 1


def ids_of(rows: int, *shape: int, seed: int = 1, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(0, rows, shape, generator=generator(seed), dtype=dtype)


def mixed() -> list[dict[str, Any]]:
    """Dtypes, widths, modes and forms of ids that fall into many classes, in no order."""
    g = generator(3)
    starts = torch.tensor([0, 2, 2, 7])

    def table(rows: int, dim: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.randn(rows, dim, generator=g).to(dtype)

    return [
        {"table": table(11, 16), "ids": ids_of(11, 5, 3)},
        {"table": table(7, 24, BF16), "ids": ids_of(7, 9, dtype=torch.int32), "offsets": starts},
        {"table": table(11, 16), "ids": ids_of(11, 4, 2), "mode": "max"},
        {"table": table(5, 7), "ids": ids_of(5, 2, 3), "mode": "none"},
        {"table": table(11, 16), "ids": ids_of(11, 6, 2, dtype=torch.int32), "mode": "mean"},
        {"table": table(7, 24, BF16), "ids": ids_of(7, 9), "offsets": starts, "padding": 3},
        {"table": table(9, 10, F16), "ids": ids_of(9, 3, 2), "mode": "max"},
        {"table": table(3, 300), "ids": ids_of(3, 3, 2)},
        {"table": table(4, 1), "ids": ids_of(4, 8), "mode": "none"},
    ]
