"""Late flights, twice: a plain DLRM and its optimised twin, trained on the same batches.

    make demo                               # the same as: python examples/demo.py
    python examples/demo.py --epochs 1 --batch 1024

Prints what was rewritten, the first lines of the graph, the proof that nothing changed, and what
both models learned and how fast. Writes ``out/report.html`` and ``out/graph.svg``.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import dataclass
from pathlib import Path

import flights
import torch
import torch.nn.functional as F
from dlrm import DLRM
from flights import Flights
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import recast
from recast.auc import auc
from recast.rewriter.report import output
from recast.rewriter.report.wrap import wrapped

LINES = 24  # of the graph
Inputs = tuple[Tensor, list[Tensor], list[Tensor]]


@dataclass
class Runner:
    """A model in training, with the rows it has seen and the seconds that took."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    rows: int = 0
    seconds: float = 0.0

    def step(self, inputs: Inputs, late: Tensor) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        F.binary_cross_entropy(self.model(*inputs), late).backward()
        self.optimizer.step()
        self.seconds += time.perf_counter() - start
        self.rows += len(late)

    @torch.no_grad()
    def score(self, data: Flights, rows: Tensor) -> Tensor:
        self.model.eval()
        return torch.cat([self.model(*inputs(data, part)) for part in rows.split(8192)])


def inputs(data: Flights, rows: Tensor) -> Inputs:
    """A batch as DLRM takes it: one id per bag, so bag r of every field starts at id r."""
    offsets = [torch.arange(len(rows))] * len(data.vocabulary)
    return data.dense[rows], offsets, list(data.ids[rows].T.contiguous())


def build(data: Flights, batch: int, lr: float) -> tuple[Runner, Runner]:
    """The plain model, and the optimised twin of a copy of it."""
    torch.manual_seed(0)
    plain = DLRM(list(data.vocabulary), dim=16, dense=data.dense.shape[1], hidden=256)
    twin = copy.deepcopy(plain)
    runners = [
        Runner(name, model, torch.optim.Adagrad(model.parameters(), lr=lr))
        for name, model in (("plain PyTorch", plain), ("recast", twin))
    ]
    example = inputs(data, torch.arange(batch))
    runners[1].model, _ = recast.optimize(twin, runners[1].optimizer, example=example)
    return runners[0], runners[1]


def train(data: Flights, runners: tuple[Runner, Runner], batches: list[Tensor]) -> None:
    """Train both models on every batch, in alternating order, so that neither always finds it in
    cache.
    """
    columns = (
        TextColumn("training both"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for k, rows in enumerate(progress.track(batches)):
            given, late = inputs(data, rows), data.late[rows]
            for runner in runners if k % 2 else reversed(runners):
                runner.step(given, late)


def results(data: Flights, plain: Runner, fast: Runner) -> Table:
    rows = torch.nonzero(data.test).squeeze(1)
    late = data.late[rows]
    table = Table(title=f"Trained on late flights, tested on {len(rows):,} others")
    for column in ("", "AUC", "samples/s", "beside plain"):
        table.add_column(column, justify="right" if column else "left")
    speed = plain.rows / plain.seconds
    for runner in (plain, fast):
        rate = runner.rows / runner.seconds
        found = auc(runner.score(data, rows), late)
        table.add_row(runner.name, f"{found:.5f}", f"{rate:,.0f}", f"{rate / speed:.2f}x")
    # with the same weights, an exact rewrite changes the AUC only by the order of float sums
    same = copy.deepcopy(plain.model)
    same.load_state_dict(fast.model.state_dict())
    moved = abs(auc(Runner("", same, plain.optimizer).score(data, rows), late) - found)
    table.caption = f"recast's weights in the plain model: AUC {moved:.0e} off"
    return table


def say(console: Console, text: str) -> None:
    """Print lines that fit already, as they are."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--epochs", type=int, default=2, help="default 2")
    p.add_argument("--batch", type=int, default=2048, help="default 2048")
    p.add_argument("--lr", type=float, default=0.02, help="default 0.02")
    p.add_argument("--steps", type=int, help="stop early")
    p.add_argument("--out", type=Path, default=Path("out"), help="folder of what is written")
    o = p.parse_args()
    console = Console()

    console.rule("data")
    data = flights.load()
    console.print(
        f"{len(data.late):,} flights, {len(data.vocabulary)} id fields "
        f"({sum(data.vocabulary):,} rows), {data.dense.shape[1]} numbers; "
        f"{data.late.mean():.1%} came in more than {flights.LATE} minutes late"
    )
    plain, fast = build(data, o.batch, o.lr)

    console.rule("what was rewritten")
    say(console, fast.model.report.text(width=console.width))

    graph = str(fast.model).splitlines()
    console.rule(f"the graph: {min(LINES, len(graph))} of {len(graph)} lines")
    say(console, wrapped("\n".join(graph[:LINES]), console.width))

    console.rule("the proof")
    example = [inputs(data, torch.arange(n)) for n in (512, 300)]
    difference = recast.diff(plain.model, fast.model, example, steps=3)
    say(console, difference.text(width=console.width))

    console.rule("training")
    rows = torch.nonzero(~data.test).squeeze(1)
    g = torch.Generator().manual_seed(0)
    shuffled = [
        rows[torch.randperm(len(rows), generator=g)].split(o.batch) for _ in range(o.epochs)
    ]
    parts = [part for epoch in shuffled for part in epoch if len(part) == o.batch]
    train(data, (plain, fast), parts[: o.steps])
    console.print(results(data, plain, fast))

    files = {"html": "report.html", "svg": "graph.svg"}
    for path in output.write(fast.model, o.out, files):
        console.print(f"wrote {path}")
    difference.check()


if __name__ == "__main__":
    main()
