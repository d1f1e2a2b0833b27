"""Tensors that forward makes and that torch negates only where it reads them: our kernels read
memory as it is.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.errors import RecastWarning


class Inside(nn.Module):
    """Makes such tensors itself, of an input and of a buffer, and returns a part of one."""

    turned: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20, 4, mode="sum") for _ in range(2))
        self.register_buffer("turned", torch.rand(2, dtype=torch.cfloat).conj().imag)

    def forward(self, ids: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.view_as_complex(parts).conj().imag
        first = self.bags[0](ids, per_sample_weights=weights)
        return first * self.bags[1](ids, per_sample_weights=self.turned.expand_as(ids)), weights


@pytest.mark.parametrize("given", [True, False], ids=["example", "symbolic"])
def test_tensors_made_inside_that_are_yet_to_be_negated(given: bool) -> None:
    torch.manual_seed(0)
    model = Inside()
    batch = torch.randint(20, (6, 2)), torch.rand(6, 2, 2)
    fast = recast.optimize(model, example=batch if given else None)
    assert "2 of 2 embedding lookups grouped" in str(fast.report)
    found, expected = fast(*batch), model(*batch)
    torch.testing.assert_close(found, expected)
    assert found[1].is_neg() == expected[1].is_neg()
    grads = [
        torch.autograd.grad(out[0].square().sum(), list(model.parameters()))
        for out in (found, expected)
    ]
    torch.testing.assert_close(*[[g + 0 for g in pair] for pair in grads])


def test_a_write_to_such_a_tensor() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(20, 4, mode="sum")

        def forward(self, ids: Tensor, parts: Tensor) -> Tensor:
            weights = (torch.view_as_complex(parts) * 2).conj().imag
            weights[:, 0] = 1.0
            return self.bag(ids, per_sample_weights=weights)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, batch = Writes(), (torch.randint(20, (6, 2)), torch.rand(6, 2, 2))
    fast = recast.optimize(model, example=batch)
    assert "torch has yet to negate" in str(fast.report.to_dict()["why"])
    with pytest.warns(RecastWarning, match="per_sample_weights is a view that torch has yet to"):
        found = fast(*batch)
    torch.testing.assert_close(found, model(*batch))
