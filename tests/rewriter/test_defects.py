"""A defect of ours costs a rewrite, never an answer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recast
from recast import passes


class Defective:
    """Drops the last node it can, so that a parameter no longer reaches the output."""

    name = "normalize"

    def run(self, graph, context):
        output = next(n for n in graph.nodes if n.op == "output")
        first = next(n for n in graph.nodes if n.op == "placeholder")
        output.args = (first,)
        return 1


class Fails:
    name = "normalize"

    def run(self, graph, context):
        raise RuntimeError("boom")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU())


@pytest.mark.parametrize(("defect", "word"), [(Defective, "no longer reaches"), (Fails, "boom")])
def test_a_defective_default_pass_is_left_out_and_named(defect, word, monkeypatch):
    monkeypatch.setattr(passes, "PIPELINE", (defect(), *passes.PIPELINE[1:]))
    plain, x = model(), torch.randn(4, 3)
    fast = recast.optimize(plain, example=x)
    torch.testing.assert_close(fast(x), plain(x), rtol=0, atol=0)
    (raised,) = fast.report.journal.raised
    assert raised.rule == "normalize" and word in raised.error
    with pytest.raises((AssertionError, RuntimeError), match=word):
        recast.optimize(plain, example=x, strict=True)


def test_a_defective_pass_that_was_asked_for_raises():
    with pytest.raises(recast.VerifyError, match="no longer reaches"):
        recast.optimize(model(), example=torch.randn(4, 3), passes=(Defective(),))


class WrongNumbers:
    """Breaks no invariant: every sigmoid becomes a tanh."""

    name = "clean-up"

    def run(self, graph, context):
        found = [n for n in graph.nodes if n.target is torch.sigmoid]
        for node in found:
            node.target = torch.tanh
        return len(found)


def test_wrong_numbers_are_not_kept_nor_reported_as_rewrites(monkeypatch):
    """The captured graph runs instead, and the report does not claim what was taken back."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.out = nn.Embedding(9, 4), nn.Linear(4, 1)

        def forward(self, ids):
            return torch.sigmoid(self.out(self.emb(ids)).square())

    monkeypatch.setattr(passes, "PIPELINE", (*passes.PIPELINE, WrongNumbers()))
    plain, ids = Net(), torch.randint(9, (6,))
    fast = recast.optimize(plain, example=ids)
    torch.testing.assert_close(fast(ids), plain(ids), rtol=0, atol=0)
    report = fast.report.to_dict()
    assert report["lookups"] == {"found": 1, "fused": 0}
    assert report["fired"] == {}
    (raised,) = fast.report.journal.raised
    assert "not that of the model" in raised.error
