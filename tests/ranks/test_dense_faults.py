"""A rank that is missing when dense gradients are reduced is named, and so is the collective."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # DistributedDataParallel does, in every rank: seconds
import torch.distributed as dist
from forked import forked
from torch import Tensor, nn

import recast
from recast.errors import RankError, UsageError
from recast.runtime import device
from recast.runtime.ranks import faults, shards_state

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not hasattr(os, "fork"), reason="needs gloo and fork"
)


class Dense(nn.Module):
    """Nothing but dense gradients crosses ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.top(x).squeeze(1)


def _dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hangs() -> None:
    time.sleep(60)


def _trained(r: int, end: Callable[[], None], last: int) -> None:
    """Rank 1 ends between the forward and the backward pass of step ``last``."""
    torch.manual_seed(0)
    model = Dense()
    example = torch.randn(5, 3)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    fast, optimizer = recast.optimize(model, optimizer, example=(example,))
    for step in range(last + 1):
        optimizer.zero_grad()
        loss = fast(example).square().mean()
        if r == 1 and step == last:
            time.sleep(0.3)  # the others are in the collective by then, and have seen it alive
            end()
        loss.backward()
        optimizer.step()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats are frequent, and ranks need not build and import, each by itself."""
    monkeypatch.setattr(faults, "INTERVAL", 0.1)
    device.extension()
    recast.optimize(Dense(), example=(torch.randn(5, 3),))
    assert shards_state.hook


@pytest.mark.parametrize(
    ("end", "last", "timeout", "why"),
    [
        (_dies, 1, 60.0, "rank 1 died"),
        (_hangs, 1, 5.0, "rank 1 hangs"),
        pytest.param(_dies, 0, 60.0, "rank 1 died", marks=pytest.mark.long),
        pytest.param(_dies, 3, 60.0, "rank 1 died", marks=pytest.mark.long),
    ],
)
def test_an_all_reduce_names_who_is_missing(
    end: Callable[[], None], last: int, timeout: float, why: str, tmp_path: Path
) -> None:
    found = forked(3, tmp_path, timeout, lambda r: _trained(r, end, last), missing=1)
    for value, error, _ in (found[0], found[2]):
        assert value is None
        assert isinstance(error, RankError), error
        assert error.what.startswith("all_reduce of dense gradients: ")
        assert why in str(error.why)


@pytest.mark.long
def test_a_hanging_rank_is_named_before_the_second_pass(
    tmp_path: Path,
) -> None:
    """Before it, ranks agree on the order of buckets by a broadcast from rank 0."""

    def rank(r: int) -> None:
        torch.manual_seed(0)
        fast = recast.optimize(Dense(), example=(torch.randn(5, 3),))
        fast(torch.randn(5, 3)).sum().backward()
        if r == 0:
            time.sleep(60)
        fast(torch.randn(5, 3))

    _, second, third = forked(3, tmp_path, 5.0, rank, missing=0)
    for _, error, _ in (second, third):
        assert isinstance(error, RankError), error
        assert error.what.startswith("order of dense gradients: rank 0 hangs")


@pytest.mark.parametrize("normed", [False, True])  # its statistics are gathered before, in forward
def test_what_one_rank_freezes_is_told_on_all(normed: bool, tmp_path: Path) -> None:
    """Its buckets of gradients are not those of the others, and gloo would end the process."""

    def rank(r: int) -> None:
        torch.manual_seed(0)
        last = nn.BatchNorm1d(1) if normed else nn.ReLU()
        fast = recast.optimize(nn.Sequential(*Dense().top, last), example=torch.randn(5, 3))
        for step in range(3):
            fast.get_parameter("0.bias").requires_grad_(not (r == 1 and step == 2))
            fast(torch.randn(5, 3)).sum().backward()

    found = forked(3, tmp_path, 30.0, rank)
    for _, error, seconds in found:
        assert isinstance(error, UsageError) and seconds < 25
        assert error.what == "rank 1 of 3 differs from the others in: frozen parameters"
        assert "rank 1: 0.bias" in str(error.why)


def test_training_in_another_thread_than_optimize(tmp_path: Path) -> None:
    """Ranks agree with those of this step, not with what they agreed upon before."""

    def rank(_: int) -> None:
        fast = recast.optimize(Dense(), example=torch.randn(5, 3))
        failed: list[BaseException] = []

        def train() -> None:
            try:
                fast(torch.randn(5, 3)).sum().backward()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        thread.join(20.0)
        assert not thread.is_alive() and not failed, failed

    assert [error for _, error, _ in forked(2, tmp_path, 30.0, rank)] == [None, None]
