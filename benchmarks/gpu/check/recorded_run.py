"""Recorded training beside plain training in fp32 and in float64."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils import _pytree as pytree

import recast
from gpu import ROOT
from gpu.check import op_checks
from recast.runtime import tolerances
from recast.runtime.recorded.recording import CudaRecorder, Recorder
from recast.runtime.recorded.training_step import TrainingStep


def recorded_step(
    model: nn.Module, loss: Any, optimizer: Any, device: torch.device, **how: Any
) -> TrainingStep:
    if device.type != "cuda":
        how["recorder"] = recorder_for(optimizer, device)
    return TrainingStep(model, loss, optimizer, **how)


def recorder_for(optimizer: torch.optim.Optimizer, device: torch.device) -> Recorder:
    if device.type == "cuda":
        return CudaRecorder(device)
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]
    from tape import TapeRecorder

    return TapeRecorder(optimizer)


@op_checks.convolving(in_tf32=False)  # as in diff_training
def compare_training(
    make: Callable[[], nn.Module],
    loss: Callable[..., Tensor],
    batches: list[Any],
    optimizer_of: Callable[..., torch.optim.Optimizer],
    device: torch.device,
    between: Callable[[int, torch.optim.Optimizer], None] = lambda k, o: None,
    clip: float | None = None,
    scale: float | None = None,
    given: list[Any] | None = None,
) -> dict[str, object]:
    """Recorded training of the optimised model against plain training in fp32 and float64.

    ``clip``: the largest norm of all gradients; ``scale``: of the loss, which changes nothing;
    ``given``: inputs that the optimised model gets instead of those of ``batches``.
    """

    def limit(net: nn.Module) -> None:
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)

    plain = make().to(device)
    wide, twin = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    optimizer = optimizer_of(twin.parameters())
    fast, _ = recast.optimize(twin, optimizer, example=batches[0][0])
    how: dict[str, Any] = {} if clip is None else {"before_step": lambda: limit(fast)}
    if scale is not None:
        how["scaler"] = GradScaler(device.type, init_scale=scale)
    step = recorded_step(fast, loss, optimizer, device, **how)
    found: list[list[Tensor]] = [[], [], []]
    others = [optimizer_of(net.parameters()) for net in (plain, wide)]
    for k, (inputs, targets) in enumerate(batches):
        found[0].append(step(inputs if given is None else given[k], *targets))
        between(k, optimizer)
        for at, (net, own) in enumerate(zip((plain, wide), others, strict=True)):
            dtype = torch.float64 if at else torch.float32
            args, rest = pytree.tree_map_only(Tensor, partial(_of, dtype), (inputs, targets))
            own.zero_grad()
            value = loss(net(*args), *rest)
            value.backward()
            limit(net)
            own.step()
            found[at + 1].append(value.detach())
            between(k, own)
    # On the emulator a scaler reads whether gradients are finite, so nothing is recorded there.
    emulated = scale is not None and device.type != "cuda"
    assert step.recorded or emulated, "nothing was recorded"
    torch.testing.assert_close(torch.stack(found[0]), torch.stack(found[1]), rtol=1e-4, atol=1e-6)
    worst = 0.0
    trios = zip(fast.parameters(), plain.parameters(), wide.parameters(), strict=True)
    for a, b, c in trios:
        share = tolerances.excess(a, b, c, scale=float(c.abs().max())) / tolerances.CHAIN
        worst = max(worst, share)
    assert worst <= 1, f"parameters after {len(batches)} steps: {worst:.2f} of the limit"
    return {"share of the limit": round(worst, 3), "detail": f"{step.recorded} recordings"}


def _of(dtype: torch.dtype, t: Tensor) -> Tensor:
    return t.to(dtype) if t.is_floating_point() else t
