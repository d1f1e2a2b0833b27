"""The ways to run a step that are compared: ours, recorded, eager, compiled."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recast
from gpu import ROOT
from gpu.bench import timing
from gpu.bench.timing import Effort, Graphed, Step, Variant
from recast.runtime import aligned
from recast.runtime.recorded import recording
from recast.runtime.recorded.forward import RecordedForward
from recast.runtime.recorded.training_step import TrainingStep

LOSS = F.binary_cross_entropy_with_logits
LARGE = 2e9  # numbers in the tables of a model
Batch = tuple[Any, Tensor]
Make = Callable[[nn.Module], torch.optim.Optimizer]
Both = tuple[nn.Module, torch.optim.Optimizer]


def effort(tiny: bool, seconds: float) -> Effort:
    """How long to measure."""
    return Effort(0.0, steps=1, rounds=1) if tiny else Effort(seconds)


def compiled(module: Callable[..., Any], tiny: bool) -> Callable[..., Any]:
    """``torch.compile``; in a dry run without its compiler."""
    return torch.compile(module, dynamic=False, backend="eager" if tiny else "inductor")


# ---------------------------------------------------------------- as one graph


def recorded(step: Step, device: torch.device) -> Step:
    """``step`` of batch 0 as our recordings run it: what the device takes without its host."""
    return _graph(step, device, recording.recording)


def captured(step: Step, device: torch.device) -> Step:
    """Torch's own ``step`` of batch 0 as a CUDA graph."""
    return _graph(step, device, contextlib.nullcontext)


def _graph(
    step: Step, device: torch.device, around: Callable[[], AbstractContextManager[Any]]
) -> Step:
    """One recorder serves all: it frees what a failed capture has allocated."""
    held: list[Any] = []

    def run(_: int) -> object:
        if device.type != "cuda":
            return step(0)
        if not held:
            recorder = recording.CudaRecorder(device)
            for _ in range(3):
                recorder.eagerly(lambda: step(0))
            with around() as made:
                held.extend((made, recorder.record(lambda: step(0))[1], recorder))
        if held[0] is not None:
            held[0].prepare()
        return held[1]()

    return run


# ---------------------------------------------------------------- training steps


class Case(NamedTuple):
    """What all variants of a step share: ``plain`` and ``sparse`` hold the same parameters."""

    plain: nn.Module
    sparse: nn.Module
    make: Make
    optimizer: torch.optim.Optimizer  # whose state is every variant's
    data: Sequence[Batch]
    low: torch.dtype | None  # of autocast
    device: torch.device
    tiny: bool


def steps(case: Case, *words: str, room: Callable[[str], str | None]) -> list[Variant]:
    """The variants ``words`` name. ``room``: why one of them does not fit into the memory."""
    torch._dynamo.reset()  # it gives up on a function that it has compiled eight times
    first = case.data[0][0]
    held: list[Both] = []

    def ours() -> Both:
        """Made once, by the first that asks."""
        if not held:
            own = shared(case.make, case.plain, case.optimizer)
            held.append(recast.optimize(case.plain, own, example=first))
        return held[0]

    def other(**how: Any) -> Both:
        own = shared(case.make, case.plain, case.optimizer)
        return recast.optimize(case.plain, own, example=first, **how)

    def eager(module: nn.Module) -> Step:
        return _loop(case, module, shared(case.make, module, case.optimizer))

    ways: dict[str, Callable[[], Step]] = {
        "recast": lambda: _loop(case, *ours()),
        'recast mode="graph"': lambda: _replayed(case, *_by_graphs(case, other)),
        "recast graph": lambda: _recorded(case, *ours()),
        # What it gains that ids are sorted while the forward runs.
        "recast graph, sorts in turn": lambda: _recorded(
            case, *ours(), around=recording.in_host_order
        ),
        # What it gains that rows of a first layer's input start at sectors or lines of memory.
        "recast graph, rows at 16 bytes": lambda: _recorded(
            case, *other(), around=aligned.least_padding
        ),
        "recast graph, gather-in-dots": lambda: _recorded(
            case, *other(passes="default,gather-in-dots")
        ),
        "eager sparse": lambda: eager(case.sparse),
        "compiled, sparse": lambda: eager(_partly(case)),
        "torch.compile": lambda: _whole(case),
    }
    found = [Variant(w, ways[w]) for w in words]
    for v in found:
        v.why = room(v.name)
    return found


def _loop(case: Case, forward: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> Step:
    """A training loop's body."""
    low, device = case.low, case.device

    def step(k: int) -> None:
        inputs, labels = case.data[k]
        try:
            with torch.autocast(device.type, low or torch.bfloat16, enabled=low is not None):
                loss = LOSS(forward(*inputs), labels)
            loss.backward()
            optimizer.step()
        finally:  # also of a step that ran out of memory: others have the same parameters
            optimizer.zero_grad(set_to_none=True)

    return step


def _by_graphs(case: Case, other: Callable[..., Both]) -> Both:
    """What ``mode="graph"`` gives; on the emulator by a tape, as there are no CUDA graphs."""
    if case.device.type == "cuda":
        return other(mode="graph")
    tape = _tape()
    fast, own = other()
    vars(fast)["_replays"] = RecordedForward(fast, tape.TapeRecorder(), tape.Pairs(own))
    return fast, own


def _replayed(case: Case, fast: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """A training loop's body, left as it is, and what of it is replayed."""
    replays: RecordedForward = vars(fast)["_replays"]

    def recorded() -> str:
        training = replays._training
        if training is None or not len(training._recordings):
            return ""
        return "forward, backward, step" if training.steps.recorded else "forward, backward"

    return Graphed(_loop(case, fast, optimizer), recorded)


def _recorded(
    case: Case, fast: nn.Module, optimizer: torch.optim.Optimizer,
    around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> Step:  # fmt: skip
    """A TrainingStep, each of whose steps runs inside ``around``."""
    recorder = None if case.device.type == "cuda" else _tape().TapeRecorder(optimizer)
    step = TrainingStep(fast, LOSS, optimizer, autocast=case.low, recorder=recorder)

    def run(k: int) -> object:
        with around():
            return step(*case.data[k])

    return Graphed(run, lambda: "the whole step" if step.recorded else "")


def _tape() -> Any:
    """The recorder of the tests."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]
    import tape

    return tape


def _partly(case: Case) -> nn.Module:
    """Compilers do not take sparse gradients: with them, only what is no lookup is compiled."""
    part = copy.copy(case.sparse)
    part._modules = dict(case.sparse._modules)
    for name in ("mlp", "bottom", "top"):
        if name in part._modules:
            part._modules[name] = _Called(compiled(getattr(case.sparse, name), case.tiny))
    return part


def _whole(case: Case) -> Step:
    """All of it compiled, so with gradients as large as the tables."""
    own = shared(case.make, case.plain, case.optimizer)
    for group in own.param_groups:
        # Nor is there room for it where several processes prepare at once.
        if timing.preparing or sum(p.numel() for p in group["params"]) > LARGE:
            group["foreach"] = False  # which takes once more the memory of all tables
    return _loop(case, compiled(case.plain, case.tiny), own)


class _Called(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = [function]  # in a list: its parameters are another's

    def forward(self, x: Tensor) -> Tensor:
        return self.function[0](x)


def shared(make: Make, model: nn.Module, like: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer over ``model`` that shares the state of ``like``, to save memory.

    Some optimizers create their state at once, so this one is created on parameters without memory.
    """
    parameters = list(model.parameters())
    hollow = nn.ParameterList(nn.Parameter(torch.empty_like(p, device="meta")) for p in parameters)
    optimizer = make(hollow)
    real = dict(zip(hollow, parameters, strict=True))
    for group in optimizer.param_groups:
        group["params"] = [real[p] for p in group["params"]]
    optimizer.state.clear()
    for p in parameters:
        if p in like.state:
            optimizer.state[p] = like.state[p]
    return optimizer


def twin(make: Callable[[bool], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Two models of one set of parameters, the second with ``sparse=True`` tables."""
    plain = make(False)
    with torch.device("meta"):
        sparse = make(True)
    there = dict(plain.named_modules())
    for path, module in sparse.named_modules():
        module._parameters = there[path]._parameters
        module._buffers = there[path]._buffers
    return plain, sparse
