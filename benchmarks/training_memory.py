"""The memory of training beyond weights and optimizer state, for tables of more and more rows.

    python benchmarks/training_memory.py              # 8 tables of 20,000 to 320,000 x 64, Adagrad
    python benchmarks/training_memory.py --record

The peak resident set of ``recast.optimize`` and five steps, less what was there before, less the
bytes of all parameters, buffers and states. A model with small tables is trained first, so that
code and memory pools are there already. ``eager``, the same model trained by torch, shows that
memory that grows with the rows is seen: its gradients do. Exit code 1 if ours grows by more than a
byte per row.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import record
import torch
import torch.nn.functional as F
from dlrm import DLRM
from torch import Tensor

import recast

MOST = 1.0  # byte a row of a table
STEPS = 5


def train(ours: bool, rows: int, o: argparse.Namespace) -> int:
    """Run a model's first steps; returns the bytes of its weights, buffers and states."""
    torch.manual_seed(0)
    model: torch.nn.Module = DLRM([rows] * o.tables, o.dim, dense=13, hidden=64)
    optimizer: torch.optim.Optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    g = torch.Generator().manual_seed(1)
    none = [None] * o.tables

    def batch() -> tuple[Tensor, list[None], list[Tensor]]:
        ids = [torch.randint(rows, (o.batch, o.ids), generator=g) for _ in range(o.tables)]
        return torch.randn(o.batch, 13, generator=g), none, ids

    if ours:
        model, optimizer = recast.optimize(model, optimizer, example=batch())
    for _ in range(STEPS):
        label = torch.randint(2, (o.batch,), generator=g).float()
        F.binary_cross_entropy(model(*batch()), label).backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = [*model.parameters(), *model.buffers()]
    kept += [t for state in optimizer.state.values() for t in state.values()]
    return sum(t.numel() * t.itemsize for t in kept)


def beside(ours: bool, rows: int, o: argparse.Namespace) -> int:
    """Bytes at the peak, beyond those that :func:`train` counts.

    Raises OSError if the system does not tell.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or memory freed but kept would hide allocations
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status("VmRSS")
    kept = train(ours, rows, o)
    return 1024 * (_status("VmHWM") - before) - kept


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))


def growth(rows: Sequence[int], found: Sequence[int], tables: int) -> float:
    """Bytes per row by which memory grows from the smallest tables to the largest."""
    return (found[-1] - found[0]) / (tables * (rows[-1] - rows[0]))


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sizes = [20_000, 80_000, 320_000]
    p.add_argument("--rows", type=int, nargs="+", default=sizes, help="default %(default)s")
    for name, default in (("tables", 8), ("dim", 64), ("batch", 256), ("ids", 4)):
        p.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    p.add_argument("--record", action="store_true", help="keep it in benchmarks/results")
    return p.parse_args(arguments)


def measure(o: argparse.Namespace, ours: bool) -> list[int]:
    """Bytes beyond weights and states, for each size of the tables."""
    train(ours, 1000, o)
    return [beside(ours, rows, o) for rows in o.rows]


def main() -> int:
    o = options()
    table: list[dict[str, object]] = []
    for ours in (True, False):
        found = measure(o, ours)
        line: dict[str, object] = {"": "recast" if ours else "eager"}
        line |= {
            f"MiB, {r:,} rows": round(b / 2**20, 1) for r, b in zip(o.rows, found, strict=True)
        }
        table.append(line | {"bytes a row": round(growth(o.rows, found, o.tables), 2)})
    if o.record:
        title = "What training takes beside weights and optimizer state, Adagrad"
        known = {k: v for k, v in vars(o).items() if k not in ("record", "rows")}
        folder = Path(__file__).resolve().parent / "results"
        record.write(folder, "training-memory", title, known, table)
    else:
        print(record.table(table))
    return int(float(str(table[0]["bytes a row"])) > MOST)


if __name__ == "__main__":
    raise SystemExit(main())
