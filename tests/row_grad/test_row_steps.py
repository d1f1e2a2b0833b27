"""Twenty steps on skewed, duplicate ids: against float64, and bit for bit between thread counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from row_lookup import ours
from row_optimizers import FUSED, Kind
from torch import Tensor
from torch.nn import Parameter

from recast.runtime import device
from recast.runtime.rows.optimizer import attach
from recast.runtime.tolerances import excess

ISAS = [isa for isa in device.ISAS if device.why_not(isa)() is None]

ROWS, STEPS = 3000, 20
# (ids a step, width): the first is sorted by one thread, the second by all.
SMALL, BIG = (3000, 19), (70_000, 5)
NAMES = ["sgd", "adagrad", "adagrad-decay", "row-wise", "sparse-adam", "lazy-adam-decay"]
NAMES += ["lazy-adamw"]


def batches(n: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(n)
    for _ in range(STEPS):
        yield (torch.rand(n, generator=generator) ** 6 * ROWS).long()


def table(width: int) -> Tensor:
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(width))


def trained(kind: Kind, weight: Tensor, n: int, *, fast: bool) -> list[Tensor]:
    """The table and its optimizer's state after the steps."""
    weight = Parameter(weight.clone())
    sparse = kind.sparse or kind.lazy
    optimizer = kind.make([weight]) if fast else (kind.reference or kind.make)([weight])
    if fast:
        attach(optimizer, lazy=kind.lazy)
    for turn, ids in enumerate(batches(n)):
        optimizer.zero_grad()
        out = ours(weight, ids, sparse) if fast else F.embedding(ids, weight, sparse=sparse)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(turn))
        out.backward(upstream.to(out.dtype) / n + 1e-4 * out.detach())
        optimizer.step()
    states = [optimizer.state[weight].get(name) for name in ("sum", "exp_avg", "exp_avg_sq")]
    return [weight.detach(), *(state for state in states if state is not None)]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kernel", ["kernel"], indirect=True)
@pytest.mark.parametrize(("name", "size"), [*((n, SMALL) for n in NAMES), ("adagrad", BIG)])
def test_twenty_steps(name: str, size: tuple[int, int]) -> None:
    kind, (n, width) = FUSED[name], size
    start = table(width)
    found = []
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        found.append(trained(kind, start, n, fast=True))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    usual = trained(kind, start, n, fast=False)
    truth = trained(kind, start.double(), n, fast=False)
    for a, b, c in zip(found[0], usual, truth, strict=True):
        assert excess(a, b, c) <= 1


@pytest.mark.parametrize("kernel", ["kernel"], indirect=True)
@pytest.mark.parametrize("name", NAMES)
def test_instruction_sets_give_the_same_bits(name: str) -> None:
    found = []
    for isa in ISAS:
        with device.use(isa):
            found.append(trained(FUSED[name], table(83), 200, fast=True))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
