"""A rank that dies, hangs or differs is named and ends the others; a restart goes on as before."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import forked
from harness import run
from torch import Tensor, nn

import recast
from recast.errors import RankError, UsageError
from recast.runtime.plan import Table, explicit
from recast.runtime.ranks import faults, faults_agree

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not hasattr(os, "fork"), reason="needs gloo and fork"
)


def _dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hangs() -> None:
    time.sleep(60)


def _raises() -> None:
    try:
        raise ValueError("a bad batch\nof many lines")
    except ValueError as error:  # as Python does at the end of a program
        sys.excepthook(type(error), error, None)
        time.sleep(60)


@pytest.mark.long
@pytest.mark.parametrize(
    "end,why,within",
    [
        (_dies, r"rank 1 died, last seen outside of any collective \(after [12] of them\)", 2.5),
        (_hangs, r"rank 1 hangs, outside of any collective \(after 2 of them\), for", 6.0),
        (_raises, "rank 1 ended by ValueError: a bad batch", 6.0),
    ],
)
def test_who_is_missing_is_named(
    end: Any, why: str, within: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "INTERVAL", 0.1)

    def rank(r: int) -> Any:
        faults.start()
        for step in range(4):
            if r == 1 and step == 2:
                time.sleep(0.3)
                end()
            with faults.collective("sum of squares"):
                dist.all_reduce(torch.zeros(3))

    first, _, third = forked(3, tmp_path, 3.0, rank, missing=1)
    for value, error, seconds in (first, third):
        assert value is None and isinstance(error, RankError)
        assert error.what.startswith("sum of squares: ") and "of 3, collective 3" in str(
            error.where
        )
        # the second to notice may have it from the first
        assert re.search(why, error.why)
        assert seconds < within + 3


@pytest.mark.long
def test_an_error_of_nobody_missing_stays_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "INTERVAL", 0.1)

    def rank(r: int) -> str:
        faults.start()
        first = faults._WATCH
        faults.start()
        assert first is not None and faults._WATCH is first
        with faults.collective("sum"):
            dist.all_reduce(torch.zeros(3))
        with pytest.raises(RuntimeError, match="a mistake of mine"), faults.collective("sum"):
            raise RuntimeError("a mistake of mine")
        with faults.collective("sum"):
            dist.all_reduce(torch.zeros(3))
        return f"{first.heartbeat.inside}{first.heartbeat.count}"

    assert [value for value, _, _ in forked(2, tmp_path, 10.0, rank)] == ["3", "3"]


def test_ranks_that_differ_are_told_at_once() -> None:
    def rank(r: int) -> None:
        plan = '{\n "ranks": 4,\n "tables": 3\n}'
        odd = plan.replace("3", "5") if r == 2 else plan
        faults_agree.agree({"plan": plan, "graph": "g"})
        with pytest.raises(UsageError) as raised:
            faults_agree.agree({"graph": "g", "plan": odd, "model": "m"})
        assert raised.value.what == "rank 2 of 4 differs from the others in: plan"
        assert raised.value.why == 'plan, line 3: rank 0: "tables": 3; rank 2: "tables": 5'

    run(4, rank)


def test_a_rank_that_does_not_come_is_named() -> None:
    def rank(r: int) -> None:
        if r == 1:
            return
        with pytest.raises(RankError, match=r"rank 1 did not come to .* within 0 s"):
            faults_agree.agree({"plan": ""}, timeout=0.3)

    run(3, rank)


class Model(nn.Module):
    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(50, dim) for _ in range(2))
        self.top = nn.Sequential(nn.Linear(2 * dim, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids: Tensor) -> Tensor:
        rows = [table(ids[:, k]) for k, table in enumerate(self.tables)]
        out: Tensor = self.top(torch.cat(rows, 1))
        return out


TABLES = [Table(f"tables.{k}.weight", 50, 4) for k in range(2)]


def _batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(50, (6, 2, 3), generator=made), torch.randn(6, 1, generator=made)


def test_optimize_compares_ranks() -> None:
    def rank(r: int) -> None:
        torch.manual_seed(0)
        model = Model(4 if r == 0 else 5)
        with pytest.raises(UsageError, match="rank 1 of 2 differs from the others in: model"):
            recast.optimize(model, example=_batch(0, 0)[0])
        kind = "row_wise" if r == 0 else "table_wise"
        with pytest.raises(UsageError, match="rank 1 of 2 differs from the others in: options"):
            recast.optimize(Model(), example=_batch(0, 0)[0], sharding=kind)
        plan = explicit(TABLES, 2, kind)
        with pytest.raises(UsageError, match="rank 1 of 2 differs from the others in: plan"):
            recast.optimize(Model(), example=_batch(0, 0)[0], plan=plan)

    run(2, rank)


@pytest.mark.long
def test_a_restart_gives_the_losses_of_an_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is killed in step 5; the last checkpoint is that of step 4."""
    monkeypatch.setattr(faults, "INTERVAL", 0.1)
    plan = explicit(TABLES, 2, {"tables.0.weight": "table_wise", "tables.1.weight": "row_wise"})
    torch.optim.Adagrad(Model().parameters())  # what the forked would import, each for itself
    recast.checkpoint.save(tmp_path / "warm", Model())
    from recast.runtime import device

    device.extension()
    steps = 8

    def train(r: int, path: Path, dies: bool) -> dict[int, float]:
        torch.manual_seed(0)
        model = Model()
        optimizer: Any = torch.optim.Adagrad(model.parameters(), lr=0.1)
        fast, optimizer = recast.optimize(model, optimizer, example=_batch(0, 0)[0], plan=plan)
        first = 0
        if (path / "step-0000000002").exists() or (path / "step-0000000004").exists():
            first = recast.checkpoint.load(path, fast, optimizer).step or 0
        losses: dict[int, float] = {}
        for step in range(first, steps):
            ids, label = _batch(step, r)
            if dies and r == 1 and step == 5:
                _dies()
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(fast(ids), label)
            loss.backward()
            optimizer.step()
            losses[step] = loss.item()
            if step % 2:
                recast.checkpoint.save(path, fast, optimizer, step=step + 1, keep=1)
        return losses

    whole = forked(2, tmp_path, 30.0, lambda r: train(r, tmp_path / "whole", False))
    broken = forked(2, tmp_path, 30.0, lambda r: train(r, tmp_path / "broken", True), missing=1)
    assert broken[1] is None and isinstance(broken[0][1], RankError)
    assert "rank 1 died" in broken[0][1].what
    assert [p.name for p in (tmp_path / "broken").iterdir()] == ["step-0000000004"]
    again = forked(2, tmp_path, 30.0, lambda r: train(r, tmp_path / "broken", False))
    for r in range(2):
        assert again[r][1] is None and whole[r][1] is None
        assert again[r][0] == {step: whole[r][0][step] for step in range(4, steps)}
        assert len({*whole[r][0].values()}) == steps


@pytest.mark.long
def test_a_rank_killed_while_all_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "INTERVAL", 0.1)
    from recast.runtime.checkpoint import blocks as checkpoint_blocks

    def rank(r: int) -> None:
        faults.start()
        torch.manual_seed(0)
        recast.checkpoint.save(tmp_path / "c", Model(), step=1)
        if r == 1:
            checkpoint_blocks.write = lambda *_: _dies()
        recast.checkpoint.save(tmp_path / "c", Model(), step=2)

    first, second = forked(2, tmp_path, 20.0, rank, missing=1)
    assert second is None and isinstance(first[1], RankError)
    assert first[1].what.startswith("checkpoint: rank 1 died")
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith("c")] == ["c"]
    assert recast.checkpoint.load(tmp_path / "c", Model()).step == 1
