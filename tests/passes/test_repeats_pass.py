"""contract-repeated: products with copies of rows, in every way to copy them; what is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from passkit import fired, journal, same
from torch import Tensor, nn

ROWS, DIM, COPIES = 5, 3, 4


def batch(rows: int, seed: int) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, ROWS, DIM, generator=g, dtype=torch.float64),)


BATCHES = [batch(4, 0), batch(7, 1)]
Copy = Callable[[Tensor], Tensor]


class Model(nn.Module):
    """Routing (Li et al. 2019): ``weights`` sum the rows to capsules, which weigh them anew."""

    def __init__(self, copy: Copy, products: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.copy, self.products = copy, products
        self.linear = nn.Linear(DIM, DIM, bias=False)
        self.weights = nn.Parameter(torch.randn(COPIES, 1, ROWS))

    def forward(self, x: Tensor) -> Tensor:
        return self.products(self, self.copy(self.linear(x)))


def _routing(m: Any, rows: Tensor) -> Tensor:
    still = rows.detach()
    weights = m.weights.expand(rows.shape[0], -1, -1, -1).softmax(-1)
    capsules = torch.matmul(weights, still)
    weights = weights + torch.matmul(still, capsules.transpose(2, 3).contiguous()).transpose(2, 3)
    return torch.matmul(weights.softmax(-1), rows).flatten(1)


def _tiled(x: Tensor) -> Tensor:
    wide = x.repeat(1, 1, COPIES)
    turned = torch.reshape(wide, (-1, ROWS, COPIES, DIM)).transpose(1, 2).contiguous()
    return torch.reshape(turned, (-1, COPIES, ROWS, DIM))


COPYING: dict[str, Copy] = {
    "tiled and turned, as in MIND": _tiled,
    "repeated": lambda x: x.unsqueeze(1).repeat(1, COPIES, 1, 1),
    "expanded": lambda x: x.unsqueeze(1).expand(-1, COPIES, -1, -1),
    "in front of the rows": lambda x: x.repeat(1, COPIES, 1).view(-1, COPIES, ROWS, DIM),
}


@pytest.mark.parametrize("form", COPYING)
def test_every_way_to_copy(form: str) -> None:
    fast = same(Model(COPYING[form], _routing), BATCHES)
    assert fired(fast)["contract-repeated"] >= 3, journal(fast).missed
    sizes = [n.meta["recast"].spec.shape for n in fast.graph.nodes if n.name.startswith("matmul")]
    assert sizes and all(len(size) == 3 for size in sizes)
    assert not [n for n in fast.graph.nodes if n.target == "repeat"]


def _several(m: Any, rows: Tensor) -> Tensor:
    weights = m.weights.repeat(1, 2, 1) * torch.ones(rows.shape[0], 1, 1, 1).to(rows)
    return torch.matmul(weights, rows).flatten(1)


def test_several_weights_a_copy() -> None:
    fast = same(Model(_tiled, _several), BATCHES)
    assert fired(fast)["contract-repeated"] >= 1, journal(fast).missed


def _stale(m: Any, x: Tensor) -> Tensor:
    rows = COPYING["repeated"](x)
    x.add_(1.0)
    return _several(m, rows) + x.sum()


def _written(m: Any, x: Tensor) -> Tensor:
    rows = COPYING["expanded"](x)  # torch's product keeps a copy of them for backward
    out = _several(m, rows)
    x.mul_(3.0)
    return out + x.sum()


def test_the_batch_size_by_a_call() -> None:
    def sized(m: Any, rows: Tensor) -> Tensor:
        return torch.matmul(m.weights.expand(rows.size(0), -1, -1, -1).softmax(-1), rows).flatten(1)

    fast = same(Model(_tiled, sized), BATCHES)
    assert not [n for n in fast.graph.nodes if n.target == "repeat"]


OTHERS: dict[str, tuple[Copy, Callable[[Any, Tensor], Tensor]]] = {
    "copies among the numbers": (
        lambda x: x.repeat(1, 1, COPIES).view(-1, ROWS, DIM, COPIES).permute(0, 3, 1, 2), _several,
    ),
    "copies of the batch": (
        lambda x: x.repeat(COPIES, 1, 1).view(COPIES, -1, ROWS, DIM).transpose(0, 1), _several,
    ),
    "many columns": (
        COPYING["repeated"],
        lambda m, rows: torch.matmul(rows, rows.transpose(2, 3) * m.weights).sum((1, 2)),
    ),
    "weights of the copies alone": (
        COPYING["repeated"], lambda m, rows: torch.matmul(m.weights, rows).flatten(1),
    ),
    "copies made before their source is written to": (lambda x: x, lambda m, x: _stale(m, x)),
    "written to after the product": (lambda x: x, lambda m, x: _written(m, x)),
    "of two dimensions": (lambda x: x.repeat(1, 1, COPIES), lambda m, rows: rows @ rows.mT),
}  # fmt: skip


@pytest.mark.parametrize("form", OTHERS)
def test_what_is_no_such_product(form: str) -> None:
    fast = same(Model(*OTHERS[form]), BATCHES, steps=False)
    done = [entry.what for entry in journal(fast).fired if entry.rule == "contract-repeated"]
    assert not [what for what in done if "a product" in what]
