"""No matrix of a table's size is ever allocated on the fused path."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from row_lookup import Bags, is_rows, ours
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.profiler import ProfilerActivity, profile

from recast.optim import RowWiseAdagrad
from recast.runtime.rows.optimizer import attach

ROWS, WIDTH, BATCH, LENGTH = 100_000, 16, 64, 3
TABLE = ROWS * WIDTH * 4  # bytes


def largest_allocation(run: Callable[[], object]) -> int:
    """The largest single allocation of ``run()`` from torch's CPU allocator, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as trace:
        run()
    results = trace.profiler.kineto_results  # type: ignore[union-attr]
    sizes = [event.nbytes() for event in results.events() if event.name() == "[memory]"]
    assert sizes, "the profiler saw no allocation at all"
    return max(sizes)


def tables() -> list[Parameter]:
    torch.manual_seed(0)
    return [Parameter(torch.randn(ROWS, WIDTH)) for _ in range(3)]


def backward(weights: list[Parameter]) -> None:
    ids = [torch.randint(0, ROWS, (BATCH, LENGTH)) for _ in weights]
    out = Bags.apply(ids, *weights)
    out.backward(torch.randn_like(out))


def test_the_measure_sees_a_dense_gradient() -> None:
    weights = tables()
    backward(weights)
    assert largest_allocation(lambda: weights[0].grad.abs()) >= TABLE
    plain = Parameter(torch.randn(ROWS, WIDTH))
    out = plain[torch.arange(5)]
    assert largest_allocation(lambda: out.backward(torch.randn(5, WIDTH))) >= TABLE


def high_water(run: Callable[[], object]) -> int:
    """How far this process's memory rises during ``run()``, in bytes; the kernels' own included."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def kib(name: str) -> int:
        return next(int(s.split()[1]) for s in status.read_text().splitlines() if name in s)

    before = kib("VmRSS:")
    reset.write_text("5")
    run()
    return 1024 * (kib("VmHWM:") - before)


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="this system does not tell"
)
def test_of_the_whole_process() -> None:
    """A step takes no memory that grows with the rows of a table, the C++ kernels included."""
    rows = 1_000_000
    weight = Parameter(torch.zeros(rows, WIDTH))
    optimizer = Adagrad([weight], lr=0.1)
    attach(optimizer)

    def step(how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        out = how(torch.randint(0, rows, (BATCH,)))
        out.backward(torch.randn(BATCH, WIDTH))
        optimizer.step()
        optimizer.zero_grad()

    step(lambda ids: ours(weight, ids))
    table = rows * WIDTH * 4
    assert high_water(lambda: step(lambda ids: ours(weight, ids))) < table // 8
    assert high_water(lambda: step(lambda ids: weight[ids])) > table // 2, "a dense gradient shows"


FLAGS: list[dict[str, Any]] = [{}, {"foreach": True}, {"fused": True}]
WAYS = [(kind, how) for kind in (SGD, Adagrad, Adam) for how in FLAGS]
WAYS += [(AdamW, {"weight_decay": 0.1}), (RowWiseAdagrad, {})]


@pytest.mark.parametrize(("kind", "how"), WAYS)
def test_training(kind: type, how: dict[str, Any]) -> None:
    weights = tables()
    optimizer = kind(weights, lr=0.1, **how)
    attach(optimizer, lazy=True)

    def step() -> None:
        for _ in range(3):
            backward(weights)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        backward(weights)
        optimizer.step()
        optimizer.zero_grad()

    if kind not in (SGD, Adagrad):
        step()  # their state is made now, of the table's size
    assert largest_allocation(step) < TABLE // 50


MOMENTS = [
    (Adam, {}), (Adam, {"weight_decay": 0.1}), (SGD, {"momentum": 0.9}),
    (SGD, {"momentum": 0.9, "weight_decay": 0.1}), (RMSprop, {}), (RMSprop, {"momentum": 0.9}),
]  # fmt: skip


@pytest.mark.parametrize("kernel", ["kernel"], indirect=True)
@pytest.mark.parametrize(("kind", "how"), MOMENTS)
def test_steps_of_all_rows(kind: type, how: dict[str, Any]) -> None:
    weights = tables()
    optimizer = kind(weights, lr=0.1, **how)
    attach(optimizer)

    def step() -> None:
        backward(weights)
        optimizer.step()
        optimizer.zero_grad()

    step()
    assert largest_allocation(step) < TABLE // 50


def test_loss_scaling() -> None:
    weights = tables()
    optimizer = torch.optim.Adagrad(weights, lr=0.1, eps=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step() -> None:
        ids = torch.randint(0, ROWS, (BATCH,))
        scaler.scale((ours(weights[0], ids) * torch.randn(BATCH, WIDTH)).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    assert largest_allocation(step) < TABLE // 50


def test_accumulation_is_bounded_by_the_table() -> None:
    weight = Parameter(torch.randn(500, WIDTH))
    for _ in range(100):
        ids = torch.randint(0, 500, (BATCH,))
        ours(weight, ids).backward(torch.randn(BATCH, WIDTH))
    assert is_rows(weight.grad)
    held = sum(piece.held() for piece in weight.grad.cell.pieces)
    assert held < 2 * weight.numel() * 4
