"""RowWiseAdagrad in plain torch, against its definition."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from recast.errors import UsageError
from recast.optim import RowWiseAdagrad
from recast.runtime.tolerances import excess


def by_hand(start: Tensor, grads: list[Tensor], lr: float, lr_decay: float, eps: float) -> Tensor:
    """Row by row in float64, from sums that start at 0.5."""
    p = start.double()
    sums = [0.5] * (len(p) if p.dim() else 1)
    for turn, grad in enumerate(grads):
        rate = lr / (1 + turn * lr_decay)
        for r in range(len(sums)):
            g = grad.double()[r] if p.dim() else grad.double()
            sums[r] += float((g * g).mean())
            step = rate * g / (sums[r] ** 0.5 + eps)
            if p.dim():
                p[r] -= step
            else:
                p -= step
    return p


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 3), (1, 4), (4, 3, 2)], ids=str)
@pytest.mark.parametrize("maximize", [False, True])
def test_its_definition(shape: tuple[int, ...], maximize: bool) -> None:
    g = torch.Generator().manual_seed(3)
    start = torch.randn(shape, generator=g)
    grads = [torch.randn(shape, generator=g) for _ in range(3)]
    p = Parameter(start.clone())
    optimizer = RowWiseAdagrad(
        [p], lr=0.3, lr_decay=0.2, initial_accumulator_value=0.5, eps=1e-3, maximize=maximize
    )
    for grad in grads:
        p.grad = -grad if maximize else grad.clone()
        optimizer.step()
    truth = by_hand(start, grads, 0.3, 0.2, 1e-3)
    largest = float(start.abs().max())  # steps may bring a weight near zero
    assert excess(p.detach(), truth.float(), truth, scale=largest) <= 1
    state = optimizer.state[p]
    assert list(state) == ["step", "sum"]
    assert state["step"] == 3 and state["sum"].shape == shape[:1]


def test_sparse_gradients_touch_their_rows_only() -> None:
    start = torch.randn(6, 4)
    p, twin = Parameter(start.clone()), Parameter(start.clone())
    optimizer, dense = RowWiseAdagrad([p], lr=0.3), RowWiseAdagrad([twin], lr=0.3)
    for _ in range(3):
        ids, rows = torch.tensor([[4, 1, 4, 2]]), torch.randn(4, 4)
        p.grad = torch.sparse_coo_tensor(ids, rows, (6, 4))
        twin.grad = p.grad.to_dense()
        optimizer.step()
        dense.step()
    torch.testing.assert_close(p, twin)
    torch.testing.assert_close(optimizer.state[p]["sum"], dense.state[twin]["sum"])
    assert torch.equal(p[[0, 3, 5]], start[[0, 3, 5]])


def test_one_column_is_adagrad() -> None:
    start = torch.randn(9, 1)
    p, twin = Parameter(start.clone()), Parameter(start.clone())
    optimizer, plain = RowWiseAdagrad([p], lr=0.1), torch.optim.Adagrad([twin], lr=0.1)
    for _ in range(3):
        p.grad = torch.randn(9, 1)
        twin.grad = p.grad.clone()
        optimizer.step()
        plain.step()
    torch.testing.assert_close(p, twin)


def test_closures_copies_and_checkpoints() -> None:
    p = Parameter(torch.randn(3, 2))
    optimizer = RowWiseAdagrad([p], lr=torch.tensor(0.1))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert first > optimizer.step(closure)
    twin, other = copy.deepcopy((p, optimizer))
    loaded = RowWiseAdagrad([Parameter(p.detach().clone())])
    loaded.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    for step in (optimizer, other, loaded):
        (table,) = step.param_groups[0]["params"]
        table.grad = torch.ones(3, 2)
        step.step()
        assert torch.equal(table, p)
    assert twin is not p


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": torch.ones(2)}, "one element"),
        ({"eps": float("nan")}, "eps is nan"),
        ({"lr_decay": -0.1}, "lr_decay is -0.1"),
        ({"initial_accumulator_value": -2}, "initial_accumulator_value is -2"),
        ({"weight_decay": 0.1}, "weight_decay=0.1 is not supported"),
    ],
)
def test_wrong_numbers(wrong: dict, message: str) -> None:
    p = Parameter(torch.randn(2, 2))
    with pytest.raises(UsageError, match=message):
        RowWiseAdagrad([p], **wrong)
    with pytest.raises(ValueError, match=message):
        RowWiseAdagrad([{"params": [p], **wrong}])
