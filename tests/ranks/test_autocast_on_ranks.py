"""bf16 compute: autocast, and dense layers in bf16, on W processes as on one with all batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from every import COLUMNS, Every, after, batch, grads, planned
from harness import processes, run
from judged import Make, adagrad, sgd
from torch import Tensor
from torch.nn import functional as F

import recast
from recast.runtime import tolerances
from recast.runtime.ranks import shards

SIZES, STEPS = [4, 3, 5, 2], 4


class Mixed(Every):
    """Its tables are float32, as are the weights of bags; ``wide``: the dtype of its layers."""

    wide = torch.float32

    def forward(  # type: ignore[override]
        self, dense: Tensor, fixed: Tensor, flat: Tensor, offsets: Tensor, one: Tensor,
        sequence: Tensor, ids: Tensor, ends: Tensor,
    ) -> Tensor:  # fmt: skip
        factors = ids * self.importance.weight.view(1) + self.importance.bias
        rows = [
            self.fixed(fixed), self.ragged(flat, offsets), self.single(one),
            self.single(sequence).sum(1), self.weighted(ids, ends, factors),
            F.embedding(one % 3, self.raw),
        ]  # fmt: skip
        joined = torch.cat([self.bottom(dense.to(self.wide)), *[r.to(self.wide) for r in rows]], 1)
        return self.top(joined).squeeze(1)


def made(how: str) -> Mixed:
    torch.manual_seed(2)
    model = Mixed()
    if how == "layers":
        model.wide = torch.bfloat16
        model.top.bfloat16()
        model.bottom.bfloat16()
    return model


def trained(
    model: Any, optimizer: Any, rank: int | None, sizes: list[int], how: str
) -> dict[str, Tensor]:
    """Outputs, first gradients, then parameters and state, all after STEPS steps."""
    found: dict[str, Tensor] = {}
    dtype = model.get_parameter("fixed.weight").dtype
    for k in range(STEPS):
        inputs, label = batch(sizes, rank, seed=k)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            out = model(inputs[0].to(dtype), *inputs[1:])
        losses = (out.to(dtype) - label.to(dtype)) ** 2
        (losses.sum() * ((1 if rank is None else len(sizes)) / sum(sizes))).backward()
        found[f"output {k}"] = out.detach()
        if k == 0:
            found |= grads(model)
        optimizer.step()
    return found | after(model, optimizer)


def one_rank(rank: int, model: Mixed, sizes: list[int], kinds: Any, make: Make, how: str) -> Any:
    model = copy.deepcopy(model)  # threads would draw from one generator
    fast, optimizer = recast.optimize(
        model, make(model.parameters()), example=batch([5, 4], 0)[0],
        plan=planned(model, len(sizes), kinds),
    )  # fmt: skip
    found = trained(fast, optimizer, rank, sizes, how)
    return found, {n: own for n, p in fast.named_parameters() if (own := shards.of(p)) is not None}


def same_as_one(results: list[Any], make: Make, how: str) -> None:
    """Equal in bf16, which is what both compute in; and of the very same dtypes."""
    sizes = SIZES[: len(results)]
    plain, exact = made(how), made("").double()
    exact.load_state_dict(plain.state_dict())
    exact.wide = torch.float64
    usual = trained(plain, make(plain.parameters()), None, sizes, how)
    truth = trained(exact, make(exact.parameters()), None, sizes, "")
    assert {k for found, _ in results for k in found} == set(usual)
    for key, wanted in usual.items():
        if key.startswith("output"):
            pairs = [(torch.cat([found[key] for found, _ in results]), wanted, truth[key])]
        else:
            name = key.removeprefix("grad ").partition(" [")[0]
            pairs = []
            for found, parts in results:
                cut = parts[name].local if name in parts and wanted.dim() else copy.copy
                pairs.append((found[key].to_dense(), cut(wanted), cut(truth[key])))
        for rank, (got, own, true) in enumerate(pairs):
            assert got.dtype == own.dtype, key
            scale = float(truth[key].abs().max())
            off = tolerances.excess(got.bfloat16(), own.bfloat16(), true, scale=scale)
            assert off <= 1, f"{key} of rank {rank}: {off:.2f}"


@pytest.mark.parametrize(
    ("kinds", "how"),
    [("row_wise", "autocast"), ("column_wise", "layers"), ("data_parallel", "layers")],
)
def test_every_plan(kinds: str, how: str) -> None:
    make = sgd if kinds == "row_wise" else adagrad
    given = (made(how), SIZES[:3], kinds, make, how)
    same_as_one(run(3, one_rank, *given), make, how)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_processes(world: int) -> None:
    given = (made("autocast"), SIZES[:world], COLUMNS, adagrad, "autocast")
    same_as_one(processes(world, one_rank, *given), adagrad, "autocast")
