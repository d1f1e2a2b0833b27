"""On a real GPU: lookups on a second stream, and the dot interaction in 16 bits and TF32."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.runtime.gpu import cuda_launch
from recast.runtime.interactions.dot_interaction import dot_interaction
from recast.runtime.tolerances import excess

WHY_NOT = cuda_launch.why_not()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"GPU: {WHY_NOT}"),
]
DEVICE = "cuda"
TABLES, WIDTH = 26, 64
DOT = dot_interaction.target


class Dlrm(nn.Module):
    """One-hot tables whose ids are computed at each call, a bottom and a top network, all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.ModuleList(nn.EmbeddingBag(5000, WIDTH, mode="sum") for _ in range(TABLES))
        # No relu: rounding turns it over where a value is near 0, and thousands are.
        self.bot = nn.Sequential(nn.Linear(13, 512), nn.Tanh(), nn.Linear(512, WIDTH), nn.Tanh())
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(nn.Linear(WIDTH + pairs, 256), nn.Tanh(), nn.Linear(256, 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bot(dense)
        ids = ids % 5000
        t = torch.stack([x, *(e(ids[:, k : k + 1]) for k, e in enumerate(self.emb))], 1)
        z = torch.bmm(t, t.transpose(1, 2))
        li, lj = torch.tril_indices(TABLES + 1, TABLES + 1, -1)
        return self.top(torch.cat([x, z[:, li, lj]], 1))


def batch(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    dense = torch.randn(rows, 13, generator=g)
    return dense.to(DEVICE), torch.randint(0, 10**6, (rows, TABLES), generator=g).to(DEVICE)


@pytest.fixture(scope="module")
def models() -> tuple[nn.Module, Any]:
    """The plain model and the rewritten one, with their own parameters."""
    torch.manual_seed(0)
    plain = Dlrm().to(DEVICE)
    fast = recast.optimize(copy.deepcopy(plain), example=[batch(0, 64), batch(1, 96)])
    beside = torch.ops.recast.embedding_bags_beside.default
    assert any(n.target is beside for n in fast.graph.nodes)
    return plain, fast


def test_memory_of_both_streams_is_left_alone(models: tuple[nn.Module, Any]) -> None:
    """Computed ids are freed while the second stream reads them; other sizes take their memory."""
    plain, fast = models
    for step in range(40):
        given = batch(step, 2048 + 512 * (step % 3))
        with torch.set_grad_enabled(step % 2 == 0):
            got, wanted = fast(*given), plain(*given)
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)
        if step % 2 == 0:
            up = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(step)).to(DEVICE)
            for model, out in ((fast, got), (plain, wanted)):
                model.zero_grad()
                out.backward(up)
            for a, b in zip(fast.parameters(), plain.parameters(), strict=True):
                assert a.grad is not None and b.grad is not None
                torch.testing.assert_close(a.grad + 0, b.grad, rtol=1e-2, atol=1e-3)


def test_two_branches_of_one_graph(models: tuple[nn.Module, Any]) -> None:
    plain, fast = models
    dense, ids = batch(3, 1024)
    with torch.no_grad():
        for _ in range(3):
            fast(dense, ids)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fast(dense, ids)
        for seed in (4, 5):
            for held, new in zip((dense, ids), batch(seed, 1024), strict=True):
                held.copy_(new)
            graph.replay()
            torch.testing.assert_close(out, plain(dense, ids), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("narrow", [False, True])
def test_autocast(dtype: torch.dtype, narrow: bool) -> None:
    g = torch.Generator().manual_seed(2)
    vectors = [torch.randn(513, 128, generator=g) / 8 for _ in range(27)]
    given = [v.to(DEVICE, dtype if narrow else None).requires_grad_() for v in vectors]
    li, lj = (i.to(DEVICE) for i in torch.tril_indices(27, 27, -1))
    found = []
    for call in (DOT, dot_interaction.reference):
        with torch.autocast(DEVICE, dtype):
            out = call(given, given[0], li, lj, 1)
        up = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
        found.append([out, *torch.autograd.grad(out, given, up)])
    wide = [v.detach().double().requires_grad_() for v in given]
    truth = dot_interaction.reference(wide, wide[0], li, lj, 1)
    exact = [truth, *torch.autograd.grad(truth, wide, up.double())]
    for a, b, c in zip(*found, exact, strict=True):
        assert a.dtype == b.dtype and excess(a.to(dtype), b.to(dtype), c) <= 1


@pytest.fixture
def tf32() -> Iterator[None]:
    held = torch.backends.cuda.matmul
    before, held.fp32_precision = held.fp32_precision, "tf32"
    yield
    held.fp32_precision = before


def test_tf32(tf32: None) -> None:
    x = torch.randn(257, 27, 128, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    li, lj = (i.to(DEVICE) for i in torch.tril_indices(27, 27, -1))
    truth = dot_interaction.reference([x.double()], None, li, lj, 0)
    plain = dot_interaction.reference([x.half()], None, li, lj, 0).float()  # of as many bits
    assert excess(DOT([x], None, li, lj, 0).half(), plain.half(), truth) <= 1
