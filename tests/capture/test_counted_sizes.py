"""Sizes that values decide are not known, however many there were in the example."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.errors import RecastWarning


class Chosen(nn.Module):
    def __init__(self, choose: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.choose = nn.Linear(6, 6), choose

    def forward(self, x: Tensor) -> Tensor:
        return self.choose(self.layer(x)).square()


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "mask": lambda h: h[h[:, 0] < 9],
    "none": lambda h: h[h[:, 0] > 9],
    "selected": lambda h: torch.masked_select(h[:, 0], h[:, 0] < 9),
    "where": lambda h: h[torch.where(h[:, 0] < 9)[0]],
    "nonzero": lambda h: h[(h[:, 0] < 9).nonzero().squeeze(1)] * 2,
    "unique": lambda h: torch.unique((h[:, 0] > 9).long()).float(),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_number_of_chosen_rows_is_not_known(form: str) -> None:
    fast = recast.optimize(Chosen(FORMS[form]), example=torch.randn(8, 6).clamp(-2, 2), passes=())
    assert fast.report.captured == "whole"
    last = [line for line in fast.report.graph_text.splitlines() if ": f32[" in line][-1]
    assert ": f32[n" in last


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.layer = nn.Embedding(9, 6), nn.Linear(6, 1)

    def forward(self, ids: Tensor) -> Tensor:
        chosen = ids[:, 0] > 2
        one_each = self.layer(self.rows(ids).sum(1)[chosen]).squeeze()
        return torch.zeros(ids.size(0)).masked_scatter(chosen, one_each * (1 + one_each.dim()))


def test_a_squeeze_of_chosen_rows_asks_the_mask_alone() -> None:
    model, ids = Squeezed(), torch.randint(3, 9, (8, 3))
    fast = recast.optimize(model, example=ids)
    (traced,) = {id(t): t for t in fast._runner.traced.values()}.values()
    assert not [n for n in traced.asks.nodes if n.op in ("call_module", "get_attr")]
    for few in (8, 2):
        ids[few:, 0] = 1
        torch.testing.assert_close(fast(ids), model(ids))
    ids[1:, 0] = 1
    with pytest.warns(RecastWarning, match="control flow that depends on values"):
        torch.testing.assert_close(fast(ids), model(ids))


@pytest.mark.parametrize("how", ["sent", "filled"])
def test_rows_that_are_written_into_others_keep_the_number_of_those(how: str) -> None:
    def sent(h: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        out[h[:, 0] < 9] = h[h[:, 0] < 9].relu()
        return out.index_add_(0, torch.where(h[:, 0] < 9)[0], h[h[:, 0] < 9])

    def filled(h: Tensor) -> Tensor:
        chosen = h[h[:, 0] < 9]
        out = torch.zeros(h.size(0), 6, device=chosen.device)
        out[h[:, 0] < 9] = chosen
        return out

    form = {"sent": sent, "filled": filled}[how]
    fast = recast.optimize(Chosen(form), example=torch.randn(8, 6).clamp(-2, 2), passes=())
    last = [line for line in fast.report.graph_text.splitlines() if ": f32[" in line][-1]
    assert ": f32[B,6]" in last
