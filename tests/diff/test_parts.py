"""A model that is captured in parts: the diff descends into the parts."""

from __future__ import annotations

import copy

import pytest
from models import CASES, build
from torch import Tensor, nn

import recast
from recast.passes import PIPELINE, REGISTRY
from recast.rewriter.api_link import link
from recast.rewriter.capture.capture_model import capture


class Outer(nn.Module):
    """Branches on its data, around a model that can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("pnn")[0]
        self.head = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x).unsqueeze(1)
        if x[:, 0].max() > 3:
            h = h * 2
        return self.head(h)


BATCHES = [CASES["pnn"].batch(10, 0), (CASES["pnn"].batch(6, 1)[0].clamp(max=3),)]


def test_a_model_in_parts_is_equal() -> None:
    model = Outer()
    fast = recast.optimize(model, example=BATCHES)
    assert fast.report.to_dict()["captured"] == "partial"
    recast.diff(model, fast, BATCHES).check()


@pytest.mark.parametrize(
    ("mistake", "node", "origin"),
    [
        ("lose-duplicates", "getitem", "inner.embs.0"),
        ("swap-tables", "embedding_bags", "inner.embs.0"),
        ("low-precision", "through_bfloat16", "inner.mlp.mlp.0"),
    ],
)
def test_a_mistake_in_a_part_is_named(mistake: str, node: str, origin: str) -> None:
    model = Outer()
    passes = (*PIPELINE, REGISTRY[f"sabotage-{mistake}"]())
    fast = link(capture(model, BATCHES), passes)
    first = recast.diff(model, fast, BATCHES).first
    assert first is not None and first.rule == f"sabotage-{mistake}", str(first)
    assert first.node.startswith(node) and first.origin[0] == origin
    assert first.where is not None and first.where.startswith("published.py:")


@pytest.mark.parametrize("sizes", [(10, 10, 6), (10, 10, 10)])
def test_a_mistake_in_a_copy_is_found_with_any_number_of_batches(sizes: tuple[int, ...]) -> None:
    """A copy holds no capture, so one is made: from one batch, or from two of different sizes."""
    batches = [CASES["pnn"].batch(rows, seed) for seed, rows in enumerate(sizes)]
    model = build("pnn")[0]
    passes = (*PIPELINE, REGISTRY["sabotage-low-precision"]())
    fast = copy.deepcopy(link(capture(model, batches[0]), passes))
    first = recast.diff(model, fast, batches).first
    assert first is not None and first.rule == "sabotage-low-precision", str(first)
