"""A training step of DLRM: ours against eager PyTorch, dense and ``sparse=True``.

    python benchmarks/training_step.py                    # 26 tables of 100,000 x 64, batch 2048
    python benchmarks/training_step.py --tables 8 --rows 10000 --rounds 5 --out results

All variants live in one process and take turns, so that a busy machine affects them alike; times
are medians over the rounds. Memory is what a step adds to the resident set at its peak, where a
dense gradient of the tables cannot hide. Writes ``<date>-<machine>-training-step.json``, ``.md``.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import record
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from dlrm import DLRM

import recast
from recast.runtime import kept_memory

MIB = 1 << 20
Batch = tuple[tuple[Tensor, list[Tensor], list[Tensor]], Tensor]


@dataclass
class Variant:
    """One way to train the model, and the times it took (milliseconds)."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    forward: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    peak_mib: float | None = None

    def train(self, batch: Batch) -> tuple[float, float]:
        """One step; the seconds of its forward and of all of it."""
        inputs, label = batch
        start = time.perf_counter()
        out = self.model(*inputs)
        forward = time.perf_counter() - start
        F.binary_cross_entropy(out, label).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return forward, time.perf_counter() - start


def batches(o: argparse.Namespace, number: int = 10) -> list[Batch]:
    """Uniform ids, ``hotness`` of them in every bag."""
    g = torch.Generator().manual_seed(0)
    offsets = torch.arange(o.batch) * o.hotness
    return [
        (
            (
                torch.randn(o.batch, 13, generator=g),
                [offsets] * o.tables,
                [
                    torch.randint(o.rows, (o.batch * o.hotness,), generator=g)
                    for _ in range(o.tables)
                ],
            ),
            torch.randint(2, (o.batch,), generator=g).float(),
        )
        for _ in range(number)
    ]


def variants(o: argparse.Namespace, batch: Batch) -> Iterator[Variant]:
    def plain(sparse: bool) -> DLRM:
        torch.manual_seed(0)
        return DLRM([o.rows] * o.tables, o.dim, dense=13, hidden=512, sparse=sparse)

    def adagrad(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(model.parameters(), lr=0.01)

    for name, sparse in (("eager dense", False), ("eager sparse=True", True)):
        model = plain(sparse)
        yield Variant(name, model, adagrad(model))
    model = plain(False)
    fast, optimizer = recast.optimize(model, adagrad(model), example=batch[0])
    yield Variant("recast", fast, optimizer)


def peak(work: Callable[[], object]) -> float | None:
    """MiB that ``work`` adds to this process at its peak; None if the system does not tell."""
    kept_memory.clear()  # memory that ours keeps from step to step counts too
    try:
        ctypes.CDLL(None).malloc_trim(0)  # or memory freed but kept would hide allocations
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    except (OSError, AttributeError):
        return None
    before = _status("VmRSS")
    work()
    return max(0, _status("VmHWM") - before) / 1024


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))


def measure(o: argparse.Namespace) -> list[Variant]:
    data = batches(o)
    found = list(variants(o, data[0]))
    for v in found:
        for batch in data[:3]:  # warm up: state of the optimizer, threads, caches
            v.train(batch)
        v.peak_mib = peak(partial(v.train, data[3]))
    for k in range(o.rounds):
        for v in found:
            forward, step = v.train(data[k % len(data)])
            v.forward.append(1e3 * forward)
            v.step.append(1e3 * step)
    return found


def rows(found: list[Variant]) -> list[dict[str, object]]:
    """One line per variant; ``times`` compares its step with that of ``eager sparse=True``."""
    base = next(v for v in found if v.name == "eager sparse=True")
    return [
        {
            "variant": v.name,
            "step_ms": round(statistics.median(v.step), 2),
            "forward_ms": round(statistics.median(v.forward), 2),
            "step_ms_quartiles": [round(q, 2) for q in statistics.quantiles(v.step, n=4)[::2]],
            "faster_than_sparse": round(
                statistics.median(a / b for a, b in zip(base.step, v.step, strict=True)), 2
            ),
            "peak_mib": None if v.peak_mib is None else round(v.peak_mib, 1),
        }
        for v in found
    ]


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (
        ("tables", 26), ("rows", 100_000), ("dim", 64),
        ("batch", 2048), ("hotness", 1), ("rounds", 15),
    ):  # fmt: skip
        p.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    p.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default all cores")
    p.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    o = p.parse_args()
    torch.set_num_threads(o.threads)
    tables = o.tables * o.rows * o.dim * 4 / MIB
    title = (
        f"A training step of DLRM: {o.tables} tables of {o.rows:,} x {o.dim} ({tables:.0f} MiB), "
        f"batch {o.batch}, {o.hotness} ids a bag, Adagrad, {o.threads} threads"
    )
    options = {k: v for k, v in vars(o).items() if k != "out"}
    record.write(o.out, "training-step", title, options, rows(measure(o)))


if __name__ == "__main__":
    main()
