"""Meaningless arguments are refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recast
from recast.errors import RecastError, UsageError

IDS = torch.randint(9, (6, 4), generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(9, 4, mode="sum"), nn.Linear(4, 1))


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def optimize(**how: Any) -> Any:
    return recast.optimize(net(), example=IDS, **how)


def diff(**how: Any) -> Any:
    plain = net()
    return recast.diff(plain, recast.optimize(plain, example=IDS), IDS, **how)


def dynamic(**how: Any) -> Any:
    model = net()
    tables = {"0": recast.Dynamic(max_rows=20, **how)}
    return recast.optimize(model, adagrad(model), example=IDS, tables=tables)


class Around(torch.optim.Optimizer):
    """Wraps another optimizer without calling torch's ``__init__``, as some Lookaheads do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups


def around() -> Any:
    model = net()
    return recast.optimize(model, Around(adagrad(model)), example=IDS)


def step(optimizer: Any) -> Any:
    return recast.TrainingStep(optimize(), nn.functional.mse_loss, optimizer)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "class": (lambda: recast.optimize(nn.Linear, example=IDS), "is the class Linear"),  # type: ignore[call-overload]
    "inplace": (lambda: optimize(inplace="yes"), "inplace='yes'"),
    "strict": (lambda: optimize(strict=1), "strict=1"),
    "layers": (lambda: optimize(passes="fuse-mlp{max-layers=0}"), "max-layers=0"),
    "steps": (lambda: diff(steps=-1), "steps=-1"),
    "no loss": (lambda: diff(loss=lambda out: None), "the loss returned None"),
    "many losses": (lambda: diff(loss=lambda out: out), r"a tensor of shape \(6, 1\)"),
    "dead loss": (lambda: diff(loss=lambda out: out.detach().sum()), "does not depend on"),
    "no model": (lambda: recast.diff(net(), None, IDS), "the second model is of type NoneType"),  # type: ignore[arg-type]
    "loss of no kind": (lambda: diff(loss=3), "loss=3"),
    "loop of no kind": (lambda: diff(train=3), "train=3"),
    "seed of no kind": (lambda: diff(seed="a"), "seed='a'"),
    "dtype by name": (lambda: diff(dtype="bf16"), "dtype='bf16'"),
    "dtype of ids": (lambda: diff(dtype=torch.int8), "dtype=torch.int8(.|\n)*floating point"),
    "optimizer by name": (lambda: diff(optimizer="sgd"), "optimizer='sgd'"),
    "another's optimizer": (lambda: diff(optimizer=adagrad(net())), "parameters of neither model"),
    "count": (lambda: dynamic(evict="lru", admit=recast.MinCount("3")), "from 1 on"),  # type: ignore[arg-type]
    "seed": (lambda: dynamic(seed="x"), "seed='x'"),
    "no optimizer": (lambda: step(None), "of type NoneType"),
    "around": (around, "Around was made without torch.optim.Optimizer.__init__"),
    "foreign": (lambda: step(adagrad(net())), "none of the optimizer's parameters"),
    "nothing to load": (
        lambda: recast.checkpoint.load("last", {}),  # type: ignore[arg-type]
        "checkpoint.load: the model is of type dict",
    ),
    "nothing to save": (
        lambda: recast.checkpoint.save("last", {}),  # type: ignore[arg-type]
        "checkpoint.save: the model is of type dict",
    ),
    "path": (lambda: recast.checkpoint.load(3, net()), "load: 3 is no path"),  # type: ignore[arg-type]
    "path to": (lambda: recast.checkpoint.save(3, net()), "save: 3 is no path"),  # type: ignore[arg-type]
    "meta": (lambda: recast.optimize(net(), example=IDS.to("meta")), "holds a tensor on meta"),
    "a form on meta": (
        lambda: optimize(forms=[IDS.to("meta")]),
        r"forms\[0\]: it holds a tensor on meta",
    ),
    "three batches": (
        lambda: recast.optimize(net(), example=[IDS] * 3),
        "raises on a list of 3(.|\n)*example=.batch, batch_of_another_size., exactly two",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_means_nothing(case: str) -> None:
    call, said = CASES[case]
    with pytest.raises(UsageError, match=said):
        call()


def test_a_loss_is_named_by_its_line() -> None:
    with pytest.raises(RecastError) as caught:
        diff(loss=lambda out: None)
    line = caught.traceback[0].lineno + 1
    assert f"  at   {Path(__file__).name}:{line}" in str(caught.value).splitlines()


def test_a_step_that_is_no_number(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="step='1' is not a whole number"):
        recast.checkpoint.save(tmp_path / "last", net(), step="1")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
