"""Inference of the example models, without gradients: ours beside eager PyTorch and torch.compile.

    python benchmarks/inference.py --threads 1

The models of ``examples/models`` in the sizes of their papers or of public benchmarks, their tables
cut to 100,000 rows. All variants of a model live in one process and take turns, each with the same
four batches in turn; times are medians over the rounds, ratios those within a round. Writes
``<date>-<machine>-inference.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import record
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "models"))
import criteo
import dcn
import dcn_v2
import deepfm
import mlperf_dlrm
import mmoe
import pnn
import xdeepfm

import recast

MOST_ROWS = 100_000
X4 = [min(n, MOST_ROWS) for n in criteo.X4]
MLPERF = [min(n, MOST_ROWS) for n in mlperf_dlrm.ROWS]
HIDDEN, DROPOUT = [400, 400, 400], 0.2
Batch = tuple[Any, ...]


def ids(rows: Sequence[int], batch: int) -> Tensor:
    """(batch, fields): one id of every field; others at each call."""
    return torch.stack([torch.randint(n, (batch,)) for n in rows], 1)


def bags(batch: int) -> Batch:
    """Numbers, ids and offsets of DLRM: one id in every bag."""
    found = list(ids(MLPERF, batch).t().contiguous())
    return torch.rand(batch, 13), found, [torch.arange(batch)] * len(MLPERF)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "DLRM": (
        lambda: mlperf_dlrm.DLRM(MLPERF, (512, 256, 64), (512, 512, 256, 1)),
        bags,
    ),
    "DCN v2": (
        lambda: dcn_v2.DCNv2(MLPERF, 64, 128, [512, 256], [1024, 512, 256]),
        bags,
    ),
    "DeepFM": (lambda: deepfm.DeepFM(X4, 16, HIDDEN, DROPOUT), lambda n: (ids(X4, n),)),
    "DCN": (lambda: dcn.DCN(X4, 16, 3, HIDDEN, DROPOUT), lambda n: (ids(X4, n),)),
    "xDeepFM": (
        lambda: xdeepfm.XDeepFM(X4, 16, [16] * 3, HIDDEN, DROPOUT),
        lambda n: (ids(X4, n),),
    ),
    "PNN": (lambda: pnn.PNN(X4, 16, HIDDEN, DROPOUT), lambda n: (ids(X4, n),)),
    "MMoE": (
        lambda: mmoe.MMoE(mmoe.ROWS, 4, 3, [256, 128]),
        lambda n: (torch.rand(n, mmoe.DENSE), ids(mmoe.ROWS, n)),
    ),
}


def variants(plain: nn.Module, example: Batch, compiles: bool) -> dict[str, nn.Module]:
    found = {"eager": plain, "recast": recast.optimize(copy.deepcopy(plain), example=example)}
    if compiles:
        found["compile"] = torch.compile(copy.deepcopy(plain))  # type: ignore[assignment]
    return {name: model.eval() for name, model in found.items()}


def timed(model: nn.Module, batches: list[Batch]) -> float:
    """Microseconds of a call."""
    start = time.perf_counter()
    for batch in batches:
        model(*batch)
    return 1e6 * (time.perf_counter() - start) / len(batches)


def measure(name: str, o: argparse.Namespace) -> list[dict[str, object]]:
    make, batch = MODELS[name]
    torch.manual_seed(0)
    found = variants(make().eval(), batch(64), not o.no_compile)
    return [row(name, rows, found, [batch(rows) for _ in range(4)], o) for rows in o.batches]


def row(
    name: str, rows: int, found: dict[str, nn.Module], batches: list[Batch], o: argparse.Namespace
) -> dict[str, object]:
    """Median microseconds of each variant, and how many times as long as ours the others take."""
    for model in found.values():  # the first calls compile, or read a new size
        for one in batches:
            model(*one)
    times: dict[str, list[float]] = {key: [] for key in found}
    repeats = max(1, int(2e4 / timed(found["recast"], batches) / len(batches)))
    for _ in range(o.rounds):
        for key, model in found.items():
            times[key].append(timed(model, batches * repeats))
    ours = times["recast"]
    ratios = {
        f"{key} / recast": round(
            statistics.median(a / b for a, b in zip(times[key], ours, strict=True)), 2
        )
        for key in found
        if key != "recast"
    }
    middle = {key: round(statistics.median(of)) for key, of in times.items()}
    return {"model": name, "batch": rows, **middle, **ratios}


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--batches", type=int, nargs="+", default=[1, 16, 128, 2048])
    p.add_argument("--rounds", type=int, default=11)
    p.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default all cores")
    p.add_argument("--only", nargs="+", default=list(MODELS), choices=MODELS, metavar="MODEL")
    p.add_argument("--no-compile", action="store_true", help="without torch.compile")
    p.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    o = p.parse_args()
    torch.set_num_threads(o.threads)
    warnings.simplefilter("ignore")  # of torch.compile's
    with torch.no_grad():
        rows = [line for name in o.only for line in measure(name, o)]
    options = {"threads": o.threads, "rounds": o.rounds}
    title = f"Inference of the example models, microseconds a batch, {o.threads} threads"
    record.write(o.out, "inference", title, options, rows)


if __name__ == "__main__":
    main()
