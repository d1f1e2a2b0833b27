"""narrow-lookups: what may read narrow rows, each Miss, and the same bits under autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import emulated_gpu
import models
import pytest
import torch
from passkit import calls, misses, optimized, same
from torch import Tensor, nn
from torch.nn import functional as F

from recast.passes import REGISTRY
from recast.passes.narrow import NarrowLookups
from recast.rewriter.report import dump

NARROW = "default,narrow-lookups{everywhere=true}"
WIDTH = 16


class Model(nn.Module):
    """``forward(ids, dense) = read(self, rows of two tables, dense)``."""

    def __init__(self, read: Callable[[Any, list[Tensor], Tensor], Tensor]) -> None:
        super().__init__()
        self.read = read
        self.emb = nn.ModuleList(nn.Embedding(9, WIDTH) for _ in range(2))
        self.bag = nn.EmbeddingBag(9, WIDTH, mode="sum")
        self.linear = nn.Linear(WIDTH, 3)
        self.bottom = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(4 * WIDTH, 3)
        self.hooked = nn.Linear(WIDTH, 3)
        self.deep = nn.Sequential(nn.Linear(4 * WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))
        self.dropped = nn.Sequential(nn.Dropout(0.0), nn.Linear(4 * WIDTH, 8), nn.ReLU())
        self.weight = nn.Parameter(torch.randn(WIDTH, 3))

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        rows = [e(ids[:, k]) for k, e in enumerate(self.emb)]
        return self.read(self, [*rows, self.bag(ids)], dense)


def batch(rows: int, seed: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 9, (rows, 2), generator=g)
    return ids, torch.randn(rows, WIDTH, generator=g, dtype=torch.float64)


BATCHES = [batch(5, 0), batch(8, 1)]


def _pairs(m: Any, rows: list[Tensor], dense: Tensor) -> Tensor:
    t = torch.stack([dense, *rows], 1)
    z = torch.bmm(t, t.transpose(1, 2))
    li, lj = torch.tril_indices(4, 4, -1)
    return torch.cat([dense, z[:, li, lj]], 1)


def _all(m: Any, rows: list[Tensor], dense: Tensor) -> Tensor:
    return torch.cat([*rows, m.bottom(dense)], 1)


TAKEN: dict[str, Callable[[Any, list[Tensor], Tensor], Tensor]] = {
    "Linear": lambda m, rows, dense: sum(m.linear(r) for r in rows) + m.linear(dense),
    "F.linear": lambda m, rows, dense: m.wide(_all(m, rows, dense))
    + F.linear(dense, m.linear.weight),
    "matmul": lambda m, rows, dense: rows[0] @ m.weight + torch.matmul(rows[1], m.weight)
    + torch.mm(rows[2] , m.weight) + dense.sum(),
    "bmm": lambda m, rows, dense: torch.bmm(
        torch.stack(rows, 1), dense.unsqueeze(2)
    ).squeeze(2),
    "mlp": lambda m, rows, dense: m.deep(_all(m, rows, dense)),
    "dot_interaction": _pairs,
    "reshaped": lambda m, rows, dense: m.wide(
        torch.stack([*rows, m.bottom(dense)], 1).view(-1, 4 * WIDTH)
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", TAKEN)
def test_rows_that_are_only_multiplied(form: str) -> None:
    fast = same(Model(TAKEN[form]), BATCHES, NARROW)
    (call,) = calls(fast, "embedding_bags")
    assert call.args[9:] == (True,), misses(fast, "narrow-lookups")


REFUSED: dict[str, tuple[Callable[[Any, list[Tensor], Tensor], Tensor], str]] = {
    "two readers": (
        lambda m, rows, dense: m.wide(_all(m, rows, dense)) + m.linear(rows[0]),
        "whose gradients would be added in 16 bits",
    ),
    "a join with two readers": (
        lambda m, rows, dense: m.wide(y := _all(m, rows, dense)) * y.sum(), "are read by",
    ),
    "twice in one product": (
        lambda m, rows, dense: torch.cat([_pairs(m, [rows[0], rows[0], rows[2]], dense)], 1)
        + m.linear(rows[1]).sum(),
        "it reads looked-up rows",
    ),
    "the dense part too": (
        lambda m, rows, dense: _pairs(m, [dense, *rows[1:]], rows[0]), "it reads",
    ),
    "dropout first": (lambda m, rows, dense: m.dropped(_all(m, rows, dense)), "it reads"),
    "an activation": (lambda m, rows, dense: m.wide(torch.relu(_all(m, rows, dense))), "it reads"),
    "what leaves the model": (lambda m, rows, dense: _all(m, rows, dense), "it reads"),
    "beside what stays float32": (
        lambda m, rows, dense: m.wide(torch.cat([*rows, dense.abs()], 1)), "leaves in float32",
    ),
    "a sum": (lambda m, rows, dense: m.linear(rows[0] + rows[1] + rows[2] + dense), "it reads"),
}  # fmt: skip


@pytest.mark.parametrize("form", REFUSED)
def test_every_miss_says_why(form: str) -> None:
    read, why = REFUSED[form]
    fast = same(Model(read), BATCHES, NARROW, steps=False)
    (call,) = calls(fast, "embedding_bags")
    assert len(call.args) == 9
    assert any(why in text for text in misses(fast, "narrow-lookups"))


def test_a_linear_with_hooks_reads_what_it_likes() -> None:
    model = Model(lambda m, rows, dense: sum(m.hooked(r) for r in rows) + dense.sum())
    model.hooked.register_forward_hook(lambda *_: None)
    fast = same(model, BATCHES, NARROW, steps=False)
    assert misses(fast, "narrow-lookups")


def test_tables_on_a_cpu_are_left_alone() -> None:
    fast = optimized(Model(TAKEN["mlp"]).double(), BATCHES)
    (call,) = calls(fast, "embedding_bags")
    assert len(call.args) == 9 and not misses(fast, "narrow-lookups")


def test_the_dump(golden: Callable[[str, str], None]) -> None:
    model, batches, _ = models.build("dlrm")
    fast = optimized(model, batches, NARROW)
    golden("passes/narrow/dlrm.txt", dump.text(fast.graph, fast, "Dlrm"))


def test_it_is_registered() -> None:
    assert REGISTRY["narrow-lookups"] is NarrowLookups


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["dot_interaction", "mlp", "bmm"])
def test_under_autocast(form: str, dtype: torch.dtype) -> None:
    """On kernels of a GPU, emulated: rows are narrow, the outputs the same bits.

    So are gradients, but for those of a fused interaction, which reads wide rows and then gives
    them wider gradients than torch's bmm does.
    """
    torch.manual_seed(1)
    model = Model(TAKEN[form])
    batches = [(ids, dense.float()) for ids, dense in BATCHES]
    found = []
    for passes in (None, NARROW):
        fast = optimized(copy.deepcopy(model), batches, passes)
        with emulated_gpu.serve(), torch.autocast("cpu", dtype):
            out = fast(*batches[0])
            up = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
            out.backward(up)
        grads = [p.grad + 0 for p in fast.parameters() if p.grad is not None]
        found.append([out.detach(), *grads])
        (call,) = calls(fast, "embedding_bags")
        assert len(call.args) == 9 + (passes is not None)
    assert len(found[0]) == len(found[1]) > 3
    assert torch.equal(found[0][0], found[1][0])
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype
        within = (
            0 if form != "dot_interaction" else 4 * torch.finfo(dtype).eps * float(a.abs().max())
        )
        assert float((a - b).abs().max()) <= within
