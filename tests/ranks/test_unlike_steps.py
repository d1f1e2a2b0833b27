"""Ranks that step differently are told so, all of them, and which rank differs in what."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import processes, run
from torch import Tensor, nn

import recast
from recast.errors import UsageError
from recast.runtime.ranks import dense_buckets, step_record
from recast.runtime.ranks.step_record import Told


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(30, 4, mode="sum")
        self.other = nn.EmbeddingBag(20, 4, mode="sum")
        self.top = nn.Linear(8, 1)
        g = torch.Generator().manual_seed(0)  # ranks that are threads share the other one
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.rand(p.shape, generator=g) - 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(torch.cat([self.bags(ids), self.other(ids % 20)], 1)).squeeze(1)


def batch(rank: int, step: int) -> Tensor:
    g = torch.Generator().manual_seed(10 * rank + step)
    return torch.randint(30, (4, 3), generator=g)


ODD = 1  # the rank that does something else, at step 1
Change = Callable[[Any, Any], bool]  # of model and optimizer, before step(); whether to step


def trained(rank: int, change: Change | None, sharding: str, steps: int = 6) -> str | None:
    """The error of a training loop; None if there is none."""
    net = Net()
    opt: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    fast, opt = recast.optimize(net, opt, example=batch(0, 0), sharding=sharding)
    try:
        for step in range(steps):
            odd = rank == ODD and step == 1 and change is not None
            opt.zero_grad()
            (fast(batch(rank, step)) - 1).square().mean().backward()
            if not odd or change(fast, opt):
                opt.step()
    except UsageError as error:
        return str(error)
    return None


def _twice(fast: Any, opt: Any) -> bool:
    opt.step()
    return True


def _faster(fast: Any, opt: Any) -> bool:
    opt.param_groups[0]["lr"] = 0.2
    return True


def _written(fast: Any, opt: Any) -> bool:
    with torch.no_grad():
        fast.top.weight.mul_(1.01)
    return True


def _spoiled(fast: Any, opt: Any) -> bool:
    fast.top.weight.grad.fill_(torch.nan)
    return True


STEPS = "rank 1 of 3 differs from the others in: optimizer steps"
LR = "SGD: lr=0.1 "


@pytest.mark.parametrize("sharding", ["row_wise", "data_parallel"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda *_: False, (STEPS, f"rank 0: {LR}", "rank 1: none")),
        (_twice, (STEPS, "line 2: rank 0: (ends); rank 1: SGD: lr=0.1 ")),
        (_faster, (STEPS, f"rank 0: {LR}", "rank 1: SGD: lr=0.2 ")),
        (_written, ("differs from the others in: values of dense parameters", "top.weight has")),
        (_spoiled, ("differs from the others in: values of dense parameters", "norm of inf")),
    ],
)
def test_all_ranks_are_told(change: Change, said: tuple[str, ...], sharding: str) -> None:
    found = run(3, trained, change, sharding)
    assert len(set(found)) == 1 and found[0] is not None
    for text in said:
        assert text in found[0], found[0]


@pytest.mark.parametrize("sharding", ["row_wise", "data_parallel"])
def test_who_steps_alike_is_left_alone(sharding: str) -> None:
    assert run(3, trained, None, sharding) == [None] * 3


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"clip": 0.001}, "the factor of clipping"),
        ({"scale": 2.0**4}, "the factor of clipping and loss scaling"),
        ({"zero": False}, "gradients of an earlier pass"),
        ({"frozen": True}, "frozen parameters"),
        ({"sync": False}, "no_sync()"),
    ],
)
def test_what_a_step_is_made_of(odd: dict[str, Any], said: str) -> None:
    def one(rank: int) -> None:
        net = Net()
        opt: Any = torch.optim.SGD(net.parameters(), lr=0.1)
        fast, opt = recast.optimize(net, opt, example=batch(0, 0), sharding="row_wise")
        how = {"clip": 0.01, "scale": 2.0**10, "zero": True, "frozen": False, "sync": True}
        how |= odd if rank == ODD else {}
        scaler = torch.amp.GradScaler("cpu", init_scale=how["scale"])
        with pytest.raises(UsageError, match="rank 1 of 3 differs") as caught:
            for step in range(4):
                if how["zero"] or step == 0:
                    opt.zero_grad()
                fast.top.bias.requires_grad_(not (how["frozen"] and step > 1))
                with nullcontext() if how["sync"] or step == 0 else fast.no_sync():
                    out = fast(batch(rank, step))
                scaler.scale((out - 1).square().mean()).backward()
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(fast.parameters(), how["clip"])
                scaler.step(opt)
                scaler.update()
        assert said in str(caught.value)

    run(3, one)


def test_a_step_of_an_inner_optimizer_is_none_of_its_own() -> None:
    """As torch's ZeroRedundancyOptimizer steps one, with other parameters on every rank."""
    net = Net()
    record = step_record.StepRecord()
    record.set_parameters(dict(net.named_parameters()), [])
    inner = torch.optim.SGD([net.top.weight], lr=0.1)
    outer = torch.optim.SGD(net.parameters(), lr=0.1)
    outer.inner = inner  # type: ignore[attr-defined]
    for one in (outer, inner, inner, outer):
        step_record.note_step(one)
    assert len(record.steps) == 2
    step_record.note_step(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    assert len(record.steps) == 2
    step_record.note_step(inner)  # by itself
    assert len(record.steps) == 3


@pytest.mark.parametrize(("norm", "other"), [(2.0, 2.0 + 1e-6), (1e-7, 2e-7)])
def test_rounding_is_no_difference(norm: float, other: float) -> None:
    """Nor is it in a parameter that passes through zero."""
    told = Told(steps=("SGD: lr=0.1",), factor=0.5, compared="w", norm=norm)
    near = Told(steps=("SGD: lr=0.1",), factor=0.5, compared="w", norm=other)
    unknown = Told(steps=("SGD: lr=0.1",))
    step_record.check_equal(told, [one.numbers() for one in (told, near, unknown)])


def test_what_a_rank_does_not_know_is_not_blamed() -> None:
    """Rank 1 has no rows of the table whose factor is compared."""
    all_told = [Told(factor=f, compared="w", norm=n) for f, n in ((0.5, 1.0), (math.nan, 2.0))]

    def one(rank: int) -> None:
        with pytest.raises(UsageError, match="differs from the others in: values of dense") as said:
            step_record.check_equal(all_told[rank], [told.numbers() for told in all_told])
        assert "factor" not in str(said.value)

    run(2, one)


def test_other_ways_to_the_same_settings() -> None:
    """Groups in another order, or without those of tables that a rank has nothing of; learning
    rates whose last bit differs.
    """
    a, b, c = (nn.Parameter(torch.ones(2)) for _ in range(3))
    said = []
    for groups in (
        [{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.2}, {"params": [c], "lr": 0.1}],
        [{"params": [b], "lr": 0.2}, {"params": [a], "lr": math.nextafter(0.1, 1.0)}],
    ):
        record = step_record.StepRecord()
        record.set_parameters({"a": a}, [])
        step_record.note_step(torch.optim.SGD(groups))
        said.append(record.steps)
        assert len(record.steps) == 1 and "lr=0.2 " in record.steps[0]
    assert said[0] == said[1]


@pytest.mark.parametrize("sharding", ["row_wise", "data_parallel"])
def test_a_user_who_averages_by_hand(sharding: str) -> None:
    """Local SGD: ranks step on gradients of their own, and average parameters now and then."""

    def one(rank: int) -> None:
        net = Net()
        opt: Any = torch.optim.SGD(net.parameters(), lr=0.1)
        fast, opt = recast.optimize(net, opt, example=batch(0, 0), sharding=sharding)
        whole = [p for n, p in fast.named_parameters() if sharding != "row_wise" or "top" in n]
        for step in range(9):
            opt.zero_grad()
            with fast.no_sync() if step < 6 else nullcontext():
                (fast(batch(rank, step)) - 1).square().mean().backward()
            opt.step()
            if step in (2, 5):
                for p in whole:
                    dist.all_reduce(p.detach().div_(2))

    run(2, one)


def test_the_error_of_a_backward_pass_comes_when_it_is_done() -> None:
    """Whoever catches it can make the ranks equal again, and go on."""

    def one(rank: int) -> None:
        net = Net()
        opt: Any = torch.optim.SGD(net.parameters(), lr=0.1)
        fast, opt = recast.optimize(net, opt, example=batch(0, 0), sharding="data_parallel")
        caught = 0
        for step in range(5):
            opt.zero_grad()
            try:
                (fast(batch(rank, step)) - 1).square().mean().backward()
            except UsageError:
                caught += 1
                for p in fast.parameters():
                    dist.broadcast(p.detach(), 0)
            if rank != ODD or step != 1:
                opt.step()
        assert caught == 1

    run(2, one)


def test_what_is_never_sent_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients on a GPU carry nothing, as it would have to be waited for."""
    record = step_record.StepRecord()
    for k in range(step_record._MOST + 10):
        record.note(f"{k}")
    assert len(record.steps) == step_record._MOST
    buffer = torch.ones(4, device="meta")
    bucket = SimpleNamespace(is_last=lambda: False, index=lambda: 0, buffer=lambda: buffer)
    monkeypatch.setattr(dense_buckets, "_issue", lambda _: torch.futures.Future())
    dense_buckets.reduced(1.0, [], [(record, record.begin(True))], bucket)
    assert not record.steps


@pytest.mark.long
@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("copied", [dense_buckets._COPIED, 0])
def test_processes_whose_gradients_carry_it(copied: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the gradients, or beside them in every 16th pass."""
    monkeypatch.setattr(dense_buckets, "_COPIED", copied)
    for change, steps in ((None, 17), (_faster, 17)):
        found = processes(2, trained, change, "data_parallel", steps)
        assert len(set(found)) == 1 and (found[0] is None) == (change is None)
