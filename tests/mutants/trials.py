"""Whether mutants that plain torch runs are optimised to the same numbers."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from mutants import Mutant, mutant
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import recast

Optimize = Callable[..., Any]
_KEPT = {"passes", "forms", "varying"}  # the options of optimize that mutants are given too


def failures(
    model: nn.Module, batches: Sequence[Any], count: int, rng: random.Random,
    optimize: Optimize = recast.optimize, **options: Any,
) -> list[str]:  # fmt: skip
    """What went wrong with ``count`` mutants of ``model``, each with its source."""
    found = []
    for _ in range(count):
        one = mutant(model, rng)
        if one is None:
            continue
        plain = one.model.double()
        given = [_double(batch) for batch in batches]
        with warnings.catch_warnings(action="ignore"):
            if _runs(plain, given):
                wrong = _wrong(plain, given, optimize, options)
                found += [_told(one, wrong)] if wrong else []
    return found


def _told(one: Mutant, wrong: str) -> str:
    return f"{type(one.model).__name__}, {one.what}: {wrong}\n\n{one.source}\n"


# ---------------------------------------------------------------- one mutant


def _double(batch: Any) -> Any:
    """A copy of ``batch`` in float64."""
    return tree_map(
        lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t,
        copy.deepcopy(batch),
    )


def _runs(plain: nn.Module, batches: Sequence[Any]) -> bool:
    """Whether plain torch runs it, to finite numbers and to the same ones at the next run."""
    try:
        for training in (True, False):
            for batch in batches:
                _call(copy.deepcopy(plain).train(training), copy.deepcopy(batch))  # no gradients
                one, two = (_run(copy.deepcopy(plain).train(training), batch) for _ in range(2))
                if _difference(one, two) or not all(map(_finite, one.values())):
                    return False
    except Exception:
        return False
    plain.train()
    return True


def _wrong(plain: nn.Module, batches: Sequence[Any], optimize: Optimize, options: Any) -> str:
    reference = copy.deepcopy(plain)
    try:
        example = list(batches) if len(batches) > 1 else batches[0]
        fast = optimize(plain, example=copy.deepcopy(example), **options)
        if raised := fast.report.to_dict()["raised"]:
            return f"a rule raised: {raised}"
        for training in (True, False):
            for k, batch in enumerate(batches):
                want = _run(reference.train(training), batch)
                difference = _difference(_run(fast.train(training), batch), want)
                if difference:
                    return f"batch {k}, training={training}: {difference}"
    except Exception as error:
        return repr(error)
    return ""


def _run(model: nn.Module, batch: Any) -> dict[str, Tensor | None]:
    """All that a call and its gradients give and leave, by name."""
    model.zero_grad(set_to_none=True)
    batch = copy.deepcopy(batch)
    inputs = [t for t in tree_leaves(batch) if isinstance(t, Tensor)]
    learning = [t.requires_grad_() for t in inputs if t.is_floating_point()]
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    outputs = [t for t in tree_leaves(_call(model, batch)) if isinstance(t, Tensor)]
    g = torch.Generator().manual_seed(1)
    up = [torch.randn(t.shape, generator=g, dtype=torch.float64).to(t.dtype) for t in outputs]
    learned = [(t, u) for t, u in zip(outputs, up, strict=True) if t.requires_grad]
    torch.autograd.backward([t for t, _ in learned], [u for _, u in learned])
    found: dict[str, Tensor | None] = {f"output {k}": t.detach() for k, t in enumerate(outputs)}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    found |= {f"gradient of input {k}": t.grad for k, t in enumerate(learning)}
    found |= {f"input {k} afterwards": t.detach() for k, t in enumerate(inputs)}
    found |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    found |= {"the state of random numbers": torch.get_rng_state()}
    return {name: _dense(value) for name, value in found.items()}


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _dense(value: Tensor | None) -> Tensor | None:
    return value.to_dense() if value is not None and value.layout != torch.strided else value


def _finite(value: Tensor | None) -> bool:
    return value is None or bool(torch.isfinite(value).all())


def _difference(got: dict[str, Tensor | None], want: dict[str, Tensor | None]) -> str:
    """The first difference in words: float64 throughout, where only the order of sums differs."""
    if got.keys() != want.keys():
        return f"other results: {sorted(got.keys() ^ want.keys())}"
    for name, wanted in want.items():
        had = got[name]
        if had is None or wanted is None:
            if had is not wanted:
                return f"{name} is {'missing' if had is None else 'there'}"
            continue
        size = float(wanted.abs().max()) if wanted.numel() and wanted.is_floating_point() else 0.0
        try:
            torch.testing.assert_close(had, wanted, rtol=1e-7, atol=1e-8 * max(size, 1.0))
        except AssertionError as error:
            return f"{name}: {str(error).splitlines()[0]}"
    return ""


# ---------------------------------------------------------------- all models that tests optimise


class Mutating:
    """A plugin of pytest: beside each model that a test optimises, ``count`` mutants are; a test
    whose mutants go wrong fails.
    """

    def __init__(self, count: int) -> None:
        self.count, self.rng, self.found = count, random.Random(0), list[str]()
        self.optimize, self.inside = recast.optimize, False
        recast.optimize = self

    def __call__(self, model: Any, *args: Any, **options: Any) -> Any:
        """``recast.optimize``."""
        mutants = options.keys() <= {*_KEPT, "example", "strict"} and not args and not self.inside
        before = copy.deepcopy(model) if mutants else None
        example = copy.deepcopy(options.get("example")) if mutants else None
        made = self.optimize(model, *args, **options)
        if mutants and example is not None:
            kept = {name: value for name, value in options.items() if name in _KEPT}
            self._try(before, example if isinstance(example, list) else [example], kept)
        return made

    def _try(self, model: Any, batches: list[Any], options: dict[str, Any]) -> None:
        state = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self.inside = True
        try:
            self.found += failures(model, batches, self.count, self.rng, self.optimize, **options)
        finally:
            self.inside = False
            torch.set_rng_state(state[0])
            random.setstate(state[1])
            np.random.set_state(state[2])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Any:
        self.found.clear()
        result = yield
        if self.found:
            pytest.fail("\n".join(self.found), pytrace=False)
        return result
