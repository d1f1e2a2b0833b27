"""What loops see beside the numbers: the memory of gradients, which of them are sparse, the order
of the state, hooks of wrappers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from inspect import getsource
from typing import Any

import pytest
import torch
from row_lookup import ours, plain, same, twins, weigh
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from recast.runtime.rows.grad import RowGrad
from recast.runtime.rows.optimizer import attach

Lookup = Callable[..., Tensor]
LOOKUPS: tuple[Lookup, Lookup] = (ours, plain)


def back(lookup: Lookup, weight: Parameter, ids: Tensor, sparse: bool = False) -> None:
    weigh(lookup(weight, ids, sparse)).backward()


def batch(turn: int) -> Tensor:
    return torch.randint(0, 20, (16,), generator=torch.Generator().manual_seed(turn))


def assign(lookup: Lookup, weight: Parameter, ids: Tensor) -> None:
    """``back``, where autograd does not lay the gradient out as it accumulates it."""
    (weight.grad,) = torch.autograd.grad(weigh(lookup(weight, ids)), weight)
    assert lookup is plain or isinstance(weight.grad, RowGrad)


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [None, "in place"])
@pytest.mark.parametrize(
    ("kind", "how"),
    [(Adam, {}), (AdamW, {}), (SGD, {"momentum": 0.9}), (Adagrad, {})],
    ids=["adam", "adamw", "momentum", "adagrad"],
)
def test_a_table_by_columns_under_a_fused_step(
    kind: Any, how: dict[str, Any], change: str | None
) -> None:
    """Torch's fused steps go through memory from end to end, whatever the strides are."""
    a, b = twins()
    for weight in (a, b):
        weight.data = weight.data.t().contiguous().t()
    for lookup, weight in zip(LOOKUPS, (a, b), strict=True):
        optimizer = kind([weight], lr=0.1, fused=True, **how)
        attach(optimizer)
        for turn in range(3):
            if lookup is ours:
                assign(lookup, weight, batch(turn))
            else:
                weight.grad = None
                back(lookup, weight, batch(turn))
            assert weight.grad is not None
            if change is not None:
                weight.grad.clamp_(-0.1, 0.1)
            optimizer.step()
        assert weight.t().is_contiguous()
    same(a, b)


def test_a_dense_gradient_lies_as_its_table() -> None:
    a, b = twins()
    a.data = a.data.t().contiguous().t()
    assign(ours, a, batch(0))
    assign(plain, b, batch(0))
    assert isinstance(a.grad, RowGrad)
    full = a.grad.promote(like=a)
    assert full.stride() == a.stride() and a.grad.cell.full is full
    same(full, b.grad)


# --- sparse gradients ----------------------------------------------------------------------------


def test_which_gradients_are_sparse() -> None:
    sparse, strided = twins()[0], twins()[0]
    optimizer = SGD([sparse, strided], lr=0.1)
    attach(optimizer)
    back(ours, sparse, batch(0), True)
    back(ours, strided, batch(0))
    assert isinstance(sparse.grad, RowGrad) and isinstance(strided.grad, RowGrad)
    assert sparse.grad.is_sparse and sparse.grad.layout is torch.sparse_coo
    assert (sparse.grad.sparse_dim(), sparse.grad.dense_dim()) == (1, 1)
    assert not strided.grad.is_sparse and strided.grad.layout is torch.strided
    full = sparse.grad.to_dense()
    assert type(full) is Tensor and sparse.grad.lazy
    torch.testing.assert_close(full, strided.grad.dense())
    sparse.grad.clamp_(-1, 1)  # dense from now on
    assert not sparse.grad.is_sparse and sparse.grad.layout is torch.strided


def test_loops_that_clip_all_but_sparse_gradients() -> None:
    results = []
    for lookup in LOOKUPS:
        table, head = twins()[0], Parameter(torch.ones(4))
        optimizer = SGD([table, head], lr=0.5)
        attach(optimizer)
        for turn in range(3):
            optimizer.zero_grad()
            (lookup(table, batch(turn), True) @ head - 3).square().mean().backward()
            grads = [(p, p.grad) for p in (table, head)]
            clip_grad_norm_([p for p, grad in grads if grad is None or not grad.is_sparse], 0.01)
            optimizer.step()
        results.append((table, head))
    for a, b in zip(*results, strict=True):
        same(a, b)


def test_clipping_all_of_them_works_still() -> None:
    a, b = twins()
    optimizer = SGD([a], lr=0.1)
    attach(optimizer)
    back(ours, a, batch(0), True)
    back(plain, b, batch(0))
    torch.testing.assert_close(clip_grad_norm_([a], 0.1), clip_grad_norm_([b], 0.1))
    assert a.grad is not None and a.grad.is_sparse
    torch.testing.assert_close(a.grad.to_dense(), b.grad)


def test_sparse_gradients_under_loss_scaling() -> None:
    results = []
    for lookup in LOOKUPS:
        table = twins()[0]
        optimizer, scaler = SGD([table], lr=0.1), torch.amp.GradScaler("cpu", init_scale=128.0)
        attach(optimizer)
        for turn in range(3):
            optimizer.zero_grad()
            scaler.scale(weigh(lookup(table, batch(turn), True))).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        results.append(table)
    same(*results)


# --- momentum that comes later -------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"nesterov": True}, {"dampening": 0.3}, {"maximize": True}])
def test_momentum_of_sparse_tables_that_comes_later(how: dict[str, Any]) -> None:
    """As a scheduler gives it to an optimizer without: torch's buffer is then sparse."""
    nesterov, states = how.pop("nesterov", False), []
    a, b = twins()
    for lookup, weight in zip(LOOKUPS, (a, b), strict=True):
        optimizer = SGD([weight], lr=0.1, **how)
        attach(optimizer)
        for turn in range(5):
            if turn == 1:
                optimizer.param_groups[0].update(momentum=0.9, nesterov=nesterov)
            weight.grad = None
            # One batch in two by torch's own lookup, as where a model falls back on its forward.
            back(plain if turn == 2 else lookup, weight, batch(turn), True)
            optimizer.step()
        states.append(optimizer.state[weight]["momentum_buffer"])
    same(a, b)
    assert states[0].layout is torch.sparse_coo
    torch.testing.assert_close(states[0].to_dense(), states[1].to_dense())


def test_a_state_with_sparse_momentum_is_loaded() -> None:
    a, b = twins()
    first = SGD([b], lr=0.1, momentum=0.9)
    back(plain, b, batch(0), True)
    first.step()
    a.data.copy_(b.data)
    for lookup, weight in zip(LOOKUPS, (a, b), strict=True):
        optimizer = SGD([weight], lr=0.1)
        attach(optimizer)
        optimizer.load_state_dict(copy.deepcopy(first.state_dict()))
        for turn in (1, 2):
            weight.grad = None
            back(lookup, weight, batch(turn), True)
            optimizer.step()
    same(a, b)


def test_dense_momentum_goes_on_dense() -> None:
    """Where torch itself refuses sparse gradients, as with weight decay, a dense one is taken."""
    a, b = twins()
    for lookup, weight in zip(LOOKUPS, (a, b), strict=True):
        optimizer = SGD([weight], lr=0.1)
        attach(optimizer)
        for turn in range(3):
            optimizer.param_groups[0].update(momentum=0.9, weight_decay=0.1)
            weight.grad = None
            back(lookup, weight, batch(turn), lookup is ours)
            optimizer.step()
        assert optimizer.state[weight]["momentum_buffer"].layout is torch.strided
    same(a, b)


# --- the order of the state ----------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD(p, lr=0.1),
        lambda p: SGD(p, lr=0.1, momentum=0.9),
        lambda p: SGD([{"params": p[:2], "momentum": 0.5}, {"params": p[2:]}], lr=0.1),
        lambda p: Adam(p, lr=0.1),
        lambda p: RMSprop(p, lr=0.1),
        lambda p: Adagrad(p, lr=0.1),
    ],
    ids=["sgd", "momentum", "momentum-groups", "adam", "rmsprop", "adagrad"],
)
def test_states_are_in_the_order_of_torch(make: Callable[..., Optimizer], late: bool) -> None:
    orders = []
    for lookup in LOOKUPS:
        head, table, idle, other = Parameter(torch.ones(4)), *(twins()[0] for _ in range(3))
        optimizer = make([head, table, idle, other])
        attach(optimizer)
        if late:  # as code that begins anew does
            if isinstance(optimizer, Adagrad) and "full_like" not in getsource(Adagrad._init_group):
                pytest.skip("this torch makes the state of Adagrad with it, and only then")
            optimizer.state.clear()
        for turn in range(2):
            optimizer.zero_grad()
            used = (table, idle, other) if turn else (table, other)
            sum(lookup(t, batch(turn)) @ head for t in used).sum().backward()  # type: ignore[union-attr]
            optimizer.step()
        orders.append(list(optimizer.state_dict()["state"]))
        assert all(optimizer.state.values())
    assert orders[0] == orders[1]


# --- hooks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("hooks", [{}, {7: lambda *_: None}], ids=["none", "one"])
def test_hooks_in_a_plain_dict(hooks: dict[int, Any]) -> None:
    """As wrappers make it that do not call torch's constructor."""

    class Wrapper(Optimizer):
        def __init__(self, inner: Optimizer) -> None:
            self._optimizer_step_pre_hooks = dict(hooks)  # type: ignore[assignment]
            self._optimizer_step_post_hooks = {}  # type: ignore[assignment]
            self.inner, self.state, self.defaults = inner, inner.state, inner.defaults

        @property
        def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
            return self.inner.param_groups

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    a, b = twins()
    for lookup, weight in zip(LOOKUPS, (a, b), strict=True):
        optimizer = Wrapper(Adagrad([weight], lr=0.1))
        attach(optimizer)
        assert len(optimizer._optimizer_step_pre_hooks) == len(hooks) + 1
        back(lookup, weight, batch(0))
        optimizer.step()
    same(a, b)


def test_the_layers_of_torch(kernel: str) -> None:
    """The same through ``optimize``: pretrained vectors that are stored by columns."""
    import recast

    vectors, x = torch.randn(8, 100), batch(0).view(4, 4)
    results = []
    for fast in (False, True):
        torch.manual_seed(0)
        embedding = nn.Embedding.from_pretrained(vectors.clone().T, freeze=False)
        model: Any = nn.Sequential(embedding, nn.Flatten(), nn.Linear(32, 1))
        optimizer: Any = Adam(model.parameters(), lr=0.01, fused=True)
        if fast:
            model, optimizer = recast.optimize(model, optimizer, example=x)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        results.append(embedding.weight)
    same(*results)
