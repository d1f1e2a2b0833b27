"""The judgement of one model: is it captured, are its lookups fused, is it still the same function?

Equality is ``recast.diff``'s, on three batches of two sizes: outputs and all gradients in eval and
in train mode, buffers, and parameters and optimizer state after three steps, judged by float64.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zoo_data import Subject

import recast

ROWS, OTHER = 64, 37  # sizes of the batches that are compared


@dataclass
class Verdict:
    """What became of one model."""

    name: str
    right: bool = False
    captured: str = "none"  # whole, partial, none
    batches: int = 1  # how many examples it took
    found: int = 0  # embedding lookups
    fused: int = 0
    left: int = 0  # those that still reach torch
    raised: int = 0  # rules that raised
    share: float = float("inf")  # of the limit, at the worst tensor
    speed: float | None = None  # of a training step, plain over optimised
    inference: float | None = None  # of a call in eval mode without gradients
    why: str = ""  # it is not right

    @property
    def all_fused(self) -> bool:
        """Whether it is right with every lookup fused, by its report and by the calls made."""
        told = self.found > 0 and self.found == self.fused
        return self.right and told and not self.left and not self.raised


def judge(subject: Subject) -> Verdict:
    """The verdict on one model; what goes wrong is written into it."""
    verdict = Verdict(subject.name)
    try:
        with quiet():
            _judge(subject, verdict)
    except Exception as error:
        verdict.right = False
        told = str(error).strip().splitlines()[:3]  # what, where and why
        verdict.why = f"{type(error).__name__}: {'; '.join(line.strip() for line in told)}"
    return verdict


def _judge(subject: Subject, verdict: Verdict) -> None:
    model, batch = subject.build()
    plain = copy.deepcopy(model)
    fast = recast.optimize(model, example=batch(ROWS, 0))
    if fast.report.to_dict()["captured"] != "whole":  # a second size may tell what one could not
        verdict.batches = 2
        fast = recast.optimize(model, example=[batch(ROWS, 0), batch(OTHER, 5)])
    told = fast.report.to_dict()
    verdict.captured, verdict.raised = told["captured"], len(told["raised"])
    verdict.found, verdict.fused = (told["lookups"][key] for key in ("found", "fused"))
    verdict.left = lookups(copy.deepcopy(fast), batch(ROWS, 0))  # it may count its calls
    verdict.why = names(plain, fast)
    if verdict.why:
        return
    report = recast.diff(
        plain, fast, [batch(ROWS, 0), batch(ROWS, 1), batch(OTHER, 2)], steps=3, optimizer=adagrad
    )
    verdict.share = max((row.share for row in report.rows), default=0.0)
    verdict.right = report.ok
    verdict.why = "" if report.ok else "; ".join(
        f"{row.tensor} {row.when}: {row.why or f'{row.share:.1f} of its limit'}"
        for row in report.rows if not row.ok
    )[:200]  # fmt: skip


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    """From zero sums, its first step would be the sign of what may be rounding noise."""
    return torch.optim.Adagrad(parameters, lr=0.05, initial_accumulator_value=0.1)


def names(plain: nn.Module, fast: nn.Module) -> str:
    """Why the two do not have the same ``state_dict()``; also loads weights both ways."""

    def kinds(model: nn.Module) -> list[Any]:
        held = model.state_dict().items()
        return [(k, v.shape, v.dtype) if isinstance(v, Tensor) else (k,) for k, v in held]

    if kinds(plain) != kinds(fast):
        return "the names, shapes or dtypes of its state_dict differ"
    changed = {
        k: v * 1.25 if isinstance(v, Tensor) and v.is_floating_point() and v.dim() > 1 else v
        for k, v in plain.state_dict().items()
    }
    fast.load_state_dict(changed)
    plain.load_state_dict(fast.state_dict())
    for k, v in plain.state_dict().items():
        if isinstance(v, Tensor) and not torch.equal(*(t.to_dense() for t in (v, changed[k]))):
            return f"{k} is not what was loaded"
    return ""


class _Counter(TorchDispatchMode):
    """Counts the lookups that reach torch."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        self.count += func.namespace == "aten" and "embedding" in name and "backward" not in name
        return func(*args, **(kwargs or {}))


def lookups(model: nn.Module, batch: tuple[Any, ...]) -> int:
    """How many embedding calls of a forward are torch's own."""
    with torch.no_grad(), _Counter() as counter:
        model(*batch)
    return counter.count


# ---------------------------------------------------------------- speed


def loss(out: Any) -> Tensor:
    """A scalar of all float outputs that lead to parameters."""
    found = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([(t.float() - 0.3).square().mean() for t in found]).sum()


def speed(subject: Subject, rows: int = 2048, rounds: int = 7) -> float:
    """The time of a plain training step over that of an optimised one: the median of the ratios.

    The two take turns, so that a busy machine affects them alike.
    """
    with quiet():
        model, batch = subject.build()
        example = batch(rows, 0)
        plain = copy.deepcopy(model).train()
        own = torch.optim.Adagrad(plain.parameters(), lr=0.01)
        model.train()
        given = torch.optim.Adagrad(model.parameters(), lr=0.01)
        fast, given = recast.optimize(model, given, example=example)
        ratios = []
        for k in range(rounds + 1):
            times = [_step(m, o, example) for m, o in ((plain, own), (fast, given))]
            if k:
                ratios.append(times[0] / times[1])
    return statistics.median(ratios)


def inference(subject: Subject, rows: int = 128, rounds: int = 15) -> float:
    """The time of a plain call in eval mode, without gradients, over that of an optimised one: the
    median of the ratios. A round lasts some milliseconds of each.
    """
    with quiet(), torch.no_grad():
        model, batch = subject.build()
        example = batch(rows, 0)
        both = model.eval(), recast.optimize(model, example=example)
        least = min(_calls(plain_or_fast, example, 1) for plain_or_fast in both * 3)
        calls = max(1, int(_LEAST / least))
        ratios = []
        for _ in range(rounds):
            times = [_calls(one, example, calls) for one in both]
            ratios.append(times[0] / times[1])
    return statistics.median(ratios)


_LEAST = 5e-3  # seconds of a round


def _calls(model: nn.Module, batch: tuple[Any, ...], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        model(*batch)
    return time.perf_counter() - start


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Any, ...]) -> float:
    start = time.perf_counter()
    optimizer.zero_grad()
    loss(model(*batch)).backward()
    optimizer.step()
    return time.perf_counter() - start


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings of libraries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
