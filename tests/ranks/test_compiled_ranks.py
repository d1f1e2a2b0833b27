"""``torch.compile(fast)`` on ranks: the dense parts are compiled, exchanges are not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo  # before ranks are forked, which would import it each for itself
from every import Every, batch, grads, step
from harness import processes
from test_habits import agree, gradients, made
from test_training import SIZES
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported

import recast
from recast.runtime import device
from recast.runtime.ranks import shards_state

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # dynamo itself asks
]


def _counted(fast: Any) -> tuple[Any, list[Any]]:
    """``fast`` compiled, and the graphs that were."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return torch.compile(fast, backend=backend), graphs


def _refusal(fast: Any, inputs: Any) -> str:
    with pytest.raises(Unsupported) as refused:
        torch.compile(fast, backend="eager", fullgraph=True)(*inputs)
    return str(refused.value)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(9, 4, mode="sum")
        self.top = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.rows(ids)).squeeze(1)


def test_a_small_model_trains() -> None:
    torch.manual_seed(8)
    model, ids, weight = Small(), torch.randint(9, (10, 3)), torch.randn(10)
    (model(ids) * weight).sum().backward()
    wanted = grads(model)
    model.zero_grad()
    device.extension()
    assert shards_state.hook  # imported, with all that it needs

    def one(rank: int) -> str:
        own = slice(0, 7) if rank == 0 else slice(7, 10)
        given: Any = {"example": (ids,), "sharding": "table_wise"}
        fast = recast.optimize(copy.deepcopy(model), **given)
        compiled, graphs = _counted(fast)
        (compiled(ids[own]) * weight[own] * 2).sum().backward()  # of a mean over ranks
        agree(grads(fast), wanted, fast)
        assert graphs
        return _refusal(fast, (ids,))

    for text in processes(2, one):
        assert "ranks talk to each other outside of compiled parts" in text


class Scored(Small):
    def forward(self, ids: Tensor, label: Tensor | None = None) -> Tensor:
        out = super().forward(ids)
        return out.sigmoid() if label is None else nn.functional.mse_loss(out, label)


def test_forms() -> None:
    torch.manual_seed(8)
    model, ids, label = Scored(), torch.randint(9, (10, 3)), torch.rand(10)
    wanted = model(ids, label).item(), model(ids).detach()
    device.extension()
    assert shards_state.hook

    def one(rank: int) -> str:
        given: Any = {"example": (ids, label), "forms": [(ids,)], "sharding": "row_wise"}
        fast = recast.optimize(copy.deepcopy(model), **given)
        compiled, graphs = _counted(fast)
        compiled(ids, label).backward()
        with torch.no_grad():
            torch.testing.assert_close(compiled(ids, label).item(), wanted[0])
            torch.testing.assert_close(compiled(ids), wanted[1])
        assert graphs
        return _refusal(fast, (ids,))

    for text in processes(2, one):
        assert "ranks talk to each other outside of compiled parts" in text


def test_every_lookup_trains() -> None:
    torch.manual_seed(6)
    model, sizes = Every(), SIZES[2]
    wanted = gradients(model, sizes)
    device.extension()
    assert shards_state.hook  # imported, with all that it needs
    recast.optimize(Every(), example=batch([5, 4], 0)[0])

    def one(rank: int) -> int:
        fast = made(model)
        compiled, graphs = _counted(fast)
        step(compiled, batch(sizes, rank), sum(sizes), 2)
        agree(grads(fast), wanted, fast)
        return len(graphs)

    assert min(processes(2, one)) >= 2, "the bottom and the top network, at least"
