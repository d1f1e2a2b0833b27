"""Sizes that depend on data: both examples have three domains, the next batch one, two or four."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import recast
from recast.errors import InputError, RecastWarning

Use = Callable[["Net", Tensor, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        self.emb, self.gru, self.use = nn.Embedding(10, 4), nn.GRU(4, 4, batch_first=True), use
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, ids: Tensor, by: Tensor) -> Tensor:
        return self.use(self, self.emb(ids), by)


def loop(net: Net, e: Tensor, by: Tensor) -> Tensor:
    total = torch.zeros(by.shape[0], 1)
    for k in torch.unique(by):
        total = torch.where((by == k).unsqueeze(1), e.sum((1, 2)).unsqueeze(1) * (k + 1), total)
    return total


def packed(net: Net, e: Tensor, by: Tensor) -> Tensor:
    rows = pack_padded_sequence(e, by + 1, batch_first=True, enforce_sorted=False)
    padded, lengths = pad_packed_sequence(net.gru(rows)[0], batch_first=True)
    mask = torch.arange(padded.shape[1]) < lengths.unsqueeze(1)
    return (padded * mask.unsqueeze(-1)).sum(1) / padded.shape[1]


def one_hot(net: Net, e: Tensor, by: Tensor) -> Tensor:
    chosen = F.one_hot(by).float()
    return e.sum(1) + chosen @ net.weight[: chosen.shape[1]]


def positive(net: Net, e: Tensor, by: Tensor) -> Tensor:
    found = e[by == 0]
    return found.sum(0) / (len(found) + 1)


USES: dict[str, Use] = {
    "a loop over unique": loop,
    "shape of unique": lambda net, e, by: e / torch.unique(by).shape[0],
    "numel of unique": lambda net, e, by: e / by.unique().numel(),
    "tolist of unique": lambda net, e, by: sum((e * (k + 1) for k in by.unique().tolist()), e),
    "a derived size": lambda net, e, by: e / by.unique().repeat(2).shape[0],
    "one_hot without classes": one_hot,
    "bincount": lambda net, e, by: e / len(torch.bincount(by)),
    "a mask": positive,
    "nonzero": lambda net, e, by: e * (by == 0).nonzero().size(0),
    "where": lambda net, e, by: e * torch.where(by == 0)[0].numel(),
    "a slice that ends at a tensor": lambda net, e, by: (
        (c := e[:, : by.max() + 1]).sum(1) / c.size(1)
    ),
    "packed sequences": packed,
}


@pytest.mark.parametrize("name", USES)
def test_it_is_asked_again(name: str) -> None:
    torch.manual_seed(0)
    net = Net(USES[name])
    ids = torch.randint(10, (6, 5))
    first, second = torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([0, 1, 2, 0])
    fast = recast.optimize(net, example=[(ids, first), (ids[:4], second)])
    assert fast.report.to_dict()["captured"] == "whole"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fast(ids, first), net(ids, first))
    for by in ([0, 1, 0, 1], [0, 1, 2, 3, 3], [1, 1], [3, 2, 3]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecastWarning)
            given = ids[: len(by)], torch.tensor(by)
            torch.testing.assert_close(fast(*given), net(*given))


class Counts(nn.Module):
    """``int`` of counts that the examples do not share, as a number and as a size."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 4)

    def forward(self, ids: Tensor, by: Tensor) -> Tensor:
        ones = int((by == 1).sum())
        start = torch.zeros(int(by.max()) + 1, 4)
        return self.emb(ids).sum(1) / (1 + ones) + start.sum() + start.shape[0]


def test_int_of_a_count() -> None:
    net, ids = Counts(), torch.randint(10, (6, 5))
    first, second = torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([0, 1, 3, 0])
    fast = recast.optimize(net, example=[(ids, first), (ids[:4], second)])
    assert fast.report.to_dict()["captured"] == "whole"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for by in ([0, 1, 2, 0, 1, 2], [0, 0, 1, 4], [5, 1, 1]):
            given = ids[: len(by)], torch.tensor(by)
            torch.testing.assert_close(fast(*given), net(*given))


class Started(nn.Module):
    """States of sequences, as wide as the code says, on the device of what a layer gave."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.gru = nn.Embedding(10, 4), nn.GRU(4, 4, batch_first=True)

    def forward(self, ids: Tensor, by: Tensor) -> Tensor:
        rows = pack_padded_sequence(self.emb(ids), by + 1, batch_first=True, enforce_sorted=False)
        x, sizes, _, back = self.gru(rows)[0]
        state = torch.zeros(sizes[0], 4, device=x.device) + x.mean()
        return state[back] + state.new_ones([ids.shape[0], *state.shape[1:]])


def test_a_size_that_stands_in_the_code_is_not_asked() -> None:
    """It would take the lookups and the recurrent layer, twice."""
    net, ids = Started(), torch.randint(10, (6, 5))
    first, second = torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([0, 1, 2, 0])
    fast = recast.optimize(net, example=[(ids, first), (ids[:4], second)])
    assert fast.report.to_dict()["captured"] == "whole"
    for traced in fast._runner.traced.values():
        nodes = [] if traced.asks is None else traced.asks.nodes
        assert not [n for n in nodes if n.op == "call_module"]
    for by in ([0, 1, 2, 0, 1, 2], [0, 2, 1], [2, 2]):
        given = ids[: len(by)], torch.tensor(by)
        torch.testing.assert_close(fast(*given), net(*given))


# Of histories of 9 and of 10 places, and of 6 and of 5 rows, each has one size.
SETTLED: dict[str, Callable[[Tensor], Tensor]] = {
    "the last places": lambda e: (c := e[:, -4:]).sum(1) / c.size(1),
    "the first places, in a loop": lambda e: sum(c.sigmoid() for c in e[:, :4].unbind(1)),  # type: ignore[misc]
    "with another dimension": lambda e: (c := e[..., None, :4, :]).sum(-2)[:, 0] / c.size(2),
    "some of the places": lambda e: (c := e[:, ::8]).sum(1) / c.shape[1],
    "places of a range": lambda e: e[:, torch.arange(0, e.size(1), 8)].flatten(1).shape[1] * e,
    "a multiple of 8": lambda e: (c := F.pad(e, (0, 0, 0, -e.size(1) % 8))).sum(1) / c.size(1),
    "zeros up to it": lambda e: e / torch.zeros((e.size(1) + 7) // 8 * 8).numel(),
    "joined up to it": lambda e: (
        e.mean() * torch.cat([e.new_zeros(6, -e.size(1) % 8, 4), e[[0] * 6]], 1).numel()
    ),
    "windows": lambda e: (c := F.max_pool1d(e.mT, 8, ceil_mode=True)).sum(2) / c.size(2),
    "windows of a layer": lambda e: (
        (c := nn.AvgPool1d(8, ceil_mode=True)(e.mT)).sum(2) / c.size(2)
    ),
    "a number of a float": lambda e: e / torch.ones(int(e.size(1) / 16) + 1).numel(),
    "pieces of the rows": lambda e: e / e.chunk(2)[0].shape[0],
    "the first rows": lambda e: e / len(e[:3]),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTLED)
def test_a_size_that_both_examples_come_to_is_asked_again(name: str) -> None:
    torch.manual_seed(0)
    net = Net(lambda _, e, by: SETTLED[name](e) + by.sum())
    batches = {(n, k): (torch.randint(10, (n, k)), torch.ones(n)) for n in (1, 2, 5, 6, 9)
               for k in (1, 3, 9, 10, 11, 17)}  # fmt: skip
    fast = recast.optimize(net, example=[batches[6, 9], batches[5, 10]])
    assert fast.report.to_dict()["captured"] == "whole"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fast(*batches[6, 11]), net(*batches[6, 11]))
    for batch in batches.values():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecastWarning)
            torch.testing.assert_close(fast(*batch), net(*batch))


def test_rows_that_are_padded_to_a_multiple() -> None:
    """One example of 8 rows, cut to 5: they are 8 again."""

    def padded(net: Net, e: Tensor, by: Tensor) -> Tensor:
        n = by.shape[0]
        rows = F.pad(by, (0, -n % 8))
        return e.sum(1) * rows.softmax(0)[:n, None] * rows.shape[0]

    net, batches = Net(padded), [(torch.randint(10, (n, 3)), torch.rand(n)) for n in (8, 3, 12, 24)]
    fast = recast.optimize(net, example=batches[0])
    assert fast.report.to_dict()["captured"] == "whole"
    for batch in batches:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecastWarning)
            torch.testing.assert_close(fast(*batch), net(*batch))


class Bounded(nn.Module):
    """``min``, ``max`` and ``divmod`` of the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 4)

    def forward(self, ids: Tensor) -> Tensor:
        e = self.emb(ids).sum(1)
        n = e.shape[0]
        nearest = (e @ e.mT).topk(min(6, n - 1), dim=1).values.mean(1)
        whole, rest = divmod(n, 3)
        padded = F.pad(e, (0, 0, 0, max(n, 7) - n))
        return nearest + e[: min(n, 6)].sum() * (whole + rest) + padded.mean()


def test_bounds_of_sizes_are_no_branches() -> None:
    """An example of 8 rows, cut to 5, which are on two sides of each bound."""
    net = Bounded()
    fast = recast.optimize(net, example=torch.randint(10, (8, 3)))
    assert fast.report.to_dict()["captured"] == "whole", fast.report.why
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (2, 3, 6, 7, 12, 20):
            ids = torch.randint(10, (rows, 3))
            torch.testing.assert_close(fast(ids), net(ids))


class LastPlaces(nn.Module):
    """Keeps four places of a history; a hook keeps it from being captured."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(60, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids[:, -4:])


class BehindHook(nn.Module):
    def __init__(self, mean: bool) -> None:
        super().__init__()
        self.inside, self.out, self.mean = LastPlaces(), nn.Linear(8, 1), mean
        self.inside.register_forward_hook(lambda module, args, out: out * 2)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.inside(ids)
        out: Tensor = self.out(h.sum(1) / h.size(1) if self.mean else h.mean(1))
        return out


@pytest.mark.parametrize("mean", [True, False])
def test_a_layer_that_runs_as_it_is_is_held_to_a_size_that_forward_took(mean: bool) -> None:
    model = BehindHook(mean)
    first, second = (torch.randint(60, shape) for shape in ((8, 10), (5, 9)))
    fast = recast.optimize(model, example=[first, second])
    for length in (10, 12, 4):
        torch.testing.assert_close(fast(first[:3, :length]), model(first[:3, :length]))
    short = first[:, :3]
    if mean:
        with pytest.raises(InputError, match="inside gives 3 in dimension 1, and gave 4"):
            fast(short)
    else:  # nothing was taken for a number
        torch.testing.assert_close(fast(short), model(short))
