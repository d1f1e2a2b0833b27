"""``forms=`` with ``precision=``: the tables are stored for all forms, with the numbers of each."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.runtime.embedding.precision_table import StoredTable

EACH = pytest.mark.parametrize("precision", ["int8", "fp16"])


class Ranker(nn.Module):
    """Scores a pair; with ``every``, all items; with a tag, by a third table."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(50, 8), nn.Embedding(70, 8)
        self.tag, self.top = nn.Embedding(9, 8), nn.Linear(16, 1)

    def forward(self, user: Tensor, item: Tensor, tag: Tensor | None = None, every: Any = 0) -> Any:
        if every:
            return self.user(user) @ self.item.weight.t()
        rows = self.item(item) if tag is None else self.item(item) + self.tag(tag)
        return self.top(torch.cat([self.user(user), rows], 1)).squeeze(1).sigmoid()


def ranker() -> nn.Module:
    torch.manual_seed(0)
    return Ranker().eval()


def batch(rows: int, seed: int = 0) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, n, (rows,), generator=g) for n in (50, 70, 9))


def stored(fast: nn.Module) -> set[str]:
    return {n.split(".")[0] for n, p in fast.named_parameters() if isinstance(p, StoredTable)}


@EACH
@torch.no_grad()
def test_each_form_has_the_numbers_that_it_has_alone(precision: Any) -> None:
    first, second = batch(16)[:2], batch(16)
    fast = recast.optimize(ranker(), example=first, forms=[second], precision=precision)
    alone = [recast.optimize(ranker(), example=b, precision=precision) for b in (first, second)]
    assert stored(fast) == {"user", "item", "tag"}
    for one in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        for given, same in zip((batch(9, 1)[:2], batch(9, 1)), alone, strict=True):
            assert torch.equal(one(*given), same(*given))
            taken = one._running_form(given, {})
            assert any(n.name.startswith("quantised_") for n in taken.graph.nodes)
    other = ranker()
    for p in other.parameters():
        p.mul_(2)
    fast.load_state_dict(other.state_dict())
    for given in (batch(9, 2)[:2], batch(9, 2)):
        again = recast.optimize(other, example=given, precision=precision)
        assert torch.equal(fast(*given), again(*given))


@pytest.mark.parametrize("whole_first", [True, False])
@torch.no_grad()
def test_a_table_that_one_form_reads_whole_is_stored_for_none(whole_first: bool) -> None:
    """Its lookups have the model's own rows; the other table is stored for both."""
    pair, every = batch(16)[:2], (*batch(16)[:2], None, True)
    given = (every, pair) if whole_first else (pair, every)
    model = ranker()
    fast = recast.optimize(model, example=given[0], forms=[given[1]], precision="int8")
    assert stored(fast) == {"user"}
    reports = [fast.report, *fast.report.forms]
    why = [missed.why for report in reports for missed in report.journal.missed]
    by = "the example" if whole_first else "forms[0]"
    assert f"{by} reads the whole table, which would be unpacked at each such call" in why
    plain = copy.deepcopy(model)
    plain.user.weight.copy_(fast.state_dict()["user.weight"])
    for call in (pair, every):
        torch.testing.assert_close(fast(*call), plain(*call), rtol=1e-5, atol=1e-6)


def test_the_report_and_the_diff_know_all_forms() -> None:
    model, (user, item, tag) = ranker(), batch(16)
    fast = recast.optimize(model, example=(user, item), forms=[(user, item, tag)], precision="int8")
    assert fast.report.notes[-1].startswith("on the example, outputs differ by at most")
    (form,) = fast.report.forms
    assert [s.table for s in form.journal.stored] == ["tag.weight"]
    recast.diff(model, fast, [(user, item), (user, item, tag)]).check()


def test_the_pass_by_name() -> None:
    """As ``precision=`` does it."""
    every = (*batch(16)[:2], None, True)
    passes = "default,quantise-tables{precision=int8}"
    made = recast.optimize(ranker(), example=batch(16), forms=[every], passes=passes)
    assert stored(made) == {"user", "tag"}
