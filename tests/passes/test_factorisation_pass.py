"""fuse-fm-interaction: every way to write a factorisation machine; each named Miss."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from passkit import calls, fired, journal, misses, same
from torch import Tensor, nn

FIELDS, DIM = 5, 4


def batch(rows: int, seed: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, DIM, generator=g, dtype=torch.float64) for _ in range(FIELDS))


BATCHES = [batch(6, 0), batch(9, 1)]


class Model(nn.Module):
    """``forward(xs) = interaction(stack(xs))``, both given."""

    def __init__(
        self,
        interaction: Callable[[Tensor], Tensor],
        stack: Callable[[tuple[Tensor, ...]], Tensor] = lambda xs: torch.stack(xs, 1),
    ) -> None:
        super().__init__()
        self.interaction, self.stack = interaction, stack
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, *xs: Tensor) -> Tensor:
        return self.interaction(self.stack((xs[0] * self.scale, *xs[1:])))


def _vector(t: Tensor) -> Tensor:
    return 0.5 * (t.sum(1).pow(2) - t.pow(2).sum(1))


# how it is written: (interaction, scale, summed)
FORMS: dict[str, tuple[Callable[[Tensor], Tensor], float, bool]] = {
    "bi-interaction": (_vector, 0.5, False),
    "summed, then halved": (
        lambda t: 0.5 * torch.sum(torch.sum(t, dim=1) ** 2 - torch.sum(t**2, dim=1), 1, True),
        0.5,
        True,
    ),
    "halved, then summed": (lambda t: _vector(t).sum(dim=1), 0.5, True),
    "keepdim": (
        lambda t: (
            (torch.pow(torch.sum(t, 1, keepdim=True), 2) - torch.sum(t * t, 1, keepdim=True)) * 0.5
        ),
        0.5,
        False,
    ),
    "keepdim, summed": (
        lambda t: (
            0.5
            * torch.sum(
                torch.pow(torch.sum(t, dim=1, keepdim=True), 2)
                - torch.sum(t * t, dim=1, keepdim=True),
                dim=2,
                keepdim=False,
            )
        ),
        0.5,
        True,
    ),
    "all dims kept": (
        lambda t: (t.sum(1, True).square() - t.square().sum(1, True)).sum(-1, True) / 2,
        0.5,
        True,
    ),
    "no factor": (lambda t: t.sum(-2).square() - torch.square(t).sum([1]), 1.0, False),
    "two factors": (lambda t: 3 * (t.sum(1) ** 2 - (t**2).sum(1)) / 2, 1.5, False),
    "a product of the sum": (lambda t: t.sum(1) ** 2.0 - torch.mul(t, t).sum(axis=1), 1.0, False),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_write_it(form: str) -> None:
    interaction, scale, summed = FORMS[form]
    fast = same(Model(interaction), BATCHES)
    assert fired(fast) == {"fuse-fm-interaction": 1}, journal(fast).missed
    (call,) = calls(fast, "fm_interaction")
    assert len(call.args[0]) == FIELDS  # no stack is written
    assert call.args[1:] == (scale, summed)
    left = {"pow", "sum", "sub", "mul", "square"} & {n.name for n in fast.graph.nodes}
    assert left <= {"mul"}  # by the parameter


STACKS: dict[str, tuple[Callable[[tuple[Tensor, ...]], Tensor], int]] = {
    "cat and view": (lambda xs: torch.cat(xs, 1).view(-1, FIELDS, DIM), FIELDS),
    "unsqueeze and cat": (lambda xs: torch.cat([x.unsqueeze(1) for x in xs], dim=1), FIELDS),
    "given": (lambda xs: torch.stack(xs, 1).relu(), 1),
}


@pytest.mark.parametrize("last", [False, True])
def test_stacked_in_front(last: bool) -> None:
    def interaction(t: Tensor) -> Tensor:
        out = 0.5 * (t.sum(0) ** 2 - (t**2).sum(0))
        return out.sum(1) if last else out

    (call,) = calls(same(Model(interaction, torch.stack), BATCHES), "fm_interaction")
    assert len(call.args[0]) == FIELDS and call.args[1:] == (0.5, last)


@pytest.mark.parametrize("stack", STACKS)
def test_every_way_to_stack(stack: str) -> None:
    how, parts = STACKS[stack]
    (call,) = calls(same(Model(_vector, how), BATCHES), "fm_interaction")
    assert len(call.args[0]) == parts


def _loop(xs: Any) -> Tensor:
    total, squares = torch.zeros_like(xs[0]), 0
    for x in xs:
        total = total + x
        squares = squares + x.pow(2)
    return 0.5 * (total.pow(2) - squares)


LISTS: dict[str, tuple[Callable[[Any], Tensor], float, bool]] = {
    "python's sum": (lambda xs: 0.5 * (sum(xs) ** 2 - sum(x * x for x in xs)), 0.5, False),
    "summed": (
        lambda xs: ((s := sum(xs)) * s - sum(x**2 for x in xs)).sum(1, keepdim=True) / 2, 0.5, True,
    ),
    "in another order": (
        lambda xs: torch.square(sum(xs[::-1])) - sum(torch.square(x) for x in xs), 1.0, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", LISTS)
def test_vectors_that_are_added_one_by_one(form: str) -> None:
    how, scale, summed = LISTS[form]
    fast = same(Model(how, lambda xs: xs), BATCHES)
    (call,) = calls(fast, "fm_interaction")
    assert len(call.args[0]) == FIELDS and call.args[1:] == (scale, summed)


@pytest.mark.parametrize(
    "how",
    [
        _loop,  # the zeros that it starts from are one more vector
        lambda xs: sum(xs) ** 2 - sum(x * x for x in xs[1:]),
        lambda xs: sum(xs) ** 2 - sum(x * y for x, y in pairwise(xs)),
    ],
)
def test_other_sums_one_by_one_are_none(how: Callable[[Any], Tensor]) -> None:
    assert not calls(same(Model(how, lambda xs: xs), BATCHES, steps=False), "fm_interaction")


def test_a_stack_used_elsewhere_is_taken_as_it_is() -> None:
    fast = same(Model(lambda t: torch.cat([t.flatten(1), _vector(t)], 1)), BATCHES)
    (call,) = calls(fast, "fm_interaction")
    assert len(call.args[0]) == 1


def test_a_sum_used_elsewhere_keeps_all_in_torch() -> None:
    def interaction(t: Tensor) -> Tensor:
        total = t.sum(1)
        return torch.cat([total, total**2 - (t**2).sum(1)], 1)

    fast = same(Model(interaction), BATCHES, steps=False)
    assert not calls(fast, "fm_interaction")
    assert any("also used by" in why for why in misses(fast, "fuse-fm-interaction"))


def test_what_follows_stays_outside() -> None:
    fast = same(Model(lambda t: _vector(t).relu() * 2), BATCHES)
    (call,) = calls(fast, "fm_interaction")
    assert call.args[1:] == (0.5, False)


MISSES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "another tensor": (
        lambda t: t.sum(1) ** 2 - (t.relu() ** 2).sum(1), "the squares are of",
    ),
    "over the batch": (lambda t: t.sum(0) ** 2 - (t**2).sum(0), "summed over dimension 0 and 0"),
    "a dimension kept": (
        lambda t: (t.sum(1, True) ** 2 - (t**2).sum(1)).mean(1), "keeps the dimension",
    ),
    "over the columns": (lambda t: t.sum(2) ** 2 - (t**2).sum(2), "summed over dimension 2 and 2"),
}  # fmt: skip


@pytest.mark.parametrize("form", MISSES)
def test_every_miss_says_why_and_keeps_the_numbers(form: str) -> None:
    interaction, why = MISSES[form]
    fast = same(Model(interaction), BATCHES, steps=False)
    assert not calls(fast, "fm_interaction")
    assert any(why in text for text in misses(fast, "fuse-fm-interaction")), journal(fast).missed


def test_one_in_front_that_stays_is_none() -> None:
    kept = lambda t: t.sum(0, keepdim=True) ** 2 - (t**2).sum(0, keepdim=True)  # noqa: E731
    assert not calls(same(Model(kept, torch.stack), BATCHES, steps=False), "fm_interaction")


def test_a_variance_is_left_alone() -> None:
    fast = same(Model(lambda t: (t**2).mean(1) - t.mean(1) ** 2), BATCHES, steps=False)
    assert not calls(fast, "fm_interaction") and not misses(fast, "fuse-fm-interaction")
