"""Terms that cancel: one draw of the plain model's own error says little, so some are taken."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import recast


class TwoRows(nn.Module):
    """A batch norm of two rows: what comes back through it is a rest of cancelled terms."""

    def __init__(self, error: float = 0.0) -> None:
        super().__init__()
        for rows, name in enumerate("abc", start=7):
            setattr(self, name, nn.Embedding(rows, 2))
        self.norm = nn.BatchNorm1d(14)
        self.head = nn.Linear(14, 2)
        self.error = error

    def forward(self, ids: Tensor) -> Tensor:
        z = torch.stack([self.a(ids[:, 0]), self.a(ids[:, 1]), self.c(ids[:, 2])], dim=1)
        li, lj = torch.tril_indices(3, 3)
        products = torch.bmm(z, z.transpose(1, 2))[:, li, lj]
        h = torch.cat([z[:, 0], products, z.flatten(1)], dim=1)
        h = h + self.error * (h - h.detach())
        out: Tensor = torch.sigmoid(self.head(self.norm(h)))
        return out


def _pair(seed: int, error: float = 0.0) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(seed)
    plain, other = TwoRows(), TwoRows(error)
    other.load_state_dict(plain.state_dict())
    return plain, other, torch.randint(7, (2, 3))


@pytest.mark.parametrize("seed", (13, 26, 56, 83))
def test_rounding_is_no_difference(seed: int) -> None:
    plain, _, ids = _pair(seed)
    recast.diff(plain, recast.optimize(plain, example=ids), ids, steps=0).check()


@pytest.mark.parametrize("seed", range(4))
def test_a_wrong_gradient_still_is(seed: int) -> None:
    plain, other, ids = _pair(seed, error=0.1)
    report = recast.diff(plain, other, ids, steps=0)
    wrong = {row.tensor for row in report.rows if not row.ok}
    assert wrong and wrong <= {"a.weight", "c.weight"}
