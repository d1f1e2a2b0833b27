"""DLRM as MLPerf trains it: one id a field, dot interaction (Naumov et al., 2019).

    recast diff examples/models/mlperf_dlrm.py:model

The form with bags of several ids and its training on real data are in ``examples/dlrm.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from criteo import Subject, loss, mlp
from torch import Tensor, nn

# Rows of the tables of Criteo 1TB, at most 40 M each, as MLPerf cuts them.
ROWS = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208,
    11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip
BOTTOM, TOP = (512, 256, 128), (1024, 1024, 512, 256, 1)


class DLRM(nn.Module):
    def __init__(self, rows: Sequence[int], bottom: Sequence[int], top: Sequence[int]):
        super().__init__()
        dim, f = bottom[-1], len(rows) + 1
        self.emb = nn.ModuleList(nn.EmbeddingBag(n, dim, mode="sum") for n in rows)
        self.bottom = mlp([13, *bottom], last=True)
        self.top = mlp([dim + f * (f - 1) // 2, *top])
        i, j = torch.tril_indices(f, f, offset=-1)
        self.register_buffer("i", i, persistent=False)
        self.register_buffer("j", j, persistent=False)

    def forward(self, dense: Tensor, indices: list[Tensor], offsets: list[Tensor]) -> Tensor:
        x = self.bottom(dense)
        pooled = [emb(indices[k], offsets[k]) for k, emb in enumerate(self.emb)]
        t = torch.stack([x, *pooled], 1)
        dots = torch.bmm(t, t.transpose(1, 2))[:, self.i, self.j]
        return self.top(torch.cat([x, dots], 1)).squeeze(1)


def bags(rows: Sequence[int], batch: int, most: int = 1) -> tuple[Tensor, list, list]:
    """Numbers, ids and offsets: 1 to ``most`` ids in every bag."""
    g = torch.Generator().manual_seed(0)
    counts = [torch.randint(1, most + 1, (batch,), generator=g) for _ in rows]
    ids = [
        torch.randint(n, (int(c.sum()),), generator=g) for n, c in zip(rows, counts, strict=True)
    ]
    return torch.rand(batch, 13, generator=g), ids, [c.cumsum(0) - c for c in counts]


def model(batch: int = 128, full: bool = False) -> Subject:
    """A model, one batch and a loss; ``full``: 96 GB of tables, so on the meta device."""
    torch.manual_seed(0)
    if full:
        with torch.device("meta"):
            return DLRM(ROWS, BOTTOM, TOP), None, loss
    sizes = [min(n, 500) for n in ROWS[:8]]
    return DLRM(sizes, (32, 8), (64, 32, 1)), bags(sizes, batch), loss
