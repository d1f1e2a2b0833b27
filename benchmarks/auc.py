"""The reference models on real data: does the rewrite move the AUC?

    python benchmarks/auc.py                       # all models: same weights, 20 steps, an epoch
    python benchmarks/auc.py --models deepfm pnn --steps 20 --no-epoch

Late flights from New York (``examples/flights.py``), Adagrad, batches of 1024. Three questions,
each with its limit: both models with the same weights, 1e-6; after 20 steps, 1e-6; after an epoch,
the difference between two runs of the plain model that only sum their batches in another order.
Exit code 1 when one is exceeded. Writes ``<date>-<machine>-auc.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import record
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "models"))
import flights
from dcn import DCN
from dcn_v2 import DCNv2
from deepfm import DeepFM
from mlperf_dlrm import DLRM
from mmoe import MMoE
from pnn import PNN
from xdeepfm import XDeepFM

import recast
from recast.rewriter.diff import auc

LIMIT = 1e-6
Batch = tuple[tuple[object, ...], Tensor]
Form = Callable[[Tensor, Tensor], tuple[object, ...]]  # dense, ids -> arguments of the model


class Late(nn.Module):
    """MMoE has two tasks; both learn this one, and the score is their mean."""

    def __init__(self, tasks: nn.Module) -> None:
        super().__init__()
        self.tasks = tasks

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        first, second = self.tasks(dense, ids)
        return (first + second) / 2


def categories(dense: Tensor, ids: Tensor) -> tuple[object, ...]:
    return (ids,)


def bags(dense: Tensor, ids: Tensor) -> tuple[object, ...]:
    """One id per bag; MLPerf's models take 13 numbers."""
    starts = torch.arange(len(ids))
    return dense[:, :13], list(ids.unbind(1)), [starts] * ids.shape[1]


def both(dense: Tensor, ids: Tensor) -> tuple[object, ...]:
    return dense[:, :11], ids


def models(rows: Sequence[int]) -> dict[str, tuple[Callable[[], nn.Module], Form]]:
    """How each model is made for tables of ``rows``, and how it takes a batch."""
    return {
        "mlperf_dlrm": (lambda: DLRM(rows, (64, 16), (64, 32, 1)), bags),
        "deepfm": (lambda: DeepFM(rows, 8, [64, 64], 0.2), categories),
        "xdeepfm": (lambda: XDeepFM(rows, 8, [16, 16], [64, 64], 0.2), categories),
        "dcn": (lambda: DCN(rows, 8, 4, [64, 64], 0.2), categories),
        "dcn_v2": (lambda: DCNv2(rows, 8, 16, [32], [64, 32]), bags),
        "pnn": (lambda: PNN(rows, 8, [64, 64], 0.2), categories),
        "mmoe": (lambda: Late(MMoE(rows, 4, 3, [32, 16])), both),
    }


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--models", nargs="*", choices=[*models(())], help="default all")
    p.add_argument("--steps", type=int, default=20, help="of the second question (%(default)s)")
    p.add_argument("--no-epoch", action="store_true", help="leave the third question out")
    p.add_argument("--batch", type=int, default=1024, help="rows (default %(default)s)")
    p.add_argument("--controls", type=int, default=2, help="runs (default %(default)s)")
    p.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return p.parse_args(arguments)


def cut(data: flights.Flights, where: Tensor, size: int, form: Form) -> list[Batch]:
    return [(form(data.dense[r], data.ids[r]), data.late[r]) for r in where.split(size)]


def measure(o: argparse.Namespace, data: flights.Flights, name: str) -> Iterator[dict[str, object]]:
    """One row per question."""
    make, form = models(data.vocabulary)[name]
    train = torch.nonzero(~data.test).squeeze(1)
    train = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(0))]
    epoch = cut(data, train, o.batch, form)
    test = cut(data, torch.nonzero(data.test).squeeze(1), 8192, form)
    torch.manual_seed(0)
    plain = make()
    example = [epoch[0][0], form(data.dense[:7], data.ids[:7])]
    fast = recast.optimize(plain, example=example)

    def rate(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        # From 0, the first step would be the sign of each gradient, even if that is only rounding.
        return torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.1)

    def row(question: str, report: auc.AucReport, limit: float) -> dict[str, object]:
        return {
            "model": name, "after": question, "plain": round(report.plain, 7),
            "fast": round(report.fast, 7), "difference": f"{report.difference:.1e}",
            "limit": f"{limit:.1e}", "": "" if report.difference <= limit else "MISSED",
        }  # fmt: skip

    def trained(batches: Sequence[Batch], controls: int) -> auc.AucReport:
        return auc.trained(
            plain, fast, batches, test,
            make=rate, loss=F.binary_cross_entropy_with_logits, controls=controls,
        )  # fmt: skip

    yield row("no step", auc.paired(plain, fast, test), LIMIT)
    yield row(f"{o.steps} steps", trained(epoch[: o.steps], 0), LIMIT)
    if not o.no_epoch:
        report = trained(epoch, o.controls)
        yield row(f"{len(epoch)} steps", report, report.limit)


def main(arguments: list[str] | None = None) -> int:
    o = options(arguments)
    data = flights.load()
    rows: list[dict[str, object]] = []
    for name in o.models or models(data.vocabulary):
        for row in measure(o, data, name):
            print(" ".join(f"{k} {v}" for k, v in row.items()), flush=True)
            rows.append(row)
    kept = {"batch": o.batch, "steps": o.steps, "controls": o.controls}
    record.write(o.out, "auc", "AUC of the reference models, plain and optimised", kept, rows)
    return int(any(row[""] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
