"""Whole models through ``optimize``: every optimizer of touched rows, and what the report says."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from row_lookup import same
from row_optimizers import FUSED, ONE_EACH, densified, fused, same_state
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

import recast
from recast.errors import UsageError
from recast.runtime.recorded import recording
from recast.runtime.rows import cuda as row_cuda
from recast.runtime.rows.update import Update


class Tables(nn.Module):
    """Two tables of different size, one looked up twice."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.EmbeddingBag(50, 8, mode="sum", sparse=sparse)
        self.b = nn.EmbeddingBag(30, 8, mode="mean", sparse=sparse)

    def forward(self, ids: Tensor, others: Tensor) -> Tensor:
        return self.a(ids) * self.b(others) + self.b(ids % 30)


def batch(turn: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(turn)
    ids = torch.randint(0, 50, (9, 3), generator=made), torch.randint(0, 30, (9, 2), generator=made)
    return ids


@pytest.mark.parametrize("name", ONE_EACH)
def test_training(name: str) -> None:
    kind = FUSED[name]
    model, plain = (Tables(kind.sparse), Tables(kind.sparse or kind.lazy))
    mine, theirs = (
        kind.make(list(model.parameters())),
        (kind.reference or kind.make)(list(plain.parameters())),
    )
    semantics = "lazy" if kind.lazy else "exact"
    fast, mine = recast.optimize(model, mine, example=batch(0), sparse_semantics=semantics)
    for turn in range(5):
        for net, optimizer in ((fast, mine), (plain, theirs)):
            out = net(*batch(turn))
            upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(turn))
            optimizer.zero_grad()
            out.backward(upstream)
            optimizer.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        same(a, b)
    same_state(mine, theirs)
    assert fused() == 10 and densified() == 0


def test_sparse_adam_refuses_a_dense_table_of_a_model() -> None:
    model = Tables(sparse=False)
    optimizer = torch.optim.SparseAdam(model.parameters())
    fast, optimizer = recast.optimize(model, optimizer, example=batch(0))
    fast(*batch(0)).sum().backward()
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        optimizer.step()


def notes(optimizer: torch.optim.Optimizer, semantics: str, model: nn.Module) -> str:
    fast, _ = recast.optimize(model, optimizer, example=batch(0), sparse_semantics=semantics)
    return "\n".join(fast.report.notes)


def test_the_report_says_what_lazy_comes_to(kernel: str) -> None:
    model = Tables(sparse=False)
    parameters = list(model.parameters())
    exact = notes(AdamW(parameters), "exact", model)
    if kernel == "kernel":
        assert "AdamW: rows that a step does not look up move by their moments alone" in exact
        assert "tables get a dense gradient" not in exact
    else:
        assert "without the kernels Adam moves every row" in exact
        assert "2 tables get a dense gradient" in exact
    lazy = notes(AdamW(parameters), "lazy", model)
    assert 'sparse_semantics="lazy": AdamW steps looked-up rows only' in lazy
    assert "tables get a dense gradient" not in lazy
    amsgrad = notes(Adam(parameters, amsgrad=True), "lazy", model)
    assert "amsgrad keeps a maximum that SparseAdam does not have: 2 tables" in amsgrad
    momentum = notes(SGD(parameters, momentum=0.9), "lazy", model)
    assert "is for Adam and AdamW; SGD is exact" in momentum
    if kernel == "kernel":
        assert "SGD: rows that a step does not look up move by their moments alone" in momentum
    else:
        assert "without the kernels momentum or weight decay moves every row" in momentum


def test_a_dense_gradient_of_a_lazy_table_steps_all_rows_which_is_told() -> None:
    model = Tables(sparse=False)
    fast, optimizer = recast.optimize(
        model, Adam(model.parameters()), example=batch(0), sparse_semantics="lazy"
    )
    assert "a dense gradient, as of a batch on the plain forward" in "\n".join(fast.report.notes)
    for forward in (fast, model):  # looked-up rows have moments from then on
        optimizer.zero_grad()
        forward(*batch(0)).sum().backward()
        before = model.a.weight.detach().clone()
        optimizer.step()
    moved = (model.a.weight != before).any(1)
    optimizer.zero_grad()
    model(*(x[:0] for x in batch(0))).sum().backward()
    before = model.a.weight.detach().clone()
    optimizer.step()
    assert torch.equal((model.a.weight != before).any(1), moved) and moved.any()


@pytest.mark.parametrize(
    ("kind", "semantics", "told"),
    [
        (Adam, "lazy", "get dense gradients, by which lazy steps move every row"),
        (Adam, "exact", "The numbers are the same"),
        (SGD, "lazy", "The numbers are the same"),
    ],
)
def test_a_call_that_runs_plain_says_what_that_changes(
    kind: type[torch.optim.Optimizer], semantics: Literal["exact", "lazy"], told: str
) -> None:
    model = Tables(sparse=False)
    fast, _ = recast.optimize(
        model, kind(model.parameters()), example=batch(0), sparse_semantics=semantics
    )
    fast.a.register_forward_hook(lambda *_: None)
    with pytest.warns(recast.RecastWarning, match=told):
        fast(*batch(1))


def test_semantics_is_checked() -> None:
    model = Tables(sparse=False)
    optimizer = Adam(model.parameters())
    with pytest.raises(UsageError, match="'sometimes' is neither 'exact' nor 'lazy'"):
        recast.optimize(model, optimizer, sparse_semantics="sometimes")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="without an optimizer"):
        recast.optimize(model, sparse_semantics="lazy")


def test_a_recorded_step_gets_new_numbers_before_each_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Learning rate, its schedule, the correction of bias, and the count of steps."""
    kind = FUSED["lazy-adamw"]
    model = Tables(sparse=False)
    optimizer = kind.make(list(model.parameters()))
    fast, optimizer = recast.optimize(model, optimizer, example=batch(0), sparse_semantics="lazy")
    renewed: list[list[Update]] = []
    monkeypatch.setattr(row_cuda, "renew", lambda recorded, updates: renewed.append(updates))
    fast(*batch(0)).sum().backward()
    with recording.recording() as recorded:
        optimizer.step()
    first = model.a.weight
    assert optimizer.state[first]["step"] == 1
    for turn in (2, 3):
        optimizer.param_groups[0]["lr"] = 0.1 * turn
        recorded.prepare()
        assert optimizer.state[first]["step"] == turn
        for update in renewed[-1]:
            lr = 0.1 * turn
            size = lr * (1 - 0.999**turn) ** 0.5 / (1 - 0.9**turn)
            assert update.lr == pytest.approx(size)
            assert update.decay == pytest.approx(lr * 0.3)
    assert len(renewed) == 2 and len(renewed[0]) == 2
