"""All gradients of a call in one lot, and steps from it: the numbers of pieces and plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from recast.errors import UsageError
from recast.optim import RowWiseAdagrad
from recast.runtime import device
from recast.runtime.plan import Table, explicit
from recast.runtime.ranks import shards
from recast.runtime.rows import lots, step
from recast.runtime.rows.grad import RowGrad
from recast.runtime.rows.optimizer import attach

ROWS, DIM = 11, 5
_TABLE = Table("table", ROWS, DIM)
_WHERE = explicit((_TABLE,), 1, {"table": "table_wise"}).placement("table")
PART = shards.ShardedTable(_TABLE, _WHERE, 0, 1)
FORMS: dict[str, tuple[str, int | None, Callable[[Tensor], Tensor]]] = {
    "sum": ("sum", None, lambda ids: ids),
    "mean": ("mean", None, lambda ids: ids),
    "mean, padding": ("mean", 3, lambda ids: ids),
    "sum, padding from the end": ("sum", -2, lambda ids: ids),
    "int32": ("sum", None, Tensor.int),
    "columns apart": ("sum", None, lambda ids: ids.t().contiguous().t()),
    "rows apart": ("sum", None, lambda ids: ids.repeat(1, 2)[:, : ids.shape[1]]),
    "no pooling": ("none", None, lambda ids: ids[:, 0]),
    "no pooling, apart": ("none", 0, lambda ids: ids[:, 0].repeat_interleave(2)[::2]),
}


def tables(count: int = 3, dims: int = DIM) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(ROWS, dims, generator=g)) for _ in range(count)]


def ids_of(form: str, bags: int, seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    change = FORMS[form][2]
    return [change(torch.randint(ROWS, (bags, 1 + k % 3), generator=g)) for k in range(3)]


def looked_up(form: str, weights: list[nn.Parameter], ids: list[Tensor]) -> list[Tensor]:
    mode, padding, _ = FORMS[form]
    n, call = len(weights), torch.ops.recast.embedding_bags.default.direct
    none, off, same = [None] * n, [False] * n, list(range(n))
    found: list[Tensor] = call(weights, ids, none, none, same, [mode] * n, [padding] * n, off, off)
    return found


def plainly(form: str, weights: list[Tensor], ids: list[Tensor]) -> list[Tensor]:
    mode, padding, _ = FORMS[form]
    if mode == "none":
        return [F.embedding(i, w, padding_idx=padding) for w, i in zip(weights, ids, strict=True)]
    pairs = zip(weights, ids, strict=True)
    return [F.embedding_bag(i, w, mode=mode, padding_idx=padding) for w, i in pairs]


def loss_of(outs: list[Tensor], seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    parts = [(torch.randn(o.shape, generator=g).to(o.dtype) * o.square()).sum() for o in outs]
    return torch.stack(parts).sum()


@pytest.mark.parametrize("bags", [1, 7])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_a_lot(form: str, bags: int, kernel: str) -> None:
    weights, ids = tables(), ids_of(form, bags, 1)
    loss_of(looked_up(form, weights, ids), 2).backward()
    cells = [w.grad.cell for w in weights if isinstance(w.grad, RowGrad)]
    assert len(cells) == 3
    assert all((cell.lot is cells[0].lot is not None) == (kernel == "kernel") for cell in cells)
    for i in ids:
        i.zero_()  # the batch is the user's again
    wide = [w.detach().double().requires_grad_() for w in weights]
    loss_of(plainly(form, wide, ids_of(form, bags, 1)), 2).backward()
    for ours, plain in zip(weights, wide, strict=True):
        torch.testing.assert_close(ours.grad.dense().double(), plain.grad, rtol=1e-5, atol=1e-5)  # type: ignore[union-attr]


def test_a_lot_beside_a_part_of_another_table(kernel: str) -> None:
    """One model of the process is sharded: the lookups of the others stay as they are."""
    (elsewhere,) = tables(1)
    shards.register(elsewhere, PART)
    test_gradients_of_a_lot("sum", 7, kernel)


@pytest.mark.parametrize("number", range(3))
def test_no_lot_of_a_part(number: int, kernel: str) -> None:
    weights = tables()
    shards.register(weights[number], PART)
    loss_of(looked_up("sum", weights, ids_of("sum", 7, 1)), 2).backward()
    cells = [w.grad.cell for w in weights if isinstance(w.grad, RowGrad)]
    assert [cell.table for cell in cells] == [PART if k == number else None for k in range(3)]
    assert all(cell.lot is None for cell in cells)


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "fused": lambda p: optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1, fused=True),
    "maximize": lambda p: optim.SGD(p, lr=0.1, maximize=True),
    "row-wise": lambda p: RowWiseAdagrad(p, lr=0.1),
    "groups": lambda p: optim.Adagrad([{"params": p[:1], "lr": 0.3}, {"params": p[1:]}], lr=0.1),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_a_lot(
    name: str, threads: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as from pieces, one table after the other, without running Python per table."""
    monkeypatch.setattr(device, "threads", lambda: threads)
    ours, others = tables(), tables()
    head, other_head = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    pair = []
    for weights, last in ((ours, head), (others, other_head)):
        optimizer = OPTIMIZERS[name]([*weights] if name == "row-wise" else [*weights, last])
        attach(optimizer)
        pair.append(optimizer)
    if kernel == "kernel" and name in ("sgd", "maximize"):  # others begin with a state
        monkeypatch.setattr(step.Step, "add", _refuse)
    for turn in range(4):
        for k, (weights, last) in enumerate(((ours, head), (others, other_head))):
            with monkeypatch.context() as patched:
                if k:
                    patched.setattr(lots, "lot_of", lambda *_: None)
                outs = looked_up("sum", weights, ids_of("sum", 40, turn))
                (loss_of(outs, turn) + last.square().sum()).backward()
                pair[k].step()
                pair[k].zero_grad()
        if kernel == "kernel":  # from the second step on there is a state
            monkeypatch.setattr(step.Step, "add", _refuse)
    assert all(torch.equal(a, b) for a, b in zip([*ours, head], [*others, other_head], strict=True))
    for a, b in zip(ours, others, strict=True):
        of_a, of_b = pair[0].state[a], pair[1].state[b]
        assert of_a.keys() == of_b.keys()
        assert all(torch.equal(of_a[key], of_b[key]) for key in of_a)
        assert not of_a or of_a["step"] == 4


def _refuse(*_: object) -> None:
    raise AssertionError("a table was stepped by itself")


def test_a_gradient_that_was_overwritten(kernel: str) -> None:
    weights = tables(1)
    (out,) = looked_up("sum", weights, ids_of("sum", 6, 1)[:1])
    upstream = torch.ones_like(out)
    out.backward(upstream)
    optimizer = optim.SGD(weights, lr=0.1)
    attach(optimizer)
    upstream.mul_(2)
    with pytest.raises(UsageError, match="overwritten"):
        optimizer.step()


def test_a_scaled_and_an_added_gradient(kernel: str) -> None:
    weights, ids = tables(), ids_of("sum", 6, 1)
    start = [w.detach().clone() for w in weights]
    for seed in (2, 3):
        loss_of(looked_up("sum", weights, ids), seed).backward()
    nn.utils.clip_grad_norm_(weights, 0.5)
    wide = [w.double().requires_grad_() for w in start]
    for seed in (2, 3):
        loss_of(plainly("sum", wide, ids), seed).backward()
    nn.utils.clip_grad_norm_(wide, 0.5)
    optimizers = [optim.SGD(weights, lr=0.1), optim.SGD(wide, lr=0.1)]
    attach(optimizers[0])
    for optimizer in optimizers:
        optimizer.step()
    for ours, plain in zip(weights, wide, strict=True):
        torch.testing.assert_close(ours.double(), plain, rtol=1e-6, atol=1e-6)
