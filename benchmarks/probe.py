"""Our training step over the least time that its parts take in all, on one thread.

    python benchmarks/probe.py                        # batch 2048, 1 and 20 ids per bag
    python benchmarks/probe.py --ids 1 --rounds 15 --record

The parts: lookups; sort, sum and Adagrad on the rows looked up; the dot interaction, forward and
backward, all by plain C++ loops (probe.cpp, first checked against torch); and all products of the
layers at the rate of a square one (``torch.mm``). Nothing is counted for Python, activations, the
loss, intermediate gradients or the dense optimizer. Step and parts take turns, in processor time;
the ratio is the median over the rounds. Exit code 1 if one is above 1.35.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record
from peers.cells import ROWS, TABLES, Cell
from peers.model import DENSE, HIDDEN, START, Tables, batch
from peers.variants import EPS, LR, build, given

HERE = Path(__file__).resolve().parent
BAR = 1.35
SIDE = 1024  # of the square product
TINY = 1e-6  # size of the gradients of the probe, which trains the tables too


class Probe:
    """The loops of probe.cpp for vectors of ``dim``, compiled for this processor."""

    def __init__(self, dim: int, folder: str) -> None:
        library = Path(folder) / "probe.so"
        command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O3", "-march=native"]
        command += [
            "-fno-math-errno",
            "-shared",
            "-fPIC",
            str(HERE / "probe.cpp"),
            "-o",
            str(library),
        ]
        subprocess.run(command, check=True)
        self._library, self.dim = ctypes.CDLL(str(library)), dim

    def __call__(self, name: str, *arguments: Tensor | float) -> None:
        """Call ``name``; tensors are contiguous, on the CPU, and of the right shape."""
        known: dict[type, Callable[[Any], object]] = {int: ctypes.c_int64, float: ctypes.c_float}
        getattr(self._library, f"{name}_{self.dim}")(
            *(
                ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else known[type(a)](a)
                for a in arguments
            )
        )


@dataclass
class Parts:
    """Seconds of each part."""

    lookups: float
    update: float
    interaction: float
    products: float

    @property
    def total(self) -> float:
        return sum(getattr(self, f.name) for f in fields(self))


def check(probe: Probe, rows: int = 50, bags: int = 33, many: int = 3, tables: int = 4) -> None:
    """Raise AssertionError if the probe computes something else than torch."""
    g = torch.Generator().manual_seed(0)
    dim = probe.dim
    weights = torch.randn(tables, rows, dim, generator=g)
    ids = torch.randint(rows, (tables, bags, many), generator=g)
    upstream = torch.randn(bags, tables, dim, generator=g)
    parameter = torch.nn.Parameter(weights.clone())
    adagrad = torch.optim.Adagrad([parameter], lr=LR, eps=EPS, initial_accumulator_value=START)
    both = zip(ids, parameter.unbind(), strict=True)
    want = torch.stack([F.embedding(i, w).sum(1) for i, w in both], 1)
    want.backward(upstream)
    adagrad.step()
    got, state = torch.empty_like(upstream), torch.full_like(weights, START)
    probe("pool", weights, ids, got, tables, bags, many, rows)
    torch.testing.assert_close(got, want.detach())
    probe("update", weights, state, ids, upstream, tables, bags, many, rows, LR, EPS)
    torch.testing.assert_close(weights, parameter.detach())

    n = tables + 1
    dense = torch.randn(bags, dim, generator=g).requires_grad_()
    pooled = torch.randn(bags, tables, dim, generator=g).requires_grad_()
    z = torch.cat([dense.unsqueeze(1), pooled], 1)
    li, lj = torch.tril_indices(n, n, -1)
    out = torch.cat([dense, torch.bmm(z, z.transpose(1, 2))[:, li, lj]], 1)
    back = torch.randn(out.shape, generator=g)
    out.backward(back)
    dots, grads = torch.empty(out.shape), (torch.empty(bags, dim), torch.empty(bags, tables, dim))
    probe("dots", dense, pooled, dots, bags, n)
    probe("undots", dense, pooled, back, *grads, bags, n)
    torch.testing.assert_close(dots, out.detach(), rtol=1e-5, atol=1e-4)
    for found, wanted in zip(grads, (dense.grad, pooled.grad), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


def flops(cell: Cell) -> float:
    """Of all products of both chains in a step; the input needs no gradient."""
    pairs = TABLES * (TABLES + 1) // 2
    bottom = (DENSE, HIDDEN, HIDDEN // 2, cell.dim)
    top = (cell.dim + pairs, HIDDEN, HIDDEN // 2, 1)
    sizes = sum(a * b for a, b in (*pairwise(bottom), *pairwise(top)))
    return 2.0 * cell.batch * (3 * sizes - DENSE * HIDDEN)


def seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def measure(cell: Cell, tables: Tables, probe: Probe, rounds: int) -> list[tuple[float, Parts]]:
    """Seconds of a step of ours, and of the parts, in each round."""
    variant = build(tables, cell, ["recast"]).variants["recast"]
    batches = [batch(cell, tables.rows, seed=100 + k) for k in range(4)]
    inputs = [given(variant.form, b) for b in batches]
    stacked = [torch.stack(b.ids) for b in batches]
    dense, pooled = torch.randn(cell.batch, cell.dim), torch.empty(cell.batch, TABLES, cell.dim)
    dots = torch.empty(cell.batch, cell.dim + TABLES * (TABLES + 1) // 2)
    of_dense, of_pooled = torch.empty_like(dense), torch.empty_like(pooled)
    upstream = TINY * torch.randn_like(pooled)
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    square = torch.empty(SIDE, SIDE)
    work = flops(cell)

    def one(k: int) -> tuple[float, Parts]:
        ids, other = stacked[k % 4], (k + 1) % 4
        sizes = TABLES, cell.batch, cell.ids, tables.rows[0]
        lookups = seconds(lambda: probe("pool", tables.flat, ids, pooled, *sizes))
        forth = seconds(lambda: probe("dots", dense, pooled, dots, cell.batch, TABLES + 1))
        back = seconds(
            lambda: probe(
                "undots", dense, pooled, dots, of_dense, of_pooled, cell.batch, TABLES + 1
            )
        )
        update = seconds(
            lambda: probe(
                "update", tables.flat, tables.flat_sums, ids, upstream, *sizes, LR, EPS
            )  # unlike in a step, nothing in between has evicted the rows
        )
        product = min(seconds(lambda: torch.mm(a, b, out=square)) for _ in range(5))
        parts = Parts(lookups, update, forth + back, product * work / (2.0 * SIDE**3))
        one_batch = batches[other]
        variant.train(one_batch.dense, inputs[other], one_batch.label)  # settles
        k = (k + 2) % 4
        step = seconds(lambda: variant.train(batches[k].dense, inputs[k], batches[k].label))
        return step, parts

    return [one(k) for k in range(rounds + 1)][1:]


def row(cell: Cell, found: list[tuple[float, Parts]]) -> dict[str, object]:
    """A line of the table; times are medians in milliseconds."""

    def middle(numbers: list[float]) -> float:
        return round(1e3 * statistics.median(numbers), 2)

    parts = {f.name: middle([getattr(p, f.name) for _, p in found]) for f in fields(Parts)}
    ratio = statistics.median(step / p.total for step, p in found)
    return {
        "batch": cell.batch,
        "dim": cell.dim,
        "ids": cell.ids,
        "step": middle([step for step, _ in found]),
        **parts,
        "sum": middle([p.total for _, p in found]),
        "ratio": round(ratio, 2),
        "at most": BAR,
        "": "" if ratio <= BAR else "missed",
    }


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--ids", type=int, nargs="+", default=[1, 20], help="default 1 20")
    p.add_argument("--batch", type=int, default=2048, help="default %(default)s")
    p.add_argument("--dim", type=int, default=64, choices=(16, 64, 128), help="default %(default)s")
    p.add_argument("--rows", type=int, default=ROWS, help="of each table (default %(default)s)")
    p.add_argument("--rounds", type=int, default=9, help="default %(default)s")
    p.add_argument("--record", action="store_true", help="keep it in benchmarks/results")
    o = p.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        probe = Probe(o.dim, folder)
        check(probe)
        tables = Tables([o.rows] * TABLES, o.dim)
        rows = []
        for ids in o.ids:
            cell = Cell(o.batch, o.dim, ids, "uniform", 1)
            rows.append(row(cell, measure(cell, tables, probe, o.rounds)))
    if o.record:
        options = {"batch": o.batch, "dim": o.dim, "rows": o.rows, "rounds": o.rounds}
        title = "A training step of DLRM over the sum of its parts, one thread"
        record.write(HERE / "results", "probe", title, options, rows)
    else:
        print(record.table(rows))
    return int(any(line[""] for line in rows))


if __name__ == "__main__":
    raise SystemExit(main())
