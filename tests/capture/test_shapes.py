"""Shapes of which some sizes depend on the batch, beside real ones and made anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast


class Noise(nn.Module):
    """Multiplies rows by ones of a shape that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.form = nn.Embedding(20, 8), ""

    def forward(self, ids: Tensor) -> tuple[Tensor, Any]:
        rows = self.table(ids)
        shape = self.forms(rows)[self.form]()
        return rows * torch.ones(shape).sum(), shape

    def forms(self, x: Tensor) -> dict[str, Callable[[], Any]]:
        def grown() -> Any:
            shape = x.shape[1:2]
            shape += (x.size(0), 8)
            return shape

        return {
            "real sizes first": lambda: x.shape[1:] + x.shape[:1],
            "a real one and a tuple": lambda: x.shape[2:] + (x.size(0),),  # noqa: RUF005
            "a tuple and a shape": lambda: (1,) + x.shape[:1],  # noqa: RUF005
            "grown": grown,
            "torch.Size": lambda: torch.Size([x.size(0), 1, 1]),
            "a Size and a shape": lambda: torch.Size([1]) + x.shape[:1],
            "a Size of nothing": lambda: torch.Size() + x.shape,
            "broadcast_shapes": lambda: torch.broadcast_shapes(x.shape, (1, 1, 8), (3, 1)),
            "broadcast with a size": lambda: torch.broadcast_shapes(x.shape[:1], (1,)),
            "asked for its kind": lambda: (
                torch.Size((x.size(0),)) if isinstance(x.shape[1:], torch.Size) else (1,)
            ),
        }


FORMS = list(Noise().forms(torch.ones(1, 3, 8)))


@pytest.mark.parametrize("form", FORMS)
def test_a_shape_is_made_of_sizes_of_the_batch(form: str) -> None:
    model = Noise()
    model.form = form
    fast = recast.optimize(model, example=torch.arange(18).view(6, 3))
    assert fast.report.captured == "whole", str(fast.report)
    for rows in (6, 4, 1):
        given = torch.arange(3 * rows).view(rows, 3) % 20
        (a, shape), (b, wanted) = fast(given), model(given)
        assert type(shape) is type(wanted) and shape == wanted
        torch.testing.assert_close(a, b)
