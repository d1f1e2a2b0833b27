"""Prove that two models are the same function, or name the first node where they differ.

Compared, on the same inputs under the same seed: outputs and every gradient in train and eval mode,
parameters and optimizer state after k steps, buffers. The judge is the plain model run in float64
(see :mod:`.judge`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from recast.errors import RecastError, UsageError
from recast.rewriter.capture.batches import given
from recast.rewriter.compiled import trees
from recast.rewriter.compiled.module import Compiled
from recast.rewriter.compiled.signature import of_forward

from . import double, locate, model_runs
from .judge import Limit, Limits, Row, compare, drawn, usual
from .model_runs import Loss, MakeOptimizer, Train
from .report import GROUPS, DiffReport
from .rounding_noise import Reruns


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
    report.command = command or f"recast.diff(plain, fast, example, steps={steps}, seed={seed})"
    make = model_runs.maker(optimizer, plain, fast)
    modes = (False, True) if training else (False,)
    trials = Trials(plain, fast, batches, steps, seed, loss, make, limits, report, modes, train)
    trials.shorter = _shorter(fast, *batches) if len(batches) == 1 else None
    with model_runs.undisturbed(plain, fast) as restore:
        trials.run(restore)
    if not report.ok:
        report.first = locate.first(
            plain, fast, batches, report.rows, seed=seed, loss=loss, make=make,
            rtol=_rtol(limits, plain), shorter=trials.shorter,
        )  # fmt: skip
    return report


Compared = tuple[str, str, str, Tensor, Tensor, Tensor | None]  # further arguments of ``compare``


@dataclass
class Trials:
    """The runs of both models and of the judge, and what is compared of them."""

    plain: nn.Module
    fast: nn.Module
    batches: list[tuple[Any, ...]]
    steps: int
    seed: int
    loss: Loss | None
    make: Callable[[nn.Module], MakeOptimizer]
    limits: Limits
    report: DiffReport
    modes: tuple[bool, ...]
    own: Train | None
    shorter: tuple[Any, ...] | None = None  # a batch of another size, for eval mode alone

    def run(self, restore: Callable[[], None]) -> None:
        self.same_start()
        exact = self._exact()
        rows: list[Row] = []
        for training in self.modes:
            for k, batch in enumerate(self.batches):
                restore()
                rows += self._passes(exact, training, k, batch, restore)
        if self.shorter is not None:
            restore()
            rows += self._passes(exact, False, len(self.batches), self.shorter, restore)
        if self.steps or self.own:
            restore()
            rows += self._steps(exact, restore)
        self.report.rows = worst_of_each(rows)

    def same_start(self) -> None:
        """Raise UsageError if the parameters differ in name or shape, and note different values."""
        ours = {**dict(self.fast.named_parameters()), **dict(self.fast.named_buffers())}
        for name, t in [*self.plain.named_parameters(), *self.plain.named_buffers()]:
            held = ours.get(name)
            if held is None or held.shape != t.shape:
                raise UsageError(
                    f"diff: the second model has no {name} of shape {tuple(t.shape)}",
                    why="a diff compares two forms of one model, under the same names",
                )
            if held is not t and not torch.equal(*(model_runs.dense(x).cpu() for x in (held, t))):
                self.report.notes.append(f"the two models start from different values of {name}")

    def _exact(self) -> nn.Module | None:
        """The judge: the plain model in float64; None, with the reason noted, if it cannot run."""
        try:
            exact = double.doubled(self.plain)
            with double.in_double(), torch.no_grad():
                model_runs.forward(exact, double.widen(self.batches[0]), self.seed)
            return double.doubled(self.plain)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            self.report.judge = f"the plain model itself (it does not run in float64: {text})"
            return None

    def _passes(
        self,
        exact: nn.Module | None,
        training: bool,
        k: int,
        batch: tuple[Any, ...],
        restore: Callable[[], None],
    ) -> list[Row]:
        mode = "train mode" if training else "eval mode"
        when = mode if len(self.batches) == 1 and not k else f"{mode}, batch {k + 1}"
        loss = self.loss if k < len(self.batches) else None  # it may hold the labels of one batch
        how: Any = {"training": training, "seed": self.seed + k, "loss": loss}
        want = self.once(self.plain, batch, how)
        restore()
        try:
            got = self.once(self.fast, batch, how)
        except Exception as error:
            return [_raised("outputs", when, error)]
        wide = double.widen(batch)
        truth = self._truth(exact, lambda m: self.once(m, wide, how))
        if truth is not None and not self._fit(truth, want):
            note = f"in {mode} the random numbers depend on the dtype, so there is no float64 judge"
            if note not in self.report.notes:
                self.report.notes.append(note)
            truth = None

        def again(model: nn.Module, widened: bool) -> model_runs.Pass:
            return model_runs.once(model, wide if widened else batch, **how)

        reruns = Reruns(self.plain, self.fast, again, restore)
        rows = self._outputs(when, training, got, want, truth, reruns)
        top = _top((truth or want).grads.values())
        none: dict[str, Tensor] = {}
        judges = _of(truth, "grads", none)
        rows += self._each("gradients", when, got.grads, want.grads, judges, top, reruns, "grads")
        if training:
            exact_ones, top = _of(truth, "buffers", none), _top(want.buffers.values())
            ours, theirs = got.buffers, want.buffers
            rows += self._each("buffers", when, ours, theirs, exact_ones, top, reruns, "buffers")
        return rows

    def _fit(self, truth: model_runs.Pass, want: model_runs.Pass) -> bool:
        """Whether the float64 run drew the same random numbers as the plain one: the generators
        must have the same state, and the outputs agree to two digits or so.
        """
        if not torch.equal(truth.random, want.random):
            return False
        if truth.outputs.keys() != want.outputs.keys():
            return False
        for path, b in want.outputs.items():
            if isinstance(b, Tensor) and b.is_floating_point() and b.numel():
                far = (b.double() - truth.outputs[path]).abs().nan_to_num(0.0, 0.0, 0.0).max()
                size = b.double().nan_to_num(0.0, 0.0, 0.0).abs().max()
                if far > self.limits.WILD * torch.finfo(b.dtype).eps * size:
                    return False
        return True

    def _outputs(
        self,
        when: str,
        training: bool,
        got: model_runs.Pass,
        want: model_runs.Pass,
        truth: Any,
        reruns: Reruns[model_runs.Pass],
    ) -> list[Row]:
        prefix = "train output" if training else "eval output"
        if got.outputs.keys() != want.outputs.keys():
            why = f"outputs {sorted(got.outputs)} instead of {sorted(want.outputs)}"
            return [_refuse("outputs", prefix, when, why)]
        rows = []
        own = _usual(want.outputs, truth.outputs if truth is not None else {})
        for path, b in want.outputs.items():
            a, name = got.outputs[path], prefix + path
            if isinstance(b, Tensor) and isinstance(a, Tensor):
                judge = truth.outputs.get(path) if truth is not None else None
                limit = Limit(own, 1.0, local=True)
                what = ("outputs", name, when, a, b, judge)
                get = functools.partial(_named, "outputs", path)
                rows.append(self.judged(what, limit, reruns, get))
            elif not trees.alike(a, b):
                rows.append(_refuse("outputs", name, when, f"{a!r} instead of {b!r}"))
        return rows

    def _steps(self, exact: nn.Module | None, restore: Callable[[], None]) -> list[Row]:
        when = "after training" if self.own else f"after {self.steps} steps"
        if not any(p.requires_grad for p in self.plain.parameters()):
            return []  # nothing to train

        want = self.trained(self.plain, self.batches)
        restore()
        try:
            got = self.trained(self.fast, self.batches)
        except Exception as error:
            return [_raised("after k steps", when, error)]
        wide = [double.widen(b) for b in self.batches]
        truth = None
        if not any("no float64 judge" in n for n in self.report.notes):
            truth = self._truth(exact, lambda m: self.trained(m, wide))
        none: dict[str, Tensor] = {}
        rows: list[Row] = []

        def again(model: nn.Module, widened: bool) -> model_runs.Steps:
            return self.trained(model, wide if widened else self.batches)

        reruns = Reruns(self.plain, self.fast, again, restore)
        for name in ("parameters", "state", "buffers"):
            a, b = getattr(got, name), getattr(want, name)
            group = "buffers" if name == "buffers" else "after k steps"
            judges = _of(truth, name, none)
            rows += self._each(group, when, a, b, judges, _top(b.values()), reruns, name)
        return rows

    def once(self, model: nn.Module, batch: tuple[Any, ...], how: Any) -> model_runs.Pass:
        """One forward and backward of one of the models; ``how``: see :func:`.model_runs.once`."""
        return model_runs.once(model, batch, **how)

    def trained(self, model: nn.Module, batches: list[tuple[Any, ...]]) -> model_runs.Steps:
        """Run the steps on one of the models; its state after them."""
        if self.own is not None:
            return model_runs.after(*self.own(model, batches))
        how: Any = {"steps": self.steps, "seed": self.seed, "loss": self.loss}
        return model_runs.train(model, batches, **how, make=self.make(model))

    def _truth(self, exact: nn.Module | None, run: Callable[[nn.Module], Any]) -> Any:
        if exact is None:
            return None
        with model_runs.undisturbed(exact), double.in_double():
            return run(exact)

    def _each(
        self,
        group: str,
        when: str,
        ours: dict[str, Tensor],
        plain: dict[str, Tensor],
        truth: dict[str, Tensor],
        top: float,
        reruns: Reruns[Any],
        field: str,
    ) -> list[Row]:
        """One row a name; a tensor that one side does not have counts as zeros.

        ``field``: of the runs of ``reruns``, where these tensors are by name.
        """
        rows = []
        # Rounding noise of a backward pass is relative to the gradients that flow through it: where
        # the true gradient is zero, only what ``top`` grants is left of the limit.
        limit = Limit(_usual(plain, truth), top)
        for name in dict.fromkeys([*plain, *ours]):
            b = plain[name] if name in plain else torch.zeros_like(ours[name])
            a = ours[name] if name in ours else torch.zeros_like(b)
            judge = truth.get(name)
            if judge is None and truth:
                judge = torch.zeros_like(b)  # the judge has no gradient there either
            what = (group, name, when, a, b, judge)
            get = functools.partial(_named, field, name)
            rows.append(self.judged(what, limit, reruns, get))
        return rows

    def judged(
        self, what: Compared, limit: Limit, reruns: Reruns[Any], get: Callable[[Any], Any]
    ) -> Row:
        """The row of one tensor; what only the plain model's own error excuses must be rounding.

        ``get``: the same tensor in a run of ``reruns``; see :mod:`.rounding_noise`.
        """
        row = compare(*what, self.limits, limit)
        _, name, when, ours, _, judge = what
        if row.why or judge is None or not ours.is_floating_point():
            return row
        if not row.ok:
            row = compare(*what, self.limits, drawn(limit, judge, map(get, reruns.draws)))
        alone = compare(*what, self.limits, replace(limit, alone=True))
        if not row.ok or alone.ok or reruns.vanishes(ours, judge, get, self.limits):
            return row
        self.report.notes.append(f"{name} ({when}) differs in float64 too: that is not rounding")
        return alone


# ---------------------------------------------------------------- small helpers


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


def _named(field: str, name: str, run: Any) -> Any:
    return getattr(run, field).get(name)


def _of(run: Any, name: str, default: Any) -> Any:
    return default if run is None else getattr(run, name)


def _usual(plain: dict[str, Any], truth: dict[str, Any]) -> float:
    """The median over all tensors of the plain model's own relative error."""
    errors = [
        usual(b, truth[k])
        for k, b in plain.items()
        if isinstance(b, Tensor) and isinstance(truth.get(k), Tensor)
    ]
    return sorted(errors)[len(errors) // 2] if errors else 0.0


def _top(tensors: Any) -> float:
    found = [t for t in tensors if t.numel() and t.is_floating_point()]
    return max((float(t.abs().max()) for t in found), default=0.0)


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(model).to(dtype)


def _cast_batch(batch: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    def to(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() else t

    cast: tuple[Any, ...] = trees.mapped(to, batch)
    return cast


def _refuse(group: str, name: str, when: str, why: str) -> Row:
    return Row(group, name, (), float("inf"), float("inf"), None, 0.0, False, when, why)


def _raised(group: str, when: str, error: Exception) -> Row:
    where = f" at {error.where}" if isinstance(error, RecastError) and error.where else ""
    text = error.what if isinstance(error, RecastError) else str(error).split("\n", 1)[0]
    return _refuse(group, "(forward)", when, f"raises {type(error).__name__}: {text}{where}")


def worst_of_each(rows: list[Row]) -> list[Row]:
    """One row per tensor: the worst over modes and batches."""
    kept: dict[tuple[str, str], Row] = {}
    for r in rows:
        held = kept.get((r.group, r.tensor))
        if held is None or r.share > held.share:
            kept[r.group, r.tensor] = r
    return sorted(kept.values(), key=lambda r: GROUPS.index(r.group))


__all__ = ["Compared", "DiffReport", "Trials", "batches_of", "count_of", "diff", "worst_of_each"]
