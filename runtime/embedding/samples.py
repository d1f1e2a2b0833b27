"""The arguments that ``embedding_bags`` is tested with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recast.runtime.op import Sample


def samples() -> list[Sample]:
    """Odd sizes, every mode and flag, empty bags, one row, shared tables, empty batch."""
    g = torch.Generator().manual_seed(7)

    def ids(rows: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(0, rows, shape, generator=g, dtype=dtype)

    def table(rows: int, dim: int) -> Tensor:
        return torch.randn(rows, dim, generator=g)

    def one(label: str, weight: Tensor, i: Tensor, **flags: Any) -> Sample:
        f = {
            "offsets": None, "weights": None, "mode": "sum", "padding": None, "last": False,
            "sparse": False,
        } | flags  # fmt: skip
        per_lookup = [f["mode"]], [f["padding"]], [f["last"]], [f["sparse"]]
        return Sample(label, ([weight], [i], [f["offsets"]], [f["weights"]], [0], *per_lookup))

    i32 = torch.int32
    starts = torch.tensor([0, 0, 1, 3, 3, 8, 12])
    ends = torch.tensor([0, 4, 4, 9, 12], dtype=torch.int32)
    wide = torch.randn(12, generator=g)
    found = [
        one("gather", table(11, 7), ids(11, 5), mode="none"),
        one("gather 3-d", table(11, 16), ids(11, 3, 2, 4), mode="none"),
        one("gather scalar", table(11, 16), ids(11), mode="none"),
        one("gather padding int32", table(4, 33), ids(4, 9, 2, dtype=i32), mode="none", padding=-1),
        one("one row", table(1, 5), ids(1, 6, 3)),
        one("one column", table(9, 1), ids(9, 6, 3)),
        one("transposed ids", table(9, 8), ids(9, 6, 3).t()),
        one("strided ids", table(9, 8), ids(9, 12, 3)[::2], mode="mean"),
        one("empty batch", table(9, 8), ids(9, 0, 3)),
        one("empty gather", table(9, 8), ids(9, 0), mode="none"),
        one("no bags", table(9, 8), ids(9, 0), offsets=starts[:0]),
        one("all bags empty", table(9, 8), ids(9, 0), offsets=starts[:2] * 0, mode="max"),
        one("table is a transpose", table(6, 9).t(), ids(9, 4, 2)),
        one("table is a column slice", table(9, 12)[:, 2:9], ids(9, 4, 2), mode="max"),
        one("ties", table(9, 20).sign(), ids(9, 7, 4), mode="max"),
        one("weights 2-d", table(9, 24), ids(9, 4, 3), weights=wide.reshape(4, 3)),
        one("weights strided", table(9, 24), ids(9, 6), offsets=starts[:4], weights=wide[::2]),
    ]  # fmt: skip
    for mode in ("sum", "mean", "max"):
        found += [
            one(f"ragged {mode}", table(13, 17), ids(13, 12), offsets=starts, mode=mode),
            one(f"ends {mode}", table(3, 33), ids(3, 12), offsets=ends, mode=mode, last=True),
            one(f"padding {mode}", table(3, 19), ids(3, 12), offsets=starts, mode=mode, padding=1),
            one(f"fixed {mode}", table(40, 48), ids(40, 5, 4, dtype=i32), mode=mode, padding=-2),
            one(f"repeats {mode}", table(2, 128), ids(2, 3, 20), mode=mode),
        ]  # fmt: skip
    found += [
        one("total", table(6, 20), ids(6, 5, 4), mode="total", padding=2),
        one("total ragged", table(3, 33), ids(3, 12), offsets=starts, mode="total", padding=-1),
        one("total weights", table(4, 8), ids(4, 4, 3), weights=wide.reshape(4, 3),
            mode="total", padding=0),
    ]  # fmt: skip
    found.append(
        one("all flags", table(5, 17), ids(5, 12), offsets=starts, weights=wide, padding=2)
    )  # fmt: skip
    weights = [table(30, 16), table(7, 16), table(50, 9)]
    lookups = [ids(30, 4), ids(7, 4, 3), ids(50, 12), ids(30, 4, 2), ids(7, 12, dtype=torch.int32)]
    found.append(
        Sample(
            "mixed and shared",
            (
                weights,
                lookups,
                [None, None, starts, None, ends],
                [None, None, wide, None, None],
                [0, 1, 2, 0, 1],
                ["none", "mean", "sum", "max", "sum"],
                [None, 0, None, None, -1],
                [False, False, False, False, True],
                [False] * 5,
            ),
        )
    )
    found.append(
        Sample(
            "many one-hot",
            (
                [table(20 + t, 8) for t in range(9)],
                [ids(20 + t, 33, 1) for t in range(9)],
                [None] * 9,
                [None] * 9,
                list(range(9)),
                ["sum"] * 9,
                [None] * 9,
                [False] * 9,
                [t % 2 == 1 for t in range(9)],
            ),
        )
    )
    return found
