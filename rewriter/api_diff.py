"""``recast.diff``: proves that two models agree, or names the first node where they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from recast.errors import UsageError
from recast.rewriter.diff.equivalence import DiffReport, batches_of
from recast.rewriter.diff.equivalence import diff as compare
from recast.runtime import checked, tolerances
from recast.runtime.embedding import precision_table

from .diff import rounding
from .diff.judge import Limits
from .diff.model_runs import Loss, MakeOptimizer, Train
from .spread import diff as spread_diff


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
    limits: Limits = tolerances,
    command: str | None = None,
) -> DiffReport:
    """Prove that two models agree, or name the first node where they differ. Changes neither.

    Compares outputs, buffers, all gradients, the parameters and optimizer state after ``steps``
    optimizer steps, eval mode under ``no_grad`` with these parameters, and what a call does
    besides: containers and ``requires_grad`` of the output, writes to inputs and attributes, how
    many random numbers are drawn on a CPU. The judge is a float64 run of ``plain``. Ids outside
    their tables are an error on a GPU too. Where ``fast`` has tables below float32
    (``precision=``), those of ``plain`` and of the judge are rounded in the same way, only eval
    mode is compared, and the notes say what the rounding does to the outputs.

    If ``optimize`` sharded ``fast`` over ranks, every rank calls this with a batch of its own, and
    the report is the same on all; ``plain`` may be the model that ``optimize`` was given.

    Args:
        plain: the reference.
        fast: the model on trial, with the same parameter names; the two may share parameters.
        example: one batch (a tuple of arguments, the sole argument, or a dict of arguments by
            name), or a list of batches, which are all tried; the optimizer steps take them in turn.
        steps: how many optimizer steps to run in train mode before parameters and state are
            compared; 0 skips this.
        loss: a function from the output to a scalar; by default a sum of all entries of all
            outputs with random weights.
        optimizer: an optimizer over the parameters of either model, as a template for fresh ones,
            or a function from parameters to an optimizer; by default Adagrad.
        seed: for the random weights and for what the models draw.
        dtype: compare copies of both models in this dtype (bfloat16 shows what low precision does).
        training: compare in train mode too; pass False for a model for inference.
        train: a training loop of your own instead of the ``steps``: ``train(model, batches)``
            returns the trained model and its optimizer, which need not be the objects it was given.
            It must draw the same random numbers for every model.
        limits: the table of limits by dtype, in the form of ``recast.runtime.tolerances``.
        command: the command that the report names for repeating the comparison.

    Raises:
        UsageError: an argument of the wrong kind, models with different parameters, or a ``loss``
            that does not return a scalar with gradients.
        whatever ``plain`` raises for this example; what ``fast`` raises is a row of the report.
    """
    _check(plain, fast, loss=loss, optimizer=optimizer, train=train, seed=seed, dtype=dtype)
    if spread_diff.is_spread(fast):
        return _diff_spread(
            plain, fast, example, steps=steps, loss=loss, optimizer=optimizer, seed=seed,
            dtype=dtype, training=training, train=train, limits=limits, command=command,
        )  # fmt: skip
    run = partial(
        compare, example=example, loss=loss, optimizer=optimizer, seed=seed, dtype=dtype,
        train=train, limits=limits, command=command,
    )  # fmt: skip
    stored = precision_table.stored(fast)
    if stored:
        return _diff_stored(plain, fast, example, stored, run)
    with checked.checked():
        return run(plain, fast, steps=steps, training=training)


def _diff_spread(
    plain: nn.Module, fast: Any, example: Any, *, dtype: object, train: object, **asked: Any
) -> DiffReport:
    """The same of a model that is spread over ranks."""
    for name, value in (("dtype", dtype), ("train", train)):
        if value is not None:
            raise UsageError(
                f"diff: {name} of a model that is spread over ranks",
                why="each rank has a part of the tables, in place, and the plain model's gradients"
                " are averaged over ranks between backward and step",
                tries=(f"leave {name} out", f"{name} on one process"),
            )
    with checked.checked():
        return spread_diff.diff(plain, fast, example, **asked)


def _diff_stored(
    plain: nn.Module,
    fast: nn.Module,
    example: Any,
    stored: Mapping[str, precision_table.StoredTable],
    run: Callable[..., DiffReport],
) -> DiffReport:
    """Compare with tables below float32: those of ``plain`` are rounded in the same way."""
    report = run(precision_table.rounded(plain, stored), fast, steps=0, training=False)
    names = ", ".join(sorted({t.precision for t in stored.values()}))
    calls: list[rounding.Call] = [(batch, {}) for batch in batches_of(example, plain)]
    report.notes[:0] = [
        precision_table.ROUNDED.format(names, len(stored)),
        f"of this rounding: {rounding.sentence(plain, fast, calls)}",
    ]
    return report


def _check(
    plain: nn.Module,
    fast: nn.Module,
    *,
    loss: object,
    optimizer: object,
    train: object,
    seed: object,
    dtype: object,
) -> None:
    """Raise UsageError for an argument of the wrong kind."""
    for which, model in (("first", plain), ("second", fast)):
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"diff: the {which} model is of type {type(model).__name__}, not an nn.Module",
                why="two forms of one model are compared",
                tries=("recast.diff(model, recast.optimize(model, example=batch), batch)",),
            )
    if loss is not None and not callable(loss):
        raise _wrong("loss", loss, "a function of the output that returns a scalar", "leave it out")
    if train is not None and not callable(train):
        raise _wrong("train", train, "a function of a model and batches", "steps=3")
    if isinstance(seed, bool) or not isinstance(seed, int) or abs(seed) >= 2**62:
        raise _wrong("seed", seed, "a whole number between -2^62 and 2^62", "seed=0")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise _wrong("dtype", dtype, "a dtype of torch", "dtype=torch.bfloat16")
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise _wrong(
            "dtype", dtype, "one of floating point, as weights are", "dtype=torch.bfloat16"
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        own = {id(p) for model in (plain, fast) for p in model.parameters()}
        if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
            raise UsageError(
                f"diff: {type(optimizer).__name__} holds parameters of neither model",
                why="fresh optimizers like it are made, over the parameters of the same names",
                tries=(f"{type(optimizer).__name__}(plain.parameters(), ...)",),
            )
    elif optimizer is not None and not callable(optimizer):
        tries = "optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1)"
        raise _wrong("optimizer", optimizer, "an optimizer, or a function that makes one", tries)


def _wrong(name: str, value: object, what: str, tries: str) -> UsageError:
    return UsageError(f"diff: {name}={value!r}", why=f"it is {what}", tries=(tries,))
