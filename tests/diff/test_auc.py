"""The exact AUC, and what a difference of two AUCs means."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import VOCAB, build, dense_and_bags, field_ids
from torch import Tensor, nn

import recast
from recast.errors import DiffError, InputError
from recast.rewriter.diff.auc import auc, paired, reordered, trained


def by_pairs(scores: np.ndarray, labels: np.ndarray) -> float:
    """The definition: over all (positive, negative) pairs."""
    positive, negative = scores[labels == 1], scores[labels == 0]
    wins = [(p > n) + 0.5 * (p == n) for p, n in itertools.product(positive, negative)]
    return float(np.mean(wins))


@pytest.mark.parametrize("values", [2, 5, 1000])
@pytest.mark.parametrize("rows", [2, 3, 50, 200])
def test_auc_is_its_definition(rows: int, values: int) -> None:
    rng = np.random.default_rng(rows + values)
    labels = rng.integers(0, 2, rows)
    labels[:2] = 0, 1
    scores = rng.integers(0, values, rows) / values
    assert auc(scores, labels) == pytest.approx(by_pairs(scores, labels), abs=1e-12)


def test_auc_is_right_at_the_ends() -> None:
    assert auc([0.1, 0.2, 0.9], [0, 0, 1]) == 1.0
    assert auc([0.1, 0.2, 0.9], [1, 1, 0]) == 0.0
    assert auc([0.5, 0.5, 0.5], [0, 1, 1]) == 0.5
    assert auc([-np.inf, np.inf], [0, 1]) == 1.0


@pytest.mark.parametrize(
    ("scores", "labels", "sentence"),
    [
        ([0.1, float("nan")], [0, 1], "a score is NaN"),
        ([0.1, 0.2], [1, 1], "2 positive and 0 negative"),
        ([0.1, 0.2], [0, 2], "labels must be 0 or 1"),
        ([0.1, 0.2, 0.3], [0, 1], "3 scores for 2 labels"),
    ],
)
def test_bad_questions(scores: list, labels: list, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        auc(scores, labels)


def batches(count: int, rows: int = 64) -> list[tuple[tuple[Tensor], Tensor]]:
    """Ids whose first field predicts the label, with noise."""
    made = []
    for k in range(count):
        ids = field_ids(rows, k)[0]
        noise = torch.rand(rows, generator=torch.Generator().manual_seed(k))
        made.append(((ids,), ((ids[:, 0].float() / VOCAB[0] + noise) > 1.0).float()))
    return made


def bce(output: Tensor, label: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output.view(-1), label)


def adagrad(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.05)


def test_the_same_weights_give_the_same_auc() -> None:
    model = build("pnn")[0]
    report = paired(model, copy.deepcopy(model), batches(4)).check()
    assert report.difference == 0.0 and report.rows == 256 and model.training
    assert "paired" in str(report)


def test_a_batch_with_other_labels_than_scores_is_named() -> None:
    model = build("pnn")[0]
    first, (ids, label) = batches(2)
    with pytest.raises(InputError, match="auc: batch 1 has 64 scores and 63 labels"):
        paired(model, model, [first, (ids, label[1:])])
    assert model.training  # as it was, whatever raised
    with pytest.raises(InputError, match="there are no batches"):
        paired(model, model, [])


def test_other_weights_do_not() -> None:
    model = build("pnn")[0]
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter("embs.0.weight").add_(torch.randn(VOCAB[0], 4))
    report = paired(model, other, batches(4))
    assert not report.ok
    with pytest.raises(DiffError, match=r"auc: 0\.\d+ instead of 0\.\d+"):
        report.check()


class Scores(nn.Module):
    """The same score for all rows, except for ``noise`` in the order of the rows."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        return 0.2 + self.noise * x


def test_only_rounding_may_exchange_rows_that_score_alike() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, generator=g)
    rows = [((x,), (x > 0).float())]
    assert paired(Scores(0.0), Scores(1e-8), rows).ok
    assert not paired(Scores(0.0), Scores(1e-4), rows).ok


def test_training_twins_agree_within_the_control() -> None:
    model = build("pnn")[0]
    seen = set()
    report = trained(
        model, copy.deepcopy(model), batches(12), batches(4), make=adagrad, loss=bce,
        progress=lambda name, step: seen.add(name),
    ).check()  # fmt: skip
    assert seen == {"plain", "fast", "control 1", "control 2"}
    assert "rows reordered" in report.how and len(report.controls) == 2
    assert 0.55 < report.plain < 1.0


def test_an_optimised_model_trains_to_the_same_auc() -> None:
    model = build("pnn")[0]
    given = batches(12)
    fast = recast.optimize(model, example=given[0][0])
    paired(model, fast, given).check()
    trained(model, fast, given, batches(4), make=adagrad, loss=bce).check()


def test_training_with_lost_gradients_does_not() -> None:
    model = build("pnn")[0]
    lossy = copy.deepcopy(model)
    lossy.get_parameter("embs.0.weight").requires_grad_(False)
    lossy.get_parameter("mlp.mlp.0.weight").requires_grad_(False)
    report = trained(model, lossy, batches(12), batches(4), make=adagrad, loss=bce)
    assert not report.ok


def test_bags_cannot_be_reordered_and_need_not_be() -> None:
    model = build("dlrm")[0]
    made = [(dense_and_bags(32, k), (torch.arange(32) % 3 == 0).float()) for k in range(4)]
    report = trained(model, copy.deepcopy(model), made, made, make=adagrad, loss=bce, controls=1)
    assert report.ok and "other rounding" in report.how


def test_reordered_keeps_rows_together() -> None:
    (ids,), label = batches(1)[0]
    (moved,), moved_label = reordered((ids,), label, torch.Generator().manual_seed(0))
    before = sorted(torch.cat([ids.float(), label.unsqueeze(1)], 1).tolist())
    after = sorted(torch.cat([moved.float(), moved_label.unsqueeze(1)], 1).tolist())
    assert before == after and not torch.equal(ids, moved)
