"""Whole training steps: the synthetic models Tiny and Small, MLPerf's DLRM.

All items of a model share one set of tables, which every variant trains. Of Small, whose tables and
sums take two thirds of 80 GB, variants are measured one after the other, each gone before the next;
what cannot fit is told with its bytes, which follow from the specification, and is not tried.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import gpu_measure
import gpu_memory
import gpu_synthetic
import torch
from gpu_floor import Floor, Rates, chain_work, linears, lookup_bytes
from gpu_groups import Item
from gpu_measure import Bar, measure, rows
from gpu_synthetic import Config, Synthetic
from gpu_variants import LARGE, Batch, Case, Make, effort, shared, steps, twin
from mlperf_dlrm import BOTTOM, DLRM, ROWS, TOP
from torch import nn

from recast.runtime import fastest

BATCH = 65536
BATCHES = 10
Found = dict[str, object]
Built = tuple[nn.Module, nn.Module, torch.optim.Optimizer]  # plain, sparse, whose state is all's

GRAPHS = "recast", 'recast mode="graph"', "recast graph"


def _built(make: Callable[[bool], nn.Module], optimizer: Make) -> Built:
    torch.manual_seed(0)
    plain, sparse = twin(make)
    return plain, sparse, optimizer(plain)


def _floor(
    rates: Rates, moved: float, chains: Sequence[Sequence[int]], batch: int, low: Any
) -> Floor:
    """Lookups, then chains, one after the other."""
    dtype = "bfloat16" if low else "float32"
    work = [chain_work(sizes, batch, 2 if low else 4) for sizes in chains]
    lookups = rates.ms(moved, 0.0, dtype)
    products = sum(rates.ms(m, f, dtype) for m, f in work)
    return {
        "ms": lookups + products,
        "lookups ms": lookups,
        "products ms": products,
        "lookups GB": moved / 1e9,
        "GFLOP": sum(f for _, f in work) / 1e9,
    }


# ---------------------------------------------------------------- Tiny, Small


def cases(config: Config) -> Iterator[tuple[str, torch.dtype | None, bool]]:
    """Label, dtype of autocast, whether ids are shuffled."""
    for low in (None, torch.bfloat16):
        for shuffle in (False, True):
            words = f"{'bf16' if low else 'fp32'}, {'shuffled' if shuffle else 'ranked'}"
            yield f"{config.name}, {words}", low, shuffle


def synthetic(
    config: Config, bar: float, rates: Rates, device: torch.device, tiny: bool
) -> Iterator[Item]:
    """Tiny and Small: ids in order of rank and shuffled, fp32 and bf16 outputs."""
    if tiny:
        config = config.scaled(60)
    elif gpu_measure.preparing and config.numbers() > LARGE:
        config = config.cut(1000)

    @cache
    def built() -> Built:
        def make(sparse: bool) -> nn.Module:
            with contextlib.nullcontext() if sparse else torch.device(device):
                return Synthetic(config, sparse)

        return _built(make, adagrad)

    for label, low, shuffle in cases(config):
        run = partial(_synthetic, config, Bar(ms=bar), rates, built, label, low, shuffle)
        yield Item(label, partial(run, device, tiny))


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(
        model.parameters(), lr=0.001, initial_accumulator_value=0.1, eps=1e-7
    )


def _synthetic(
    config: Config, bar: Bar, rates: Rates, built: Callable[[], Built], label: str,
    low: torch.dtype | None, shuffle: bool, device: torch.device, tiny: bool,
) -> Found:  # fmt: skip
    size, count = (8, 3) if tiny else (BATCH, BATCHES)
    needs = gpu_memory.of_synthetic(config, size, count, 2 if low else 4)
    large = config.numbers() > LARGE
    room = gpu_memory.room(needs, device)
    gpu_memory.refuse(room("recast graph"))
    plain, sparse, optimizer = built()
    data: list[Batch] = [
        gpu_synthetic.batch(config, size, k, device, alpha=1.05, shuffle=shuffle)
        for k in range(count)
    ]
    words = [*GRAPHS, "eager sparse"]
    if not shuffle:
        words.append("torch.compile")
    if not shuffle and low is None:
        words[3:3] = ["recast graph, sorts in turn"]
        words.append("compiled, sparse")
    case = Case(plain, sparse, adagrad, optimizer, data, low, device, tiny)
    found = steps(case, *words, room=room)
    measure(found, device, effort(tiny, 6 if large else 5), batches=count, apart=large or tiny)
    dims = [t.embedding_dim for t in plain.tables]
    inputs = list(zip(plain.of_input, data[0][0][1], strict=True))
    width = 2 if low else 4
    moved = lookup_bytes(inputs, dims, size * sum(dims[t] for t, _ in inputs), state=1, width=width)
    floor = _floor(rates, moved, [linears(plain.mlp)], size, low)
    told: Found = {"needs GB": {k: round(v / 1e9, 1) for k, v in needs.items()}}
    if config.published_ms:
        told["published A100 ms"] = config.published_ms
    return {"rows": rows(label, found, floor, bar), **told, "chosen": fastest.timings()}


# ---------------------------------------------------------------- DLRM


def dlrm(rates: Rates, device: torch.device, tiny: bool) -> Iterator[Item]:
    """MLPerf's DLRM, one id a field, tables of at most 10 M rows, fp32 tables, bf16 compute."""
    most = 60 if tiny else 1000 if gpu_measure.preparing else 10_000_000
    sizes = [min(n, most) for n in ROWS]
    layers = ((16, 8), (16, 1)) if tiny else (BOTTOM, TOP)

    @cache
    def built() -> Built:
        def make(sparse: bool) -> nn.Module:
            with contextlib.nullcontext() if sparse else torch.device(device):
                net = DLRM(sizes, *layers)
            for emb in net.emb:
                emb.sparse = sparse
            return net

        return _built(make, sgd)

    for shuffle in (False, True):
        label = f"MLPerf DLRM, {'shuffled' if shuffle else 'ranked'}"
        yield Item(label, partial(_dlrm, rates, sizes, built, label, shuffle, device, tiny))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _dlrm(
    rates: Rates, sizes: list[int], built: Callable[[], Built], label: str, shuffle: bool,
    device: torch.device, tiny: bool,
) -> Found:  # fmt: skip
    batch, count = (8, 3) if tiny else (BATCH, BATCHES)
    plain, sparse, optimizer = built()
    offsets = torch.arange(batch, device=device)
    data: list[Batch] = []
    for k in range(count):
        g = torch.Generator(device).manual_seed(k)
        ids = [gpu_synthetic.power_law(n, (batch,), 1.05, g) for n in sizes]
        if shuffle:
            ids = [gpu_synthetic.shuffled(i, n) for i, n in zip(ids, sizes, strict=True)]
        dense = torch.rand(batch, 13, generator=g, device=device)
        labels = torch.randint(2, (batch,), generator=g, device=device).float()
        data.append(((dense, ids, [offsets] * len(sizes)), labels))
    words = [*GRAPHS, "recast graph, gather-in-dots", "eager sparse"]
    if not shuffle:
        words += ["recast graph, sorts in turn", "compiled, sparse"]
    low = torch.bfloat16
    case = Case(plain, sparse, sgd, optimizer, data, low, device, tiny)
    room = gpu_memory.room(gpu_memory.of_model(plain, 0, len(sizes) * batch), device)
    found = steps(case, *words, room=room)
    measure(found, device, effort(tiny, 7), batches=count)
    if not shuffle:  # its gradients are as large as the tables: alone
        alone = steps(case, "torch.compile", room=room)
        measure(alone, device, effort(tiny, 2), batches=count, apart=True)
        found += alone
    dim, f = plain.emb[0].embedding_dim, len(sizes) + 1
    moved = lookup_bytes(
        enumerate(data[0][0][1]), [dim] * len(sizes), batch * dim * len(sizes), state=0, width=2
    )
    # The dots: each feature read and its gradient written; products of all pairs, thrice.
    floor = _floor(rates, moved, [linears(plain.bottom), linears(plain.top)], batch, low)
    dots = rates.ms(batch * f * dim * 2.0 * 3, 6.0 * batch * f * f * dim, "bfloat16")
    floor = {**floor, "ms": floor["ms"] + dots, "dots ms": dots}
    lines = rows(label, found, floor, Bar(ms=3.0))
    return {"rows": lines, "published A100 ms": 14.4, "chosen": fastest.timings()}


__all__ = ["BATCH", "BATCHES", "adagrad", "cases", "dlrm", "sgd", "shared", "synthetic"]
