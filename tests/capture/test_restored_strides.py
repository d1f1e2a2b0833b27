"""``view`` takes outputs of a rewritten model, and values inside it, as in the plain model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.rewriter.restored_strides import RULE, joinable, order_to_copy

IDS = torch.randint(50, (6, 5), generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Rows through a GRU and through attention by hand, which are fused; ``end`` returns."""

    def __init__(self, end: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.end = end

    def forward(self, ids: Tensor) -> object:
        rows = self.table(ids)
        q, k, v = (part(rows).view(-1, 5, 2, 4).transpose(1, 2) for part in self.parts)
        heads = torch.softmax(q @ k.transpose(2, 3) / 2, -1) @ v
        return self.end(self.gru(rows)[0], heads)


@pytest.mark.parametrize(
    "end",
    [
        lambda states, heads: states[:, -1],
        lambda states, heads: {"heads": heads, "both": [states[:, 0], states[:, 0]]},
        lambda states, heads: heads.permute(3, 0, 1, 2),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_outputs_can_be_viewed_as_before(
    end: Callable[[Tensor, Tensor], object], training: bool
) -> None:
    """A GRU's states are stored by step in torch, and by sample in the fused one."""
    net = Net(end).train(training)
    fast = recast.optimize(net, example=IDS)
    assert RULE in str(fast)
    for ids in (IDS, IDS[:3]):
        plain, ours = (torch.utils._pytree.tree_leaves(m(ids)) for m in (net, fast))
        for a, b in zip(ours, plain, strict=True):
            assert joinable(b) <= joinable(a)
    report = recast.diff(net, fast, IDS, steps=2).check()
    assert not [n for n in report.notes if "contiguous" in n]


def test_nothing_is_copied_where_strides_agree() -> None:
    fast = recast.optimize(Net(lambda states, heads: states.sum(1) + heads.sum()), example=IDS)
    assert RULE not in str(fast)


class Modes(Net):
    def forward(self, ids: Tensor) -> Tensor:
        states: Tensor = self.gru(self.table(ids))[0][:, -1]
        return states if self.training else states.sigmoid()


def test_a_graph_for_train_mode_alone() -> None:
    """Its numbers are not compared, its strides are."""
    fast = recast.optimize(Modes(lambda states, heads: None), example=IDS)
    assert len(fast.graphs) == 2
    assert fast(IDS).view(-1).shape == (48,)
    assert RULE in str(fast) and RULE not in str(fast.eval())


def test_a_view_inside() -> None:
    """The rewritten graph runs, rather than the captured one with a warning."""
    net = Net(lambda states, heads: states[:, -1].view(-1) + heads.sum())
    fast = recast.optimize(net, example=IDS, passes="group-embeddings,fuse-recurrence")
    assert RULE in str(fast)
    recast.diff(net, fast, IDS, steps=2).check()


class Written(Net):
    """Writes through a reshape of what is fused: a view in the model, and a copy of ours."""

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids)
        q, k, v = (part(rows).view(-1, 5, 2, 4).transpose(1, 2) for part in self.parts)
        heads: Tensor = torch.softmax(q @ k.transpose(2, 3) / 2, -1) @ v + 1.0
        if self.training or self.end(rows, rows):
            heads.view(-1)[0] = 1.0
        return heads


@pytest.mark.parametrize("always", [True, False])
def test_a_write_through_a_reshape_is_not_lost(always: bool) -> None:
    """The captured graph runs, and says so, even where only the one for training writes."""
    net = Written(lambda *_: always)
    with pytest.warns(recast.RecastWarning, match="changes other values|is not that of the model"):
        fast = recast.optimize(net, example=IDS)
    recast.diff(net, fast, IDS, steps=2).check()


class Copied(Net):
    """Writes to a copy, which is a view of what is fused, and of what nothing else reads."""

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids)
        q, k, v = (part(rows).view(-1, 5, 2, 4).transpose(1, 2) for part in self.parts)
        heads = (torch.softmax(q @ k.transpose(2, 3) / 2, -1) @ v).transpose(1, 2)
        joined: Tensor = heads.reshape(-1, 5, 8)
        joined[:, 0] = 1.0
        return joined if self.end(rows, rows) else joined + heads.sum()


@pytest.mark.parametrize("alone", [True, False])
def test_a_write_to_what_was_a_copy(alone: bool) -> None:
    net = Copied(lambda *_: alone)
    if alone:
        fast = recast.optimize(net, example=IDS)
        assert "field_attention" in str(fast)
    else:
        with pytest.warns(recast.RecastWarning, match="changes other values|is not that of"):
            fast = recast.optimize(net, example=IDS)
    recast.diff(net, fast, IDS, steps=2).check()


@pytest.mark.parametrize(
    ("ours", "plain", "order"),
    [
        (torch.empty(4, 3, 2), torch.empty(4, 3, 2), None),
        (torch.empty(4, 3, 2), torch.empty(3, 4, 2).transpose(0, 1), (1, 0, 2)),
        (torch.empty(3, 4, 2).transpose(0, 1), torch.empty(4, 3, 2), (0, 1, 2)),
        (torch.empty(4, 9)[:, :2], torch.empty(4, 2), (0, 1)),
        (torch.empty(4, 2), torch.empty(4, 9)[:, :2], None),  # it can be viewed in more ways
        (torch.empty(4, 1, 2), torch.empty(1, 4, 2).transpose(0, 1), None),
        (torch.empty(0, 3), torch.empty(3, 0).t(), None),
        (torch.empty(4, 3), torch.empty(3).expand(4, 3), None),
        (torch.empty(2, 2), torch.empty(4).as_strided((2, 2), (1, 1)), None),  # no copy could
        (torch.empty(2).to_sparse(), torch.empty(2), None),
    ],
)
def test_the_order_to_copy(ours: Tensor, plain: Tensor, order: tuple[int, ...] | None) -> None:
    assert order_to_copy(ours, plain) == order
