"""``squeeze`` in batches where other sizes are 1 than in the example: of one row, of one item."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recast
from recast.errors import RecastWarning

Form = Callable[..., Tensor]


class Net(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.e, self.other = nn.Embedding(50, 8), nn.Embedding(50, 8)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, *args: Tensor) -> Tensor:
        return self.form(self, *args)


def _either(o: Tensor) -> Tensor:
    return (o.unsqueeze(0) if o.dim() == 1 else o).sum(1)


def _matching(m: Net, x: Tensor) -> Tensor:
    rows = (x[:, 0] > 24).nonzero().squeeze()
    return m.e(x).sum(1)[rows].sum(-1)


def _fm(h: Tensor) -> Tensor:
    return 0.5 * (h.sum(-2).pow(2) - h.pow(2).sum(-2)).sum(-1)


RANKED: dict[str, Form] = {
    "cat": lambda m, x: torch.cat([m.e(x[:, :1].squeeze()), m.other(x[:, 1:2].squeeze())], -1),
    "fm": lambda m, x: _fm(m.e(x).squeeze()),
    "pooling": lambda m, x: (F.softmax(m.mlp(m.e(x)).squeeze(), -1).unsqueeze(-2) @ m.e(x)),
    "gate": lambda m, x: (
        m.mlp(m.e(x)).squeeze().softmax(-1).unsqueeze(-1) * m.e(x).squeeze()
    ).sum(-2),
    "turned": lambda m, x: torch.squeeze(m.e(x)).transpose(-1, -2).mean(-1),
    "gru": lambda m, x: m.gru(m.e(x).squeeze())[0],
    "dim": lambda m, x: _either(m.e(x).sum(2, keepdim=True).squeeze()),
    "ndim": lambda m, x: (
        lambda o: o.view(1) if o.ndim == 0 else o * 2
    )(m.mlp(m.e(x).sum(1)).squeeze()),
    "len(shape)": lambda m, x: (
        lambda o: o.sum(-1) if len(o.shape) == 2 else o.sum(-1)[None]
    )(m.e(x).sum(2, keepdim=True).squeeze()),
    "one dimension": lambda m, x: m.e(x).squeeze(0).sum(-1),
    "several": lambda m, x: m.e(x).squeeze((0, 1)).sum(-1),
    "in place": lambda m, x: (m.e(x) * 1.0).squeeze_().sum(-1),
    "data": _matching,
}  # fmt: skip


def ids(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 50, (rows, length), generator=torch.Generator().manual_seed(seed))


def outcome(model: nn.Module, *args: Tensor) -> Any:
    """The result, or that there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecastWarning)
        try:
            return model(*args).detach()
        except (RuntimeError, IndexError, ValueError):
            return None


@pytest.mark.parametrize("name", RANKED)
def test_ranks_are_those_of_the_model(name: str) -> None:
    plain = Net(RANKED[name])
    fast = recast.optimize(copy.deepcopy(plain), example=[(ids(8, 6),), (ids(5, 6),)])
    batches = [ids(4, 6), ids(1, 6), ids(7, 1), ids(1, 1), ids(3, 6)]
    one = ids(6, 6)
    one[:, 0] = torch.tensor([1, 2, 40, 3, 4, 5])  # one row of "data" matches
    for batch in (*batches, one):
        wanted, got = outcome(plain, batch), outcome(fast, batch)
        assert (wanted is None) == (got is None)
        if wanted is not None:
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    "form",
    [
        lambda m, x: m.mlp(m.e(x).sum(1)).squeeze(),
        lambda m, x: torch.sigmoid(m.mlp(m.e(x).sum(1)).squeeze() + m.other(x).sum((1, 2))),
        lambda m, x: m.mlp(m.e(x).sum(1)).squeeze(1),
        lambda m, x: m.mlp(m.e(x).sum(1)).squeeze(-1).unsqueeze(1),
        lambda m, x: m.mlp(m.e(x).sum(1)).squeeze().view(-1),
        lambda m, x: m.mlp(m.e(x)).squeeze(2).softmax(1),
    ],
)
def test_a_score_that_is_squeezed_runs_on_the_graph_for_one_row(form: Form) -> None:
    """Nothing asks for its rank: warnings are errors here."""
    plain = Net(form)
    fast = recast.optimize(copy.deepcopy(plain), example=ids(8, 6))
    for rows in (4, 1):
        torch.testing.assert_close(fast(ids(rows, 6)), plain(ids(rows, 6)))


def test_what_is_squeezed_in_the_example_and_not_later() -> None:
    """An example with histories of one item."""
    plain = Net(lambda m, x, y: torch.cat([m.e(x).squeeze(), m.other(y)], -1))
    fast = recast.optimize(copy.deepcopy(plain), example=(ids(8, 1), ids(8, 3)[:, 0]))
    torch.testing.assert_close(fast(ids(4, 1), ids(4, 3)[:, 0]), plain(ids(4, 1), ids(4, 3)[:, 0]))
    plain = Net(lambda m, x: m.e(x).squeeze().sum(-1))
    fast = recast.optimize(copy.deepcopy(plain), example=ids(8, 1))
    for length in (1, 4):
        torch.testing.assert_close(outcome(fast, ids(5, length)), outcome(plain, ids(5, length)))


def test_the_warning_says_which_input_has_one() -> None:
    fast = recast.optimize(Net(RANKED["fm"]), example=ids(8, 6))
    with pytest.warns(RecastWarning, match="has 1 in dimension 0, and what forward squeezes"):
        fast(ids(1, 6))
