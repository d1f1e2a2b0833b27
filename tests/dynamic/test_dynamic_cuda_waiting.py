"""``recast.MinCount`` on the emulated GPU: which ids wait or are stored, what moves with them."""

from __future__ import annotations

import copy
from typing import Any

import emulated_gpu
import pytest
import torch
from dynamickit import Model, Stream, example, train, waiting

import recast
from recast.runtime.dynamic.cuda_table import CudaTable


def made(how: dict[str, Any]) -> tuple[Any, ...]:
    torch.manual_seed(3)
    stream, model = Stream(1), Model()
    opt = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.2)
    fast, opt = recast.optimize(model, opt, example=example(stream), tables=how)
    return fast, opt, stream


def table(fast: Any, name: str = "user") -> Any:
    found = recast.dynamic.tables(fast)[name]
    assert isinstance(found, CudaTable)
    return found


def waiting_how(**user: Any) -> dict[str, Any]:
    return {
        "user": recast.Dynamic(max_rows=64, seed=5, admit=recast.MinCount(3), **user),
        "items": recast.Dynamic(max_rows=64, evict="lfu", seed=5, admit=recast.MinCount(2)),
    }


@pytest.mark.parametrize(
    "user", [{"evict": "lru", "ttl": 3}, pytest.param({}, marks=pytest.mark.long)]
)
def test_ids_wait_for_min_count(user: Any) -> None:
    """The same ids are stored as on the host, at the same step, and learn the same."""
    how = waiting_how(**user)
    batches = [Stream(1).batch(1), *(Stream(k).batch(5 + k) for k in (1, 1, 2, 1, 1, 3, 1, 1))]
    host, host_opt, _ = made(how)
    with emulated_gpu.serve():
        fast, opt, _ = made(how)
        for batch in batches:
            want, got = train(host, host_opt, [batch]), train(fast, opt, [batch])
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
            for name, its in recast.dynamic.tables(host).items():
                mine = table(fast, name)
                assert set(mine.ids().tolist()) == set(its.ids().tolist())
                counted = [waiting(x) for x in (mine, its)]
                assert counted[0] == counted[1]
                assert mine.counters() == its.counters()
        assert len(table(fast)) > 3 and len(waiting(table(fast))) > 3
        for name in ("user", "items"):
            ours, theirs = (recast.dynamic.export(m.get_submodule(name)) for m in (fast, host))
            torch.testing.assert_close(ours.rows, theirs.rows, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_those_who_wait_move_with_checkpoints() -> None:
    """Saved and loaded, pickled, and with more that wait than there is room for: the last ones."""
    with emulated_gpu.serve():
        check_that_they_move()


def check_that_they_move() -> None:
    fast, opt, stream = made(waiting_how())
    train(fast, opt, [stream.batch(7) for _ in range(4)])
    again, _, _ = made(waiting_how())
    again.load_state_dict(fast.state_dict())
    copied = copy.deepcopy(fast)
    for other in (again, copied):
        assert waiting(table(other)) == waiting(table(fast)) != {}
    index = table(again).waiting.index
    many = index.capacity + 500
    seen = torch.stack([torch.arange(many) * 10**12, torch.ones(many).long(), torch.arange(many)])
    table(again).load_candidates(seen)
    kept = waiting(table(again))
    assert index.capacity * 0.75 < len(kept) <= index.capacity
    assert sum(stamp >= many // 2 for _, stamp in kept.values()) == many - many // 2
