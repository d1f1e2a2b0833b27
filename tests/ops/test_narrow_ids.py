"""Ids and offsets of different widths get the wider one, as in torch, with the same gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from recast.errors import DtypeError
from recast.runtime.embedding.embedding_bags import embedding_bags

IDS, OFFSETS = torch.tensor([3, 1, 3, 7, 0]), torch.tensor([0, 2, 2, 4])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(
    ("ids", "offsets"),
    [
        (torch.int16, torch.int64),
        (torch.uint8, torch.int32),
        (torch.int8, torch.int64),
        (torch.int64, torch.int16),
        (torch.int32, torch.int64),
    ],
)
def test_the_wider_of_two(ids: torch.dtype, offsets: torch.dtype, mode: str) -> None:
    table = torch.randn(9, 4, requires_grad=True)
    twin = table.detach().clone().requires_grad_()
    given = IDS.to(ids), OFFSETS.to(offsets)
    (out,) = embedding_bags.target(
        [table], [given[0]], [given[1]], [None], [0], [mode], [None], [False], [False]
    )
    wanted = F.embedding_bag(given[0], twin, given[1], mode=mode)
    torch.testing.assert_close(out, wanted)
    upstream = torch.randn(4, 4)
    out.backward(upstream), wanted.backward(upstream)
    assert table.grad is not None and twin.grad is not None
    torch.testing.assert_close(table.grad + 0, twin.grad)
    assert given[0].dtype is ids and given[1].dtype is offsets


def test_what_torch_refuses_is_refused() -> None:
    table = torch.randn(9, 4)
    short = IDS.short(), OFFSETS.short()
    with pytest.raises(RuntimeError):
        F.embedding_bag(short[0], table, short[1])
    with pytest.raises(DtypeError, match="ids of lookup 0"):
        embedding_bags.target(
            [table], [short[0]], [short[1]], [None], [0], ["sum"], [None], [False], [False]
        )
