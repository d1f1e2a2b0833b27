"""``recast bench``: a step of the plain model and of its optimised twin, timed in turn.

Rounds are interleaved and their order alternates, so that a machine that warms up or has other work
treats both alike. Memory is the peak of what torch's allocator hands out during one step, beyond
what was held before: exact, and the same on every run.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

from recast.errors import UsageError
from recast.rewriter.compiled import trees
from recast.rewriter.diff import model_runs

from .native_stderr import no_native_stderr

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}

_DOUBT = "rounds vary as much as the two differ: measure on an idle machine, or with more --rounds"

Step = Callable[[], object]


@dataclass
class Timing:
    """The timing of one of the two: seconds of every round, and the peak bytes of a step."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def iqr(self) -> float:
        """The interquartile range; 0 for a single round."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return high - low

    def to_dict(self) -> dict[str, Any]:
        return {
            "median_s": self.median,
            "iqr_s": self.iqr,
            "peak_bytes": self.peak_bytes,
            "seconds": self.seconds,
        }


@dataclass
class Bench:
    """What :func:`compare` measured."""

    model: str
    step: str  # what a step is, in words
    plain: Timing
    recast: Timing
    machine: str = ""

    @property
    def speedup(self) -> float:
        """How many times as fast as plain: the ratio of the medians."""
        return self.plain.median / self.recast.median

    @property
    def doubtful(self) -> bool:
        """Whether the rounds vary as much as the two differ."""
        return abs(self.plain.median - self.recast.median) < self.plain.iqr + self.recast.iqr

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "step": self.step,
            "rounds": len(self.plain.seconds),
            "plain": self.plain.to_dict(),
            "recast": self.recast.to_dict(),
            "speedup": self.speedup,
            "memory_ratio": self.recast.peak_bytes / max(self.plain.peak_bytes, 1),
            "machine": self.machine,
        }

    def __str__(self) -> str:
        rounds = len(self.plain.seconds)
        lines = [
            f"{self.model}: {self.speedup:.2f} × as fast as plain",
            f"  {self.step}; {rounds} round{'' if rounds == 1 else 's'}, interleaved",
            f"  {'':<8}{'median':>12}{'IQR':>12}{'peak memory':>14}",
        ]
        for name, t in (("plain", self.plain), ("recast", self.recast)):
            times = f"{duration(t.median):>12}{duration(t.iqr):>12}"
            lines.append(f"  {name:<8}{times}{size(t.peak_bytes):>14}")
        if self.doubtful:
            lines.append(f"  {_DOUBT}")
        return "\n".join([*lines, f"  on {self.machine}"])


def compare(
    plain: Step,
    fast: Step,
    *,
    rounds: int,
    warmup: int = 3,
    progress: Callable[[int], None] = lambda k: None,
) -> tuple[Timing, Timing]:
    """Time both steps in turn, ``rounds`` times each after ``warmup``; then their memory."""
    for _ in range(warmup):
        plain()
        fast()
    timings = (Timing(), Timing())
    for k in range(rounds):
        progress(k)
        pairs = [(plain, timings[0]), (fast, timings[1])]
        for step, timing in pairs if k % 2 == 0 else reversed(pairs):
            started = time.perf_counter()
            step()
            timing.seconds.append(time.perf_counter() - started)
    for step, timing in ((plain, timings[0]), (fast, timings[1])):
        timing.peak_bytes = peak_bytes(step)
    return timings


def peak_bytes(step: Step) -> int:
    """The peak of bytes held during ``step`` beyond those held before, by torch's allocator."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        no_native_stderr(),
        torch.profiler.profile(
            activities=activities, profile_memory=True, acc_events=True
        ) as profile,
    ):
        step()
    results = profile.profiler.kineto_results
    moves = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    held = highest = 0
    for _, change in sorted(moves, key=lambda move: move[0]):
        held += change
        highest = max(highest, held)
    return highest


def training_step(
    model: nn.Module,
    batch: tuple[Any, ...],
    loss: Callable[..., Any] | None,
    optimizer: torch.optim.Optimizer | None,
) -> Step:
    """Forward, backward, and the optimizer's step when there is one."""
    model.train()
    weigh, given = loss or _Weights(), _own(batch)

    def step() -> None:
        total = weigh(model(*given))
        if not total.requires_grad:
            raise UsageError(
                f"recast bench: the loss of {type(model).__name__} has no gradient",
                why="what is timed is a training step, and nothing depends on parameters",
                tries=("--inference",),
            )
        total.backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)  # last, so that a step's memory shows its gradients

    return step


def inference_step(model: nn.Module, batch: tuple[Any, ...]) -> Step:
    """Forward in eval mode without gradients."""
    model.eval()
    given = _own(batch)

    def step() -> None:
        with torch.no_grad():
            model(*given)

    return step


class _Weights:
    """A scalar of any output: fixed random weights, so that every output has its own gradient."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def __call__(self, output: Any) -> Tensor:
        tensors = [t for t in model_runs.leaves(output).values() if isinstance(t, Tensor)]
        tensors = [t for t in tensors if t.requires_grad]
        if not self.weights:
            generator = torch.Generator().manual_seed(0)
            self.weights = [torch.randn(t.shape, generator=generator).to(t) for t in tensors]
        parts = [(t * w).sum() for t, w in zip(tensors, self.weights, strict=True)]
        return torch.stack(parts).sum() if parts else torch.zeros(())


def _own(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same tensors in copies of their containers: what one model keeps in a batch object would
    change its form for the other.
    """
    own: tuple[Any, ...] = trees.mapped(lambda t: t, batch)
    return own


def duplicate(model: nn.Module) -> nn.Module:
    """A copy with its own parameters, so that neither twin trains the other."""
    return copy.deepcopy(model)


def duration(seconds: float) -> str:
    """``93.1 ms``, ``850 µs``, ``1.25 s``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.2g} µs"


def size(count: int) -> str:
    """Bytes in readable form: ``1.20 GB``, ``13.0 MB``."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} B"
