"""Outputs of lookups share memory by width and dtype, and are not views of each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from recast.runtime import device
from recast.runtime.embedding import embedding_bags


def lookups() -> tuple[Any, ...]:
    """Two widths and two dtypes in turn, a pooled lookup, and one of two-dimensional ids."""
    g = torch.Generator().manual_seed(3)
    kinds = [(8, torch.float32), (1, torch.float32), (8, torch.bfloat16)] * 2 + [(8, torch.float32)]
    weights = [torch.randn(20, dim, generator=g).to(dtype) for dim, dtype in kinds]
    ids = [torch.randint(20, (5,), generator=g) for _ in range(6)]
    ids.append(torch.randint(20, (5, 3), generator=g))
    ids[3] = torch.randint(20, (4, 2), generator=g)  # fewer bags than the other of its width
    modes = ["none", "none", "none", "sum", "none", "none", "none"]
    n = len(weights)
    none, off = [None] * n, [False] * n
    return weights, ids, none, none, list(range(n)), modes, none, off, off


def storages(outs: list[Tensor]) -> list[int]:
    return [out.untyped_storage().data_ptr() for out in outs]


@pytest.mark.skipif(device.extension() is None, reason="no CPU kernels here")
def test_outputs_of_one_width_and_dtype_share_an_allocation() -> None:
    with torch.no_grad():
        outs = embedding_bags.differentiable(*lookups())
        expected = embedding_bags.reference(*lookups())
    torch.testing.assert_close(outs, expected, rtol=0, atol=0)
    first, second, third, fourth, fifth, sixth, alone = storages(outs)
    assert first == fourth and second == fifth and third == sixth
    assert len({first, second, third, alone}) == 4
    assert all(out._base is None and out.is_contiguous() for out in outs)
    before = [out._version for out in outs]
    outs[0].add_(1.0)
    after = [before[0] + 1, *before[1:]]
    assert [out._version for out in outs] == after
    torch.testing.assert_close(outs[1:], expected[1:], rtol=0, atol=0)


def test_outputs_of_the_op_have_storages_of_their_own() -> None:
    outs = embedding_bags.forward(*lookups())
    assert len({*storages(outs)}) == len(outs)
