"""Every random model computes the same when it is optimised.

``pytest tests/random_models --models 5000 --timeout 0`` tries more, and other ones at each run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from habits import Habit, trained
from hypothesis import HealthCheck, Phase, given, note, settings
from recipes import Lookup, Recipe, Table, batch, lookups, model, program, recipes

import recast

CI = 24  # the default of --models: the same ones at each run
SIZES = (6, 4)


def training(recipe: Recipe) -> Callable[..., Any]:
    """Trains either model as the recipe says."""
    return lambda model, batches: trained(model, batches, recipe.habit)


def check(recipe: Recipe) -> None:
    """Optimise the model and compare: captured whole, every lookup grouped, no rule raised."""
    plain = model(recipe)
    batches = [batch(recipe, rows, rows) for rows in SIZES]
    fast = recast.optimize(plain, example=batches)
    report = fast.report.to_dict()
    assert report["captured"] == "whole", report.get("why")
    assert report["raised"] == []
    assert report["lookups"]["found"] == report["lookups"]["fused"] >= lookups(recipe)
    assert list(fast.state_dict()) == list(plain.state_dict())
    recast.diff(plain, fast, [batches[0], batch(recipe, 9, 9)], train=training(recipe)).check()


def test_random_models(request: pytest.FixtureRequest) -> None:
    count = request.config.getoption("--models")

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=count == CI,
        database=None,
        print_blob=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(recipes())
    def run(recipe: Recipe) -> None:
        note(program(recipe))
        note(str(recipe))
        check(recipe)

    run()


def _recipe(**changes: object) -> Recipe:
    plain = {
        "tables": (Table(7, 2, None, False, "sum"),),
        "lookups": (Lookup(0, "column"), Lookup(0, "packed")),
        "dense": 1,
        "interactions": ("cat",),
        "chain": ("linear", "ReLU"),
        "style": "sequential",
        "flag": False,
        "outputs": "one",
        "container": "flat",
    }
    return Recipe(**{**plain, **changes})  # type: ignore[arg-type]


# Small programs that once were rewritten wrongly, and forms that a short run may miss by chance.
KEPT = {
    "one shared table by two forms": _recipe(),
    "dropout before the activation": _recipe(chain=("linear", "drop", "ReLU", "norm")),
    "norm alone": _recipe(chain=("norm",), style="loop"),
    "functional dropout under a flag": _recipe(
        chain=("linear", "ReLU", "drop"), style="functional", flag=True
    ),
    "ragged max with padding": _recipe(
        tables=(Table(5, 2, 1, False, "max"),), lookups=(Lookup(0, "ragged"), Lookup(0, "bag"))
    ),
    "a norm of a norm, whose running mean is a true zero": _recipe(
        tables=(Table(9, 4, None, False, "sum"), Table(7, 4, None, False, "mean")),
        lookups=(Lookup(1, "bag"), *(Lookup(0, "column") for _ in range(3))),
        dense=0, interactions=("dot",), chain=("norm", "norm"), flag=True,
    ),
    "a norm of two rows, whose gradient is a rest of cancelled terms": _recipe(
        tables=tuple(Table(rows, 2, None, False, "sum") for rows in (8, 9, 7)),
        lookups=tuple(Lookup(table, "column") for table in (0, 0, 2)),
        dense=0, interactions=("dot-self", "cat"), chain=("norm",), first_order=True,
    ),
    "a norm of rows that share an id, twice stepped": _recipe(
        tables=(Table(3, 4, None, False, "sum"),), lookups=(Lookup(0, "column"),),
        dense=0, interactions=("compressed-layers",), chain=("ELU", "PReLU", "norm"),
    ),
    "a factorisation machine that cancels": _recipe(
        tables=tuple(Table(*sizes, None, False, mode) for *sizes, mode in (
            (4, 2, "sum"), (7, 2, "mean"), (6, 2, "sum"),
        )),
        lookups=tuple(Lookup(1, form) for form in ("column", "bag", "masked", "bag")),
        dense=3, interactions=("fm-summed",), chain=("ReLU",), outputs="dict",
    ),
    "target attention, a shared dropout, a loss of tables and batch": _recipe(
        lookups=(Lookup(0, "target-softmax"), Lookup(0, "length-mean"), Lookup(0, "tied")),
        chain=("linear", "shared", "ReLU", "shared", "noise"), outputs="loss of tables",
        habit=Habit("Adam", groups=True, scheduler="warm", clip="norm", events=("copy", "eval")),
    ),
    "a table looked up and read whole": _recipe(
        tables=(Table(9, 4, 0, False, "sum"),),
        lookups=(Lookup(0, "convolved"), Lookup(0, "scored"), Lookup(0, "column")),
        interactions=("random-mask", "two-levels"), outputs="loss in a dict",
        habit=Habit("SGD, fused", accumulate=2, closure=True, events=("saved", "frozen", "thawed")),
    ),
    "sparse tables, buffers that forward writes, field-aware pairs": _recipe(
        tables=(Table(7, 2, 1, True, "mean"),), interactions=("moving-mean", "counted"),
        aware=True, chain=("norm",), outputs="nested",
        habit=Habit("Adagrad", scheduler="step", accumulate=2, events=("restored", "scaled")),
    ),
    "dot with itself": _recipe(interactions=("dot-self",), outputs="dict", container="dict"),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_kept(name: str) -> None:
    check(KEPT[name])


def test_a_program_reads_like_a_model() -> None:
    text = program(_recipe(chain=("linear", "ReLU", "drop")))
    assert "class Model(nn.Module):" in text and "def forward(self, ids, packed, x):" in text
