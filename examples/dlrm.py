"""DLRM in plain PyTorch: bags, dot interaction, two MLPs. Nothing here knows of a compiler.

recast diff examples/dlrm.py:model --arg tables=8 --arg sparse=True
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(sizes: list[int], last: nn.Module) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1], last)


class DLRM(nn.Module):
    def __init__(self, rows: list[int], dim: int, dense: int, hidden: int, sparse: bool = False):
        super().__init__()
        self.emb = nn.ModuleList(nn.EmbeddingBag(r, dim, mode="sum", sparse=sparse) for r in rows)
        for e in self.emb:
            nn.init.uniform_(e.weight, -(e.num_embeddings**-0.5), e.num_embeddings**-0.5)
        f = len(rows) + 1
        self.bot = mlp([dense, hidden, hidden // 2, dim], nn.ReLU())
        self.top = mlp([dim + f * (f - 1) // 2, hidden, hidden // 2, 1], nn.Sigmoid())
        li, lj = torch.tril_indices(f, f, offset=-1)
        self.register_buffer("li", li, persistent=False)
        self.register_buffer("lj", lj, persistent=False)

    def forward(self, dense: Tensor, offsets: list[Tensor], indices: list[Tensor]) -> Tensor:
        x = self.bot(dense)
        bags = [emb(indices[k], offsets[k]) for k, emb in enumerate(self.emb)]
        t = torch.cat([x, *bags], dim=1).view(x.shape[0], -1, x.shape[1])
        z = torch.bmm(t, t.transpose(1, 2))
        return self.top(torch.cat([x, z[:, self.li, self.lj]], dim=1)).squeeze(1)


def loss(click: Tensor) -> Tensor:
    label = torch.arange(len(click), device=click.device) % 4 == 0  # as good as any other
    return F.binary_cross_entropy(click, label.to(click.dtype))


def model(
    tables: int = 26, rows: int = 1000, dim: int = 16, batch: int = 128, sparse: bool = False
) -> tuple[DLRM, tuple, Callable[[Tensor], Tensor]]:
    """A small model, one batch of bags of 0 to 4 ids, and a loss."""
    g = torch.Generator().manual_seed(0)
    counts = [torch.randint(0, 5, (batch,), generator=g) for _ in range(tables)]
    offsets = [c.cumsum(0) - c for c in counts]
    indices = [torch.randint(rows, (int(c.sum()),), generator=g) for c in counts]
    torch.manual_seed(0)
    net = DLRM([rows] * tables, dim, dense=13, hidden=64, sparse=sparse)
    return net, (torch.randn(batch, 13, generator=g), offsets, indices), loss
