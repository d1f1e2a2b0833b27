"""The runs of both models and of the judge, and what is compared of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recast.errors import RecastError, UsageError
from recast.rewriter.compiled import trees

from . import call_effects, double, model_runs
from .judge import Limit, Limits, Row, compare, drawn, usual
from .model_runs import Loss, MakeOptimizer, Train
from .report import GROUPS, DiffReport
from .rounding_noise import Reruns

_UNSTEADY = (
    "run twice on the same batch, with the same parameters and seed, the plain model differs from"
    " itself: it reads a clock or a file, or keeps state outside of its parameters and buffers"
)
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
    learnt: dict[str, Tensor] = field(default_factory=dict)  # parameters, buffers after the steps

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
        restore()
        rows += self._without_gradients(exact, restore)
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
        exact_ones, top = _of(truth, "buffers", none), _top(want.buffers.values())
        ours, theirs = got.buffers, want.buffers
        rows += self._each("buffers", when, ours, theirs, exact_ones, top, reruns, "buffers")
        self._note_the_empty(want, mode)
        return rows

    def _note_the_empty(self, want: model_runs.Pass, mode: str) -> None:
        """Note what any model would agree with: gradients of zero, outputs without a number."""
        told = []
        if want.grads and not _top(want.grads.values()):
            told.append(f"in {mode} gradients of the plain model are 0 or NaN, which proves little")
        floats = [t for t in want.outputs.values() if _floats(t) and t.numel()]
        if floats and not any(bool(torch.isfinite(t).any()) for t in floats):
            told.append(f"in {mode} no output of the plain model is finite, which proves little")
        self.report.notes += [note for note in told if note not in self.report.notes]

    def _without_gradients(self, exact: nn.Module | None, restore: Callable[[], None]) -> list[Row]:
        """Eval mode under ``no_grad``, where a model may take a way of its own, with the parameters
        of the plain model after the steps: whatever was kept from earlier calls is out of date.
        Each model is called with the old ones first, since it may keep something on purpose.
        """
        when = "eval mode without gradients" + (", new parameters" if self.learnt else "")
        batch, wide = self.batches[0], double.widen(self.batches[0])
        how: Any = {"training": False, "seed": self.seed, "loss": None, "gradients": False}

        def run(model: nn.Module, widened: bool) -> model_runs.Pass:
            given = wide if widened else batch
            if self.learnt:
                self.once(model, given, how)
                self.take_learnt(model)
            return self.once(model, given, how)

        want = run(self.plain, False)
        restore()
        try:
            got = run(self.fast, False)
        except Exception as error:
            return [_raised("after k steps" if self.learnt else "outputs", when, error)]
        truth = self._truth(exact, lambda m: run(m, True))
        if truth is not None and not self._fit(truth, want):
            truth = None
        reruns = Reruns(self.plain, self.fast, run, restore)
        rows = self._outputs(when, False, got, want, truth, reruns)
        return [replace(row, group="after k steps") for row in rows] if self.learnt else rows

    @torch.no_grad()
    def take_learnt(self, model: nn.Module) -> None:
        """Let ``model`` have the parameters and buffers of the plain model after the steps."""
        for name, t in [*model.named_parameters(), *model.named_buffers()]:
            new = self.learnt.get(name)
            if new is not None and new.shape == t.shape and t.layout == torch.strided:
                t.copy_(new)

    def _fit(self, truth: model_runs.Pass, want: model_runs.Pass) -> bool:
        """Whether the float64 run drew the same random numbers as the plain one: the generators
        must have the same state, and the outputs agree to two digits or so.
        """
        if not torch.equal(truth.effects.random, want.effects.random):
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
        for field_name in ("outputs", "written"):
            ours, plain = getattr(got, field_name), getattr(want, field_name)
            exact = _of(truth, field_name, {})
            limit = Limit(_usual(plain, exact), 1.0, local=True)
            for path in plain:
                if path not in ours:
                    continue  # told below
                a, b, judge = (_tensor(held.get(path)) for held in (ours, plain, exact))
                name = prefix + path if field_name == "outputs" else f"{prefix}, {path}"
                if isinstance(b, Tensor) and isinstance(a, Tensor):
                    judge = judge if isinstance(judge, Tensor) else None
                    what = ("outputs", name, when, a, b, judge)
                    get = functools.partial(_named, field_name, path)
                    kept = field_name == "written" and not path.startswith("input")
                    if kept and not self._repeats(what, limit, get(reruns.second)):
                        continue  # a running mean: it depends on how many calls were before
                    rows.append(self.judged(what, limit, reruns, get))
                elif not trees.alike(a, b):
                    rows.append(_refuse("outputs", name, when, f"{a!r} instead of {b!r}"))
        outputs = got.outputs, want.outputs
        for path, why in call_effects.differences(got.effects, want.effects, outputs):
            rows.append(_refuse("outputs", prefix + path, when, why))
        for path in call_effects.scattered(*outputs):
            note = f"{prefix + path} is not contiguous, the plain model's is: reshape() takes both"
            if note not in self.report.notes:
                self.report.notes.append(note)
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
        self.learnt = want.parameters | want.buffers
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
        group, name, when, ours, _, judge = what
        if row.why or not ours.is_floating_point():
            return row
        alone = compare(*what, self.limits, replace(limit, alone=True))
        if not (row.ok and alone.ok) and not self._repeats(what, limit, get(reruns.second)):
            self.report.unsought = _UNSTEADY
            return _refuse(group, name, when, "the plain model gives another value each time")
        if judge is None:
            return row
        if not row.ok:
            row = compare(*what, self.limits, drawn(limit, judge, map(get, reruns.draws)))
        if not row.ok or alone.ok or reruns.vanishes(ours, judge, get, self.limits):
            return row
        self.report.notes.append(f"{name} ({when}) differs in float64 too: that is not rounding")
        return alone

    def _repeats(self, what: Compared, limit: Limit, second: Any) -> bool:
        """Whether the plain model gives the same a ``second`` time, up to rounding."""
        group, name, when, _, plain, _ = what
        if not isinstance(second, Tensor):
            return True  # a missing gradient, taken as zeros
        limit = replace(limit, alone=True)
        return compare(group, name, when, second, plain, None, self.limits, limit).ok


# ---------------------------------------------------------------- small helpers


def _named(field: str, name: str, run: Any) -> Any:
    return _tensor(getattr(run, field).get(name))


def _tensor(value: Any) -> Any:
    """``value``; a number or an array that Python made of floats as a tensor, since it is rounded
    too.
    """
    if type(value) is float:
        return torch.tensor(value, dtype=torch.float32)
    floats = isinstance(value, np.ndarray) and value.dtype.kind == "f"
    return torch.from_numpy(value.copy()) if floats else value


def _floats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


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
    found = [t[t.isfinite()] for t in tensors if t.is_floating_point()]
    return max((float(t.abs().max()) for t in found if t.numel()), default=0.0)


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


__all__ = ["Compared", "Trials", "worst_of_each"]
