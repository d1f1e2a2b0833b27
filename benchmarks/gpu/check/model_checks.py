"""Whole models on a device, diffed with training steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import recast
from gpu.check import common_models, op_checks
from gpu.check.example_models import EXAMPLES, load_example, to, without_dropout
from gpu.harness.items import Item
from recast.runtime import tolerances


def models(device: torch.device, tiny: bool) -> Iterator[Item]:
    """DLRM and the models of ``examples/models``."""
    for name in ("deepfm", "mlperf_dlrm") if tiny else ("dlrm", *EXAMPLES):
        yield Item(f"{name}, diff", partial(_diff_example, name, 16 if tiny else 512, device))
        if device.type == "cuda":
            yield Item(f"{name}, bfloat16 autocast", partial(_autocast, name, device))


def _diff_example(name: str, batch: int, device: torch.device) -> dict[str, object]:
    subject = load_example(name, batch)
    model, example = without_dropout(subject.model).to(device), to(subject.example, device)
    return diff_training(model, example, loss=subject.loss)


# Where convolutions may be TF32, ours are and cuDNN's perhaps not: ops are judged so, one by one.
@op_checks.convolving(in_tf32=False)
def diff_training(model: nn.Module, example: Any, **options: Any) -> dict[str, object]:
    # Two batches tell which sizes belong to the batch; more are for the steps.
    shown = example[:2] if isinstance(example, list) else example
    fast = recast.optimize(model, example=shown)
    report = recast.diff(model, fast, example, steps=3, **options)
    report.check()
    rows = [r.share for r in report.rows]
    fired = len(fast.report.journal.fired)
    return {"share of the limit": round(max(rows), 3), "detail": f"{fired} rewrites"}


def _autocast(name: str, device: torch.device) -> dict[str, object]:
    """No worse than plain torch under the same autocast, up to the rounding of bfloat16."""
    subject = load_example(name, 512)
    model, example = without_dropout(subject.model).to(device), to(subject.example, device)
    fast = recast.optimize(model, example=example)
    wide = copy.deepcopy(model).double()
    widened = pytree.tree_map_only(
        Tensor, lambda t: t.double() if t.is_floating_point() else t, example
    )
    leaves = [
        p for p, q in zip(model.parameters(), wide.parameters(), strict=True) if p.numel() < 1e6
    ]
    doubles = [q for q in wide.parameters() if q.numel() < 1e6]

    def run(net: nn.Module, batch: Any, parameters: Sequence[Tensor], low: bool) -> list[Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            out = net(*batch)
        # Outside, and of float32: under autocast torch refuses losses of probabilities.
        assert subject.loss is not None
        loss = subject.loss(
            pytree.tree_map_only(Tensor, lambda t: t.double() if not low else t.float(), out)
        )
        grads = torch.autograd.grad(loss, parameters)
        return [loss, *(g.to_dense() if g.layout != torch.strided else g + 0 for g in grads)]

    truth = run(wide, widened, doubles, False)
    plain, ours = run(model, example, leaves, True), run(fast, example, leaves, True)
    worst = 0.0
    for a, b, c in zip(ours, plain, truth, strict=True):
        usual, error = (float((t.double() - c).abs().max()) for t in (b, a))
        room = max(4 * usual, tolerances.CHAIN * 2.0**-8 * float(c.abs().max()))
        worst = max(worst, error / room if room else float(error > 0))
    assert worst <= 1, f"{worst:.2f} of what bfloat16 allows"
    return {"share of the limit": round(worst, 3)}


def zoo(device: torch.device, tiny: bool) -> Iterator[Item]:
    """Five common forms of models."""
    for name, subject in common_models.ZOO.items():
        yield Item(name, partial(_diff_zoo, subject, 12 if tiny else 300, device))
        if tiny:
            return


def _diff_zoo(subject: common_models.Subject, rows: int, device: torch.device) -> dict[str, object]:
    torch.manual_seed(0)
    model = subject.make().to(device)
    return diff_training(model, [to(subject.batch(rows, k), device) for k in (0, 1)])
