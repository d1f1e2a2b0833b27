"""``x[range(n), range(n)]`` with an ``n`` that depends on the batch; a loop over it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.rewriter.capture.capture_model import capture


class Contrast(nn.Module):
    """Scores of two views against each other; no row is compared with itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(40, 8)
        self.layer = nn.Linear(8, 8)

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        own, other = x @ x.t(), x @ y.t()
        rows = other.shape[0]
        own[..., range(rows), range(own.size(1))] = float("-inf")
        both = torch.cat([other, own], 1)
        return both.logsumexp(1) - both[range(rows), range(rows)] + both[:, range(rows)].sum(1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.scores(self.layer(self.table(a)), self.layer(self.table(b)))


class Ends(Contrast):
    """A range with two ends, which small batches leave empty."""

    def forward(self, a: Tensor, b: Tensor) -> Any:
        rows = self.layer(self.table(a)) + self.table(b)
        assert isinstance(range(len(a)), range)
        return rows[range(1, len(a) - 3)], rows[range(2)], rows.sum() + sum(range(3))


class Shuffled(Contrast):
    """Another function of it leaves torch: both kinds of copies are made in one trace."""

    def shuffled(self, ids: Tensor) -> Tensor:
        return torch.stack([row.flip(0) for row in ids])

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        turned = self.shuffled(a.view(-1, 1)).view(len(a))
        return self.scores(self.layer(self.table(turned)), self.layer(self.table(b)))


class Loop(Contrast):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        rows = self.layer(self.table(a))
        return torch.stack([rows[k] * b[k] for k in range(a.shape[0])])


def batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    a, b = torch.randint(40, (2, rows), generator=generator)
    return a, b


@pytest.mark.parametrize("kind", [Contrast, Ends, Shuffled])
def test_as_an_index_it_is_captured(kind: type[Contrast]) -> None:
    model = kind()
    (traced,) = capture(kind(), batch(9)).traced.values()
    left = [call.partition("(")[0] for call in traced.opaque_calls]
    assert left == (["shuffled"] if kind is Shuffled else [])
    fast = recast.optimize(model, example=batch(9))
    report = fast.report.to_dict()
    assert report["captured"] == "whole"
    assert report["lookups"]["found"] == report["lookups"]["fused"] == 2
    sizes = (9, 6, 4, 2) if kind is Ends else (9, 4, 2)
    for rows in sizes:
        assert [t.shape for t in _all(fast(*batch(rows)))] == [
            t.shape for t in _all(kind()(*batch(rows)))
        ]
    recast.diff(model, fast, [batch(rows) for rows in (9, 5)], steps=2).check()


def test_a_loop_over_it_is_refused_as_before() -> None:
    captured = capture(Loop(), batch(9))
    assert captured.kind != "whole"
    assert "range() of the batch size: 9 for one example" in (captured.why or "")
    fast = recast.optimize(Loop(), example=batch(9))
    torch.testing.assert_close(fast(*batch(5)), Loop()(*batch(5)))


def _all(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else list(out)
