"""Does a rewrite move the AUC? Paired on the same weights, and after training both models.

An exact rewrite that scores the same rows with the same weights moves the AUC by at most 1e-6, plus
the pairs of rows whose scores are equal up to rounding. Training amplifies rounding: the order of a
float sum alone makes two runs differ by some 1e-5 after an epoch. So two trained models are
compared against a control: the plain model, trained once more on the same batches with their rows
in another order. Only a difference beyond that of the control means anything.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from recast.errors import DiffError, InputError

from .model_runs import MakeOptimizer

Batch: TypeAlias = tuple[tuple[Any, ...], Tensor]  # the model's arguments, labels of 0 and 1
Loss: TypeAlias = Callable[[Any, Tensor], Tensor]  # of output and labels

PAIRED = 1e-6  # how much rounding moves an AUC when the weights are the same
ROUNDING = 1e-5  # of the largest score: how much an exact rewrite may move any score
BEYOND = 4.0  # times the control's own difference still counts as no difference


@dataclass(frozen=True, slots=True)
class AucReport:
    """AUC of both models on the same rows."""

    plain: float
    fast: float
    limit: float
    controls: tuple[float, ...]  # AUC of each control run; empty when paired
    rows: int
    how: str  # "paired", or how the controls differ

    @property
    def difference(self) -> float:
        """|fast - plain|."""
        return abs(self.fast - self.plain)

    @property
    def ok(self) -> bool:
        """Whether the difference is within the limit."""
        return self.difference <= self.limit

    def check(self) -> AucReport:
        """This report; raises DiffError when not ``ok``."""
        if self.ok:
            return self
        raise DiffError(
            f"auc: {self.fast:.6f} instead of {self.plain:.6f}",
            why=f"they differ by {self.difference:.1e}, limit {self.limit:.1e} ({self.how})",
            tries=("recast.diff(plain, fast, example) names the first node that parts",),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "difference": self.difference, "ok": self.ok}

    def __str__(self) -> str:
        answer = "equal" if self.ok else "NOT equal"
        return (
            f"AUC {self.plain:.6f} plain, {self.fast:.6f} fast on {self.rows} rows: difference "
            f"{self.difference:.1e}, limit {self.limit:.1e} ({self.how}): {answer}"
        )


def auc(scores: Any, labels: Any) -> float:
    """Area under the ROC curve: the chance that a positive scores above a negative, ties half.

    Counted exactly in integers (the Mann-Whitney statistic). ``scores`` and ``labels``: one entry a
    row, labels 0 or 1. Raises InputError for NaN scores, other labels, or a single class.
    """
    s, y = np.asarray(scores).reshape(-1), np.asarray(labels).reshape(-1)
    if s.shape != y.shape:
        raise InputError(f"auc: {s.size} scores for {y.size} labels")
    if np.isnan(s).any():
        raise InputError("auc: a score is NaN")
    if not np.isin(y, (0, 1)).all():
        raise InputError("auc: labels must be 0 or 1")
    values, inverse = np.unique(s, return_inverse=True)
    positive = np.bincount(inverse[y == 1], minlength=len(values)).astype(object)
    negative = np.bincount(inverse[y == 0], minlength=len(values)).astype(object)
    p, n = int(positive.sum()), int(negative.sum())
    if not p or not n:
        raise InputError(f"auc: {p} positive and {n} negative rows", why="both are needed")
    below = np.cumsum(negative) - negative
    return int((positive * (2 * below + negative)).sum()) / (2 * p * n)


def score(model: nn.Module, batches: Iterable[Batch]) -> tuple[np.ndarray, np.ndarray]:
    """Scores and labels of all rows, in eval mode without gradients."""
    training = [(m, m.training) for m in model.modules()]
    model.eval()
    scores, labels = [], []
    try:
        with torch.no_grad():
            for k, (args, label) in enumerate(batches):
                output = model(*args)
                if label.numel() != output.numel():
                    raise InputError(
                        f"auc: batch {k} has {output.numel()} scores and {label.numel()} labels",
                        why="there is a label for each number of the model's output",
                    )
                scores.append(output.detach().double().cpu().numpy().reshape(-1))
                labels.append(label.detach().cpu().numpy().reshape(-1))
    finally:
        for m, flag in training:
            m.training = flag
    if not scores:
        raise InputError("auc: there are no batches", why="an AUC is of scores and labels")
    return np.concatenate(scores), np.concatenate(labels)


def paired(plain: nn.Module, fast: nn.Module, batches: Sequence[Batch]) -> AucReport:
    """Both models, as they are, score the same rows, in eval mode.

    ``batches``: pairs of the model's arguments, a tuple, and labels of 0 and 1, one for each number
    of the output. A report is ``ok`` if the two AUCs differ by no more than :data:`PAIRED`, and
    what the pairs of rows add whose scores rounding ties.

    Raises:
        InputError: a score is NaN, a label neither 0 nor 1, all labels are the same, a batch has
            not as many labels as scores, or there is none.
    """
    a, labels = score(plain, batches)
    b, _ = score(fast, batches)
    limit = PAIRED + _near(a, b, labels)
    return AucReport(auc(a, labels), auc(b, labels), limit, (), len(labels), "paired")


def _near(plain: np.ndarray, fast: np.ndarray, labels: np.ndarray) -> float:
    """The share of pairs (positive, negative) whose scores rounding may tie or swap.

    These are at most two fp32 spacings apart in the plain model, and they count only if all scores
    of the two models are equal up to rounding. For well spread scores there are none; among a few
    hundred rows with almost equal scores, one pair is more than :data:`PAIRED`.
    """
    if np.abs(fast - plain).max() > ROUNDING * np.abs(plain).max():
        return 0.0
    positive, negative = plain[labels == 1], np.sort(plain[labels == 0])
    reach = 2 * np.spacing(np.abs(positive).astype(np.float32)).astype(np.float64)
    first = np.searchsorted(negative, positive - reach, side="left")
    past = np.searchsorted(negative, positive + reach, side="right")
    return float((past - first).sum()) / max(1, len(positive) * len(negative))


def trained(
    plain: nn.Module,
    fast: nn.Module,
    batches: Sequence[Batch],
    test: Sequence[Batch],
    *,
    make: MakeOptimizer,
    loss: Loss,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    controls: int = 2,
    seed: int = 0,
    progress: Callable[[str, int], None] = lambda name, step: None,
) -> AucReport:
    """Train copies of both models on the same batches, one step a batch, and compare their AUC on
    ``test``. Neither model is changed.

    Args:
        batches, test: as in :func:`paired`.
        make: an optimizer of parameters. ``optimizer_of`` makes that of ``fast`` from the model,
            where it needs more than its parameters.
        loss: of (output, labels), a scalar.
        controls: runs of the plain model with the rows of each batch in another order, or, where
            they cannot be reordered, with other rounding.
        seed: of what the models draw, and of the orders.
        progress: called with the name of the run and the step.

    Returns:
        A report, ``ok`` if the AUCs differ by no more than :data:`BEYOND` times what the farthest
        control differs, and :data:`PAIRED`.

    Raises:
        InputError: as :func:`paired`.
    """
    copies = {"plain": copy.deepcopy(plain), "fast": copy.deepcopy(fast)}
    copies |= {f"control {k + 1}": copy.deepcopy(plain) for k in range(controls)}
    order = torch.Generator().manual_seed(seed)
    found: dict[str, float] = {}
    movable = all(_rows_first(args, label) for args, label in batches)
    for name, model in copies.items():
        control = name.startswith("control")
        own = optimizer_of if name == "fast" else None
        optimizer = own(model) if own else make(list(model.parameters()))
        model.train()
        for step, (args, label) in enumerate(batches):
            if control and movable:
                args, label = reordered(args, label, order)
            scale = 3.0 if control and not movable else 1.0
            torch.manual_seed(seed + step)
            optimizer.zero_grad()
            (loss(model(*args), label) * scale).backward()
            _unscale(model, scale)
            optimizer.step()
            progress(name, step)
        found[name] = auc(*score(model, test))
    spread = tuple(v for k, v in found.items() if k.startswith("control"))
    far = max((abs(v - found["plain"]) for v in spread), default=0.0)
    how = (
        f"{controls} controls with the rows reordered: {far:.1e}"
        if movable
        else f"{controls} controls with other rounding (loss x 3, gradients / 3): {far:.1e}"
    )
    rows = sum(label.numel() for _, label in test)
    return AucReport(found["plain"], found["fast"], BEYOND * far + PAIRED, spread, rows, how)


def _unscale(model: nn.Module, scale: float) -> None:
    if scale != 1.0:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.div_(scale)


def _rows_first(args: tuple[Any, ...], label: Tensor) -> bool:
    """Whether every tensor holds one entry a row, so that rows can be reordered.

    A 1-D tensor of integers that never decreases from 0 may be the offsets of bags: it cannot.
    """
    for t in pytree.tree_leaves(args):
        if not isinstance(t, Tensor) or t.dim() == 0 or t.shape[0] != label.shape[0]:
            return False
        if t.dim() == 1 and not t.is_floating_point() and _like_offsets(t):
            return False
    return True


def _like_offsets(t: Tensor) -> bool:
    return int(t[0]) == 0 and bool((t[1:] >= t[:-1]).all())


def reordered(
    args: tuple[Any, ...], label: Tensor, generator: torch.Generator
) -> tuple[tuple[Any, ...], Tensor]:
    """The same rows in a random order: the same sums, rounded otherwise."""
    order = torch.randperm(label.shape[0], generator=generator)
    moved: tuple[Any, ...] = pytree.tree_map_only(Tensor, lambda t: t[order.to(t.device)], args)
    return moved, label[order.to(label.device)]


__all__ = ["AucReport", "auc", "paired", "reordered", "score", "trained"]
