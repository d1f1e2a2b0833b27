"""Batches cut into pieces, as ghost batch norm (TabNet) and pairs of views (SimCLR) do: how many
there are depends on the batch.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast

PIECES: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "split": lambda x: x.split(64),
    "torch.split": lambda x: torch.split(x, 64, dim=0),
    "split, from the end": lambda x: x.split(64, -2),
    "chunk": lambda x: x.chunk(-(-x.shape[0] // 64)),
    "math": lambda x: x.chunk(math.ceil(x.shape[0] / 64), 0),
    "tensor_split": lambda x: x.tensor_split(max(1, x.shape[0] // 64)),
    "of the middle": lambda x: x[2:].split(64),
}


class Ghost(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.first, self.name = nn.Embedding(50, 8), nn.Linear(8, 8), name
        self.norm, self.act, self.last = nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(self.table(ids))
        x = torch.cat([self.norm(piece) for piece in PIECES[self.name](x)])
        return self.last(self.act(x))


def batch(rows: int) -> Tensor:
    return torch.arange(rows) * 7 % 50


@pytest.mark.parametrize("name", PIECES)
def test_another_number_of_pieces_runs_the_plain_forward(name: str) -> None:
    plain = Ghost(name)
    alone = copy.deepcopy(plain)
    fast = recast.optimize(plain, example=batch(60))
    assert fast.report.to_dict()["captured"] == "whole", str(fast.report)
    for rows in (60, 50, 130, 200, 66, 33):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            ours = fast.train()(batch(rows))
        torch.testing.assert_close(ours, alone.train()(batch(rows)))
        assert rows > 64 or not said
    for (key, a), (_, b) in zip(fast.named_buffers(), alone.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=key)


@pytest.mark.parametrize("cut", ["chunk", "split"])
def test_two_views_of_each_sample(cut: str) -> None:
    class Views(Ghost):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.first(self.table(ids))
            a, b = x.chunk(2) if self.name == "chunk" else x.split(x.size(0) // 2)
            return (a * b).sum(1)

    plain = Views(cut)
    fast = recast.optimize(plain, example=[batch(12), batch(8)])
    assert fast.report.to_dict()["captured"] == "whole", str(fast.report)
    for rows in (12, 6, 30):
        torch.testing.assert_close(fast(batch(rows)), plain(batch(rows)))
    rows = 1 if cut == "chunk" else 7  # of which there are one piece, and three
    with pytest.raises(ValueError, match="to unpack") as theirs:
        plain(batch(rows))
    with pytest.warns(recast.RecastWarning), pytest.raises(ValueError) as ours:
        fast(batch(rows))
    assert str(ours.value) == str(theirs.value)


class Features(Ghost):
    def forward(self, ids: Tensor) -> Tensor:
        a, b = self.first(self.table(ids)).chunk(2, dim=1)
        return a * b.sigmoid()


class Halves(nn.Module):
    """Runs as it is, for its hook."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, given, result: None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :4], x[:, 4:]


class Named(Ghost):
    """A module of the user's with the name of torch's function."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.split = Halves()

    def forward(self, ids: Tensor) -> Tensor:
        a, b = self.split(self.first(self.table(ids)))
        return a * b.sigmoid()


@pytest.mark.parametrize("make", [Features, Named])
def test_pieces_of_features_ask_nothing(make: type[Ghost]) -> None:
    plain = make("")
    fast = recast.optimize(plain, example=batch(12))
    assert fast.report.to_dict()["captured"] == "whole", str(fast.report)
    assert all(not traced.guards for traced in fast._captured.traced.values())
    torch.testing.assert_close(fast(batch(7)), plain(batch(7)))


class Finite(torch.autograd.Function):
    """Rows without those that are not finite: of most batches, all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = x.isfinite().all(1)
        return x[ctx.kept]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.new_zeros(len(ctx.kept), grad.shape[1]).index_put((ctx.kept,), grad)


def test_pieces_of_what_a_function_of_the_users_keeps() -> None:
    """Its number of rows is taken for that of its input, and it is held to it."""

    class Kept(Ghost):
        def forward(self, ids: Tensor, x: Tensor) -> Tensor:
            x = Finite.apply(self.first(self.table(ids)) + x)
            return torch.cat([self.norm(piece) for piece in x.split(64)])

    plain = Kept("").eval()
    examples = [(batch(rows), torch.zeros(rows, 8)) for rows in (70, 80)]
    fast = recast.optimize(plain, example=examples)
    assert fast.report.to_dict()["captured"] == "whole", str(fast.report)
    x = torch.zeros(70, 8)
    torch.testing.assert_close(fast(batch(70), x), plain(batch(70), x))
    x[:9] = torch.nan  # so that there is but one piece
    with pytest.warns(recast.RecastWarning, match="does not keep the shape"):
        torch.testing.assert_close(fast(batch(70), x), plain(batch(70), x))


@pytest.mark.parametrize(
    "layer", [nn.GroupNorm(2, 8), nn.RMSNorm(8), nn.Softplus(), nn.BatchNorm1d(8)]
)
def test_pieces_behind_layers_that_keep_the_shape(layer: nn.Module) -> None:
    class Behind(Ghost):
        def forward(self, ids: Tensor) -> Tensor:
            scale = torch.FloatTensor([0.5]).to(self.first.weight.device)
            x = self.layer(self.first(self.table(ids))) * torch.sqrt(scale.to(ids.device))
            return torch.cat([piece - piece.mean(0) for piece in x.split(64)])

    plain = Behind("")
    plain.layer = layer
    fast = recast.optimize(plain.eval(), example=batch(60))
    assert fast.report.to_dict()["captured"] == "whole", str(fast.report)
    torch.testing.assert_close(fast(batch(50)), plain(batch(50)))
    with pytest.warns(recast.RecastWarning, match="goes another way"):
        torch.testing.assert_close(fast(batch(150)), plain(batch(150)))
