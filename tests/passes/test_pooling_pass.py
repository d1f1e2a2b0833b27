"""pool-sequences: every spelling of a masked sum, with the gradients of padding rows; each Miss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from passkit import calls, fired, journal, misses, optimized, same
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, DIM, LENGTH = 11, 3, 5


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ids with padding behind, one row of padding only, one without; and the lengths (B, 1)."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, LENGTH + 1, (rows, 1), generator=g)
    lengths[0], lengths[1] = 0, LENGTH
    ids = torch.randint(1, ROWS, (rows, LENGTH), generator=g)
    return ids * (torch.arange(LENGTH) < lengths), lengths


BATCHES = [batch(6, 0), batch(9, 1)]
Form = Callable[[Tensor, Tensor, Tensor], Tensor]  # rows (B, L, D), ids, lengths


def expanded(rows: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    mask = (ids != 0).float()
    count = torch.sum(mask, dim=1, keepdim=True)
    mask = mask.unsqueeze(2).expand_as(rows)
    return torch.div(torch.sum(rows * mask.float(), dim=1), count + 1e-8)


def by_product(rows: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    mask = torch.cat([(ids.long() != 0).unsqueeze(1).double()], dim=1)
    return torch.bmm(mask, rows).squeeze(1) / (mask.sum(dim=-1).float() + 1e-16)


def repeated(rows: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    """The length is given, the mask transposed and repeated."""
    mask = torch.arange(0, LENGTH) < lengths.unsqueeze(-1)
    mask = torch.transpose(mask, 1, 2)
    mask = torch.repeat_interleave(mask, DIM, dim=2)
    total = torch.sum(rows * mask.float(), dim=1, keepdim=False)
    return torch.unsqueeze(total / (lengths.type(torch.float32) + 1e-8), dim=1)


def plain_mask(rows: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    return (rows * (ids != 0)[:, :, None]).sum(1, keepdim=True)


def mask_first(rows: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    return ((ids != 0).unsqueeze(-1).repeat(1, 1, DIM) * rows).sum(dim=1)


def other_mask(rows: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    return (rows * (ids > 3).view(-1, LENGTH, 1)).sum(-2)


def _spelled(mask: Callable[[Tensor], Tensor]) -> Form:
    return lambda rows, ids, lengths: (rows * mask(ids).unsqueeze(2).to(rows.dtype)).sum(1)


def _dropped(mask: Callable[[Tensor], Tensor]) -> Form:
    return lambda rows, ids, lengths: rows.masked_fill(mask(ids), 0).sum(1)


def _chosen(how: Callable[[Tensor, Tensor], Tensor]) -> Form:
    return lambda rows, ids, lengths: how(rows, ids).sum(1, keepdim=True)


# Other ways to leave out id 0: no id that a lookup takes is below it.
WITHOUT_ZERO: dict[str, Form] = {
    "above": _spelled(lambda ids: ids > 0),
    "from one": _spelled(lambda ids: ids.ge(1)),
    "called": _spelled(lambda ids: torch.gt(ids, 0)),
    "a bool": _spelled(lambda ids: ids.bool()),
    "cast to bool": _spelled(lambda ids: ids.to(torch.bool)),
    "not equal": _spelled(lambda ids: ~(ids == 0)),
    "logically not": _spelled(lambda ids: torch.logical_not(ids.eq(0))),
    "filled": _dropped(lambda ids: (ids == 0).unsqueeze(-1)),
    "filled where not above": _dropped(lambda ids: ~(ids > 0).unsqueeze(-1)),
    "filled where no bool": _dropped(lambda ids: ~ids.bool().unsqueeze(-1)),
    "where": _chosen(lambda rows, ids: torch.where((ids != 0).unsqueeze(-1), rows, 0.0)),
    "mean of filled": lambda rows, ids, lengths: rows.masked_fill((ids == 0).unsqueeze(-1), 0).mean(
        1
    ),
    "where, else a tensor": _chosen(
        lambda rows, ids: torch.where((ids != 0).unsqueeze(-1), rows, torch.tensor(0.0))
    ),
    "zeros where": _chosen(
        lambda rows, ids: torch.where((ids == 0).unsqueeze(-1), torch.zeros_like(rows), rows)
    ),
}


def numbers_turned(rows: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    """No mask: -1 or -2."""
    return (rows * ~(ids == 0).long().unsqueeze(2)).sum(1)


def ids_as_weights(rows: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    return (rows * ids.int().unsqueeze(2)).sum(1)


def everything(rows: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    return rows.sum(1)


def _with_zeros(rows: Tensor, ids: Tensor) -> Tensor:
    zeros = torch.zeros_like(rows)
    return torch.where((ids != 0).unsqueeze(2), rows, zeros).sum(1) + zeros.sum(1)


def mean(rows: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    return torch.mean(rows, dim=1)


def masked_mean(rows: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    """Over all places, padding too, as in YouTube's network."""
    return torch.mean(rows * (ids != 0).unsqueeze(2).double(), dim=1)


def other_mean(rows: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    return (rows * (ids > 3).unsqueeze(2)).mean(1, keepdim=True)


# whether the mask leaves out id 0, so that it is no more than padding
FORMS: dict[Form, bool] = {
    expanded: True, by_product: True, plain_mask: True, mask_first: True,
    repeated: False, other_mask: False, numbers_turned: False, ids_as_weights: False,
    everything: False, mean: False, masked_mean: True, other_mean: False,
}  # fmt: skip


class Sequence(nn.Module):
    """A table beside one of a sequence, both pooled into one Linear."""

    def __init__(self, form: Form, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM, padding_idx=padding)
        self.other = nn.Embedding(4, DIM)
        self.top = nn.Linear(2 * DIM, 1)
        nn.init.normal_(self.table.weight)  # the padding row too, so that it shows
        self.form = form

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        pooled = self.form(self.table(ids), ids, lengths).view(-1, DIM)
        return self.top(torch.cat([pooled, self.other(lengths[:, 0] % 4)], 1))


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_every_form_is_a_pooled_lookup(form: Form) -> None:
    torch.manual_seed(1)
    fast = same(Sequence(form), BATCHES)
    assert fired(fast)["pool-sequences"] == 1
    (call,) = calls(fast, "embedding_bags")
    assert call.args[5] == ["mean" if form is mean else "sum", "none"]
    assert call.args[6][0] == (0 if FORMS[form] else None)
    weighted = form in (repeated, other_mask, numbers_turned, ids_as_weights, other_mean)
    assert (call.args[3][0] is not None) is weighted
    assert fast.report.journal.lookups_found == fast.report.journal.lookups_fused == 2


@pytest.mark.parametrize(
    "form", [f for f, padded in FORMS.items() if padded], ids=lambda f: f.__name__
)
def test_the_padding_row_of_the_table_gets_no_gradient(form: Form) -> None:
    fast = same(Sequence(form, padding=0), BATCHES)
    assert fired(fast)["pool-sequences"] == 1
    plain = Sequence(form, padding=0).double()
    fast = optimized(plain, BATCHES)
    fast(*BATCHES[0]).sum().backward()
    grad = fast.get_parameter("table.weight").grad
    assert not (grad + 0)[0].any() and (grad + 0)[1:].any()


@pytest.mark.parametrize("form", WITHOUT_ZERO)
@pytest.mark.parametrize("padding", [None, 0])
def test_masks_that_leave_out_the_first_id(form: str, padding: int | None) -> None:
    fast = same(Sequence(WITHOUT_ZERO[form], padding), BATCHES)
    assert fired(fast)["pool-sequences"] == 1 and not fast.report.to_dict()["raised"]
    (call,) = calls(fast, "embedding_bags")
    assert call.args[3][0] is None and call.args[6][0] == 0


class Functional(nn.Module):
    """The table is a bare Parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, DIM))

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return (F.embedding(ids, self.weight) * (ids != 0).unsqueeze(2)).sum(1)


def test_a_functional_lookup() -> None:
    fast = same(Functional(), BATCHES)
    assert fired(fast)["pool-sequences"] == 1


class Shared(nn.Module):
    """One table for two sequences and a single id."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM, padding_idx=0)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        other = ids.flip(1)
        one = expanded(self.table(ids), ids, lengths)
        return one + expanded(self.table(other), other, lengths) * self.table(ids[:, 0])


def test_a_table_used_several_times() -> None:
    fast = same(Shared(), BATCHES)
    assert fired(fast)["pool-sequences"] == 2
    (call,) = calls(fast, "embedding_bags")
    assert len(call.args[0]) == 1


def kept(rows: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    return plain_mask(rows, ids, lengths)[:, 0] * rows[:, 0]


COUNTED: dict[str, tuple[Form, int]] = {
    "all": (everything, 0),
    "all, the last id": (everything, -1),
    "mean of all": (lambda rows, ids, n: rows.mean(1), 0),
    "mean, kept": (lambda rows, ids, n: torch.mean(rows, dim=1, keepdim=True).squeeze(1), 0),
    "without another id": (mask_first, 7),
    "within lengths": (repeated, 0),
    "mean within lengths": (
        lambda rows, ids, n: (rows * (torch.arange(LENGTH) < n).unsqueeze(2)).mean(1), 0
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COUNTED)
def test_a_padding_row_that_is_summed_counts_and_is_not_trained(case: str) -> None:
    form, padding = COUNTED[case]
    fast = same(Sequence(form, padding), BATCHES)
    assert fired(fast)["pool-sequences"] == 1
    (call,) = calls(fast, "embedding_bags")
    assert call.args[5][0] == "total"


def test_the_padding_of_the_module_is_read_at_each_call() -> None:
    model = Sequence(everything, 0)
    fast = optimized(model, BATCHES)
    model.table.padding_idx = fast.get_submodule("table").padding_idx = 7
    ids, lengths = BATCHES[0]
    grads = []
    for m in (model, fast):
        model.table.weight.grad = None
        m(ids, lengths).square().sum().backward()
        assert model.table.weight.grad is not None
        grads.append(torch.as_tensor(model.table.weight.grad + 0.0))
    torch.testing.assert_close(grads[1], grads[0])


REFUSED: dict[str, tuple[Form, int | None, str]] = {
    "rows read elsewhere": (kept, None, "also read by"),
    "another padding, chosen": (
        _dropped(lambda ids: (ids == 0).unsqueeze(-1)), 7, "another one is its padding_idx"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_every_miss_says_why_and_keeps_the_numbers(case: str) -> None:
    form, padding, why = REFUSED[case]
    fast = same(Sequence(form, padding), BATCHES, steps=False)
    assert fired(fast)["pool-sequences"] == 0
    assert any(why in text for text in misses(fast, "pool-sequences"))


OTHERS: dict[str, Form] = {
    "weights that are trained": lambda rows, ids, n: (rows * torch.sigmoid(rows)).sum(1),
    "a mask of columns": lambda rows, ids, n: (rows * (ids[:, :DIM] != 0).unsqueeze(1)).sum(1),
    "maximum": lambda rows, ids, n: (rows - (ids == 0).unsqueeze(2) * 1e9).max(1)[0],
    "rows under the mask alone": _dropped(lambda ids: (ids != 0).unsqueeze(-1)),
    "zeros that are read elsewhere": lambda rows, ids, n: _with_zeros(rows, ids),
    "another filling": lambda rows, ids, n: rows.masked_fill((ids == 0).unsqueeze(2), 1.0).sum(1),
    "chosen by lengths": lambda rows, ids, n: torch.where(
        (torch.arange(LENGTH) < n).unsqueeze(2), rows, 0.0
    ).sum(1),
    "sum over columns": lambda rows, ids, n: (rows * (ids != 0).unsqueeze(2)).sum(2)[:, :DIM],
}


@pytest.mark.parametrize("form", OTHERS)
def test_what_only_looks_like_it_stays(form: str) -> None:
    fast = same(Sequence(OTHERS[form]), BATCHES, steps=False)
    assert fired(fast)["pool-sequences"] == 0


def test_the_report_says_what_it_is_worth() -> None:
    fast = optimized(Sequence(mask_first).double(), BATCHES)
    (entry,) = (e for e in journal(fast).fired if e.rule == "pool-sequences")
    assert entry.what == "sum of 5 ids without 0 as one pooled lookup"
    assert entry.saves is not None and entry.saves.startswith("4 launches")
