"""The model of the comparison (examples/dlrm.py), its tables, and its batches."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from dlrm import DLRM

from peers.cells import Cell

DENSE, HIDDEN = 13, 512
SKEW = 1.05  # exponent of the power law that zipf ids follow
# Sums of squares begin here, as with ``initial_accumulator_value``: from zero, the first step would
# follow the sign of each gradient alone, and the sign of a tiny one is chance.
START = 1e-8


class Tables:
    """Weights and optimizer states of all tables: one flat buffer each, trained by all variants.

    weights: parameters (rows, dim), views of ``flat``; sums: Adagrad's states, views of
    ``flat_sums``; row_sums: row-wise Adagrad's states (rows,), views of ``flat_row_sums``; rates:
    GB/s of reading random rows, by (data, threads), once they are measured.
    """

    def __init__(self, rows: Sequence[int], dim: int) -> None:
        self.rows, self.dim = list(rows), dim
        self.rates: dict[tuple[str, int], float] = {}
        total = sum(rows)
        generator = torch.Generator().manual_seed(1)
        self.flat = torch.empty(total, dim)
        self.flat_sums = torch.full((total, dim), START)
        self.flat_row_sums = torch.full((total,), START)
        for part, r in zip(self.flat.split(self.rows), rows, strict=True):
            part.uniform_(-(r**-0.5), r**-0.5, generator=generator)
        # ``data``: each parameter counts its own changes, as separate tensors do.
        self.weights = [nn.Parameter(w.data) for w in self.flat.split(self.rows)]
        self.sums = [s.data for s in self.flat_sums.split(self.rows)]
        self.row_sums = [s.data for s in self.flat_row_sums.split(self.rows)]

    def saved(self, ids: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """A copy of some rows of each table and their states; see :meth:`restore`."""
        with torch.no_grad():
            return [
                (w[i].clone(), s[i], r[i])
                for w, s, r, i in zip(self.weights, self.sums, self.row_sums, ids, strict=True)
            ]

    def restore(self, ids: Sequence[Tensor], rows: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        with torch.no_grad():
            for k, i in enumerate(ids):
                self.weights[k][i], self.sums[k][i], self.row_sums[k][i] = rows[k]


class Batch(NamedTuple):
    """dense: (B, 13); ids: (B, ids per bag) int64 for each table; label: (B,)."""

    dense: Tensor
    ids: list[Tensor]
    label: Tensor


def batch(cell: Cell, rows: Sequence[int], seed: int, size: int | None = None) -> Batch:
    """A random batch of ``size`` rows, by default the cell's."""
    size = cell.batch if size is None else size
    g = torch.Generator().manual_seed(seed)
    draw = _zipf if cell.data == "zipf" else _uniform
    return Batch(
        torch.randn(size, DENSE, generator=g),
        [draw(r, (size, cell.ids), g) for r in rows],
        torch.randint(2, (size,), generator=g).float(),
    )


def _uniform(rows: int, shape: tuple[int, int], g: torch.Generator) -> Tensor:
    return torch.randint(rows, shape, generator=g)


def _zipf(rows: int, shape: tuple[int, int], g: torch.Generator) -> Tensor:
    """A bounded power law by its inverse; frequent ids are scattered over the table."""
    u = torch.rand(shape, generator=g, dtype=torch.float64)
    power = 1 - SKEW
    rank = (1 + u * ((rows + 1) ** power - 1)) ** (1 / power) - 1
    return (rank.long().clamp_(0, rows - 1) * 2654435761) % rows


def plain(tables: Tables, sparse: bool) -> DLRM:
    """A DLRM on the shared tables; its dense part is the same each time."""
    torch.manual_seed(0)
    model = DLRM([1] * len(tables.rows), tables.dim, DENSE, HIDDEN, sparse=sparse)
    for bag, weight in zip(model.emb, tables.weights, strict=True):
        bag.weight, bag.num_embeddings = weight, len(weight)
    return model


class DensePart(DLRM):
    """A DLRM whose pooled rows come from elsewhere, (B, tables * dim)."""

    def __init__(self, tables: Tables) -> None:
        torch.manual_seed(0)
        super().__init__([1] * len(tables.rows), tables.dim, DENSE, HIDDEN)
        self.emb = nn.ModuleList()

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        x = self.bot(dense)
        t = torch.cat([x, pooled], dim=1).view(x.shape[0], -1, x.shape[1])
        z = torch.bmm(t, t.transpose(1, 2))
        return self.top(torch.cat([x, z[:, self.li, self.lj]], dim=1)).squeeze(1)
