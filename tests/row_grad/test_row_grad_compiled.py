"""Row gradients of the op itself under compilers and function transforms, and what they cost."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from row_lookup import IDS, dense, twins, weigh
from torch import Tensor
from torch.nn import Parameter

import recast.runtime  # noqa: F401  (registers the op)

TABLES = 55


def gather(weights: list[Tensor], ids: list[Tensor]) -> list[Tensor]:
    n = len(weights)
    none, off = [None] * n, [False] * n
    return torch.ops.recast.embedding_bags.default(
        weights, ids, none, none, [*range(n)], ["none"] * n, none, off, off
    )


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_around_the_op(fullgraph: bool) -> None:
    """The compiler sees plain torch, so the gradient is what it makes of plain torch."""
    a, b = twins()
    compiled = torch.compile(
        lambda w: gather([w], [IDS])[0] * 2, backend="aot_eager", fullgraph=fullgraph
    )
    weigh(compiled(a)).backward()
    weigh(b[IDS] * 2).backward()
    torch.testing.assert_close(dense(a.grad), dense(b.grad))


@pytest.mark.parametrize("last", [False, True])
def test_compiled_for_any_number_of_bags(last: bool) -> None:
    a, b = twins()

    def bags(weight: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        rest = ([0], ["sum"], [None], [last], [False])
        return torch.ops.recast.embedding_bags.default([weight], [ids], [offsets], [None], *rest)[0]

    compiled = torch.compile(bags, backend="aot_eager", dynamic=True, fullgraph=True)
    for count in (5, 3):
        a.grad = b.grad = None
        ids = torch.arange(2 * count)
        offsets = torch.arange(0, 2 * count + last, 2)
        weigh(compiled(a, ids, offsets)).backward()
        weigh(b[ids].view(count, 2, -1).sum(1)).backward()
        torch.testing.assert_close(dense(a.grad), dense(b.grad))


def test_compiled_whole_around_a_lookup_kept_outside_is_refused() -> None:
    a, _ = twins()
    outside = torch.compiler.disable(lambda w: gather([w], [IDS])[0])
    compiled = torch.compile(lambda w: outside(w) * 2, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(a)


def test_the_gradient_as_a_function() -> None:
    a, b = twins()
    ours = torch.func.grad(lambda w: weigh(gather([w], [IDS])[0]))(a.detach())
    plain = torch.func.grad(lambda w: weigh(w[IDS]))(b.detach())
    assert type(ours) is Tensor
    torch.testing.assert_close(ours, plain)


def test_cost_a_table(kernel: str) -> None:
    """Backward and step of many tiny tables, against torch's own sparse gradients.

    Without the kernel, each table takes some ten small calls of torch to sort and sum its ids.
    """
    ids, upstream = torch.zeros(1, dtype=torch.long), [torch.ones(1, 4)] * TABLES
    lookups = (
        lambda tables: gather(list(tables), [ids] * TABLES),
        lambda tables: [torch.nn.functional.embedding(ids, t, sparse=True) for t in tables],
    )
    runs = []
    for lookup in lookups:
        tables = [Parameter(torch.randn(10, 4)) for _ in range(TABLES)]
        runs.append((lookup, tables, torch.optim.Adagrad(tables, lr=0.1), []))
    for _ in range(15):
        for lookup, tables, optimizer, spent in runs:
            optimizer.zero_grad()
            outs = lookup(tables)
            start = time.perf_counter()
            torch.autograd.backward(outs, upstream)
            optimizer.step()
            spent.append(time.perf_counter() - start)
    ours, plain = (statistics.median(spent) for *_, spent in runs)
    assert ours < plain * (5 if kernel == "torch" else 1.5)
