"""Models on meta: the same values on any number of ranks, and no whole table on any of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import run
from placed import NAMES, Model, model, plan
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recast.errors import UsageError
from recast.runtime.plan import Plan, Table, explicit
from recast.runtime.ranks import initial_rows, shards, shards_state
from recast.runtime.ranks.materialise import materialise, on_meta
from recast.runtime.ranks.shards import ShardedTable


class Largest(TorchDispatchMode):
    """The most elements that any one operation allocated."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = (
            t.untyped_storage().nbytes() // t.itemsize
            for t in tree_leaves(out)
            if isinstance(t, Tensor) and not t.is_meta
        )
        self.elements = max(self.elements, *sizes, 0)
        return out


def meta() -> Model:
    with torch.device("meta"):
        made = Model()
    made.tables[1].padding_idx = 2
    return made


def cut(chosen: Plan, rank: int) -> dict[str, ShardedTable]:
    return {
        t.name: ShardedTable(t, chosen.placement(t.name), rank, chosen.world_size)
        for t in chosen.tables
    }


@pytest.mark.parametrize("world", [2, 3, 8])
def test_values_do_not_depend_on_placement(world: int) -> None:
    one = meta()
    materialise(one, {}, seed=5)
    assert not on_meta(one)
    whole = one.state_dict()
    assert torch.equal(
        whole[NAMES[0]], initial_rows.rows(torch.arange(11), 4, seed=5, name=NAMES[0])
    )
    assert not whole[NAMES[1]][2].any() and whole[NAMES[1]][[0, 1, 3]].all()
    assert one.norm.running_var.eq(1).all() and one.top.weight.std() > 0
    copies = [copy.deepcopy(meta()) for _ in range(world)]
    held = [list(c.parameters()) for c in copies]

    def rank(r: int) -> dict[str, Tensor]:
        own = copies[r]
        optimizer = torch.optim.Adagrad(own.parameters(), lr=0.1, initial_accumulator_value=0.5)
        materialise(own, cut(plan(world), r), seed=5 + r)  # rank 0's
        shards.place_state(optimizer)
        assert all(a is b for a, b in zip(own.parameters(), held[r], strict=True))
        for parameter in own.parameters():
            state = optimizer.state[parameter]["sum"]
            assert state.shape == parameter.shape and state.eq(0.5).all()
        found: dict[str, Tensor] = shards_state.hook(own).full(own.state_dict(), ranks="all")
        return found

    results = run(world, rank)
    for found in results:
        for name in whole:
            # threads share one generator: dense values are some rank 0's, and the same everywhere
            expected = whole[name] if name in NAMES else results[0][name]
            assert torch.equal(found[name], expected)


def test_no_rank_makes_a_whole_table() -> None:
    world, rows, dim = 4, 4096, 16
    chosen = explicit(
        [Table("0.weight", rows, dim), Table("1.weight", rows, dim)],
        world,
        {"0.weight": "row_wise", "1.weight": "column_wise"},
    )
    with torch.device("meta"):
        copies = [
            nn.Sequential(nn.EmbeddingBag(rows, dim), nn.EmbeddingBag(rows, dim))
            for _ in range(world)
        ]

    def rank(r: int) -> int:
        with Largest() as seen:
            materialise(copies[r], cut(chosen, r), seed=1)
        return seen.elements

    assert max(run(world, rank)) == rows * dim // world
    with Largest() as seen, torch.device("meta"):
        whole = nn.EmbeddingBag(rows, dim)
        materialise(whole, {}, seed=1)
    assert seen.elements >= rows * dim  # what the test would see


def test_the_users_own_rows() -> None:
    def own(ids: Tensor) -> Tensor:
        return ids[:, None] * 10.0 + torch.arange(4)

    one = meta()
    one.tables[0].initial_rows = own
    part = cut(plan(2, "column_wise"), 1)
    materialise(one, {NAMES[0]: part[NAMES[0]]}, seed=0)
    assert torch.equal(one.tables[0].weight, own(torch.arange(11))[:, 2:])
    bad = meta()
    bad.tables[0].initial_rows = lambda ids: torch.zeros(1, 4)
    with pytest.raises(UsageError, match=r"gave \(1, 4\), not \(11, 4\)"):
        materialise(bad, {}, seed=0)


def test_what_nobody_can_make_is_named() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    class Xavier(nn.Embedding):
        def reset_parameters(self) -> None:
            nn.init.xavier_normal_(self.weight)

    with torch.device("meta"):
        made = nn.Sequential(nn.Linear(3, 3), Own())
        table = nn.Sequential(Xavier(3, 4))
    with pytest.raises(UsageError, match=r"scale of 1 \(Own\) has no first value"):
        materialise(made, {}, seed=0)
    assert made[0].weight.is_meta  # nothing was begun
    with pytest.raises(UsageError, match=r"0\.weight has no first value"):
        materialise(table, {}, seed=0)


def test_a_real_model_is_left_alone() -> None:
    made = model()
    before = {n: t.data_ptr() for n, t in made.state_dict().items()}
    materialise(made, {}, seed=0)
    assert before == {n: t.data_ptr() for n, t in made.state_dict().items()}
