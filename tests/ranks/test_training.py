"""Training on W ranks gives the numbers of one process with the batches of all of them."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from every import COLUMNS, MIXED, Every, after, batch, grads, plain_run, planned, step
from harness import run
from judged import Make, adagrad, compare, sgd
from torch import Tensor

import recast
from recast.runtime.plan import SHARDING_TYPES
from recast.runtime.ranks import shards

SIZES = {1: [6], 2: [4, 4], 3: [4, 3, 5], 4: [3, 0, 5, 4], 8: [2, 1, 0, 3, 2, 4, 1, 3]}


def train(
    rank: int, model: Every, make: Make, sizes: list[int], kind: Any,
    dtype: torch.dtype = torch.float32, by_closure: bool = False, **words: Any,
) -> Any:  # fmt: skip
    """One rank: its outputs, its parts of gradients, parameters and state."""
    given = lambda b: ((b[0][0].to(dtype), *b[0][1:]), b[1])  # noqa: E731
    model = copy.deepcopy(model)
    optimizer = make(model.parameters())
    fast, optimizer = recast.optimize(
        model,
        optimizer,
        example=given(batch([5, 4], 0))[0],
        plan=planned(model, len(sizes), kind),
        **words,
    )
    found: dict[str, Tensor] = {}

    def compute(k: int) -> None:
        optimizer.zero_grad()
        out = step(fast, given(batch(sizes, rank, seed=k)), sum(sizes), len(sizes))
        found[f"output {k}"] = out
        if k == 0:
            found.update(grads(fast))

    for k in range(5):
        if by_closure:
            optimizer.step(partial(compute, k))
        else:
            compute(k)
            optimizer.step()
    found |= after(fast, optimizer)
    parts = {n: shards.of(p) for n, p in fast.named_parameters() if shards.of(p) is not None}
    return found, parts, str(fast), fast.plan


@pytest.mark.parametrize(
    ("kind", "world"), [*((kind, 4) for kind in SHARDING_TYPES), ("row_wise", 3), ("table_wise", 8)]
)
def test_every_scheme(kind: str, world: int) -> None:
    torch.manual_seed(world)
    model = Every()
    plain = plain_run(model, sgd, SIZES[world])
    truth = plain_run(model, sgd, SIZES[world], dtype=torch.float64)
    results = run(world, train, model, sgd, SIZES[world], kind)
    assert {p.sharding_type for p in results[0][3].placements} == {kind}
    assert ("wait_rows" in results[0][2]) == (kind != "data_parallel")
    assert all(r[2] == results[0][2] for r in results), "one graph on all ranks"
    compare(results, plain, truth)


def test_float64_is_float64_all_the_way() -> None:
    """In float64 only the order of sums makes ranks differ from one process; float32 hides more."""
    torch.manual_seed(5)
    model = Every().double()
    sizes = SIZES[4]
    plain = plain_run(model, adagrad, sizes, dtype=torch.float64)
    for found, parts, *_ in run(4, train, model, adagrad, sizes, COLUMNS, torch.float64):
        for name, value in found.items():
            if name.startswith("output"):
                continue
            own = parts.get(name.removeprefix("grad ").partition(" [")[0])
            wanted = own.local(plain[name]) if own and plain[name].dim() else plain[name]
            assert value.dtype == wanted.dtype
            torch.testing.assert_close(value.to_dense(), wanted, rtol=1e-12, atol=1e-12)


OPTIMIZERS: dict[str, Make] = {
    "adagrad": adagrad,
    "row_wise_adagrad": lambda p: recast.optim.RowWiseAdagrad(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-2),  # no division by noise
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-2, momentum=0.5),
}


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("adagrad", 1),
        ("adagrad", 2),
        ("adagrad", 8),
        ("row_wise_adagrad", 3),
        ("adam", 4),
        ("momentum", 3),
        ("rmsprop", 2),
    ],
)
def test_every_optimizer(name: str, world: int) -> None:
    """Each with tables of every scheme."""
    torch.manual_seed(3)
    model, make = Every(), OPTIMIZERS[name]
    kinds = MIXED if name == "row_wise_adagrad" else COLUMNS
    plain = plain_run(model, make, SIZES[world])
    truth = plain_run(model, make, SIZES[world], dtype=torch.float64)
    compare(run(world, train, model, make, SIZES[world], kinds), plain, truth)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_with_a_closure(name: str) -> None:
    torch.manual_seed(3)
    model, make, sizes = Every(), OPTIMIZERS[name], SIZES[2]
    plain = plain_run(model, make, sizes)
    truth = plain_run(model, make, sizes, dtype=torch.float64)
    compare(run(2, train, model, make, sizes, "row_wise", torch.float32, True), plain, truth)
