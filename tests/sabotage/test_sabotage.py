"""Rewrites wrong on purpose: each is caught, by verify or by diff, with the sentence that names it.

A proof that never finds a fault proves nothing; these tests show that ours finds them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
from models import CASES, DLRM, build
from torch import nn

import recast
from recast.errors import VerifyError
from recast.passes import PIPELINE, REGISTRY
from recast.passes.sabotage import SABOTEURS
from recast.rewriter.api_link import link
from recast.rewriter.capture.capture_model import capture
from recast.rewriter.diff.bisect import bisect
from recast.runtime import tolerances


@dataclass(frozen=True)
class Crime:
    """Which model shows it, what catches it, and what is said."""

    model: str
    caught_by: str  # verify, or the group of the first row that fails
    says: str
    node: str = ""
    side: str = "forward"


CRIMES = {
    "sabotage-swap-tables": Crime("dlrm", "outputs", "its value is off by", "embedding_bags"),
    "sabotage-sum-for-mean": Crime("dlrm", "outputs", "its value is off by", "embedding_bags"),
    "sabotage-wrong-triangle": Crime("dlrm", "outputs", "its value is off by", "dot_interaction"),
    "sabotage-low-precision": Crime("dlrm", "outputs", "its value is off by", "through_bfloat16"),
    "sabotage-lose-duplicates": Crime(
        "dlrm", "gradients", "the gradient of emb_l.0.weight is off by", "getitem", "gradient"
    ),
    "sabotage-lose-padding": Crime(
        "dcn", "gradients", "the gradient of tables.item.weight", "embedding_bags", "gradient"
    ),
    "sabotage-detach-branch": Crime(
        "dlrm", "gradients", "no gradient goes back through it", "detach", "gradient"
    ),
    "sabotage-drop-bias": Crime("dlrm", "verify", "bot_l.0.bias no longer reaches the output"),
    "sabotage-stale-copy": Crime("dlrm", "after k steps", "its value is off by", ""),
    "sabotage-bake-training": Crime(
        "dlrm_dropout_norm", "verify|outputs", "its value is off by|random draw", "mlp"
    ),
    "sabotage-double-dropout-scale": Crime(
        "dlrm_dropout_norm", "outputs", "its value is off by", "scaled"
    ),
    "sabotage-reorder-random": Crime("mmoe", "verify", "comes earlier than in the model"),
    "sabotage-forget-weights": Crime("bags", "verify", "no longer reaches the output"),
    "sabotage-forget-mask": Crime("sasrec", "outputs", "its value is off by", "field_attention"),
    "sabotage-say-nothing": Crime("dlrm", "verify", "reports that it did not"),
}


def sabotaged(model: nn.Module, example: Any, name: str, fuel: int | None = None) -> Any:
    """``model`` after the default pipeline and one saboteur."""
    captured = capture(model, example)
    return link(captured, (*PIPELINE, REGISTRY[name]()), fuel=fuel)


def test_every_saboteur_has_its_crime() -> None:
    assert set(CRIMES) == set(SABOTEURS) and set(SABOTEURS) <= set(REGISTRY)


@pytest.mark.parametrize("name", CRIMES)
def test_caught(name: str) -> None:
    crime = CRIMES[name]
    model, batches, _ = build(crime.model)
    if crime.caught_by == "verify":
        with pytest.raises(VerifyError, match=crime.says) as caught:
            sabotaged(model, batches, name)
        assert name in str(caught.value)
        return
    fast = sabotaged(model, batches, name)
    assert fast.report.journal.fired[-1].rule == name
    report = recast.diff(model, fast, batches)
    bad = [r for r in report.rows if not r.ok]
    assert bad and bad[0].group == crime.caught_by.rpartition("|")[2], str(report)
    first = report.first
    assert first is not None and first.side == crime.side, str(report)
    assert first.rule == name and first.node.startswith(crime.node), str(first)
    assert first.where is not None and first.where.startswith("published.py:")
    assert any(part in str(first) for part in crime.says.split("|")), str(first)


def test_caught_in_a_copy() -> None:
    """A copy no longer holds the graph as captured; the diff captures again."""
    model, batches, _ = build("dlrm")
    fast = copy.deepcopy(sabotaged(model, batches, "sabotage-wrong-triangle"))
    first = recast.diff(model, fast, batches, steps=1).first
    assert first is not None and first.node == "dot_interaction", str(first)


@pytest.mark.parametrize("name", ["swap-tables", "lose-duplicates", "stale-copy"])
def test_bisect_finds_it(name: str) -> None:
    name = f"sabotage-{name}"
    model, batches, _ = build(CRIMES[name].model)

    def make(fuel: int | None) -> Any:
        return sabotaged(model, batches, name, fuel)

    found = bisect(model, make, batches, steps=2, limits=tolerances)
    assert found is not None and found.fired.rule == name
    assert f"rewrite {found.fuel} of {found.rewrites} breaks the numbers: {name}" in str(found)
    assert found.to_dict()["rewrite"]["rule"] == name


def test_bisect_of_a_sound_pipeline_finds_nothing() -> None:
    model, batches, _ = build("dlrm")

    def make(fuel: int | None) -> Any:
        return link(capture(model, batches), PIPELINE, fuel=fuel)

    assert bisect(model, make, batches, steps=1, limits=tolerances) is None


def test_sound_models_pass_the_same_check() -> None:
    """The control: without a saboteur the same diff says yes."""
    for name in {c.model for c in CRIMES.values()}:
        model, batches, _ = build(name)
        recast.diff(model, recast.optimize(model, example=batches), batches, steps=1).check()


def test_a_saboteur_can_be_named_on_the_command_line() -> None:
    model = DLRM()
    batch = CASES["dlrm"].batch(8, 0)
    with pytest.raises(VerifyError, match=r"bot_l\.0\.bias no longer reaches"):
        recast.optimize(model, example=batch, passes="default,sabotage-drop-bias")
