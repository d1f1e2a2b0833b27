"""The plain DLRM becomes four calls, and passes/README.md is true."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import pytest
import torch
from passkit import calls, fired, journal, optimized, same
from seen_ops import SeenOps
from torch import Tensor, nn

import recast.passes

TABLES, ROWS, DIM, DENSE = 26, 30, 4, 5


class Dlrm(nn.Module):
    """Bags of one ModuleList, cat and view, bmm and a triangle, two MLPs."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.emb = nn.ModuleList(
            nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=sparse) for _ in range(TABLES)
        )
        self.bot = nn.Sequential(nn.Linear(DENSE, 8), nn.ReLU(), nn.Linear(8, DIM), nn.ReLU())
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(
            nn.Linear(DIM + pairs, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid()
        )

    def forward(self, dense: Tensor, offsets: list[Tensor], indices: list[Tensor]) -> Tensor:
        x = self.bot(dense)
        bags = [e(indices[k], offsets[k]) for k, e in enumerate(self.emb)]
        t = torch.cat([x, *bags], dim=1).view((x.shape[0], -1, DIM))
        z = torch.bmm(t, t.transpose(1, 2))
        li = torch.tensor([i for i in range(TABLES + 1) for j in range(i)])
        lj = torch.tensor([j for i in range(TABLES + 1) for j in range(i)])
        return self.top(torch.cat([x, z[:, li, lj]], dim=1))


def batch(rows: int, seed: int) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(seed)
    offsets, indices = [], []
    for _ in range(TABLES):
        counts = torch.randint(0, 4, (rows,), generator=g)
        ends = torch.cumsum(counts, 0)
        offsets.append(torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1]]))
        indices.append(torch.randint(0, ROWS, (int(ends[-1]),), generator=g))
    return torch.randn(rows, DENSE, generator=g, dtype=torch.float64), offsets, indices


@pytest.mark.parametrize("sparse", [False, True])
def test_the_plain_dlrm_becomes_four_calls(sparse: bool) -> None:
    torch.manual_seed(1)
    batches = [batch(6, 0), batch(9, 1)]
    fast = same(Dlrm(sparse), batches)
    assert fired(fast) == {"group-embeddings": 1, "fuse-dot-interaction": 1, "fuse-mlp": 2}
    ours = [len(calls(fast, name)) for name in ("embedding_bags", "dot_interaction", "mlp")]
    assert ours == [1, 1, 2]
    assert journal(fast).lookups_found == journal(fast).lookups_fused == TABLES
    (interaction,) = calls(fast, "dot_interaction")
    assert len(interaction.args[0]) == TABLES + 1 and interaction.args[1] is not None
    with torch.no_grad(), SeenOps() as seen:
        fast(*batches[0])
    assert not seen.of_torch("embedding")
    left = [
        n for n in fast.graph.nodes if n.op == "call_module" or n.target in (torch.bmm, torch.cat)
    ]
    assert not left


def test_the_sentences_of_the_report() -> None:
    said = {
        e.rule: (e.what, e.saves)
        for e in journal(optimized(Dlrm(False).double(), [batch(6, 0), batch(9, 1)])).fired
    }
    assert said["group-embeddings"] == (
        "26 lookups of 26 tables in one call", "25 launches, 25 kB of dense gradient a step",
    )  # fmt: skip
    assert said["fuse-dot-interaction"][0] == (
        "pairwise dot products of 27 vectors, with dense in front, 355 columns out in one call"
    )


def test_every_pass_is_registered_and_documents_its_equation() -> None:
    for p in recast.passes.PIPELINE:
        assert isinstance(p, recast.passes.REGISTRY[p.name])
        assert "=>" in (type(p).__doc__ or "").splitlines()[0]


def test_the_readme_is_true() -> None:
    path = Path(__file__).parents[2] / "passes" / "README.md"
    failed, tried = doctest.testfile(str(path), module_relative=False)
    assert tried > 10 and not failed
