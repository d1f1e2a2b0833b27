"""Is a difference only rounding? Two tests for a tensor that differs by more than the table allows.

*How far does rounding move this tensor?* The plain model's own error on one batch may be small by
luck: rows of a batch that share an id are equal to the last bit, so what cancels between them
cancels exactly, where any other order of sums would leave a remainder. So the plain model is run
several more times with the last digit of every operand of every operation moved up or down, in
forward, backward and update (Monte Carlo arithmetic: Parker, 1997). Each run is plain torch as it
might have rounded; the largest of their errors against float64 is what rounding does to this model.

*Does it go away in float64?* There the optimised model must agree with the judge up to ``SHRINK``
of the difference. Rounding shrinks by the ratio of the units, 5e8; the error of a wrong rewrite
does not, however much the model magnifies rounding. If more is left, the last digits of float64
must move the plain model just as far: an optimizer that takes signs turns any rounding into a full
step.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from recast.errors import RecastWarning

from . import double, model_runs
from .judge import Limits

TIMES = 4
T = TypeVar("T")

_MOVES = frozenset({
    "_to_copy", "cat", "clone", "constant_pad_nd", "copy", "copy_", "embedding", "fill", "fill_",
    "flip", "gather", "index", "index_select", "lift_fresh", "new_zeros", "ones_like", "repeat",
    "roll", "stack", "zeros_like",
})  # fmt: skip  # which put numbers elsewhere and do not round


class Reruns(Generic[T]):
    """Further runs with which a difference is judged, each made once, on first use.

    Args:
        run: ``run(model, wide)`` writes down what a model computes, on the batch or, when ``wide``,
            on its float64 twin.
        restore: gives ``plain`` and ``fast`` back the state in which ``run`` is to find them.
    """

    def __init__(
        self,
        plain: nn.Module,
        fast: nn.Module,
        run: Callable[[nn.Module, bool], T],
        restore: Callable[[], None],
    ) -> None:
        self.plain, self.fast, self.run, self.restore = plain, fast, run, restore

    @functools.cached_property
    def second(self) -> T:
        """What the plain model computes when it is run once more in the same way."""
        self.restore()
        try:
            return self.run(self.plain, False)
        finally:
            self.restore()

    @functools.cached_property
    def draws(self) -> list[T]:
        """What the plain model computes where every operation rounds another way."""
        return self._runs(self.plain, wide=False)

    @functools.cached_property
    def wide_draws(self) -> list[T]:
        """The same in float64."""
        self.restore()
        with double.in_double():
            return self._runs(double.doubled(self.plain), wide=True)

    def _runs(self, model: nn.Module, wide: bool) -> list[T]:
        made = []
        for seed in range(TIMES):
            self.restore()
            try:
                with model_runs.undisturbed(model), _LastDigits(seed):
                    made.append(self.run(model, wide))
            except Exception:
                break  # it cannot be run like this: grant nothing more
        self.restore()
        return made

    @functools.cached_property
    def wide(self) -> T | None:
        """What the optimised model computes in float64; None if its graphs do not run in float64,
        as those of a forward that reads dtypes, in whose place the plain forward would run.
        """
        self.restore()
        try:
            twin = double.doubled(self.fast)
            with (
                model_runs.undisturbed(twin), double.in_double(),
                warnings.catch_warnings(action="error", category=RecastWarning),
            ):  # fmt: skip
                return self.run(twin, True)
        except Exception:
            return None
        finally:
            self.restore()

    def vanishes(
        self, ours: Tensor, truth: Tensor, get: Callable[[T], Any], limits: Limits
    ) -> bool:
        """Whether in float64 only rounding remains of the difference between ``ours`` and
        ``truth``. Also true if float64 cannot tell: ``ours`` is float64 already, or the model does
        not run in it.
        """
        if ours.dtype == torch.float64 or self.wide is None:
            return True
        left = _far(get(self.wide), truth)
        if left <= limits.SHRINK * _far(ours, truth):
            return True
        most = max((_far(get(d), truth) for d in self.wide_draws), default=0.0)
        return left <= limits.limit(torch.float64).factor * most


def _far(a: Tensor | None, b: Tensor) -> float:
    """The largest difference; None is a missing gradient, taken as zeros."""
    x, y = (
        t.detach().to("cpu", torch.float64) for t in (torch.zeros_like(b) if a is None else a, b)
    )
    if x.shape != y.shape:
        return float("inf")
    return (x - y).abs().nan_to_num(0.0).max().item() if x.numel() else 0.0


class _LastDigits(TorchDispatchMode):
    """Every operation reads its floating operands with their last digit moved, up or down.

    Left alone: what an operation writes to or gives a view of; whole numbers, which are counts,
    masks and ids; operations that draw, so that masks stay; those that only put numbers elsewhere.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.signs = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _rounds(func):
            return func(*args, **kwargs)
        moved = tuple(
            pytree.tree_map(self._moved, value) if reads else value
            for value, reads in zip(args, _reads(func), strict=False)
        )
        return func(*moved, **kwargs)

    def _moved(self, value: Any) -> Any:
        if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
            return value
        if not value.is_floating_point() or not value.numel():
            return value
        up = torch.rand(value.shape, generator=self.signs).round().sub_(0.5).to(value.device)
        moved = value * (1 + 2 * torch.finfo(value.dtype).eps * up.to(value.dtype))
        return torch.where(value == value.round(), value, moved)


@functools.cache
def _reads(func: Any) -> tuple[bool, ...]:
    """Of each argument, whether it is only read."""
    return tuple(
        a.alias_info is None
        and a.name not in ("running_mean", "running_var")  # written all the same
        for a in func._schema.arguments
    )


@functools.cache
def _rounds(func: Any) -> bool:
    schema = func._schema
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if schema.name.rpartition("::")[2] in _MOVES:
        return False
    if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        return False  # a view
    wrote = any(a.alias_info is not None for a in schema.arguments)
    return wrote or any("Tensor" in str(r.type) for r in schema.returns)


__all__ = ["Reruns"]
