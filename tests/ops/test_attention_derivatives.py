"""field_attention under create_graph: the formula that its kernels' backward becomes there.

The generic test runs in float64, which no kernel takes. And both attentions under vmap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from recast.runtime.layers.field_attention import field_attention, reference
from recast.runtime.layers.silu_attention import silu_attention
from recast.runtime.op import Op, Sample

SAMPLES = [s for s in field_attention.samples() if not s.args[4]]  # without dropout


def derivatives(
    call: Callable[..., list[Tensor]], sample: Sample, dtype: torch.dtype
) -> list[Tensor]:
    """The gradients under random upstreams, and theirs."""
    args: list[Any] = [
        t.to(dtype).requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t
        for t in sample.args
    ]
    leaves = [t for t in args if isinstance(t, Tensor) and t.requires_grad]
    g = torch.Generator().manual_seed(1)

    def like(tensors: list[Tensor]) -> list[Tensor]:
        return [torch.randn(t.shape, generator=g).to(dtype) for t in tensors]

    outs = call(*args)
    first = list(torch.autograd.grad(outs, leaves, like(outs), create_graph=True))
    second = torch.autograd.grad(first, leaves, like(first), allow_unused=True)
    zeros = [torch.zeros_like(t) if s is None else s for s, t in zip(second, leaves, strict=True)]
    return [t.detach() for t in (*first, *zeros)]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.label)
def test_first_and_second_derivatives_in_float32(sample: Sample) -> None:
    ours = derivatives(field_attention.target, sample, torch.float32)
    truth = derivatives(reference, sample, torch.float64)
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", [field_attention, silu_attention], ids=lambda op: op.name)
def test_vmap_over_the_queries_alone(op: Op) -> None:
    q, *rest = next(iter(op.samples())).args
    many = torch.stack([q, 2 * q])
    found = torch.func.vmap(lambda one: op.target(one, *rest))(many)
    wanted = [op.target(one, *rest) for one in many]
    if op is field_attention:
        found, wanted = found[0], [one[0] for one in wanted]
    torch.testing.assert_close(found, torch.stack(wanted))
