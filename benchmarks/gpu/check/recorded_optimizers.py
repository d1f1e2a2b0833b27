"""The optimizers of dense parameters, recorded once and replayed with new rates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpu.check.example_models import to
from gpu.check.recorded_run import compare_training, recorder_for
from gpu.harness.items import Skip
from recast.runtime.recorded import recording
from recast.runtime.recorded.optimizer.dense_step import DenseStep

STEPS = 8


def capturable(device: torch.device) -> dict[str, object]:
    if device.type != "cuda":
        raise Skip("torch has no capturable optimizers on a CPU")
    torch.manual_seed(0)
    make = partial(torch.optim.Adam, lr=0.01, capturable=True)
    g = torch.Generator().manual_seed(0)
    batches = [
        to(((torch.randn(32, 8, generator=g),), (torch.rand(32, 1, generator=g),)), device)
        for _ in range(STEPS)
    ]

    def between(k: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 / (k + 1)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    return compare_training(model, F.mse_loss, batches, make, device, between)


DENSE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, weight_decay=0.01),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1),
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
}
HEADER = Path(torch.__file__).parent / "include/ATen/native/cuda/DeviceAddCmulCdiv.cuh"


def dense_step(
    make: Callable[..., torch.optim.Optimizer], device: torch.device
) -> dict[str, object]:
    """The optimizer of dense parameters, recorded once and replayed with a new rate each time.

    On a GPU bit for bit torch's own step. On a CPU torch rounds differently; and versions of torch
    without its header of fused multiply-adds left these to the compiler, except in SGD.
    """
    g = torch.Generator(device).manual_seed(0)
    sets: list[list[Tensor]] = []
    for _ in range(2):
        g.manual_seed(0)
        whole = torch.randn(1001, generator=g, device=device)
        made = [torch.randn(n, generator=g, device=device) for n in (3, 17 * 5, 129, 70_001)]
        sets.append([nn.Parameter(t) for t in (whole[1:], *made)])  # one at an odd address
    theirs, ours = (make(parameters) for parameters in sets)
    for parameters in sets:
        for p in parameters:
            p.grad = torch.empty_like(p)

    def prepare(k: int) -> None:
        """Set the gradients of step ``k``, in place, and its rate."""
        for optimizer in (theirs, ours):
            optimizer.param_groups[0]["lr"] = 0.1 / (k + 2)
        for a, b in zip(*sets, strict=True):
            assert a.grad is not None and b.grad is not None
            a.grad.normal_(generator=g)
            b.grad.copy_(a.grad)

    prepare(0)
    theirs.step(), ours.step()  # the first step creates the state
    to_the_bit = device.type == "cuda" and (isinstance(ours, torch.optim.SGD) or HEADER.exists())
    rtol, atol = (0.0, 0.0) if to_the_bit else (1e-5, 1e-6)
    same = partial(torch.testing.assert_close, rtol=rtol, atol=atol)
    recorder, replay = recorder_for(ours, device), None
    for k in range(1, STEPS):
        prepare(k)
        theirs.step()
        if replay is None:
            with recording.recording() as recorded:
                step = DenseStep(ours, device)
                recorded.before_replay(step.renew)
                _, replay = recorder.record(partial(step.run, ours.param_groups))
        else:
            recorded.prepare()
        replay()
        for a, b in zip(*sets, strict=True):
            same(b, a, msg=partial("step {}: {}".format, k))
            for key, held in theirs.state[a].items():
                same(ours.state[b][key], held, msg=partial("{}, step {}: {}".format, key, k))
    return {"detail": "to the bit" if to_the_bit else f"within {rtol:g}"}
