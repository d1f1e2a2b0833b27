"""join-cats: tensors that are appended one by one are concatenated at once; others stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from passkit import fired, same
from torch import Tensor, nn

FIELDS = 5
Form = Callable[[list[Tensor]], Tensor]


def batch(rows: int, seed: int) -> tuple[Tensor]:
    return (torch.randint(9, (rows, FIELDS), generator=torch.Generator().manual_seed(seed)),)


BATCHES = [batch(6, 0), batch(4, 1)]


class Model(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.tables = nn.ModuleList(nn.Embedding(9, k + 1) for k in range(FIELDS))

    def forward(self, ids: Tensor) -> Tensor:
        rows = [table(ids[:, k]) for k, table in enumerate(self.tables)]
        return torch.tanh(self.form(rows)).sum(1)


def loop(rows: list[Tensor]) -> Tensor:
    out = rows[0]
    for row in rows[1:]:
        out = torch.cat([out, row], 1)
    return out


def from_nothing(rows: list[Tensor]) -> Tensor:
    out = torch.tensor([])
    for row in rows:
        out = torch.cat((out.to(row.dtype), row), dim=-1)
    return out


JOINED: dict[str, Form] = {
    "a loop": loop,
    "from the other end": lambda r: torch.cat(
        [r[0], torch.cat([r[1], torch.cat([r[2], torch.cat(r[3:], 1)], -1)], 1)], 1
    ),
    "on both sides": lambda r: torch.cat(
        [torch.cat([torch.cat(r[:2], 1), r[2]], 1), torch.cat(r[3:], dim=1)], dim=1
    ),
}


@pytest.mark.parametrize("form", JOINED)
def test_nested_ones_are_one_call(form: str) -> None:
    fast = same(Model(JOINED[form]), BATCHES)
    assert fired(fast)["join-cats"] == 1
    (call,) = (n for n in fast.graph.nodes if n.target is torch.cat)
    assert len(call.args[0]) == FIELDS


OTHERS: dict[str, Form] = {
    "read elsewhere": lambda r: (lambda a: torch.cat([a, torch.cat([a, r[2]], 1) * 2], 1))(
        torch.cat(r[:2], 1)
    ),
    "another dimension": lambda r: torch.cat(
        [torch.cat([r[0], r[0]], 0), torch.cat([r[1], r[1]], 0)], 1
    )[: len(r[0])],
    "one": lambda r: torch.cat(r, 1),
    "two": lambda r: torch.cat([torch.cat(r[:3], 1), *r[3:]], 1),
    "three": lambda r: torch.cat([torch.cat(r[:2], 1), torch.cat(r[2:], 1)], 1),
}


@pytest.mark.parametrize("form", OTHERS)
def test_others_stay(form: str) -> None:
    assert fired(same(Model(OTHERS[form]), BATCHES, steps=False))["join-cats"] == 0


def test_one_that_begins_with_nothing_keeps_its_numbers() -> None:
    same(Model(from_nothing), BATCHES, steps=False)
