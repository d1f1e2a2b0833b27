"""The models whose steps are judged: the synthetic Tiny and Small, MLPerf's DLRM.

Each case has its batches, its bar, the bytes it needs, and its floor, from the bytes and operations
of those very batches. All cases of a model share one set of tables, which every variant trains.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from mlperf_dlrm import BOTTOM, DLRM, ROWS, TOP
from torch import Tensor, nn

from gpu.bench import memory_needs, synthetic_models, timing
from gpu.bench.memory_needs import Needs
from gpu.bench.roofline import Floor, Rates, chain_work, linears, lookup_bytes
from gpu.bench.synthetic_models import Config, Synthetic
from gpu.bench.timing import Bar
from gpu.bench.variants import LARGE, Batch, Make, twin

BATCH = 65536
BATCHES = 10
MOST_ROWS = 10_000_000  # of a table of the DLRM
Built = tuple[nn.Module, nn.Module, torch.optim.Optimizer]  # plain, sparse, whose state is all's


class Subject(NamedTuple):
    """One case of a model.

    peers: timed in turn with ours; ``later``: peers that come after all judged cases, as they take
    minutes to compile or fill the memory. ways: ours in other modes, which show what a part of it
    gains. large: variants do not fit into memory together.
    """

    label: str
    built: Callable[[], Built]
    make: Make
    batches: Callable[[], list[Batch]]
    floor: Callable[[nn.Module, Batch], Floor]
    needs: Needs
    low: torch.dtype | None
    bar: Bar
    published: float | None  # ms on one A100-80GB
    large: bool
    peers: tuple[str, ...]
    later: tuple[str, ...]
    ways: tuple[str, ...]

    def floor_of(self, model: nn.Module, data: Sequence[Batch]) -> Floor:
        """That of a step, the mean over all batches."""
        every = [self.floor(model, batch) for batch in data]
        return {k: sum(f[k] for f in every) / len(every) for k in every[0]}


def _built(make: Callable[[bool], nn.Module], optimizer: Make, device: torch.device) -> Built:
    def on(sparse: bool) -> nn.Module:
        with contextlib.nullcontext() if sparse else torch.device(device):
            return make(sparse)

    torch.manual_seed(0)
    plain, sparse = twin(on)
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


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(
        model.parameters(), lr=0.001, initial_accumulator_value=0.1, eps=1e-7
    )


def labels(config: Config) -> Iterator[tuple[str, torch.dtype | None, bool]]:
    """Of each case the label, the dtype of autocast, and whether ids are shuffled."""
    for low in (None, torch.bfloat16):
        for shuffle in (False, True):
            words = f"{'bf16' if low else 'fp32'}, {'shuffled' if shuffle else 'ranked'}"
            yield f"{config.name}, {words}", low, shuffle


def synthetic(
    config: Config, bar: Bar, rates: Rates, device: torch.device, tiny: bool
) -> Iterator[Subject]:
    """Ids in order of rank and shuffled, fp32 and bf16 outputs."""
    large = config.numbers() > LARGE
    published = config.published_ms
    if tiny:
        config = config.scaled(60)
    elif timing.preparing and (large or timing.only_ours):
        config = config.cut(1000)  # beside other processes: its tables alone would fill the memory
    size, count = (8, 3) if tiny else (BATCH, BATCHES)

    @cache
    def built() -> Built:
        return _built(lambda sparse: Synthetic(config, sparse), adagrad, device)

    def floor(low: torch.dtype | None, model: nn.Module, batch: Batch) -> Floor:
        assert isinstance(model, Synthetic)
        dims = config.dims()
        inputs = list(zip(model.of_input, batch[0][1], strict=True))
        width = 2 if low else 4
        outputs = size * sum(dims[t] for t, _ in inputs)
        moved = lookup_bytes(inputs, dims, outputs, state=1, width=width)
        return _floor(rates, moved, [linears(model.mlp)], size, low)

    def batches(shuffle: bool) -> list[Batch]:
        return [
            synthetic_models.batch(config, size, k, device, alpha=1.05, shuffle=shuffle)
            for k in range(count)
        ]

    for label, low, shuffle in labels(config):
        compiled = () if large or shuffle else ("torch.compile",)
        partly = ("compiled, sparse",) if not shuffle and low is None else ()
        rest = ("torch.compile",) if not compiled and not (large and shuffle) else ()
        padded = ("recast graph, rows at 16 bytes",)
        yield Subject(
            label, built, adagrad, partial(batches, shuffle), partial(floor, low),
            memory_needs.of_synthetic(config, size, count, 2 if low else 4),
            low, bar, published, large or tiny,
            peers=("eager sparse", *compiled, *(() if large else partly)),
            later=(*(partly if large else ()), *rest),
            ways=(*(() if large else ("recast graph, sorts in turn",)), *padded) if partly else (),
        )  # fmt: skip


# ---------------------------------------------------------------- DLRM


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def dlrm(bar: Bar, rates: Rates, device: torch.device, tiny: bool) -> Iterator[Subject]:
    """MLPerf's DLRM, one id a field, tables of at most 10 M rows, fp32 tables, bf16 compute."""
    most = 60 if tiny else 1000 if timing.preparing else MOST_ROWS
    sizes = [min(n, most) for n in ROWS]
    layers = ((16, 8), (16, 1)) if tiny else (BOTTOM, TOP)
    size, count = (8, 3) if tiny else (BATCH, BATCHES)
    low = torch.bfloat16
    with torch.device("meta"):
        hollow = DLRM(sizes, *layers)

    def make(sparse: bool) -> nn.Module:
        net = DLRM(sizes, *layers)
        for emb in net.emb:
            emb.sparse = sparse
        return net

    @cache
    def built() -> Built:
        return _built(make, sgd, device)

    def batches(shuffle: bool) -> list[Batch]:
        offsets = torch.arange(size, device=device)
        return [_clicks(sizes, size, k, offsets, shuffle) for k in range(count)]

    def floor(model: nn.Module, batch: Batch) -> Floor:
        dim, f = layers[0][-1], len(sizes) + 1
        outputs = size * dim * len(sizes)
        dims = [dim] * len(sizes)
        moved = lookup_bytes(enumerate(batch[0][1]), dims, outputs, state=0, width=2)
        # The dots: each feature read and its gradient written; products of all pairs, thrice.
        chains = [linears(m) for m in (model.bottom, model.top) if isinstance(m, nn.Module)]
        found = _floor(rates, moved, chains, size, low)
        dots = rates.ms(size * f * dim * 2.0 * 3, 6.0 * size * f * f * dim, "bfloat16")
        return {**found, "ms": found["ms"] + dots, "dots ms": dots}

    for shuffle in (False, True):
        yield Subject(
            f"MLPerf DLRM, {'shuffled' if shuffle else 'ranked'}",
            built, sgd, partial(batches, shuffle), floor,
            memory_needs.of_model(hollow, 0, len(sizes) * size),
            low, bar, 14.4, False,
            peers=("eager sparse", *(() if shuffle else ("compiled, sparse",))),
            later=("torch.compile",),  # its gradients are as large as the tables
            ways=() if shuffle else ("recast graph, sorts in turn", "recast graph, gather-in-dots"),
        )  # fmt: skip


def _clicks(rows: Sequence[int], size: int, seed: int, offsets: Tensor, shuffle: bool) -> Batch:
    """Numbers, ids and offsets; labels."""
    device = offsets.device
    g = torch.Generator(device).manual_seed(seed)
    ids = [synthetic_models.power_law(n, (size,), 1.05, g) for n in rows]
    if shuffle:
        ids = [synthetic_models.shuffled(i, n) for i, n in zip(ids, rows, strict=True)]
    dense = torch.rand(size, 13, generator=g, device=device)
    labels = torch.randint(2, (size,), generator=g, device=device).float()
    return (dense, ids, [offsets] * len(rows)), labels
