"""Ids outside their tables on a GPU: left out, counted and warned about, or raised when checked."""

from __future__ import annotations

import runpy
import warnings
from typing import Any

import emulated_gpu
import pytest
import torch
from emulated_bags import WHY_NOT, call, generator, ids_of
from torch import Tensor

from recast.errors import IdError, RecastWarning
from recast.runtime import checked
from recast.runtime.recorded import recording


def spoilt(bad: int) -> list[dict[str, Any]]:
    ids = ids_of(9, 4, 3)
    ids[1, 2] = ids[3, 0] = bad
    table = torch.randn(9, 8, generator=generator(abs(bad)))
    return [
        {"table": table, "ids": ids_of(9, 4, 3), "mode": "max"},
        {"table": table, "ids": ids, "mode": "mean"},
    ]


def without(bad: int, lookup: dict[str, Any]) -> Tensor:
    """The means of what is left of the bags."""
    good = [[i for i in row if i != bad] for row in lookup["ids"].tolist()]
    return torch.stack([lookup["table"][row].mean(0) for row in good])


@pytest.mark.parametrize("bad", [9, -1, 2**40])
def test_bad_ids_are_left_out_and_the_next_call_warns_once(bad: int) -> None:
    lookups, before = spoilt(bad), checked.bad_ids()
    with emulated_gpu.serve():
        out = call(lookups)[1]
        torch.testing.assert_close(out, without(bad, lookups[1]))
        assert checked.bad_ids() == before + 2
        with pytest.warns(RecastWarning) as warned:
            call(lookups)
        assert str(warned[0].message) == (
            "embedding_bags of 2 lookups left out 2 ids outside the table, first at place 5 of"
            " lookup 1 (table 1); recast.checked() or RECAST_CHECKED=1 raises where it happens"
        )
        call(lookups)  # warnings are errors here
    assert checked.bad_ids() == before + 6
    assert checked.since(before)[0].startswith("6 ids and offsets outside their tables")
    assert not checked.since(before + 6)


def test_wrong_offsets_are_cut_and_the_next_call_warns(emulated: emulated_gpu.Emulated) -> None:
    table, ids = torch.randn(9, 8), ids_of(9, 10)
    lookups = [{"table": table, "ids": ids, "offsets": torch.tensor([0, 4, 99])}]
    (out,) = call(lookups)
    torch.testing.assert_close(out, torch.stack([table[ids[:4]].sum(0), table[ids[4:]].sum(0),
                                                 torch.zeros(8)]))  # fmt: skip
    with pytest.warns(RecastWarning, match="2 bags of wrong offsets, first at place 1 of lookup 0"):
        call(lookups)


def test_gradients_leave_bad_ids_out_too(emulated: emulated_gpu.Emulated) -> None:
    g = generator(6)
    ids = ids_of(9, 4, 3)
    ids[1, 2] = 9
    weights = torch.randn(4, 3, generator=g, requires_grad=True)
    table = torch.randn(9, 8, generator=g, requires_grad=True)
    lookups = [
        {"table": table, "ids": ids, "weights": weights},
        {"table": table, "ids": ids, "mode": "max"},
    ]
    outs = call(lookups)
    upstream = [torch.randn(o.shape, generator=g) for o in outs]
    graphed = torch.autograd.grad(outs, (table, weights), upstream, create_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecastWarning)
        plain = torch.autograd.grad(call(lookups), weights, upstream)[0]
    # The same with a table that has a row of nothing where the ids point to.
    padded = torch.cat([table, torch.full((1, 8), -1e9)]).detach().requires_grad_()
    safe = torch.nn.functional.embedding(ids, padded)
    zero = safe.masked_fill((ids == 9).unsqueeze(2), 0)
    total = (zero * weights.unsqueeze(2)).sum(1), safe.amax(1)
    expected = torch.autograd.grad(total, (padded, weights), upstream)
    torch.testing.assert_close(graphed[0], expected[0][:9])
    torch.testing.assert_close(graphed[1], expected[1])
    torch.testing.assert_close(plain, expected[1])


def test_checked_mode_writes_nothing_and_counts_nothing(emulated: emulated_gpu.Emulated) -> None:
    lookups, before = spoilt(11), checked.bad_ids()
    with checked.checked():
        with pytest.raises(IdError, match=r"id 11 of lookup 1 \(table 1\) is outside its 9 rows"):
            call(lookups)
        with checked.checked(False):
            assert not checked.is_checked()
    assert not checked.is_checked()
    call([lookups[0]])
    assert checked.bad_ids() == before


def test_before_each_replay_what_was_counted_is_told(emulated: emulated_gpu.Emulated) -> None:
    with recording.recording() as recorded:
        call([*spoilt(10), *spoilt(10)])
    with pytest.warns(RecastWarning, match="left out 4 ids outside the table, first at place 5"):
        recorded.prepare()


@pytest.mark.gpu
@pytest.mark.skipif(WHY_NOT is not None, reason=f"GPU: {WHY_NOT}")
def test_a_gpu_counts_in_memory_of_the_host() -> None:
    lookups, before = spoilt(-7), checked.bad_ids()
    on = [{key: x.cuda() if isinstance(x, Tensor) else x for key, x in y.items()} for y in lookups]
    first, second = call(on)
    torch.cuda.synchronize()
    assert checked.bad_ids() == before + 2
    table, rows = lookups[0]["table"], lookups[0]["ids"]
    torch.testing.assert_close(first.cpu(), table[rows].amax(1))
    torch.testing.assert_close(second.cpu(), without(-7, lookups[1]))
    with pytest.warns(RecastWarning, match="2 ids outside the table, first at place 5 of lookup 1"):
        call(on)
    with checked.checked(), pytest.raises(IdError, match=r"id -7 of lookup 1 \(table 1\)"):
        call(on)


def test_counts_outlive_their_site() -> None:
    before = checked.bad_ids()
    counts = checked.Counts(torch.tensor([3, ~(1 << 40 | 7), 2, ~9]), "a site", (4, 5))
    assert checked.bad_ids() == before + 5
    assert counts.sentence().startswith(
        "a site left out 3 ids outside the table, first at place 7 of lookup 1 (table 5) and 2 bags"
        " of wrong offsets, first at place 9 of lookup 0 (table 4);"
    )
    del counts
    assert checked.bad_ids() == before + 5


@pytest.mark.parametrize("value, on", [("1", True), ("0", False), ("", False)])
def test_checked_by_the_environment(monkeypatch: pytest.MonkeyPatch, value: str, on: bool) -> None:
    monkeypatch.setenv("RECAST_CHECKED", value)
    assert runpy.run_path(checked.__file__)["is_checked"]() is on
