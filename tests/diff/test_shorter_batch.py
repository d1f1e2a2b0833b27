"""What only a batch of another size shows, and what is named when no node is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.rewriter.diff import locate, model_runs
from recast.rewriter.diff.judge import Row
from recast.rewriter.ir import annotate


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 8, mode="sum")
        self.norm = nn.BatchNorm1d(8)
        self.top = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.top(self.norm(self.bag(ids)))
        return out


IDS = torch.randint(50, (32, 3), generator=torch.Generator().manual_seed(0))


def odd_tail(x: Tensor) -> Tensor:
    """As a kernel that takes rows two by two would, if it had the last one wrong."""
    return torch.cat([x[:-1], 1.001 * x[-1:]]) if len(x) % 2 else x


def odd_gradient(x: Tensor) -> Tensor:
    """Right but for the gradient of that row."""
    return x + 0.001 * (x - x.detach()) * (torch.arange(len(x)) == len(x) - len(x) % 2)[:, None]


def with_a_mistake(mistake: Any) -> Any:
    torch.manual_seed(0)
    fast = recast.optimize(Net(), example=IDS)
    (end,) = (n for n in fast.graph.nodes if n.op == "output")
    (result,) = end.all_input_nodes
    with fast.graph.inserting_before(end):
        wrong = fast.graph.call_function(mistake, (result,))
    annotate(wrong, origin=("top",), rule="mistaken")
    end.replace_input_with(result, wrong)
    fast._runner.build()
    return fast


@pytest.mark.parametrize("mistake", [odd_tail, odd_gradient])
def test_a_mistake_in_the_last_row_of_an_odd_batch(mistake: Any) -> None:
    torch.manual_seed(0)
    plain, fast = Net(), with_a_mistake(mistake)
    assert fast._captured.sizes == (32, 17)
    report = recast.diff(plain, fast, IDS)
    assert not report.ok
    assert {r.when for r in report.rows if not r.ok} == {"eval mode, batch 2"}
    assert report.first is not None and report.first.node == mistake.__name__


def test_a_loss_with_the_labels_of_one_batch() -> None:
    labels = torch.rand(32, 1)
    torch.manual_seed(0)
    plain = Net()
    fast = recast.optimize(plain, example=IDS)
    assert recast.diff(plain, fast, IDS, loss=lambda out: (out - labels).square().mean()).ok


def test_a_buffer_is_named_where_no_node_is() -> None:
    """Gradients whose errors add up over many nodes do not hide who wrote the buffer."""
    net = Net()
    rows = [
        Row("gradients", "top.0.weight", (8, 8), 1.0, 1.0, (0, 0), 0.1, False, "train mode"),
        Row("buffers", "norm.running_var", (8,), 1.0, 1.0, (0,), 0.1, False, "train mode"),
    ]
    found = locate.first(
        net, net, [(IDS,)], rows, seed=0, loss=None, make=model_runs.maker(None, net), rtol=1e-5
    )
    assert found is not None
    assert (found.node, found.what) == ("norm", "it leaves another value in norm.running_var")


def test_it_is_left_out_where_the_model_was_cast_since() -> None:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layers(x)
            return out

    plain = Dense()
    fast = recast.optimize(plain, example=torch.randn(8, 4)).double()
    assert recast.diff(plain, fast, torch.randn(8, 4, dtype=torch.float64)).ok
