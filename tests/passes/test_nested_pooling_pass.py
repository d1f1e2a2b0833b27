"""pool-sequences, of several fields: sums and means under masks and weights; what is none stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from passkit import calls, fired, same
from torch import Tensor, nn

ROWS, FIELDS, LENGTH, DIM = 11, 3, 4, 5


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ids, many of them 0, and a weight for each."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(ROWS, (rows, FIELDS, LENGTH), generator=g)
    ids = ids * (torch.rand(ids.shape, generator=g) < 0.6)
    return ids, torch.randn(rows, FIELDS, LENGTH, generator=g, dtype=torch.float64)


BATCHES = [batch(6, 0), batch(9, 1)]


class Model(nn.Module):
    def __init__(self, form: Callable[..., Tensor], padding: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.form = form
        self.rows = nn.Embedding(ROWS, DIM, padding_idx=padding)
        self.scale = nn.Parameter(torch.rand(LENGTH))
        self.last = nn.Linear(DIM, 2)

    def forward(self, ids: Tensor, w: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.form(self, ids, w)))
        return out


FORMS: dict[str, tuple[int | None, Callable[..., Tensor]]] = {
    "sum": (None, lambda m, x, w: m.rows(x).sum(2)),
    "sum, from the end": (None, lambda m, x, w: m.rows(x).sum(-2)),
    "mean": (None, lambda m, x, w: torch.mean(m.rows(x), dim=2)),
    "kept": (None, lambda m, x, w: m.rows(x).sum(2, keepdim=True).squeeze(2)),
    "of an index": (None, lambda m, x, w: m.rows.weight[x % ROWS].sum(2)),
    "without an id": (None, lambda m, x, w: (m.rows(x) * (x != 0).unsqueeze(-1)).sum(2)),
    "without the padding": (0, lambda m, x, w: (m.rows(x) * (x > 0)[..., None]).sum(2)),
    "without it, as numbers": (
        0, lambda m, x, w: ((x != 0).float().unsqueeze(3) * m.rows(x)).sum(2)
    ),
    "mean without it": (0, lambda m, x, w: (m.rows(x) * (x != 0).unsqueeze(3).double()).mean(2)),
    "over counts": (
        0,
        lambda m, x, w: (m.rows(x) * (x != 0).unsqueeze(3)).sum(2)
        / (x != 0).sum(2, keepdim=True).clamp(min=1),
    ),
    "weighted": (None, lambda m, x, w: (m.rows(x) * w.unsqueeze(-1)).sum(2)),
    "weighted, trained": (
        None, lambda m, x, w: (m.rows(x) * (w * m.scale).unsqueeze(-1)).sum(2)
    ),
    "by another mask": (None, lambda m, x, w: (m.rows(x) * (w > 0).unsqueeze(-1)).sum(2)),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_bags_of_fields_are_one_lookup(form: str) -> None:
    padding, read = FORMS[form]
    fast = same(Model(read, padding), BATCHES, steps=form in ("mean", "without the padding"))
    assert fired(fast)["pool-sequences"] == 1
    (call,) = calls(fast, "embedding_bags")
    assert call.args[5] == ["mean" if form == "mean" else "sum"]
    assert (call.args[3] != [None]) == ("weighted" in form or form == "by another mask")


COUNTED: dict[str, Callable[..., Tensor]] = {
    "sum": lambda m, x, w: m.rows(x).sum(2),
    "mean": lambda m, x, w: m.rows(x).mean(2),
    "weighted": lambda m, x, w: (m.rows(x) * w.unsqueeze(-1)).sum(2),
    "weighted mean": lambda m, x, w: (m.rows(x) * w.unsqueeze(-1)).mean(2),
    "another id left out": lambda m, x, w: (m.rows(x) * (x != 2).unsqueeze(-1)).sum(2),
}


@pytest.mark.parametrize("form", COUNTED)
def test_a_padding_row_that_is_summed_counts_and_is_not_trained(form: str) -> None:
    model = Model(COUNTED[form], 0)
    nn.init.normal_(model.rows.weight)
    fast = same(model, BATCHES, steps=form == "mean")
    (call,) = calls(fast, "embedding_bags")
    assert call.args[5] == ["total"]


OTHER: dict[str, Callable[..., Tensor]] = {
    "over fields": lambda m, x, w: m.rows(x).sum(1),
    "rows read twice": lambda m, x, w: (lambda r: r.sum(2) + r[:, :, 0])(m.rows(x)),
    "weights of fields": lambda m, x, w: (m.rows(x) * w[:, :1].unsqueeze(-1)).sum(2),
    "weights of columns": lambda m, x, w: (m.rows(x) * m.scale.sum()).sum(2),
    "weights that are cut": lambda m, x, w: (m.rows(x) * w.long().unsqueeze(-1)).sum(2),
}  # fmt: skip


@pytest.mark.parametrize("form", OTHER)
def test_others_keep_their_numbers(form: str) -> None:
    fast = same(Model(OTHER[form]), BATCHES, steps=False)
    assert fired(fast)["pool-sequences"] == (form == "weights that are cut")
