"""``state_dict`` of placed tables: DTensors of the global shape, or whole tensors; both load."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import processes, run
from placed import KINDS, NAMES, Model, model, place, plan, trained
from torch import nn
from torch.distributed.tensor import DTensor

from recast.errors import CheckpointError, RecastWarning, UsageError
from recast.optim import RowWiseAdagrad
from recast.runtime.ranks import shards, shards_state

_WORLDS = (2, 3, 8)


def _same(one: Any, two: Any) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def full(placed: nn.Module, **options: Any) -> Any:
    return shards_state.hook(placed).full(placed.state_dict(), **options)


@pytest.mark.parametrize("world", _WORLDS)
def test_same_names_order_and_shapes(world: int) -> None:
    whole, chosen = model(), plan(world)
    expected = whole.state_dict()

    def rank(r: int) -> None:
        own = copies[r]
        place(own, None, r, chosen)
        state = own.state_dict()
        assert list(state) == list(expected)
        for name, value in state.items():
            assert value.shape == expected[name].shape and value.dtype == expected[name].dtype
            assert isinstance(value, DTensor) == (name in NAMES and name != NAMES[3])
        assert list(own.tables[0].state_dict(prefix="p.")) == ["p.weight"]
        assert own.state_dict(keep_vars=True)[NAMES[0]] is own.tables[0].weight

    copies = [copy.deepcopy(whole) for _ in range(world)]
    run(world, rank)


@pytest.mark.parametrize("world", _WORLDS)
@pytest.mark.parametrize("kinds", [None, "row_wise", "column_wise"])
def test_full_state_dict_is_the_whole_model(world: int, kinds: str | None) -> None:
    whole, chosen = model(), plan(world, kinds)
    expected = whole.state_dict()
    copies = [copy.deepcopy(whole) for _ in range(world)]

    def rank(r: int) -> None:
        own = copies[r]
        place(own, None, r, chosen)
        assert _same(full(own, ranks="all"), expected)
        first = full(own, device="cpu")
        held = {n: v for n, v in expected.items() if r == 0 or n in first}
        assert _same(first, held)
        cut = {n for n, v in own.state_dict().items() if isinstance(v, DTensor)}
        assert r == 0 or not cut & set(first)

    run(world, rank)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_a_pickled_state_dict_is_of_one_rank_which_is_said(tmp_path: Path) -> None:
    """``if rank == 0: torch.save(model.state_dict(), file)`` loses the rows of all other ranks."""

    def rank(r: int) -> None:
        own, file = model(), tmp_path / f"{r}.pt"
        place(own, None, r, plan(2))
        said = f"parts of rank {r}, and of no other; recast.checkpoint.save"
        with pytest.warns(RecastWarning, match=said):
            torch.save(own.state_dict(), file)
        kept = {n: p.detach().clone() for n, p in own.named_parameters()}
        with torch.no_grad():
            for p in own.parameters():
                p.zero_()
        own.load_state_dict(torch.load(file, weights_only=True))  # a file of its own: all is there
        assert _same(kept, dict(own.named_parameters()))

    processes(2, rank)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tables_keep_their_dtype(dtype: torch.dtype) -> None:
    """Torch's own wrapper of shards is float32, whatever it holds."""
    whole, other = model().to(dtype), model().to(dtype)
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    expected = whole.state_dict()
    copies = [(copy.deepcopy(whole), copy.deepcopy(other)) for _ in range(3)]

    def rank(r: int) -> None:
        own, blank = copies[r]
        place(own, None, r, plan(3))
        place(blank, None, r, plan(3))
        state = own.state_dict()
        assert all(state[n].dtype == expected[n].dtype for n in expected)
        assert _same(full(own, ranks="all"), expected)
        blank.load_state_dict(state)
        assert _same(full(blank, ranks="all"), expected)

    run(3, rank)


@pytest.mark.parametrize("world", _WORLDS)
def test_load_state_dict_takes_dtensors_and_whole_tensors(world: int) -> None:
    whole, other, chosen = model(0), model(1), plan(world)
    copies = [(copy.deepcopy(whole), copy.deepcopy(other)) for _ in range(world)]

    def rank(r: int) -> None:
        own, sharded = copies[r]
        place(own, None, r, chosen)
        place(sharded, None, r, chosen)
        own.load_state_dict(sharded.state_dict())
        assert _same(full(own, ranks="all"), other.state_dict())
        own.load_state_dict(whole.state_dict())
        assert _same(full(own, ranks="all"), whole.state_dict())
        own.tables[0].load_state_dict({"weight": other.tables[0].weight})
        part = shards.of(own.tables[0].weight)
        assert part is not None
        assert torch.equal(own.tables[0].weight, part.local(other.tables[0].weight.detach()))

    run(world, rank)


@pytest.mark.parametrize("kinds", [None, "row_wise", "column_wise"])
def test_an_average_of_weights_over_steps(kinds: str | None) -> None:
    """As loops keep it: of every entry of ``state_dict()``, element by element."""
    one, two = model(0), model(1)
    copies = [(copy.deepcopy(one), copy.deepcopy(two)) for _ in range(3)]

    def averages(first: nn.Module, second: nn.Module) -> list[dict[str, Any]]:
        a, b, new = copy.deepcopy(first.state_dict()), first.state_dict(), second.state_dict()
        there = {name: torch.lerp(a[name], new[name], 0.5) for name in NAMES}
        for name, value in new.items():
            if value.is_floating_point():
                a[name].mul_(0.9).add_(value, alpha=0.1)
                b[name].copy_(0.9 * b[name] + (1 - 0.9) * value)  # the first model's own
        return [b, a, {**new, **there}]

    expected = averages(one, two)

    def rank(r: int) -> None:
        own, other = copies[r]
        for placed in (own, other):
            place(placed, None, r, plan(3, kinds))
        for found, whole in zip(averages(own, other), expected, strict=True):
            own.load_state_dict(found)
            assert _same(full(own, ranks="all"), whole)

    processes(3, rank)  # in threads torch 2.11 crashes where DTensors compute


def test_shards_are_not_computed_with_as_a_whole() -> None:
    copies = [(model(), model()) for _ in range(2)]

    def rank(r: int) -> None:
        own, other = copies[r]
        place(own, None, r, plan(2, "row_wise"))
        place(other, None, r, plan(2, "column_wise"))
        table, cut_otherwise = own.state_dict()[NAMES[0]], other.state_dict()[NAMES[0]]
        for wrong in (lambda: table.sum(), lambda: table * cut_otherwise):
            with pytest.raises(UsageError, match="element by element"):
                wrong()

    processes(2, rank)


def test_what_does_not_fit_is_refused_in_global_shapes() -> None:
    whole = model()
    copies = [(copy.deepcopy(whole), copy.deepcopy(whole)) for _ in range(2)]

    def rank(r: int) -> None:
        own, other = copies[r]
        place(own, None, r, plan(2))
        place(other, None, r, plan(2, "column_wise"))
        with pytest.raises(RuntimeError, match=r"tables.0.weight: \(11, 5\) is not the shape"):
            own.load_state_dict({**own.state_dict(), NAMES[0]: torch.zeros(11, 5)})
        with pytest.raises(RuntimeError, match="shards of another plan"):
            own.load_state_dict(other.state_dict())
        with pytest.raises(RuntimeError, match="Missing key"):
            own.load_state_dict({n: v for n, v in own.state_dict().items() if n != NAMES[0]})
        with pytest.raises(UsageError, match="full_state_dict"):
            own.state_dict()[NAMES[0]].full_tensor()

    run(2, rank)


@pytest.mark.parametrize(
    "kind,options",
    [
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.AdamW, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_optimizer_state_goes_and_comes_whole(kind: Any, options: dict[str, float]) -> None:
    world = 3
    whole, optimizer = trained(0, kind, **options)
    _, state = trained(1, kind, **options)
    pairs = [copy.deepcopy((whole, optimizer, state)) for _ in range(world)]
    wanted, expected = state.state_dict(), optimizer.state_dict()

    def rank(r: int) -> None:
        own, mine, _ = pairs[r]
        place(own, mine, r, plan(world))
        saved = mine.state_dict()
        assert saved["param_groups"] == expected["param_groups"]
        for number, kept in expected["state"].items():
            assert list(saved["state"][number]) == list(kept)
            for key, value in kept.items():
                assert saved["state"][number][key].shape == value.shape
        before = copy.deepcopy([dict(s) for s in mine.state.values()])
        mine.load_state_dict(wanted)  # whole tensors
        for number, parameter in enumerate(own.parameters()):
            part = shards.of(parameter)
            for key, value in mine.state[parameter].items():
                there = wanted["state"][number][key]
                cut = part is not None and there.dim() > 0
                assert torch.equal(value, part.local(there) if cut and part else there)
        mine.load_state_dict(saved)  # DTensors: what it had
        for parameter, held in zip(own.parameters(), before, strict=True):
            assert _same(mine.state[parameter], held)

    run(world, rank)


def test_a_value_a_row_is_a_dtensor_too() -> None:
    whole, optimizer = trained(0, RowWiseAdagrad, lr=0.1)
    pairs = [copy.deepcopy((whole, optimizer)) for _ in range(3)]
    expected = optimizer.state_dict()["state"]

    def rank(r: int) -> None:
        own, mine = pairs[r]
        place(own, mine, r, plan(3, "row_wise"))
        saved = mine.state_dict()["state"]
        assert isinstance(saved[0]["sum"], DTensor) and saved[0]["sum"].shape == (11,)
        mine.load_state_dict({**optimizer.state_dict()})
        assert mine.state[own.tables[0].weight]["sum"].shape == own.tables[0].weight.shape[:1]
        with pytest.raises(CheckpointError, match="not the shape"):
            bad = {0: {**expected[0], "sum": torch.zeros(12)}}
            mine.load_state_dict({**optimizer.state_dict(), "state": {**expected, **bad}})

    run(3, rank)


@pytest.mark.parametrize("before,after", [(2, 3), (3, 2), (2, 1), (1, 3)])
def test_torchs_own_checkpoints_take_them(before: int, after: int, tmp_path: Path) -> None:
    whole, chosen = model(), plan(before)
    made = [copy.deepcopy(whole) for _ in range(before)]
    blank = [model(1) for _ in range(after)]

    def save(r: int) -> None:
        if before > 1:
            place(made[r], None, r, chosen)
        dcp.save({"model": made[r].state_dict()}, checkpoint_id=str(tmp_path / "there"))

    def load(r: int) -> None:
        if after > 1:
            place(blank[r], None, r, plan(after, {NAMES[0]: "column_wise", NAMES[1]: "row_wise"}))
        state = blank[r].state_dict()
        dcp.load({"model": state}, checkpoint_id=str(tmp_path / "there"))
        blank[r].load_state_dict(state)
        found = full(blank[r], ranks="all")
        assert _same(found, whole.state_dict())

    run(before, save)
    run(after, load)


def test_copies_are_placed_again() -> None:
    whole = model()

    def rank(r: int) -> None:
        own = made[r]
        place(own, None, r, plan(2))
        again: Model = copy.deepcopy(own)
        shards_state.hook(own).renew(again)
        assert _same(full(again, ranks="all"), whole.state_dict())
        assert len(again.tables[0]._state_dict_hooks) == 1

    made = [copy.deepcopy(whole) for _ in range(2)]
    run(2, rank)


def test_kinds_are_what_the_model_is_cut_by() -> None:
    assert [p.sharding_type for p in plan(2).placements] == list(KINDS)
