"""Shapes that torch broadcasts or refuses: no kernel reads them as if they were whole."""

from __future__ import annotations

from typing import Any

import emulated_gpu
import pytest
import torch
from torch import Tensor

from recast.errors import InputError
from recast.runtime import OPS

RANK, WIDTH = 5, 20


def some(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def mixture(bias: Tensor, inner: Tensor | None = None, outer: Tensor | None = None) -> list[Any]:
    x0, x, v, core = some(9, WIDTH), some(9, WIDTH), some(3, RANK, WIDTH), some(3, RANK, RANK)
    u, gate = some(3, WIDTH, RANK), some(3, WIDTH)
    return [x0, x, v, core, u, gate, bias, inner, outer, "relu", 0.0, True]


BROADCAST = {
    "one scale": ("scaled_einsum", [some(7, 1), some(3, 8, 5), some(7, 5), "bi,eij,bj->bei"]),
    "one vector": ("contraction", [some(9, 1, 4), some(3, 5, 4), "acd,bcd->abc"]),
    "vectors of one number": ("contraction", [some(9, 5, 1), some(3, 5, 4), "acd,bcd->abc"]),
    "a bias for all gates": ("cross_mixture", mixture(some(1))),
    "one number inside": ("cross_mixture", mixture(some(3), some(1))),
    "one number outside": ("cross_mixture", mixture(some(3), None, some(1))),
}  # fmt: skip


@pytest.mark.parametrize("name", BROADCAST)
def test_broadcast_as_by_torch(name: str) -> None:
    op, args = BROADCAST[name]
    wanted = OPS[op].reference(*args)
    with emulated_gpu.serve():
        got = OPS[op].target(*args)
    torch.testing.assert_close(got, wanted)


def test_the_shape_that_a_broadcast_has() -> None:
    op, args = BROADCAST["one vector"]
    assert OPS[op].fake(*args).shape == OPS[op].reference(*args).shape


@pytest.mark.parametrize("shape", [(1, 2), (7, 1), (2,)])
def test_weights_of_pairs(shape: tuple[int, ...]) -> None:
    places = torch.tensor([0, 1]), torch.tensor([1, 2])
    with emulated_gpu.serve(), pytest.raises(InputError, match="weight has shape"):
        OPS["pair_products"].target([some(7, 4)] * 3, [], *places, some(*shape), "none")
