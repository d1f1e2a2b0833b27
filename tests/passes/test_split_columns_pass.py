"""split-columns: columns selected one by one are taken in one call; others stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from passkit import fired, journal, same
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


SLICES: dict[str, Form] = {
    "slices": lambda x: [x[:, k : k + 1].squeeze(1) for k in range(COLUMNS)],
    "with gaps, in another order": lambda x: [x[:, k : k + 1].sum(1) for k in (4, 2, 1, 0)],
    "of several columns": lambda x: [
        x[:, :2].sum(1) % ROWS, x[:, 2:3].squeeze(1), x[:, 3:4].sum(1), x[:, 4:5].squeeze(1)
    ],
}  # fmt: skip


@pytest.mark.parametrize("form", SLICES)
def test_slices_are_taken_in_one_call(form: str) -> None:
    fast = same(Model(SLICES[form]), BATCHES)
    assert fired(fast)["split-columns"] == 1
    assert sum(n.target is torch.split for n in fast.graph.nodes) == 1


CAST: dict[str, Form] = {
    "columns": lambda x: [x[:, k].long() for k in range(COLUMNS)],
    "slices": lambda x: [x[:, k : k + 1].long().squeeze(1) for k in range(COLUMNS)],
    "in several spellings": lambda x: [
        x[:, 1].long(), x[:, 2].to(torch.int64), x[:, 3].type(torch.long), x[:, 4].long()
    ],
    "to int32": lambda x: [x[:, k].int() for k in range(COLUMNS)],
    "columns and slices": lambda x: [
        x[:, 0].long(), x[:, 1:2].long().squeeze(1), x[:, 2].long(), x[:, 3].long()
    ],
    "slices that overlap": lambda x: [
        x[:, k : k + 2].long().sum(1) % ROWS for k in range(COLUMNS - 1)
    ],
}  # fmt: skip


class OfNumbers(nn.Module):
    """Ids that come as numbers, beside others that are numbers."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.model = Model(form)
        self.last = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        ids = x[:, :COLUMNS]
        return self.model(ids, ids) * self.last(x[:, COLUMNS:]).sum(1, keepdim=True)


def numbers(rows: int, seed: int) -> tuple[Tensor]:
    ids, others = batch(rows, seed)
    return (torch.cat([ids + 0.4, others[:, :2, 0]], 1),)


@pytest.mark.parametrize("form", CAST)
def test_columns_are_cast_at_once(form: str) -> None:
    fast = same(OfNumbers(CAST[form]), [numbers(6, 0), numbers(4, 1)])
    assert any("casts of" in e.what for e in journal(fast).fired if e.rule == "split-columns")
    assert sum(n.target is torch.Tensor.to for n in fast.graph.nodes) == 1


UNCAST: dict[str, Form] = {
    "few": lambda x: [x[:, k].long() for k in range(3)],
    "to two dtypes": lambda x: [
        x[:, 0].long(), x[:, 1].int().long(), x[:, 2].long(), x[:, 3].int().long()
    ],
    "few of many": lambda x: [torch.cat([x, x, x], 1)[:, k].long() for k in (0, 5, 10, 14)],
}  # fmt: skip


@pytest.mark.parametrize("form", UNCAST)
def test_other_casts_stay(form: str) -> None:
    fast = same(OfNumbers(UNCAST[form]), [numbers(6, 0), numbers(4, 1)], steps=False)
    assert not any("casts of" in e.what for e in journal(fast).fired)


def test_casts_that_are_written_to_stay() -> None:
    def form(x: Tensor) -> list[Tensor]:
        columns = [x[:, k].long() for k in range(COLUMNS)]
        columns[0].add_(1).remainder_(ROWS)
        return columns

    fast = same(OfNumbers(form), [numbers(6, 0), numbers(4, 1)], steps=False)
    held = [e.what for e in journal(fast).fired if e.rule == "split-columns"]
    assert held in ([], [f"{COLUMNS - 1} casts of getitem in one call"])


def test_casts_that_are_returned_can_be_written_to() -> None:
    class Ids(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return [x[:, k].long() for k in range(COLUMNS)]

    fast = recast.optimize(Ids(), example=numbers(6, 0))
    first, *others = fast(*numbers(6, 0))
    before = [other.clone() for other in others]
    first.add_(7)
    assert all(map(torch.equal, others, before)) and first.is_contiguous()


def test_slices_of_wider_and_narrower_batches_behave_as_in_the_model() -> None:
    model = Model(SLICES["slices"]).double()
    fast = recast.optimize(model, example=BATCHES[0])
    wider = batch(5, 3, COLUMNS + 2)
    torch.testing.assert_close(fast(*wider), model(*wider))
    for one in (model, fast):
        with pytest.raises(RuntimeError):
            one(*batch(5, 3, COLUMNS - 1))


class Chosen(nn.Module):
    """Vectors that an index takes out of the numbers, after a layer."""

    def __init__(self, form: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.form, self.first = form, nn.Linear(3, 3)
        self.register_buffer("index", torch.tensor([0, 2]))

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.form(self.first(x), self.index)).flatten(1)


CHOSEN: dict[str, tuple[bool, Callable[[Tensor, Tensor], Tensor]]] = {
    "a list": (True, lambda x, i: x[:, [0, 3, 2]]),
    "a list, and all": (True, lambda x, i: x[:, [4, 0], :]),
    "from the end": (True, lambda x, i: x[:, [-1, 0]]),
    "of the last dimension": (True, lambda x, i: x[:, :, [2, 0]]),
    "a tensor that never changes": (True, lambda x, i: x[:, torch.tensor([1, 2])]),
    "one twice": (False, lambda x, i: x[:, [0, 3, 0]]),
    "one twice, from the end": (False, lambda x, i: x[:, [0, -COLUMNS]]),
    "a buffer": (False, lambda x, i: x[:, i]),
    "a mask": (False, lambda x, i: x[:, [True, False, True, True, False]]),
    "pairs": (False, lambda x, i: x[:, [0, 1], [1, 2]]),
    "samples": (False, lambda x, i: x[[0, 1]]),
}


@pytest.mark.parametrize("form", CHOSEN)
def test_different_columns_of_a_list_are_selected(form: str) -> None:
    whether, how = CHOSEN[form]
    fast = same(Chosen(how), BATCHES)
    assert fired(fast)["split-columns"] == whether, journal(fast).missed


OTHER: dict[str, Form] = {
    "few": lambda x: [x[:, k] for k in range(3)],
    "few of many": lambda x: [torch.cat([x, x], 1)[:, k] for k in range(4)],
    "written to": _written,
    "samples": lambda x: [x[k] for k in range(4)],
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
