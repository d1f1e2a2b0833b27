"""Which gradients of tables become ``.grad`` in the lookup's own backward, and which do not."""

from __future__ import annotations

from collections.abc import Iterator

import emulated_gpu
import pytest
import torch
from torch import Tensor, nn

from recast.runtime.embedding import assign_grads, embedding_bags
from recast.runtime.embedding.assign_grads import left_after_assignment
from recast.runtime.rows.grad import RowGrad

TABLES = 3


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """The tables whose gradients were placed, a list for each backward pass."""
    seen: list[list[int]] = []

    def spy(ctx: object, weights: list[Tensor], grads: list[Tensor | None]) -> object:
        left = left_after_assignment(ctx, weights, grads)
        seen.append([t for t, (a, b) in enumerate(zip(grads, left, strict=True)) if a is not b])
        return left

    monkeypatch.setattr(embedding_bags, "left_after_assignment", spy)
    yield seen


@pytest.fixture
def tables() -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(9, 4, generator=g)) for _ in range(TABLES)]


def loss(tables: list[nn.Parameter], seed: int = 1) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    ids = [torch.randint(9, (5, 2), generator=g) for _ in tables]
    none, several = [None] * TABLES, list(range(TABLES))
    off = [False] * TABLES
    call = torch.ops.recast.embedding_bags.default.direct
    outs = call(list(tables), ids, none, none, several, ["sum"] * TABLES, none, off, off)
    return sum((torch.randn(5, 4, generator=g) * x.square()).sum() for x in outs)  # type: ignore[return-value]


def dense(grad: Tensor | None) -> Tensor:
    assert isinstance(grad, RowGrad)
    return grad.dense()


def test_backward_places_all(tables: list[nn.Parameter], placed: list[list[int]]) -> None:
    wanted = torch.autograd.grad(loss(tables), tables)
    loss(tables).backward()
    assert placed == [[], [0, 1, 2]]
    for table, grad in zip(tables, wanted, strict=True):
        assert torch.equal(dense(table.grad), dense(grad))


def test_on_a_gpu_too(tables: list[nn.Parameter], placed: list[list[int]]) -> None:
    wanted = torch.autograd.grad(loss(tables), tables)
    with emulated_gpu.serve():
        loss(tables).backward()
    assert placed == [[], [0, 1, 2]]
    for table, grad in zip(tables, wanted, strict=True):
        torch.testing.assert_close(dense(table.grad), dense(grad))


@pytest.mark.parametrize("other", [False, True])
def test_the_caller_s_stream_follows(monkeypatch: pytest.MonkeyPatch, other: bool) -> None:
    """As after torch's own gradients: backward may be called on another stream than forward was."""

    class Stream:
        waited: list[object]

    here, caller = Stream(), Stream()
    here.waited, caller.waited = [], []
    caller.wait_stream = caller.waited.append  # type: ignore[attr-defined]
    current = [here]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            assign_grads.let_caller_wait(torch.device("cuda:0"))
            if other:
                current[0] = caller  # from here on the engine is back on the caller's
            return grad

    Node.apply(torch.ones(1, requires_grad=True)).backward()
    assert caller.waited == ([here] if other else []) and not here.waited


def test_a_second_backward_adds(tables: list[nn.Parameter], placed: list[list[int]]) -> None:
    one, two = (torch.autograd.grad(loss(tables, seed), tables) for seed in (1, 2))
    loss(tables, 1).backward()
    loss(tables, 2).backward()
    assert placed[2:] == [[0, 1, 2], []]
    for table, a, b in zip(tables, one, two, strict=True):
        torch.testing.assert_close(dense(table.grad), dense(a) + dense(b))


def test_chosen_inputs(tables: list[nn.Parameter], placed: list[list[int]]) -> None:
    """Gradients that were not asked for appear nowhere."""
    loss(tables).backward(inputs=[tables[1]])
    assert [table.grad is None for table in tables] == [True, False, True]
    (grad,) = torch.autograd.grad(loss(tables), tables[2])
    assert isinstance(grad, RowGrad)
    assert [table.grad is None for table in tables] == [True, False, True]
    assert placed == [[1], []]


@pytest.mark.parametrize("kind", ["tensor", "accumulated", "node"])
def test_hooks_run(tables: list[nn.Parameter], placed: list[list[int]], kind: str) -> None:
    ran: list[object] = []
    if kind == "tensor":
        tables[1].register_hook(lambda grad: ran.append(type(grad)))
    elif kind == "accumulated":
        tables[1].register_post_accumulate_grad_hook(lambda table: ran.append(type(table.grad)))
    node = torch.autograd.graph.get_gradient_edge(tables[1]).node if kind == "node" else None
    if node is not None:
        node.register_hook(lambda *_: ran.append(RowGrad))
    loss(tables).backward()
    assert ran == [RowGrad]
    assert placed == [[0, 2]]
    assert all(isinstance(table.grad, RowGrad) for table in tables)


def test_a_table_frozen_since_forward(tables: list[nn.Parameter], placed: list[list[int]]) -> None:
    """Gets no gradient, as in torch."""
    whole = loss(tables)
    tables[1].requires_grad_(False)
    whole.backward()
    assert placed == [[0, 2]]
    assert [table.grad is None for table in tables] == [False, True, False]


def test_a_table_that_is_no_leaf(tables: list[nn.Parameter], placed: list[list[int]]) -> None:
    scaled = [table * 2 for table in tables]
    loss(scaled).backward()  # type: ignore[arg-type]
    assert placed == [[]]
    assert all(table.grad is not None for table in tables)
