"""Does training on W ranks, or an int8 wire, move the AUC? On real data, processes over gloo.

    python benchmarks/ranks_auc.py                # 4 ranks, 5 seeds, an epoch each
    python benchmarks/ranks_auc.py --ranks 2 --seeds 3 --steps 20 # too few for the limits

Late flights from New York (``examples/flights.py``), a DLRM, Adagrad, batches of 1024. For every
seed (of the weights and of the order of the rows): the plain model on one process; on W ranks with
an fp32 wire, and with an int8 wire both ways; and W - 1 controls, the plain model with the rows of
each batch and the units of its hidden layers in another order: the same sums, each added in another
order. (Reordering rows alone would leave the sums within a layer, which decide what a ReLU cuts
off; W ranks, whose batches are smaller, change those too.) The questions, each with its limit:

- W ranks, fp32 wire: no further from one process than the controls spread (the largest range, over
  the seeds, of one process and its controls), or 1e-6;
- float64, the first seed: W ranks and one process differ by rounding alone, so by 1e-9 at most;
- int8 wire: the mean difference from one process over the seeds is within the spread of the seeds,
  the standard deviation of one process's AUC over them; and each difference is within their range.

Exit code 1 when one is exceeded. Writes ``<date>-<machine>-ranks-auc.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import record
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import flights
from dlrm import DLRM

import recast
from recast.rewriter.diff.auc import auc
from recast.rewriter.diff.reordered_units import reordered_units

BATCH = 1024
WIRES = ("fp32", "int8")
FLOOR = 1e-6  # two AUCs this close are equal
FLOOR_64 = 1e-9  # likewise in float64: a single pair of rows that changed places


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--ranks", type=int, default=4)
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--steps", type=int, help="default an epoch")
    p.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return p.parse_args(arguments)


class Runs:
    """All runs of one seed, on this rank."""

    def __init__(
        self, data: flights.Flights, seed: int, steps: int | None, dtype: torch.dtype
    ) -> None:
        self.data, self.rank, self.world = data, dist.get_rank(), dist.get_world_size()
        self.dense, self.late = data.dense.to(dtype), data.late.to(dtype)
        order = torch.nonzero(~data.test).squeeze(1)
        random = torch.Generator().manual_seed(seed)
        # Whole batches: ranks with unequal parts average unequal means, as under DDP.
        whole = len(order) // BATCH * BATCH
        self.batches = order[torch.randperm(len(order), generator=random)][:whole].split(BATCH)
        self.batches = self.batches[:steps]
        self.test = torch.nonzero(data.test).squeeze(1)
        torch.manual_seed(seed)
        self.model = DLRM(list(data.vocabulary), dim=16, dense=14, hidden=128).to(dtype)

    def batch(self, rows: Tensor) -> tuple[Any, ...]:
        offsets = [torch.arange(len(rows))] * len(self.data.vocabulary)
        return self.dense[rows], offsets, list(self.data.ids[rows].unbind(1))

    def train(self, model: nn.Module, opt: torch.optim.Optimizer, control: bool = False) -> None:
        """Train on this rank's part of each batch, or on all of it if ``model`` is plain."""
        spread = isinstance(model, recast.Compiled)
        random = torch.Generator().manual_seed(self.rank)
        for rows in self.batches:
            if spread:
                rows = rows.tensor_split(self.world)[self.rank]
            if control:
                rows = rows[torch.randperm(len(rows), generator=random)]
            loss = F.binary_cross_entropy(model(*self.batch(rows)), self.late[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()

    def auc(self, model: nn.Module) -> float:
        with torch.no_grad():
            parts = [model.eval()(*self.batch(rows)) for rows in self.test.split(8192)]
        return auc(torch.cat(parts), self.data.late[self.test])

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        # With the default eps, a gradient that is only rounding noise becomes a step of lr.
        return torch.optim.Adagrad(model.parameters(), lr=0.02, eps=1e-6)

    def on_ranks(self, wire: str) -> float:
        own = copy.deepcopy(self.model)
        rows = self.batches[0].tensor_split(self.world)[self.rank]
        fast, opt = recast.optimize(
            own, self.optimizer(own), example=self.batch(rows), wire=wire, sharding="table_wise"
        )
        self.train(fast, opt)
        return self.auc(fast)

    def alone(self) -> list[float]:
        """The AUCs of one process, on rank 0, and of a control on every other rank."""
        own = copy.deepcopy(self.model)
        if self.rank:
            own = reordered_units(own, torch.Generator().manual_seed(self.rank))
        self.train(own, self.optimizer(own), control=self.rank > 0)
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, self.auc(own))
        return found


def measure(o: argparse.Namespace, data: flights.Flights) -> list[dict[str, Any]]:
    """A row per seed; the last three columns are numbers."""
    rows = []
    for seed in range(o.seeds):
        runs = Runs(data, seed, o.steps, torch.float32)
        many = {wire: runs.on_ranks(wire) for wire in WIRES}
        one, *controls = runs.alone()
        rows.append(
            {
                "seed": seed, "steps": len(runs.batches), "one process": one,
                **{f"{runs.world} ranks {wire}": v for wire, v in many.items()},
                "controls' spread": max(one, *controls) - min(one, *controls),
                "fp32 apart": many["fp32"] - one, "int8 apart": many["int8"] - one,
            }
        )  # fmt: skip
        if dist.get_rank() == 0:
            print({k: f"{v:.7g}" for k, v in rows[-1].items()}, flush=True)
    return rows


def in_float64(o: argparse.Namespace, data: flights.Flights) -> tuple[float, float]:
    """How far W ranks are from one process, and how far the controls spread."""
    runs = Runs(data, 0, o.steps, torch.float64)
    many = runs.on_ranks("fp32")
    one, *controls = runs.alone()
    return abs(many - one), max(one, *controls) - min(one, *controls)


def judged(rows: list[dict[str, Any]], exact: tuple[float, float]) -> list[dict[str, Any]]:
    """The questions, each with its figure and its limit."""
    one = [r["one process"] for r in rows]
    spread = max(r["controls' spread"] for r in rows)
    int8 = [r["int8 apart"] for r in rows]
    asked = [
        ("fp32 wire, furthest from one process", max(abs(r["fp32 apart"]) for r in rows),
         max(spread, FLOOR), "largest spread of one process and its controls"),
        ("float64, from one process", exact[0], FLOOR_64,
         f"no more than rounding; its controls spread {exact[1]:.1e}"),
        ("int8 wire, mean of the seeds", abs(statistics.mean(int8)), statistics.pstdev(one),
         "standard deviation of the seeds"),
        ("int8 wire, furthest from one process", max(map(abs, int8)), max(one) - min(one),
         "range of the seeds"),
    ]  # fmt: skip
    return [
        {"question": q, "found": f"{found:.1e}", "limit": f"{limit:.1e}", "limit is": why,
         "": "" if found <= limit else "MISSED"}
        for q, found, limit, why in asked
    ]  # fmt: skip


def shown(row: dict[str, Any]) -> dict[str, str]:
    def cell(key: str, value: Any) -> str:
        if isinstance(value, int):
            return str(value)
        return f"{value:.7f}" if "process" in key or "ranks" in key else f"{value:.1e}"

    return {key: cell(key, value) for key, value in row.items()}


def main(o: argparse.Namespace) -> int:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    data = flights.load()
    rows = measure(o, data)
    answers = judged(rows, in_float64(o, data))
    if dist.get_rank() == 0:
        kept = {"ranks": o.ranks, "seeds": o.seeds} | ({"steps": o.steps} if o.steps else {})
        title = "AUC of training on many ranks, and through an int8 wire"
        file = record.write(o.out, "ranks-auc", title, kept, [shown(r) for r in rows])
        with file.with_suffix(".md").open("a") as text:
            text.write(f"\n{record.table(answers)}\n")
        print(record.table(answers))
    first = dist.get_rank() == 0
    dist.destroy_process_group()
    return int(first and any(a[""] for a in answers))


if __name__ == "__main__":
    found = options()
    if "RANK" in os.environ:
        sys.exit(main(found))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(found.ranks)]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    sys.exit(subprocess.run([*launch, *sys.argv], check=False).returncode)
