"""MMoE: experts shared by two tasks, a gate for each (Ma et al., 2018).

    task k:  sigmoid-logit = tower_k(Σ_e softmax(gate_k(x))_e expert_e(x))

recast diff examples/models/mmoe.py:model
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from criteo import ids, lookup, loss, mlp, tables
from torch import Tensor, nn

# Rows of the 29 categories of the census-income data.
ROWS = (
    9, 52, 47, 17, 3, 24, 15, 5, 10, 2, 3, 6, 8, 6, 6, 51, 38, 8, 10, 9, 10, 3, 4, 5, 43, 43, 43, 5,
    3,
)  # fmt: skip
DENSE = 11


class MMoE(nn.Module):
    def __init__(self, rows: Sequence[int], dim: int, experts: int, hidden: Sequence[int]):
        super().__init__()
        self.emb, width = tables(rows, dim), len(rows) * dim + DENSE
        self.experts = nn.ModuleList(mlp([width, *hidden], last=True) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(width, experts, bias=False) for _ in range(2))
        self.towers = nn.ModuleList(nn.Linear(hidden[-1], 1, bias=False) for _ in range(2))

    def forward(self, dense: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        e = torch.cat([lookup(self.emb, x).flatten(1), dense], 1)
        found = torch.stack([expert(e) for expert in self.experts], 1)
        income, marital = (
            tower((torch.softmax(gate(e), 1).unsqueeze(2) * found).sum(1)).squeeze(1)
            for gate, tower in zip(self.gates, self.towers, strict=True)
        )
        return income, marital


def both(tasks: tuple[Tensor, Tensor]) -> Tensor:
    return loss(tasks[0]) + loss(tasks[1])


def model(
    batch: int = 128, full: bool = False
) -> tuple[nn.Module, tuple[Tensor, Tensor], Callable[[tuple[Tensor, Tensor]], Tensor]]:
    """A model, one batch and a loss; ``full``: census-income, three experts of 256 and 128."""
    torch.manual_seed(0)
    net = MMoE(ROWS if full else ROWS[:8], 4, 3, [256, 128] if full else [32, 16])
    sizes = ROWS if full else ROWS[:8]
    return net, (torch.rand(batch, DENSE), ids(sizes, batch)), both
