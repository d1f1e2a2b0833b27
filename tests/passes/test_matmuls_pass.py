"""contract-matmuls: products with a stack of matrices, without copying it for each sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from passkit import fired, journal, same
from torch import Tensor, nn

FIELDS, DIM, OUT = 5, 4, 3


def batch(rows: int, seed: int) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, FIELDS, DIM, generator=g, dtype=torch.float64),)


BATCHES = [batch(6, 0), batch(9, 1)]


class Model(nn.Module):
    def __init__(self, product: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(5)
        self.product = product
        self.scale = nn.Parameter(torch.ones(DIM))
        self.stack = nn.Parameter(torch.randn(FIELDS, DIM, OUT, generator=g))
        self.one = nn.Parameter(torch.randn(1, DIM, OUT, generator=g))
        self.experts = nn.Parameter(torch.randn(2, DIM, OUT, generator=g))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self, x * self.scale)


STACKED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "rows": lambda m, x: torch.matmul(x.unsqueeze(2), m.stack).squeeze(2),
    "an operator": lambda m, x: (x.unsqueeze(-2) @ m.stack).squeeze(-2) * x[:, :, :OUT],
    "columns": lambda m, x: torch.matmul(m.stack.transpose(1, 2), x.unsqueeze(-1)).squeeze(-1),
    "computed": lambda m, x: torch.matmul(x.unsqueeze(2), (m.stack * 2).tanh()).sum(1),
    "shaped behind": lambda m, x: torch.matmul(x.unsqueeze(2), m.stack).view(-1, FIELDS * OUT),
    "several rows": lambda m, x: torch.matmul(torch.stack([x, x * 2, -x], 2), m.stack),
    "one matrix": lambda m, x: torch.matmul(x.unsqueeze(2), m.one),
    "experts": lambda m, x: torch.matmul(x.unsqueeze(1), m.experts),
    "method": lambda m, x: x.unsqueeze(2).matmul(m.stack).relu_(),
}


@pytest.mark.parametrize("form", STACKED)
def test_the_stack_is_not_copied(form: str) -> None:
    fast = same(Model(STACKED[form]), BATCHES)
    assert fired(fast)["contract-matmuls"] == 1, journal(fast).missed
    assert any(node.target is torch.einsum for node in fast.graph.nodes)


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps the strides of the operands of products by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.strides: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bmm.default and args[0].shape[0] == len(BATCHES[0][0]):
            self.strides += [t.stride() for t in args[:2]]
        return func(*args, **(kwargs or {}))


def test_what_reads_the_product_finds_it_in_the_order_of_a_product() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        state = torch.matmul(m.stack.transpose(1, 2), x.unsqueeze(-1)).squeeze(-1)
        return torch.bmm(x, x.transpose(1, 2)) @ state

    fast = same(Model(forward), BATCHES)
    assert fired(fast)["contract-matmuls"] == 1
    with Products() as seen, torch.no_grad():
        fast(*BATCHES[0])
    assert len(seen.strides) == 4
    assert all(1 in stride[1:] for stride in seen.strides)  # else each sample is copied


OTHERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a matrix": lambda m, x: torch.matmul(x.unsqueeze(2), m.stack[0]),
    "a stack for each sample": lambda m, x: torch.matmul(x.unsqueeze(2), x[:, :DIM].unsqueeze(1)),
    "of three dimensions": lambda m, x: torch.matmul(x, x.transpose(1, 2)),
    "many vectors": lambda m, x: torch.matmul(torch.stack([x] * 8, 2), m.stack),
    "many columns": lambda m, x: torch.matmul(
        m.stack.transpose(1, 2), torch.stack([x] * 8, -1)
    ).sum(-1),
    "a vector": lambda m, x: torch.matmul(x.unsqueeze(2), m.scale),
}


@pytest.mark.parametrize("form", OTHERS)
def test_others_are_left_alone(form: str) -> None:
    fast = same(Model(OTHERS[form]), BATCHES, steps=False)
    assert not fired(fast)["contract-matmuls"]
