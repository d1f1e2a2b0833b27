"""Ids that int32 cannot hold, in a recording whose ids are int32: left out, counted, and named as
they were given.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest
import torch
from torch import Tensor

import recast
from recast.errors import IdError, RecastWarning
from recast.runtime import checked
from recast.runtime.recorded.batches import input_roles
from recast.runtime.rows.grad import RowGrad

sys.path.insert(0, str(Path(__file__).parent))
from test_narrow_rooms import ROWS, Net, batch, dtypes, graph, train, whole

# Beyond int32 at both ends, and at its ends. As int32 some of the former would be rows: 3 and 5.
BEYOND = [2**32 + 3, -(2**32) + 5, 2**31, -(2**31) - 1, 2**31 - 1, -(2**31), 2**62, -1]


def spoiled(data: list[Any]) -> tuple[list[Any], list[Any], int]:
    """``data`` with bad ids among the fixed bags and the single rows from the fifth step on; the
    same with padding instead, which has no effect either; and the number of bad ids.
    """
    bad, good, count = [], [], 0
    for k, ((many, offsets, few, one), label) in enumerate(data):
        few, one = few.clone(), one.clone()
        if k > 3:
            few[1:4, 1], one[2:5] = torch.tensor(BEYOND[:3]), torch.tensor(BEYOND[3:6])
            few[4], one[5] = torch.tensor([BEYOND[6], 2, BEYOND[7]]), BEYOND[k % 8]
            count += 9
        bad.append(((many, offsets, few, one), label))
        few, one = few.clone(), one.clone()
        few[(few < 0) | (few >= ROWS[1])], one[(one < 0) | (one >= ROWS[2])] = 2, 0
        good.append(((many, offsets, few, one), label))
    return bad, good, count


class Zeroed(Net):
    """Its padding row is zero from the start, like the row a gather gives for an id left out."""

    def __init__(self) -> None:
        super().__init__()
        assert not self.rows.weight[0].any()


@pytest.mark.parametrize("ways", [graph, whole])
@pytest.mark.parametrize("narrow", [True, False])
def test_they_are_left_out_and_counted(
    ways: Any, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not narrow:
        monkeypatch.setattr(input_roles, "method_of", lambda model, name: None)
    # Where nothing is told of the batch, bags of all lengths are forms of their own.
    bad, good, count = spoiled([batch(k * narrow) for k in range(8)])
    before = checked.bad_ids()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RecastWarning)
        found = train(ways, bad, Zeroed, plain=good)
    assert found[2:4] == [torch.int32 if narrow else torch.int64] * 2
    assert checked.bad_ids() - before == count
    (said,) = [str(w.message) for w in told if "left out" in str(w.message)]
    assert "at place 4 of lookup 1 (table 1)" in said


def test_an_error_of_a_checked_step_names_the_id_that_was_given() -> None:
    """Forward and backward by replays, before anybody asks for checks: the optimizer steps as
    always, which checks.
    """
    model, data = Net(), [batch(k) for k in range(7)]
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with emulated_gpu.serve(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "embedding_bags of 3 lookups left out", RecastWarning)
        step, recordings = graph(model, optimizer)
        for inputs, label in data[:6]:
            step(inputs, label)
        assert dtypes(recordings)[3] is torch.int32
        for number in BEYOND:
            (many, offsets, few, one), label = data[6]
            one = one.clone()
            one[3:5] = torch.tensor([number, BEYOND[0]])
            with pytest.raises(IdError, match=f"for row {number} "), ExitStack() as later:
                hook = optimizer.register_step_pre_hook(
                    lambda *_, later=later: later.enter_context(checked.checked())
                )
                later.callback(hook.remove)
                step((many, offsets, few, one), label)


def test_an_error_of_a_gradient_that_is_kept_names_the_id_too() -> None:
    """Its ids get memory of their own, where the next batch is not written."""
    model, data = Net(), [batch(k) for k in range(8)]
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with emulated_gpu.serve(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "embedding_bags of 3 lookups left out", RecastWarning)
        step, recordings = graph(model, optimizer)
        for inputs, label in data[:6]:
            step(inputs, label)
        kept = []
        for number in (BEYOND[0], BEYOND[1]):
            (many, offsets, few, one), label = data[6]
            one = one.clone()
            one[3] = number
            step((many, offsets, few, one), label)
            kept.append(model.rows.weight.grad)
        step(*data[7])
        assert dtypes(recordings)[3] is torch.int32
        for number, grad in zip(BEYOND, kept, strict=False):
            assert isinstance(grad, RowGrad) and grad.cell.pieces[0].ids.dtype is torch.int32
            with pytest.raises(IdError, match=f"for row {number} "):
                grad.merged()


def test_tables_that_int32_cannot_number_keep_their_ids() -> None:
    from recast.passes import looked_up

    def asked() -> list[Tensor]:
        found: list[Tensor] = fast.looked_up_inputs(*inputs)
        return found

    inputs = batch(0)[0]
    with emulated_gpu.serve():
        fast = recast.optimize(Net(), example=[inputs, batch(1, 4)[0]])
        assert len(asked()) == 4
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(looked_up, "MOST_ROWS", max(ROWS) - 1)
            assert asked() == []
        assert fast.double().looked_up_inputs(*inputs) == []
    assert fast.float().looked_up_inputs(*inputs) == []
