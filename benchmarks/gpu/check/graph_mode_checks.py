"""``mode="graph"``: forwards and whole training loops, replayed as CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import recast
from gpu.check.example_models import load_example, to, without_dropout
from gpu.harness.items import Skip
from recast.runtime import tolerances
from recast.runtime.rows import optimizer as row_optimizer

STEPS = 8
ADAGRAD = partial(torch.optim.Adagrad, lr=0.05)


def forwards(device: torch.device) -> dict[str, object]:
    if device.type != "cuda":
        raise Skip("there are no CUDA graphs on a CPU")
    model: Any = load_example("deepfm", 64).model.to(device).eval()
    batches = [to(load_example("deepfm", n).example, device) for n in (64, 64, 64, 64, 7, 7, 7, 7)]
    fast = recast.optimize(model, example=batches[0], mode="graph")
    for batch in batches:
        model.emb[0].weight.data.mul_(1.01)  # in place: a replay sees it
        with torch.no_grad():
            torch.testing.assert_close(fast(*batch), model(*batch), rtol=1e-4, atol=1e-5)
    replays = vars(fast)["_replays"]
    assert len(replays._recordings) == 2, "a recording for each size"
    return {}


@contextmanager
def _replays() -> Iterator[list[bool]]:
    """Whether each of the optimizers' steps inside was replayed."""
    found: list[bool] = []
    before = list(row_optimizer.instead)

    def seen(ask: Callable[..., bool]) -> Callable[..., bool]:
        def answer(*args: Any) -> bool:
            found.append(ask(*args))
            return found[-1]

        return answer

    row_optimizer.instead[:] = [seen(ask) for ask in before]
    try:
        yield found
    finally:
        row_optimizer.instead[:] = before


def training_loop(device: torch.device, schedule: bool = False) -> dict[str, object]:
    """Forward, backward and step replayed, against plain training in fp32 and float64.

    ``schedule``: the rate changes at every step, and no gradient is left from the step before.
    """
    if device.type != "cuda":
        raise Skip("there are no CUDA graphs on a CPU")
    subject = load_example("dlrm", 512)
    assert subject.loss is not None
    plain = without_dropout(subject.model).to(device)
    wide, twin = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    example = to(subject.example, device)
    widened = pytree.tree_map_only(
        Tensor, lambda t: t.double() if t.is_floating_point() else t, example
    )
    optimizers = [ADAGRAD(net.parameters()) for net in (twin, plain, wide)]
    fast, _ = recast.optimize(twin, optimizers[0], example=example, mode="graph")
    with _replays() as replayed:
        for k in range(2 * STEPS):
            for net, own in zip((fast, plain, wide), optimizers, strict=True):
                early = schedule or k % 2  # else gradients are there still at the next forward
                if schedule:
                    own.param_groups[0]["lr"] = 0.05 / (k + 1)
                if early:
                    own.zero_grad()
                loss = subject.loss(net(*(widened if net is wide else example)))
                if not early:
                    own.zero_grad()
                loss.backward()
                own.step()
    assert any(replayed) or not schedule, "no step was replayed"
    pairs = len(vars(fast)["_replays"]._training._recordings)
    assert pairs == 1, f"{pairs} recordings"
    worst = 0.0
    for a, b, c in zip(fast.parameters(), plain.parameters(), wide.parameters(), strict=True):
        share = tolerances.excess(a, b, c, scale=float(c.abs().max())) / tolerances.CHAIN
        worst = max(worst, share)
    assert worst <= 1, f"parameters after {2 * STEPS} steps: {worst:.2f} of the limit"
    told = f"{sum(replayed)} steps replayed"
    return {"share of the limit": round(worst, 3), "detail": told}
