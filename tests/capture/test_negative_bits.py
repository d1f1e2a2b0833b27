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


@pytest.mark.parametrize("name", ["factors", "turned"])
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


def test_an_integer_of_the_example_that_is_now_yet_to_be_negated() -> None:
    """Integers never are, so the graph does not ask; but this input is read by ``float()`` too."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))

        def forward(self, counts: Tensor) -> Tensor:
            return self.mlp(counts.float())

    torch.manual_seed(0)
    model = Counted().eval()
    fast = recast.optimize(model, example=torch.randint(9, (4, 3)))
    assert "fuse-mlp" in str(fast.report)
    lazy = torch.randn(4, 3, dtype=torch.complex64).conj().imag
    assert lazy.is_neg()
    with torch.no_grad(), pytest.warns(RecastWarning, match="counts is a view that torch has yet"):
        torch.testing.assert_close(fast(lazy), model(lazy))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_integers_have_no_such_bit_by_public_means(dtype: torch.dtype) -> None:
    lazy = torch.randn(4, 4, dtype=torch.complex64).conj().imag
    assert lazy.is_neg() and not lazy.to(dtype).is_neg()
    assert not torch.empty(0, dtype=dtype).copy_(lazy[:0, 0]).is_neg()
    with pytest.raises(RuntimeError, match="negative bit"):
        lazy.view(dtype)


def test_an_example_that_is_yet_to_be_negated() -> None:
    torch.manual_seed(0)
    model = Net()
    ids, factors = torch.randint(20, (6, 2)), torch.rand(6, 2)
    turned = torch.complex(factors, factors)
    fast = recast.optimize(model, example=(negated(ids), negated(factors), turned.conj()))
    assert "group-embeddings" in str(fast.report)
    torch.testing.assert_close(fast(ids, factors, turned), model(ids, factors, turned))
