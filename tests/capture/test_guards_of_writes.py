"""Questions about tensors that forward makes of nothing and then writes to: the answers depend on
what was written, be it a value of the batch or a random number.
"""

from __future__ import annotations

import pytest
import torch
from guarded import Net, both, check
from torch import Tensor, nn
from torch.nn import functional as F

LOW, HIGH = torch.zeros(6, 2, dtype=torch.long), torch.full((6, 2), 9)


class Written(Net):
    def forward(self, x: Tensor) -> Tensor:
        largest = torch.zeros((), dtype=torch.long)
        largest += x.max()
        return self.a(self.table(x).sum(1)) * (2.0 if largest else 1.0)  # type: ignore[no-any-return]


class Counted(Net):
    def forward(self, x: Tensor) -> Tensor:
        largest = torch.zeros(1, dtype=torch.long)
        largest.copy_(x.max())
        return self.a(self.table(x).sum(1)) * float(int(largest[0]) + 1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Written, Counted])
def test_an_answer_that_was_written(kind: type[Net]) -> None:
    plain, fast, it = both(kind(), LOW)
    assert it.kind == "whole"
    check(plain, fast, LOW[:4])
    check(plain, fast, HIGH, warns="control flow that depends on values")


class Truncated(Net):
    """Draws again as often as one of the numbers is too large."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.empty(4).normal_()
        while (noise.abs() > 2.0).any():
            noise.normal_()
        return self.a(self.table(x).sum(1) + noise)  # type: ignore[no-any-return]


def test_an_answer_that_was_drawn() -> None:
    torch.manual_seed(0)
    plain, fast, it = both(Truncated(), LOW)
    assert it.why is not None
    assert "depends on a value that may draw random numbers" in it.why
    for seed in range(16):
        results = []
        for model in (plain, fast):
            torch.manual_seed(seed)
            results.append(model(HIGH))
        torch.testing.assert_close(results[1], results[0])


class Normalized(Net):
    """Asks for what batch normalization gives, as a layer or as a function."""

    layer = True

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y, norm = self.table(x).sum(1), self.norm
        if self.layer:
            y = norm(y)
        else:
            y = F.batch_norm(y, norm.running_mean, norm.running_var, training=self.training)
        return self.a(y) * (2.0 if (y > 1e3).any() else 1.0)  # type: ignore[no-any-return]


@pytest.mark.parametrize("layer", [True, False])
def test_statistics_are_updated_once(layer: bool) -> None:
    model = Normalized()
    model.layer = layer
    plain, fast, it = both(model, LOW)
    assert it.why is not None and "which updates its statistics" in it.why
    for one in (plain, fast):
        one.train()(HIGH[:4])
        one.eval()
    check(plain, fast, LOW)
    assert torch.equal(fast.norm.running_mean, plain.norm.running_mean)
