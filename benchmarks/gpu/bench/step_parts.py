"""Parts of a step alone: an MLP with dropout, each op, tables and their optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import recast
from gpu.bench import memory_needs, op_cases, synthetic_models
from gpu.bench.roofline import Rates, chain_work, lookup_bytes
from gpu.bench.timing import Bar, Step, Variant, measure, profiled, rows
from gpu.bench.variants import Batch, Case, Make, captured, compiled, effort, recorded, steps, twin
from gpu.harness.items import Item, Skip
from gpu.harness.worker import report_so_far
from recast.optim import RowWiseAdagrad
from recast.runtime import OPS, fastest
from recast.runtime.interactions import outer_cuda, pair_cuda

BATCH = 65536
Found = dict[str, object]

DROPOUT = "dropout MLP, forward and backward, bf16"


def dropout(rates: Rates, device: torch.device, tiny: bool) -> Iterator[Item]:
    """An MLP with dropout, forward and backward; at the end, what it is on the device."""
    yield Item("dropout MLP", partial(_dropout, rates, device, tiny), limit=75)
    yield Item("dropout MLP, kernels", partial(_dropout, rates, device, tiny, traced=True))


def _dropout(rates: Rates, device: torch.device, tiny: bool, traced: bool = False) -> Found:
    sizes, batch = ([16, 16, 8, 8], 8) if tiny else ([1024, 1024, 512, 256], BATCH)
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU(), nn.Dropout(0.2)]
    torch.manual_seed(0)
    plain = nn.Sequential(*layers).to(device)
    x = [torch.randn(batch, sizes[0], device=device) for _ in range(2)]
    fast = recast.optimize(plain, example=(x[0],))
    low = torch.bfloat16

    def both(forward: Callable[..., Tensor]) -> Callable[[int], None]:
        leaves = [t.detach().to(low).requires_grad_() for t in x]
        upstream = torch.randn(batch, sizes[-1], device=device, dtype=low)

        def step(k: int) -> None:
            with torch.autocast(device.type, low):
                out = forward(leaves[k])
            torch.autograd.grad(out, [leaves[k], *plain.parameters()], upstream)

        return step

    ours = Variant("recast graph", lambda: recorded(both(fast), device))
    if traced:
        step = ours.make()
        step(0)
        return {"rows": [{"case": DROPOUT, "variant": ours.name, **profiled(step, device)}]}
    found = [
        Variant("recast", lambda: both(fast)),
        ours,
        Variant("eager", lambda: both(plain)),
        Variant("eager graph", lambda: captured(both(plain), device)),
        Variant("torch.compile", lambda: both(compiled(plain, tiny))),
        Variant("torch.compile graph", lambda: captured(both(compiled(plain, tiny)), device)),
    ]
    floor = rates.floor(*chain_work(sizes, batch, 2), "bfloat16")

    def lines() -> list[dict[str, object]]:
        return rows(DROPOUT, found, floor, Bar(times=1.3))

    measure(found, device, effort(tiny, 4), batches=2, told=lambda: report_so_far(lines()))
    return {"rows": lines(), "chosen": fastest.timings()}


# ---------------------------------------------------------------- ops


def labels() -> Iterator[tuple[str, tuple[str, str]]]:
    """Of each op alone, and of its two cases."""
    for name, _, _, dtype in op_cases.ALONE:
        label = f"{name}, {str(dtype).removeprefix('torch.')}"
        yield label, (f"{label}, forward", f"{label}, forward and backward")


def ops(rates: Rates, device: torch.device, tiny: bool) -> Iterator[Item]:
    """Each op alone, in the shapes of models, forward and backward."""
    for (label, cases), (_, op, make, dtype) in zip(labels(), op_cases.ALONE, strict=True):
        yield Item(label, partial(_op, rates, cases, op, make, dtype, device, tiny), limit=45)


# Cases whose forward has a new kernel, not yet timed beside the one before: what brings that back.
BEFORE = {"products of pairs": pair_cuda.without_rows, "outer products": outer_cuda.without_tiles}


def _inside(around: Callable[[], AbstractContextManager[None]], make: Callable[[], Step]) -> Step:
    with around():
        step = make()

    def run(k: int) -> object:
        with around():
            return step(k)

    return run


def _op(
    rates: Rates,
    cases: tuple[str, str],
    op: str,
    make: Callable[..., op_cases.Case],
    dtype: torch.dtype,
    device: torch.device,
    tiny: bool,
) -> Found:
    """The op, its definition in eager torch, and the definition compiled; leaves of ``dtype``."""
    if op not in OPS:
        raise Skip(f"there is no op {op}")
    made = make(dtype, device, 8 if tiny else BATCH)
    args = made.args
    leaves = [
        t for a in args for t in (a if isinstance(a, list) else [a])
        if isinstance(t, Tensor) and t.is_floating_point()
    ]  # fmt: skip
    leaves = list({id(t): t.requires_grad_() for t in leaves}.values())
    with torch.no_grad():
        outs = OPS[op].target(*args)
    upstream = [torch.randn_like(o) for o in (outs if isinstance(outs, list) else [outs])]
    del outs

    def both(call: Callable[..., Any], backward: bool) -> Callable[[int], None]:
        def step(_: int) -> None:
            with torch.set_grad_enabled(backward):
                outs = call(*args)
            if backward:
                torch.autograd.grad(
                    outs, leaves, upstream if isinstance(outs, (list, tuple)) else upstream[0],
                    allow_unused=True,
                )  # fmt: skip

        return step

    def as_one(how: Callable[..., Step], way: Callable[..., Step], call: Any) -> Step:
        return how(way(call), device)

    found: list[dict[str, object]] = []
    ours, plain, word = OPS[op].target, OPS[op].reference, str(dtype).removeprefix("torch.")
    for backward, case in zip((False, True), cases, strict=True):
        way = partial(both, backward=backward)
        fast = compiled(plain, tiny)
        variants = [
            Variant("recast", partial(way, ours)),
            Variant("recast graph", partial(as_one, recorded, way, ours)),
            Variant("eager", partial(way, plain)),
            Variant("torch.compile", partial(way, fast)),
            Variant("torch.compile graph", partial(as_one, captured, way, fast)),
        ]
        if op == "gathered_dots":
            variants.insert(2, Variant("recast, two ops", partial(way, op_cases.apart)))
        for without in (without for name, without in BEFORE.items() if case.startswith(name)):
            as_before = partial(_inside, without, partial(as_one, recorded, way, ours))
            variants.insert(2, Variant("recast graph, kernel before", as_before))
        measure(variants, device, effort(tiny, 0.5), batches=1)
        work = (made.moved, made.flops) if backward else made.forward
        floor = rates.floor(*work, word)
        found += rows(case, variants, floor, Bar(times=2.0))
        report_so_far(found)
        torch._dynamo.reset()
    return {"rows": found}


# ---------------------------------------------------------------- tables and their optimizer

UPDATES: dict[str, tuple[Make, float]] = {  # and the numbers of state a weight
    "SGD": (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), 0.0),
    "Adagrad": (lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1), 1.0),
    "row-wise Adagrad": (lambda m: RowWiseAdagrad(m.parameters(), lr=0.1), 1 / 64),
}
TABLES, ROWS, DIM = 26, 200_000, 64


class Scored(nn.Module):
    """One row of each table, and a weight of each column that is not trained."""

    score: Tensor

    def __init__(self, rows: int, sparse: bool) -> None:
        super().__init__()
        self.emb = nn.ModuleList(nn.Embedding(rows, DIM, sparse=sparse) for _ in range(TABLES))
        self.register_buffer("score", torch.ones(TABLES * DIM))

    def forward(self, *ids: Tensor) -> Tensor:
        rows = [emb(i) for emb, i in zip(self.emb, ids, strict=True)]
        return torch.cat(rows, 1) @ self.score


def update_cases() -> Iterator[tuple[str, str]]:
    """Optimizer and label."""
    for name in UPDATES:
        yield name, f"lookups and {name}, {TABLES} x {DIM}"


def updates(rates: Rates, device: torch.device, tiny: bool) -> Iterator[Item]:
    """Steps that are little but lookups and the update of their rows."""
    for name, label in update_cases():
        yield Item(label, partial(_update, rates, label, *UPDATES[name], device, tiny), limit=60)


def _update(
    rates: Rates, label: str, make: Make, state: float, device: torch.device, tiny: bool
) -> Found:
    count, size, batches = (50, 8, 3) if tiny else (ROWS, BATCH, 4)
    torch.manual_seed(0)

    def model(sparse: bool) -> nn.Module:
        with contextlib.nullcontext() if sparse else torch.device(device):
            return Scored(count, sparse)

    plain, sparse = twin(model)
    data: list[Batch] = []
    for k in range(batches):
        g = torch.Generator(device).manual_seed(k)
        ids = [synthetic_models.power_law(count, (size,), 1.05, g) for _ in range(TABLES)]
        ids = [synthetic_models.shuffled(i, count) for i in ids]
        data.append((tuple(ids), torch.randint(2, (size,), generator=g, device=device).float()))
    case = Case(plain, sparse, make, make(plain), data, None, device, tiny)
    words = "recast", 'recast mode="graph"', "recast graph", "eager sparse", "torch.compile"
    room = memory_needs.room(memory_needs.of_model(plain, 1, TABLES * size), device)
    found = steps(case, *words, room=room)
    measure(found, device, effort(tiny, 1.5), batches=batches)
    outputs, dims = size * TABLES * DIM, [DIM] * TABLES
    moved = [lookup_bytes(enumerate(d[0]), dims, outputs, state=state, width=4) for d in data]
    floor = rates.floor(sum(moved) / len(moved), 0.0, "float32")
    return {"rows": rows(label, found, floor, Bar(times=2.0))}
