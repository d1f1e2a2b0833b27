"""Inputs that torch has yet to negate or to conjugate, which it does where it reads them: our
kernels read memory as it is.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.errors import RecastWarning


class Net(nn.Module):
    """Lookups with weights of their own, and a complex input by its two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20, 4, mode="sum") for _ in range(2))
        self.top = nn.Linear(16, 1)

    def forward(self, ids: Tensor, factors: Tensor, turned: Tensor) -> Tensor:
        parts = [bag(ids, per_sample_weights=factors) for bag in self.bags]
        parts += [bag(ids, per_sample_weights=turned.imag) for bag in self.bags]
        return self.top(torch.cat(parts, 1)).squeeze(1)


def negated(t: Tensor) -> Tensor:
    """The same numbers, as a view that is negated where it is read."""
    found: Tensor = torch._neg_view(-t)
    return found


@pytest.mark.parametrize("name", ["ids", "factors", "turned"])
def test_inputs_that_are_yet_to_be_negated(name: str) -> None:
    torch.manual_seed(0)
    model = Net()
    ids, factors = torch.randint(20, (6, 2)), torch.rand(6, 2)
    turned = torch.complex(factors, factors)
    fast = recast.optimize(model, example=(ids, factors, turned))
    expected = model(ids, factors, turned)
    torch.testing.assert_close(fast(ids, factors, turned), expected)
    batch = {"ids": ids, "factors": factors, "turned": turned}
    batch[name] = turned.conj().resolve_conj().conj() if name == "turned" else negated(batch[name])
    assert batch[name].is_neg() or batch[name].is_conj()
    with pytest.warns(RecastWarning, match=rf"plain forward: {name} is a view that torch has yet"):
        found = fast(**batch)
    torch.testing.assert_close(found, expected)


def test_an_example_that_is_yet_to_be_negated() -> None:
    torch.manual_seed(0)
    model = Net()
    ids, factors = torch.randint(20, (6, 2)), torch.rand(6, 2)
    turned = torch.complex(factors, factors)
    fast = recast.optimize(model, example=(negated(ids), negated(factors), turned.conj()))
    assert "group-embeddings" in str(fast.report)
    torch.testing.assert_close(fast(ids, factors, turned), model(ids, factors, turned))
