"""``recast.checkpoint`` with tables below float32, in one process."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.errors import CheckpointError, RecastWarning
from recast.runtime.embedding import precision as formats


class Pair(nn.Module):
    """One table under two names, and one beside it."""

    def __init__(self, rows: int = 20) -> None:
        super().__init__()
        self.one, self.two, self.day = (nn.Embedding(n, 8) for n in (rows, rows, 7))
        self.two.weight = self.one.weight
        self.top = nn.Linear(24, 1)

    def forward(self, x: Tensor, y: Tensor, day: Tensor) -> Tensor:
        out: Tensor = self.top(torch.cat([self.one(x), self.two(y), self.day(day)], 1))
        return out


BATCH = (torch.arange(9), torch.arange(9).flip(0), torch.arange(9) % 7)


def test_a_table_of_two_names_gets_the_rows_that_were_saved(tmp_path: Path) -> None:
    saved = Pair()
    recast.checkpoint.save(tmp_path / "c", saved)
    fast = recast.optimize(Pair().eval(), example=BATCH, precision="int8")
    recast.checkpoint.load(tmp_path / "c", fast)
    packed = formats.pack(saved.one.weight, "int8")
    state = fast.state_dict()
    for name in ("one.weight", "two.weight"):
        assert torch.equal(state[name], formats.unpack(packed, "int8", 8))


def test_a_table_of_other_rows_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    recast.checkpoint.save(tmp_path / "c", Pair())
    fast = recast.optimize(Pair(23).eval(), example=BATCH, precision="int8")
    before = copy.deepcopy(fast.state_dict())
    with pytest.raises(CheckpointError, match=r"one\.weight is \(20, 8\) there and \(23, 8\) here"):
        recast.checkpoint.load(tmp_path / "c", fast)
    assert all(torch.equal(value, before[name]) for name, value in fast.state_dict().items())


def test_a_table_that_is_assigned_is_no_longer_stored_which_is_said() -> None:
    model = Pair().eval()
    fast = recast.optimize(model, example=BATCH, precision="int8")
    fast.load_state_dict(model.state_dict(), assign=True)
    with pytest.warns(RecastWarning, match=r"the stored form of \w+\.weight that the graph reads"):
        assert torch.equal(fast(*BATCH), model(*BATCH))
