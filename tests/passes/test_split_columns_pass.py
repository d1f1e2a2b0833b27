"""split-columns: columns selected one by one are taken in one call; others stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from passkit import fired, same
from torch import Tensor, nn

import recast

ROWS, COLUMNS = 9, 5
Form = Callable[[Tensor], "list[Tensor]"]


def batch(rows: int, seed: int, columns: int = COLUMNS) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(ROWS, (rows, columns), generator=g)
    return ids, torch.randn(rows, columns, 3, generator=g, dtype=torch.float64)


BATCHES = [batch(6, 0), batch(4, 1)]


class Model(nn.Module):
    """A table for each column that ``form`` takes of the ids, a layer for each of the numbers."""

    def __init__(self, form: Form, of_ids: bool = True, of_numbers: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.of_ids, self.of_numbers = form, of_ids, of_numbers
        self.tables = nn.ModuleList(nn.Embedding(ROWS, 2) for _ in range(COLUMNS))
        self.slopes = nn.ParameterList(torch.randn(3) for _ in range(COLUMNS))

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        rows = []
        if self.of_ids:
            rows += [t(i) for t, i in zip(self.tables, self.form(ids), strict=False)]
        if self.of_numbers:
            rows += [torch.tanh(s * v) for s, v in zip(self.slopes, self.form(x), strict=False)]
        return torch.cat(rows, 1)


FORMS: dict[str, Form] = {
    "columns": lambda x: [x[:, k] for k in range(COLUMNS)],
    "most of them, mixed": lambda x: [x[:, k] for k in (3, 1, 4, 0)],
    "from the end": lambda x: [x[:, k] for k in range(-1, -COLUMNS - 1, -1)],
    "select": lambda x: [x.select(1, k) for k in range(COLUMNS)],
    "torch.select": lambda x: [torch.select(x, dim=1, index=k) for k in range(COLUMNS)],
    "in two spellings": lambda x: [x[:, 0], x.select(1, 1), x[:, 2], x.select(-x.dim() + 1, 3)],
    "twice": lambda x: [x[:, k] for k in (0, 1, 2, 3, 3)],
}


@pytest.mark.parametrize("form", FORMS)
def test_columns_are_taken_in_one_call(form: str) -> None:
    fast = same(Model(FORMS[form]), BATCHES)
    assert fired(fast)["split-columns"] == 1
    assert sum(n.target is torch.unbind for n in fast.graph.nodes) == 1


def test_columns_of_numbers_get_their_gradients() -> None:
    fast = same(Model(FORMS["columns"], of_numbers=True), BATCHES)
    assert fired(fast)["split-columns"] == 2


@pytest.mark.parametrize(
    "form",
    [
        lambda x: [x[..., k] for k in range(COLUMNS)],
        lambda x: [x.t()[k] for k in range(COLUMNS)],
        lambda x: [x.unsqueeze(2)[:, k, :].squeeze(1) for k in range(COLUMNS)],
    ],
    ids=["the last dimension", "rows", "a column of a stack"],
)
def test_columns_of_other_spellings(form: Form) -> None:
    fast = same(Model(form), BATCHES)
    assert any(n.target is torch.unbind for n in fast.graph.nodes)


def _written(x: Tensor) -> list[Tensor]:
    x = x + 0
    x[:, 0] = 0
    return [x[:, k] for k in range(COLUMNS)]


OTHER: dict[str, Form] = {
    "few": lambda x: [x[:, k] for k in range(3)],
    "few of many": lambda x: [torch.cat([x, x], 1)[:, k] for k in range(4)],
    "written to": _written,
    "samples": lambda x: [x[k] for k in range(4)],
    "slices": lambda x: [x[:, k : k + 1].squeeze(1) for k in range(COLUMNS)],
    "of two dimensions": lambda x: [x[k : k + 3, k] for k in range(4)],
}


@pytest.mark.parametrize("form", OTHER)
def test_other_columns_stay(form: str) -> None:
    model = Model(OTHER[form], of_ids=form != "of two dimensions", of_numbers="of two" in form)
    fast = same(model, [batch(8, 0), batch(7, 1)], steps=False)
    assert fired(fast)["split-columns"] == 0


@pytest.mark.parametrize("view", [False, True])
def test_columns_that_are_returned_can_be_written_to(view: bool) -> None:
    class Columns(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            x = x * 2
            return [x[:, k].unsqueeze(0) if view else x[:, k] for k in range(COLUMNS)]

    fast = recast.optimize(Columns(), example=(BATCHES[0][1],))
    assert fired(fast)["split-columns"] == 0
    fast(BATCHES[0][1].clone().requires_grad_())[0].add_(1.0)  # torch refuses it for unbind's


def test_wider_and_narrower_batches_behave_as_in_the_model() -> None:
    model = Model(FORMS["columns"])
    fast = recast.optimize(model.double(), example=BATCHES[0])
    wider = batch(5, 3, COLUMNS + 2)
    torch.testing.assert_close(fast(*wider), model(*wider))
    for one in (model, fast):
        with pytest.raises(IndexError):
            one(*batch(5, 3, COLUMNS - 1))
