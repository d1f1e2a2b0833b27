"""Prove that two models are the same function, or name the first node where they differ.

Compared, on the same inputs under the same seed: outputs and every gradient in train and eval mode,
parameters and optimizer state after k steps, buffers, and what a call does besides computing
numbers (:mod:`.call_effects`). The judge is the plain model run in float64
(see :mod:`.judge`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from recast.errors import UsageError
from recast.rewriter.capture.batches import given
from recast.rewriter.compiled import trees
from recast.rewriter.compiled.module import Compiled
from recast.rewriter.compiled.signature import of_forward

from . import call_effects, locate, model_runs
from .judge import Limits
from .model_runs import Loss, MakeOptimizer, Train
from .report import DiffReport
from .trials import Trials


def diff(
    plain: nn.Module,
    fast: nn.Module,
    example: Any,
    *,
    steps: int = 3,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    training: bool = True,
    train: Train | None = None,
    limits: Limits,
    command: str | None = None,
) -> DiffReport:
    """Compare two models that should be the same function; neither is changed.

    ``limits`` is the table of limits by dtype, ``recast.runtime.tolerances``; all other arguments
    are those of :func:`recast.diff`, which has checked them.

    Raises:
        UsageError: ``steps`` is no count, or ``loss`` returns no scalar with gradients.
        whatever ``plain`` raises for this example. What ``fast`` raises is a row of the report.
    """
    count_of(steps)
    batches = batches_of(example, plain)
    if dtype is not None:
        plain, fast = _cast(plain, dtype), _cast(fast, dtype)
        batches = [_cast_batch(b, dtype) for b in batches]
    name = type(plain).__name__
    report = DiffReport(name, seed=seed, steps=steps)
    report.notes += _counted_apart(plain, fast)
    report.command = command or f"recast.diff(plain, fast, example, steps={steps}, seed={seed})"
    make = model_runs.maker(optimizer, plain, fast)
    modes = (False, True) if training else (False,)
    trials = Trials(plain, fast, batches, steps, seed, loss, make, limits, report, modes, train)
    trials.shorter = _shorter(fast, *batches) if len(batches) == 1 else None
    with model_runs.undisturbed(plain, fast) as restore:
        trials.run(restore)
    if not report.ok and not report.unsought:
        report.first = locate.first(
            plain, fast, batches, report.rows, seed=seed, loss=loss, make=make,
            rtol=_rtol(limits, plain), shorter=trials.shorter,
        )  # fmt: skip
    return report


def _counted_apart(plain: nn.Module, fast: nn.Module) -> list[str]:
    """A note of the numbers, such as a count of calls, that the two models begin with."""
    numbers = (int, float)
    pairs = zip(plain.named_modules(), call_effects.held_by(plain), strict=True)
    others = dict(
        zip((p for p, _ in fast.named_modules()), call_effects.held_by(fast), strict=True)
    )
    apart = [
        f"{path}.{name}".lstrip(".") + f" is {value} in the plain model and {now} in the other"
        for (path, _), held in pairs
        for name, value in held.items()
        if type(value) in numbers and type(now := others.get(path, {}).get(name)) in numbers
        and now != value and not name.startswith("_")
    ]  # fmt: skip
    return [f"before the comparison {'; '.join(apart)}"] if apart else []


def _shorter(fast: nn.Module, batch: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The second batch that ``fast`` was captured with, in most cases a part of the first: the last
    rows of a batch that is no multiple of anything take their own way through kernels. None if it
    is not of the kind of ``batch``, as when the model was moved or cast since.
    """
    captured = getattr(fast, "_captured", None) if isinstance(fast, Compiled) else None
    if captured is None or captured.batches is None or captured.signature is None:
        return None
    args, kwargs = captured.signature.unbind(captured.batches[1])
    same = [(t.dtype, t.device) for t in _tensors(args)] == [
        (t.dtype, t.device) for t in _tensors(batch)
    ]
    return args if same and not kwargs and captured.sizes != (0, 0) else None


def _tensors(batch: tuple[Any, ...]) -> list[Tensor]:
    return [t for t in model_runs.leaves(batch).values() if isinstance(t, Tensor)]


def count_of(steps: object) -> None:
    """Raise UsageError unless ``steps`` is a count."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise UsageError(
            f"diff: steps={steps!r} is not a number of optimizer steps",
            tries=("steps=3", "steps=0"),
        )


def batches_of(example: Any, model: nn.Module) -> list[tuple[Any, ...]]:
    """The batches in ``example``, each a tuple of arguments of ``model``; see :func:`diff`.

    One batch is what ``optimize`` takes as one, and two are; of more, each is a tuple or a dict.
    Raises UsageError for one that forward does not take.
    """
    many = type(example) is list and example != []
    if many and all(type(b) is tuple for b in example):
        return list(example)
    if type(example) is tuple:
        return [example]
    try:
        signature = of_forward(model)
    except ValueError:  # a forward that cannot be read
        return [(example,)]
    several = example if many and all(isinstance(b, dict) for b in example) else None
    found = [signature.unbind(b) for one in several or [example] for b in given(one, signature)]
    for _, kwargs in found:
        defaults = signature.defaults
        if told := [k for k, v in kwargs.items() if k not in defaults or v is not defaults[k]]:
            raise UsageError(
                f"example: forward takes {', '.join(told)} by keyword only",
                why="what is compared or timed is called with a tuple of arguments",
                tries=("a module whose forward takes them in order and calls this one",),
            )
    return [args for args, _ in found]


def _rtol(limits: Limits, model: nn.Module) -> float:
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} or {torch.float32}
    return max(limits.limit(d).ulps * torch.finfo(d).eps for d in dtypes) * limits.CHAIN


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(model).to(dtype)


def _cast_batch(batch: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    def to(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() else t

    cast: tuple[Any, ...] = trees.mapped(to, batch)
    return cast


__all__ = ["DiffReport", "batches_of", "count_of", "diff"]
