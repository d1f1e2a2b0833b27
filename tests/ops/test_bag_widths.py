"""Bags of rows of every width, from tables within and beyond the caches, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from recast.runtime import device

BAGS = torch.ops.recast.embedding_bags.default
# Less than a register, as much, a little more, of one to four and of more registers.
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 10, 15, 16, 17, 24, 33, 40, 48, 50, 64, 65, 100, 130, 300)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
COUNTS = torch.tensor([3, 0, 1, 6, 2, 2, 5, 0, 4, 1, 7, 3, 1])  # ids of the bags: odd, many unequal


@pytest.fixture(params=device.ISAS)
def isa(request: pytest.FixtureRequest) -> Any:
    why = device.why_not(request.param)()
    if why is not None:
        pytest.skip(why)
    with device.use(request.param):
        yield request.param


def lookup(weight: Tensor, ids: Tensor, mode: str, **given: Any) -> Tensor:
    starts, weights = given.get("offsets"), given.get("weights")
    flags = [0], [mode], [None], [False], [False]
    with torch.no_grad():
        (found,) = BAGS([weight], [ids], [starts], [weights], *flags)
    return found


def table(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    g = torch.Generator().manual_seed(width)
    return torch.randn(rows, width, generator=g).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("rows", [5, 9000])  # a large one is prefetched
def test_ragged_bags(isa: str, rows: int, dtype: torch.dtype) -> None:
    for width in WIDTHS:
        weight = table(rows, width, dtype)
        g = torch.Generator().manual_seed(rows)
        ids = torch.randint(rows, (int(COUNTS.sum()),), generator=g)
        starts = COUNTS.cumsum(0) - COUNTS
        weights = torch.randn(len(ids), generator=g).to(dtype)
        for mode in ("sum", "mean", "max", "weighted"):
            own = weights if mode == "weighted" else None
            mode = "sum" if own is not None else mode
            found = lookup(weight, ids, mode, offsets=starts, weights=own)
            wanted = F.embedding_bag(
                ids, weight.double(), starts, mode=mode,
                per_sample_weights=None if own is None else own.double(),
            )  # fmt: skip
            what = f"{mode} of {width}"
            torch.testing.assert_close(found.double(), wanted, **_limits(dtype), msg=what)


def _limits(dtype: torch.dtype) -> dict[str, float]:
    """Of a sum of seven in float32, rounded to ``dtype`` once."""
    size = torch.finfo(dtype).eps
    return {"rtol": 2 * size, "atol": 8 * torch.finfo(torch.float32).eps * 8 + size * 1e-3}


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_one_id_a_bag_is_its_row(isa: str, kind: torch.dtype) -> None:
    """Also of ids that lie apart, and bit for bit."""
    for width in WIDTHS:
        for rows in (5, 9000):
            weight = table(rows, width, torch.float32)
            columns = torch.randint(rows, (37, 3), dtype=kind)
            ids = columns[:, 1]
            assert torch.equal(lookup(weight, ids, "none"), weight[ids.long()])
            assert torch.equal(lookup(weight, ids.unsqueeze(1), "sum"), weight[ids.long()])


def test_what_stands_beside_a_bag_does_not_change_it(isa: str) -> None:
    """Bags are summed side by side, as many as there are: each has the bits it has alone."""
    for width in WIDTHS:
        weight = table(50, width, torch.float32)
        ids = torch.randint(50, (int(COUNTS.sum()),))
        starts = COUNTS.cumsum(0) - COUNTS
        together = lookup(weight, ids, "sum", offsets=starts)
        for bag, (start, count) in enumerate(zip(starts, COUNTS, strict=True)):
            alone = lookup(weight, ids[start : start + count], "sum", offsets=starts[:1])
            assert torch.equal(alone[0], together[bag])
