"""Optimizers that ``optimize`` was not given: they train parts of tables all the same."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from every import COLUMNS, MIXED, Every, after, batch, planned, step
from harness import run
from torch import Tensor
from torch.distributed.tensor import DTensor

import recast
from recast.errors import UsageError
from recast.runtime.ranks import shards

SIZES = [4, 3]
EXAMPLE = batch([5, 4], 0)[0]


def adagrad(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def trained(model: Any, optimizer: Any, steps: range, rank: int | None = None) -> None:
    for k in steps:
        optimizer.zero_grad()
        ranks = 1 if rank is None else len(SIZES)
        step(model, batch(SIZES, rank, seed=k), sum(SIZES), ranks)
        optimizer.step()


def spread(model: Every, kinds: Any = MIXED) -> Any:
    return recast.optimize(copy.deepcopy(model), example=EXAMPLE, plan=planned(model, 2, kinds))


def same(fast: Any, optimizer: Any, wanted: dict[str, Tensor]) -> None:
    parts = {n: shards.of(p) for n, p in fast.named_parameters()}
    for key, value in after(fast, optimizer).items():
        own = parts[key.partition(" [")[0]]
        whole = wanted[key]
        part = whole if own is None or not whole.dim() else own.local(whole)
        torch.testing.assert_close(value, part, rtol=1e-5, atol=1e-6)


def test_whole_state_loaded_before_the_first_step() -> None:
    torch.manual_seed(0)
    model = Every()
    plain, start = copy.deepcopy(model), copy.deepcopy(model)
    first = adagrad(plain)
    trained(plain, first, range(2))
    weights, state = copy.deepcopy(plain.state_dict()), copy.deepcopy(first.state_dict())
    trained(plain, first, range(2, 4))
    wanted = after(plain, first)

    def one(rank: int) -> None:
        fast = spread(start)
        optimizer = adagrad(fast)
        fast.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(state))  # ranks are threads, and torch copies none
        trained(fast, optimizer, range(2, 4), rank)
        same(fast, optimizer, wanted)
        number = [n for n, _ in fast.named_parameters()].index("ragged.weight")
        saved = optimizer.state_dict()["state"][number]["sum"]
        assert isinstance(saved, DTensor) and saved.shape == (17, 6), "it says whole what it has"

    run(2, one)


def test_a_checkpoint_of_one_and_into_another(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Every()
    plain = copy.deepcopy(model)
    first = adagrad(plain)
    trained(plain, first, range(3))
    wanted = after(plain, first)

    def one(rank: int) -> None:
        fast = spread(model)
        optimizer = adagrad(fast)
        trained(fast, optimizer, range(2), rank)
        recast.checkpoint.save(tmp_path / "c", fast, optimizer)
        other = spread(Every(), COLUMNS)
        new = adagrad(other)
        recast.checkpoint.load(tmp_path / "c", other, new)
        trained(other, new, range(2, 3), rank)
        same(other, new, wanted)

    run(2, one)


@pytest.mark.parametrize("name", ["RowWiseAdagrad", "Adafactor"])
def test_what_cannot_step_parts_is_refused_as_by_optimize(name: str) -> None:
    model = Every()
    kind = getattr(torch.optim, name, None) or recast.optim.RowWiseAdagrad

    def one(rank: int) -> None:
        fast = spread(model, COLUMNS)
        before = {n: p.detach().clone() for n, p in fast.named_parameters()}
        with pytest.raises(UsageError, match=f"{name} cannot step"):
            trained(fast, kind(fast.parameters()), range(1), rank)
        assert all(torch.equal(p, before[n]) for n, p in fast.named_parameters())

    run(2, one)


def test_state_by_name() -> None:
    """As ``torch.distributed.checkpoint.state_dict`` loads it: names instead of numbers."""
    torch.manual_seed(0)
    model = Every()
    plain = copy.deepcopy(model)
    first = adagrad(plain)
    trained(plain, first, range(3))
    wanted = after(plain, first)

    def one(rank: int) -> None:
        fast = spread(model)
        optimizer, other = adagrad(fast), adagrad(fast)
        trained(fast, optimizer, range(2), rank)
        saved = optimizer.state_dict()
        names = dict(enumerate(n for n, _ in fast.named_parameters()))
        groups = [{**g, "params": [names[k] for k in g["params"]]} for g in saved["param_groups"]]
        named = {"state": {names[k]: v for k, v in saved["state"].items()}, "param_groups": groups}
        optimizer.load_state_dict(named)
        other.load_state_dict(named)  # it has not stepped yet
        trained(fast, other, range(2, 3), rank)
        same(fast, other, wanted)

    run(2, one)


def test_an_optimizer_that_gives_parameters_of_one_rank_to_all_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit.script, by torch
        from torch.distributed.optim import ZeroRedundancyOptimizer

    model = Every()

    def one(rank: int) -> None:
        fast = spread(model, COLUMNS)
        optimizer = ZeroRedundancyOptimizer(fast.parameters(), torch.optim.Adagrad, lr=0.1)
        before = {n: p.detach().clone() for n, p in fast.named_parameters()}
        with pytest.raises(UsageError, match="ZeroRedundancyOptimizer cannot step"):
            trained(fast, optimizer, range(1), rank)
        assert all(torch.equal(p, before[n]) for n, p in fast.named_parameters())

    run(2, one)
