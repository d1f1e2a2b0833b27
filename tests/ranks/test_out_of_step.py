"""Ranks that do not do the same: an error on all of them, before anything is exchanged."""

from __future__ import annotations

import copy
import inspect
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from every import MIXED, Every, batch, planned, step
from forked import forked
from harness import processes, run
from torch.nn.parallel import DistributedDataParallel

import recast
from recast.errors import RankError, UsageError
from recast.runtime.ranks import faults, faults_process

EXAMPLE = batch([5, 4], 0)[0]


def spread(model: Every) -> Any:
    return recast.optimize(copy.deepcopy(model), example=EXAMPLE, plan=planned(model, 3, MIXED))


@pytest.mark.parametrize("why", ["evaluates", "froze"])
def test_one_rank_records_no_gradients(why: str) -> None:
    model, sizes = Every(), [3, 2, 4]

    def one(rank: int) -> str:
        fast = spread(model)
        if rank == 1 and why == "froze":
            fast.requires_grad_(False)
        with (
            torch.set_grad_enabled(rank != 1 or why == "froze"),
            pytest.raises(UsageError, match="rank 1 of 3 looks rows up without gradients") as said,
        ):
            fast(*batch(sizes, rank)[0])
        fast.requires_grad_()
        step(fast, batch(sizes, rank), sum(sizes), 3)  # and the next one goes through
        return str(said.value)

    assert len(set(run(3, one))) == 1


def test_a_wrapper_of_torch_is_refused() -> None:
    model = Every()

    class Around(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *given: Any) -> Any:
            return self.inner(*given)

    def one(rank: int) -> None:
        fast = spread(model)
        with pytest.raises(UsageError, match="spread over ranks already"):
            DistributedDataParallel(fast, init_sync=False)
        assert dict(inspect.getmembers(fast))["training"]  # who looks at all of it may
        wrapped = DistributedDataParallel(Around(fast), init_sync=False)
        with pytest.raises(UsageError, match="spread over ranks already"):
            wrapped(*batch([2, 2, 2], rank)[0])

    run(3, one)


def test_a_plan_on_one_rank_alone() -> None:
    """The others would wait for the plan of rank 0, which has one and sends none."""

    def one(rank: int) -> None:
        model = Every()
        plan = planned(model, 3, MIXED) if rank == 0 else None
        with pytest.raises(UsageError, match=r"ranks? .* of 3 differ.* in: options"):
            recast.optimize(model, example=EXAMPLE, plan=plan)

    run(3, one)


def test_examples_of_unlike_sizes() -> None:
    """As when each batch is padded to its own longest sequence."""

    def one(rank: int) -> None:
        model, longest = torch.nn.Embedding(9, 4), 5 + rank
        with pytest.raises(UsageError, match=r"differ.* in: graph") as caught:
            recast.optimize(model, example=torch.zeros(6, longest, dtype=torch.long))
        assert "in every size that varies" in caught.value.tries[0]
        pair = [torch.zeros(6 - k, longest + k, dtype=torch.long) for k in range(2)]
        fast = recast.optimize(torch.nn.Embedding(9, 4), example=pair)
        assert fast(torch.zeros(2, 7 + rank, dtype=torch.long)).shape == (2, 7 + rank, 4)

    run(2, one)


def test_a_part_that_is_no_part_any_more_is_refused() -> None:
    """As fully_shard makes them: it takes the parts for copies and makes whole parameters."""
    model = Every()

    def one(rank: int) -> None:
        fast = spread(model)
        given = batch([2, 2, 2], rank)[0]
        fast(*given)
        table = next(m for m in fast.modules() if isinstance(m, torch.nn.EmbeddingBag))
        part = table.weight
        table.weight = torch.nn.Parameter(part.detach().clone())
        with pytest.raises(UsageError, match="exchanged for what is not this rank's part"):
            fast(*given)
        table.weight = part
        fast(*given)

    run(3, one)


@pytest.mark.parametrize("wrapper", ["fully_shard", "FullyShardedDataParallel"])
@pytest.mark.filterwarnings("ignore")  # of torch, about itself
@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_sharding_by_torch_is_refused_around_parts_and_taken_around_whole_models(
    wrapper: str,
) -> None:
    def wrapped(module: torch.nn.Module) -> torch.nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

        if wrapper == "FullyShardedDataParallel":
            return FullyShardedDataParallel(module, device_id=torch.device("cpu"))
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        return module

    def one(rank: int) -> None:
        ids = torch.randint(12, (6, 2), generator=torch.Generator().manual_seed(rank))
        found = []
        for fastly in (False, True):
            torch.manual_seed(0)
            model: Any = torch.nn.Sequential(torch.nn.EmbeddingBag(12, 4), torch.nn.Linear(4, 1))
            if fastly:
                model = recast.optimize(model, example=ids, world_size=1)
            model = wrapped(model)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                opt.zero_grad()
                model(ids).square().sum().backward()
                opt.step()
            found.append(model(ids).detach())
        torch.testing.assert_close(found[1], found[0])
        plain = torch.nn.Sequential(torch.nn.EmbeddingBag(12, 4), torch.nn.Linear(4, 1))
        fast = wrapped(recast.optimize(plain, example=ids, sharding="row_wise"))
        with pytest.raises(UsageError, match="exchanged for what is not this rank's part"):
            fast(ids)

    processes(2, one)


def test_a_process_that_has_ended_is_seen() -> None:
    where = faults_process.here().partition("|")[0]
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    found = faults_process._stat(child.pid)
    assert where and found is not None
    who = f"{where}|{child.pid}|{found[1]}"
    assert not faults_process.gone(who) and not faults_process.gone(faults_process.here())
    assert faults_process.gone(f"{where}|{child.pid}|{int(found[1]) + 1}"), "its number, reused"
    child.kill()
    end = time.monotonic() + 10
    while not faults_process.gone(who):  # nobody has asked for its exit code yet
        assert time.monotonic() < end
    child.communicate()
    assert faults_process.gone(who)
    assert not faults_process.gone("") and not faults_process.gone(f"elsewhere|{child.pid}|1")


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_who_died_is_known_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after three heartbeats: a launcher would have ended the others by then."""
    monkeypatch.setattr(faults, "INTERVAL", 20.0)

    def rank(r: int) -> None:
        faults.start()
        for k in range(3):
            if r == 1 and k == 2:
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGKILL)
            with faults.collective("sum"):
                dist.all_reduce(torch.zeros(3))

    first, _, third = forked(3, tmp_path, 60.0, rank, missing=1)
    for _, error, seconds in (first, third):
        assert isinstance(error, RankError) and "rank 1 died" in error.why
        assert "a batch that one rank skips, all must skip" in error.tries[0]
        assert seconds < 10


class Other(torch.nn.Module):
    """A lookup that changes its table depending on the batch."""

    def __init__(self, functional: bool, **flags: Any) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(9, 4, **({} if functional else flags))
        self.flags = flags if functional else {}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.flags:
            return torch.nn.functional.embedding(ids, self.emb.weight, **self.flags)
        return self.emb(ids)


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("flags", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_what_depends_on_one_ranks_batch_is_refused(functional: bool, flags: Any) -> None:
    """Copies of the table would diverge, or get other gradients than one process would."""
    ids = torch.randint(9, (5,))
    with pytest.raises(UsageError, match=f"{next(iter(flags))} on several ranks"):
        recast.optimize(Other(functional, **flags), example=(ids,), world_size=2)


def test_a_model_whose_tables_have_gone() -> None:
    model, sizes = Every(), [3, 2, 4]

    def one(rank: int) -> None:
        mine = copy.deepcopy(model)
        fast = recast.optimize(mine, example=EXAMPLE, plan=planned(model, 3, MIXED))
        with pytest.raises(UsageError, match="only this rank's part of its table"):
            mine(*batch(sizes, rank)[0])
        with pytest.raises(UsageError, match="is this rank's part of a table already"):
            recast.optimize(mine, example=EXAMPLE)
        step(fast, batch(sizes, rank), sum(sizes), 3)  # which the hooks do not reach
        with pytest.raises(UsageError, match=r"assign=True"):
            fast.load_state_dict(fast.state_dict(), assign=True)

    run(3, one)


def test_tables_that_were_converted() -> None:
    ids = torch.tensor([1, 2, 8])

    def one(rank: int) -> None:
        fast = recast.optimize(Other(False), example=(ids,), sharding="row_wise")
        assert fast(ids).dtype == torch.float32
        with pytest.raises(UsageError, match=r"emb\.weight is float64, and was float32"):
            fast.double()(ids)

    run(2, one)
