"""Updates of a step whose form is known give the same, bit for bit, as when described anew."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import emulated_gpu
import pytest
import torch
from torch import Tensor, nn

import recast
from recast import optim
from recast.runtime import checked
from recast.runtime.rows import cuda_step_cache

Made = Callable[..., torch.optim.Optimizer]


class Bags(nn.Module):
    """One-hot, several ids, a mean cut by offsets; the last table is looked up twice."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = ((40, 4, "sum"), (7, 8, "sum"), (30, 4, "mean"))
        self.emb = nn.ModuleList(
            nn.EmbeddingBag(n, d, mode=mode, dtype=dtype) for n, d, mode in sizes
        )

    def forward(self, one: Tensor, some: Tensor, flat: Tensor, starts: Tensor) -> Tensor:
        a, b, c = self.emb
        return torch.cat([a(one), b(some), c(flat, starts), c(some)], 1)


def batch(k: int, rows: int = 5) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(k)
    counts = torch.randint(0, 3, (rows,), generator=g)
    counts[-1] += 2 * rows - counts.sum()  # as many ids in every batch
    starts = counts.cumsum(0) - counts
    one, some = (torch.randint(7, (rows, n), generator=g) for n in (1, 3))
    return one, some, torch.randint(30, (2 * rows,), generator=g), starts


def train(make: Made, dtype: torch.dtype, steps: int, how: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = Bags(dtype)
    optimizer = make(model.parameters())
    fast, optimizer = recast.optimize(model, optimizer, example=batch(0))
    if how == "stochastic":
        optim.stochastic_rounding(optimizer)
    for k in range(steps):
        optimizer.param_groups[0]["lr"] = 0.1 / (k + 1)
        out = fast(*batch(k, 5 if k < steps - 1 else 6))
        up = torch.randn(out.shape, generator=torch.Generator().manual_seed(k)).to(dtype)
        out.backward(up)
        if how == "clipped" and k % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if how == "scaled":
            for p in model.parameters():
                p.grad.mul_(0.5 + k)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many updates each known step had."""
    found: list[int] = []
    run = cuda_step_cache.run

    def told(plan: Any, step: Any, updates: Any, packed: bytes) -> None:
        found.append(len(updates))
        run(plan, step, updates, packed)

    monkeypatch.setattr(cuda_step_cache, "run", told)
    monkeypatch.setattr(cuda_step_cache, "_PLANS", {})
    return found


MAKERS: dict[str, Made] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1),
    "row-wise": partial(optim.RowWiseAdagrad, lr=0.1, maximize=True),
}


@pytest.mark.parametrize(
    ("name", "dtype", "how"),
    [
        ("sgd", torch.float32, ""),
        ("sgd", torch.bfloat16, "stochastic"),
        ("adagrad", torch.float32, ""),
        ("adagrad", torch.float32, "clipped"),
        ("adagrad", torch.float32, "scaled"),
        ("row-wise", torch.float32, ""),
    ],
)
def test_the_same_bits(
    name: str, dtype: torch.dtype, how: str, ran: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with emulated_gpu.serve():
        ours = train(MAKERS[name], dtype, 6, how)
        # The first of a form is described, the last has other sizes; norms sort by themselves.
        assert ran == [3] * (2 if how == "clipped" else 4)
        monkeypatch.setattr(cuda_step_cache, "cached", lambda step: None)
        for a, b in zip(ours, train(MAKERS[name], dtype, 6, how), strict=True):
            assert torch.equal(a, b)


def test_a_table_elsewhere_or_of_other_size_is_described_anew(ran: list[int]) -> None:
    torch.manual_seed(0)
    model = Bags(torch.float32)
    plain = copy.deepcopy(model)
    fast, optimizer = recast.optimize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), example=batch(0)
    )
    own = torch.optim.SGD(plain.parameters(), lr=0.1)
    room = torch.zeros(50, 4)
    held = []
    with emulated_gpu.serve():
        for k in range(8):
            if k in (3, 5):  # moved, then grown where it lies
                for net, data in ((model, room), (plain, room.clone())):
                    rows = 40 if k == 3 else 50
                    data[: len(net.emb[0].weight)] = net.emb[0].weight.detach()
                    net.emb[0].weight.data = data[:rows]
                    net.emb[0].num_embeddings = rows
            for net, optimizer_of in ((fast, optimizer), (plain, own)):
                out = net(*batch(k))
                g = torch.Generator().manual_seed(k)
                out.backward(torch.randn(out.shape, generator=g))
                optimizer_of.step()
                optimizer_of.zero_grad()
            held.append(len(ran))
    assert held == [0, 1, 2, 2, 3, 3, 4, 5]
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_checked_mode_looks_at_every_id(ran: list[int]) -> None:
    with emulated_gpu.serve(), checked.checked():
        train(MAKERS["sgd"], torch.float32, 4, "")
    assert ran == []
