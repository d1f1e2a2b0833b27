"""Modules that return a sparse tensor, as the dropout of graph models does, or a complex one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.rewriter.capture import proof


class Thinned(nn.Module):
    """Drops edges of a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        x = x.coalesce()
        kept = torch.rand(x.values().shape) + 0.5
        return torch.sparse_coo_tensor(x.indices(), x.values() * kept.floor() * self.scale, x.shape)


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        edges = torch.randint(20, (2, 60), generator=g)
        ones = torch.ones(60)
        self.register_buffer("edges", torch.sparse_coo_tensor(edges, ones, (20, 20)).coalesce())
        self.nodes, self.thin = nn.Embedding(20, 4), Thinned()

    def forward(self, ids: Tensor) -> Tensor:
        rows = torch.sparse.mm(self.thin(self.edges), self.nodes.weight)
        few = [rows[k] for k in ids.tolist()]  # leaves torch: the parts are captured one by one
        return torch.stack(few) * self.nodes(ids)


def test_a_part_that_returns_a_sparse_tensor() -> None:
    ids = torch.arange(12)
    plain = Graph()
    fast = recast.optimize(plain, example=[ids, ids[:7]])
    assert fast.report.to_dict()["captured"] == "partial"
    report = recast.diff(plain, fast, [(ids,), (ids[2:9],)], steps=2)
    assert report.ok, report


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("kind", ["to_sparse_coo", "to_sparse_csr"])
def test_sparse_results_are_compared_by_their_entries(kind: str) -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    one, same = (getattr(dense.clone(), kind)() for _ in range(2))
    other, moved = (getattr(t, kind)() for t in (dense * 1.5, dense.flip(0)))
    differ = [proof._differ(*map(proof._strided, ([one], [t]))) for t in (same, other, moved)]
    assert differ[0] is None
    assert all(differ[1:])


def test_complex_results_are_compared_by_both_parts() -> None:
    one = torch.complex(torch.ones(3), torch.tensor([1.0, 0.0, 2.0]))
    unlike = one.conj(), torch.complex(one.real, one.imag * 1.5), one.real + 0j
    assert proof._differ([one], [one.conj().resolve_conj().conj()]) is None
    assert all(proof._differ([one], [other]) for other in unlike)
