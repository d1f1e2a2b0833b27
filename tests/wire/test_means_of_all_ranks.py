"""Means over the rows of the batch on W ranks: those of one process, or told to be others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import processes, run
from test_pairs_of_all_ranks import Form, Towers, batch, learnt
from torch import Tensor

import recast
from recast.passes import PIPELINE
from recast.passes.synchronise_means import SynchroniseMeans

PASSES = (*PIPELINE, SynchroniseMeans())


def balanced(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """The load of experts: how often each is the first choice, and its mean probability."""
    gates = u.softmax(1)
    chosen = torch.nn.functional.one_hot(gates.argmax(1), 6).float().mean(0)
    return (gates * v).sum(1) + 6 * (chosen * gates.mean(dim=0)).sum()


def by_hand(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """A batch norm of means alone."""
    middle = u.mean(0, keepdim=True)
    return ((u - middle) / (((u - middle) ** 2).mean(0) + 1.0).sqrt() * v).sum(1)


def of_places(u: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    x = torch.stack([u, v], 1)  # (B, 2, 6)
    return (x * x.mean((0, 1))).sum((1, 2))


ROWS: dict[str, Form] = {
    "balanced": balanced,
    "by hand": by_hand,
    "of places": of_places,
    "a function": lambda u, v, ids: (u - torch.mean(v, 0)).square().sum(1),
    "by name": lambda u, v, ids: (u - v.mean(axis=-2)).square().sum(1),
}


def answers(form: Form, split: tuple[int, ...], how: Any) -> tuple[Any, Any]:
    fast = recast.optimize(Towers(form), example=batch(8, 0), passes=PASSES)
    assert any(e.rule == "synchronise-means" for e in fast.report.journal.fired)
    copies = [copy.deepcopy(fast) for _ in split]
    parts = [batch(n, seed) for seed, n in enumerate(split)]
    ours = how(len(split), lambda r: learnt(copies[r], parts[r]))
    whole = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    wide = [t.double() if t.is_floating_point() else t for t in whole]
    return ours, learnt(Towers(form).double(), wide)


def check(form: Form, split: tuple[int, ...], how: Any) -> None:
    ours, (wanted, grads) = answers(form, split, how)
    found = torch.cat([out for out, _ in ours]).double()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for k, grad in enumerate(grads):
        total = torch.stack([theirs[k] for _, theirs in ours]).sum(0).double()
        torch.testing.assert_close(total, grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("split", [(4, 4), (5, 0, 2), (1, 3)])
@pytest.mark.parametrize("form", ROWS)
def test_means_are_of_the_rows_of_all_ranks(form: str, split: tuple[int, ...]) -> None:
    check(ROWS[form], split, run)


def test_over_gloo() -> None:
    check(by_hand, (5, 2), processes)


LEFT: dict[str, tuple[Form, set[str]]] = {
    "variance": (lambda u, v, ids: ((u - u.mean(0)) / u.std(0)).sum(1), {"mean", "std"}),
    "sum": (lambda u, v, ids: u.sum(1) + u.sum(0).square().sum(), {"sum"}),
    "shift": (lambda u, v, ids: (u * v.roll(1, 0)).sum(1), {"roll"}),
    "order": (lambda u, v, ids: u.sum(1).sort()[0] + v.topk(1, dim=0)[0].sum(), {"sort", "topk"}),
    "softmax": (lambda u, v, ids: u.sum(1).softmax(0) + v.mean(0).sum(), {"softmax", "mean"}),
    "covariance": (lambda u, v, ids: u.sum(1) + (u.t() @ v).square().sum(), {"sum"}),
    "number": (lambda u, v, ids: u.sum(1) + (v.mean(0) * v.size(0)).sum(), {"mean"}),
    "places": (
        lambda u, v, ids: u.sum(1) + (v * torch.arange(v.size(0))[:, None]).mean(0).sum(), {"mean"}
    ),
    "normalised": (
        lambda u, v, ids: torch.nn.functional.normalize(u, dim=0).sum(1) + v.mean(0).sum(),
        {"normalize", "mean"},
    ),
    "greatest": (lambda u, v, ids: u.sum(1) - u.max(), {"max"}),
}  # fmt: skip


@pytest.mark.parametrize("form", LEFT)
def test_others_are_of_each_ranks_own_and_told(form: str) -> None:
    made, kinds = LEFT[form]
    fast = recast.optimize(Towers(made), example=batch(8, 0), passes=PASSES)
    missed = [m for m in fast.report.journal.missed if m.rule == "synchronise-means"]
    assert {m.why for m in missed} == {
        f"a {kind} over the rows of the batch: on several ranks, of each rank's own"
        for kind in kinds
    }
    assert all(str(m.where).startswith("test_means_of_all_ranks.py:") for m in missed)
    copies, plain = [copy.deepcopy(fast) for _ in range(2)], Towers(made)
    for r, found in enumerate(run(2, lambda r: copies[r](*batch(4, r)).detach())):
        torch.testing.assert_close(found, plain(*batch(4, r)).detach())


@pytest.mark.parametrize(
    "form",
    [
        lambda u, v, ids: (u * v).mean(),
        lambda u, v, ids: (u * v).sum(1).mean(0),
        lambda u, v, ids: (u * v).sum(),
        lambda u, v, ids: u.softmax(1).mean(1),
        lambda u, v, ids: (u.mean(1) * v.std(1)).sum(0),
    ],
)
def test_losses_and_what_is_of_each_row_are_nothing_to_tell(form: Form) -> None:
    fast = recast.optimize(Towers(form), example=batch(8, 0), passes=PASSES)
    journal = fast.report.journal
    assert not [e for e in (*journal.fired, *journal.missed) if e.rule == "synchronise-means"]


def test_a_length_that_is_the_number_of_rows_is_not_taken_for_it() -> None:
    class Pooled(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(1).sum(1)

    examples = [torch.randn(n, n, 3) for n in (8, 5)]
    fast = recast.optimize(Pooled(), example=examples, passes=PASSES)
    assert "mean_of_all" not in fast.report.graph_text
    (missed,) = [m for m in fast.report.journal.missed if m.rule == "synchronise-means"]
    assert missed.why.startswith("a mean, perhaps, over the rows of the batch")
