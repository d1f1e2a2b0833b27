"""A training step of DLRM under optimizers that step every row, beside eager PyTorch: as it is by
default, and the fastest that it has (``fused=True``; ``foreach=True`` for RMSprop).

    python benchmarks/optimizer_step.py --threads 1

Ids are uniform, or follow a power law and are then shuffled. Under Adam and momentum a step of ours
also moves the rows of some 150 steps before, so it is timed after ``--lead`` of them. All variants
of a case live in one process and take turns; times are medians over the rounds, ratios those within
a round. Writes ``<date>-<machine>-optimizer-step.json`` and ``.md``. The largest case takes 12 GB.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import record
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, RMSprop
from torch.optim.lr_scheduler import OneCycleLR

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from dlrm import DLRM

import recast

Batch = tuple[tuple[Tensor, list[Tensor], list[Tensor]], Tensor]


class Kind(NamedTuple):
    """fast: the option of the fastest that torch has.
    after: whether rows move for some time after a gradient.
    cycles: whether OneCycleLR changes beta1 at every step.
    """

    make: Callable[..., torch.optim.Optimizer]
    fast: str
    after: bool
    cycles: bool = False


KINDS = {
    "adam": Kind(partial(Adam, lr=1e-3), "fused", True),
    "adam-decay": Kind(partial(Adam, lr=1e-3, weight_decay=1e-5), "fused", False),
    "momentum": Kind(partial(SGD, lr=0.1, momentum=0.9), "fused", True),
    "momentum-decay": Kind(partial(SGD, lr=0.1, momentum=0.9, weight_decay=1e-5), "fused", False),
    "sgd-decay": Kind(partial(SGD, lr=0.1, weight_decay=1e-5), "fused", False),
    "adagrad-decay": Kind(partial(Adagrad, lr=0.01, weight_decay=1e-5), "fused", False),
    "adam-cycle": Kind(partial(Adam, lr=1e-3), "fused", False, cycles=True),
    "rmsprop": Kind(partial(RMSprop, lr=1e-3), "foreach", False),
}


class Case(NamedTuple):
    """``alpha``: the exponent of the power law of ids; 0: they are uniform."""

    tables: int
    rows: int
    dim: int
    alpha: float
    batch: int


CASES = (
    Case(26, 100_000, 64, 0.0, 2048),
    Case(26, 100_000, 64, 1.05, 2048),
    Case(26, 10_000, 16, 1.05, 256),
    Case(26, 1_000, 16, 1.05, 256),
    Case(26, 100, 8, 0.0, 32),
    Case(8, 1_000_000, 16, 1.05, 2048),
    Case(4, 5_000_000, 16, 1.05, 2048),
)


@dataclass
class Variant:
    """One way to train the model, and the milliseconds that its steps took."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    cycles: bool
    step: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        steps = 1_000_000
        self.cycle = OneCycleLR(self.optimizer, 1e-3, steps) if self.cycles else None

    def train(self, batch: Batch) -> float:
        inputs, label = batch
        start = time.perf_counter()
        F.binary_cross_entropy(self.model(*inputs), label).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        taken = 1e3 * (time.perf_counter() - start)
        if self.cycle is not None:
            self.cycle.step()
        return taken


def ids(o: Case, draws: torch.Generator) -> Tensor:
    """(batch,) ids of one table."""
    if o.alpha == 0:
        return torch.randint(o.rows, (o.batch,), generator=draws)
    drawn = torch.rand(o.batch, generator=draws, dtype=torch.float64)
    power = 1 - o.alpha
    rank = ((drawn * (o.rows**power - 1) + 1) ** (1 / power)).long().clamp(1, o.rows) - 1
    return rank * 2_654_435_761 % o.rows  # a prime: frequent ids do not lie side by side


def batches(o: Case) -> Iterator[Batch]:
    draws = torch.Generator().manual_seed(0)
    offsets = torch.arange(o.batch)
    while True:
        dense = torch.randn(o.batch, 13, generator=draws)
        looked_up = [ids(o, draws) for _ in range(o.tables)]
        label = torch.randint(2, (o.batch,), generator=draws).float()
        yield (dense, [offsets] * o.tables, looked_up), label


def variants(kind: Kind, o: Case, batch: Batch) -> Iterator[Variant]:
    def plain() -> DLRM:
        torch.manual_seed(0)
        return DLRM([o.rows] * o.tables, o.dim, dense=13, hidden=512, sparse=False)

    for name, how in (("eager", None), ("eager, fastest", True)):
        model = plain()
        optimizer = kind.make(model.parameters(), **{kind.fast: how})
        yield Variant(name, model, optimizer, kind.cycles)
    model = plain()
    optimizer = kind.make(model.parameters())
    fast, optimizer = recast.optimize(model, optimizer, example=batch[0])
    yield Variant("recast", fast, optimizer, kind.cycles)


def measure(kind: Kind, case: Case, lead: int, rounds: int) -> list[Variant]:
    data = batches(case)
    found = list(variants(kind, case, next(data)))
    for k in range(lead if kind.after else 2):
        batch = next(data)
        for v in found[0 if k < 2 else -1 :]:
            v.train(batch)
    for _ in range(rounds):
        batch = next(data)
        for v in found:
            v.step.append(v.train(batch))
    return found


def row(name: str, case: Case, found: list[Variant]) -> dict[str, object]:
    """Median milliseconds of each variant; and how many times as long as ours the others take."""
    *others, ours = found
    times = {v.name: round(statistics.median(v.step), 1) for v in found}
    ratios = {
        f"{v.name} / recast": round(
            statistics.median(a / b for a, b in zip(v.step, ours.step, strict=True)), 2
        )
        for v in others
    }
    return {"optimizer": name, **case._asdict(), **times, **ratios}


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("lead", 250), ("rounds", 11), ("cases", len(CASES))):
        p.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    p.add_argument("--optimizers", nargs="+", choices=KINDS, default=[*KINDS])
    p.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default all cores")
    p.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    o = p.parse_args()
    torch.set_num_threads(o.threads)
    title = f"A training step of DLRM, milliseconds, {o.threads} threads"
    options = {k: v for k, v in vars(o).items() if k != "out"}
    options["optimizers"] = " ".join(o.optimizers)
    rows = [
        row(name, case, measure(KINDS[name], case, o.lead, o.rounds))
        for name in o.optimizers
        for case in CASES[: o.cases]
    ]
    record.write(o.out, "optimizer-step", title, options, rows)


if __name__ == "__main__":
    main()
