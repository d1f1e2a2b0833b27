"""Numbers of samples and pairs that kernels cannot count: these are left to torch."""

from __future__ import annotations

import emulated_gpu
import pytest
import torch
from torch import Tensor

from recast.runtime.gpu.gpu import Gpu
from recast.runtime.interactions import cross_cuda, fm_cuda, pair_cuda
from recast.runtime.layers import attention_cuda, gated_cuda

MOST = 2**31 - 1  # the largest int: the last block counts beyond it


def many(count: int, *sizes: int) -> Tensor:
    """One sample, expanded ``count`` times."""
    return torch.zeros(1, *sizes).expand(count, *sizes)


def fm(gpu: Gpu, count: int) -> object:
    return fm_cuda.interaction(gpu, [many(count, 4)] * 2, 1.0, True)


def cross(gpu: Gpu, count: int) -> object:
    return cross_cuda.network(gpu, many(count, 4), None, torch.zeros(1, 4), torch.zeros(1, 4))


def gates(gpu: Gpu, count: int) -> object:
    return gated_cuda.sums(gpu, [many(count, 4)], [many(count, 1)], [0], False)


def attention(gpu: Gpu, count: int) -> object:
    return attention_cuda.attention(gpu, *[many(count, 1, 2, 4)] * 3)


def pairs(gpu: Gpu, count: int) -> object:
    places = torch.zeros(1, dtype=torch.int64)
    return pair_cuda.products(gpu, [many(count, 4)] * 2, [], places, places, None)


@pytest.mark.parametrize("call", [fm, cross, gates, attention, pairs], ids=lambda f: f.__name__)
def test_no_count_runs_over(call: object) -> None:
    assert callable(call)
    with emulated_gpu.serve() as gpu:
        assert call(gpu, MOST - 2**20) is not None
        assert call(gpu, MOST - 3) is None


def test_pairs_are_counted_with_samples() -> None:
    places = torch.empty((1 << 24) + 1, dtype=torch.int64)  # nobody looks at them
    with emulated_gpu.serve() as gpu:
        most = [places[:-1]] * 2
        assert pair_cuda.products(gpu, [many(7, 4)], [], *most, None) is not None
        assert pair_cuda.products(gpu, [many(7, 4)], [], places, places, None) is None
