"""Dot interactions of several samples at once: bit for bit those of one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recast.runtime import device, tolerances

DOT = torch.ops.recast.dot_interaction.default
# Batch, features, dim: whole groups of eight and what is left; blocks of pairs and of columns.
SHAPES = [(8, 1, 5), (9, 2, 1), (16, 3, 8), (19, 4, 13), (40, 7, 16), (23, 27, 41), (8, 18, 130)]


@pytest.fixture(params=device.ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    why = device.why_not(request.param)()
    if why is not None:
        pytest.skip(why)
    return str(request.param)


def pairs(kind: str, n: int) -> tuple[Tensor, Tensor]:
    if kind == "some":
        g = torch.Generator().manual_seed(n)
        li, lj = torch.randint(n, (2, 2 * n + 1), generator=g)
        return li, lj
    of = {"lower": (torch.tril_indices, -1), "self": (torch.tril_indices, 0)}
    indices, diagonal = of.get(kind, (torch.triu_indices, 1))
    li, lj = indices(n, n, diagonal)
    return li, lj


@pytest.mark.parametrize("kind", ["lower", "self", "upper", "some"])
@pytest.mark.parametrize(("batch", "count", "dim"), SHAPES)
def test_against_float64_and_one_by_one(
    batch: int, count: int, dim: int, kind: str, isa: str
) -> None:
    g = torch.Generator().manual_seed(batch)
    x, li_lj = torch.randn(batch, count, dim, generator=g), pairs(kind, count)
    dense = torch.randn(batch, 3, generator=g)
    # Some features by themselves, and one block whose features lie far apart.
    features = [x[:, 0].clone(), *([x[:, 1:].transpose(0, 1).contiguous().transpose(0, 1)]
                                   if count > 1 else [])]  # fmt: skip
    with device.use(isa):
        ours = DOT(features, dense, *li_lj, 2)
        single = [DOT([f[b : b + 1] for f in features], dense[b : b + 1], *li_lj, 2)
                  for b in range(batch)]  # fmt: skip
    with device.use("torch"):
        plain = DOT(features, dense, *li_lj, 2)
        truth = DOT([f.double() for f in features], dense.double(), *li_lj, 2)
    assert torch.equal(ours, torch.cat(single))
    assert tolerances.excess(ours, plain, truth, scale=dim**0.5) <= 1


def test_bits_do_not_depend_on_threads(isa: str) -> None:
    x, before = torch.randn(77, 12, 24), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            with device.use(isa):
                found.append(DOT([x], None, *pairs("lower", 12), 0))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_nan_stays_in_its_sample(isa: str) -> None:
    x = torch.randn(11, 5, 9)
    x[3, 2, 4], x[9, 0, 0] = float("nan"), float("inf")
    with device.use(isa):
        ours = DOT([x], None, *pairs("lower", 5), 0)
    with device.use("torch"):
        plain = DOT([x], None, *pairs("lower", 5), 0)
    assert torch.equal(ours.isfinite(), plain.isfinite())
