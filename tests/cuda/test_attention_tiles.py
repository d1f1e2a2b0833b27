"""``field_attention`` on tensor cores, on the emulator, with float64 as the judge."""

from __future__ import annotations

import emulated_gpu
import pytest
import torch
from torch import Tensor

from recast.runtime.layers.field_attention import field_attention

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
KERNELS = ["attention_tiles_forward", "attention_tiles_backward"]
ROUNDING = {F32: 2**-11, F16: 2**-11, BF16: 2**-8}


def run(inputs: list[Tensor], p: float, weights: bool, up: list[Tensor]) -> list[Tensor]:
    """The results, and the gradients of q, k and v."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    torch.manual_seed(3)
    outs = field_attention.target(*leaves, 0.4, p, True, weights)
    torch.autograd.backward(outs, [u.to(o.dtype) for u, o in zip(up, outs, strict=True)])
    return [*(o.detach() for o in outs), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize(
    ("dtype", "dim", "values", "queries", "keys", "p", "weights"),
    [
        (F32, 16, 16, 39, 39, 0.0, False),  # heads that are views: four elements at a time
        (F32, 6, 3, 5, 18, 0.3, True),  # one at a time, dropout, and the weights with a gradient
        (BF16, 12, 16, 17, 9, 0.0, True),
        (F16, 7, 5, 1, 64, 0.0, False),
    ],
)
def test_forward_and_backward(
    dtype: torch.dtype, dim: int, values: int, queries: int, keys: int, p: float, weights: bool
) -> None:
    g = torch.Generator().manual_seed(dim + keys)

    def heads(rows: int, width: int) -> Tensor:
        return torch.randn(2, rows, 3, width, generator=g).to(dtype).transpose(1, 2)

    inputs = [heads(queries, dim), heads(keys, dim), heads(keys, values)]
    up = [torch.randn(2, 3, queries, values, generator=g)]
    up += [torch.randn(2, 3, queries, keys, generator=g)] * weights
    up = [u.to(dtype) for u in up]
    with emulated_gpu.serve() as emulated:
        found = run(inputs, p, weights, up)
    assert emulated.launched == KERNELS
    wide = [t.double() for t in inputs]
    if p:  # double draws another mask
        truth = [t.double() for t in run(inputs, p, weights, up)]
    else:
        truth = run(wide, p, weights, [u.double() for u in up])
    for a, b in zip(found, truth, strict=True):
        assert a.dtype == dtype and a.shape == b.shape
        assert float((a.double() - b).norm() / b.norm()) <= 2 * ROUNDING[dtype]
        off = float((a.double() - b).abs().max())
        assert off <= 8 * ROUNDING[dtype] * float(b.abs().max())


def test_float32_stays_float32_where_tf32_is_not_allowed() -> None:
    q = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    with emulated_gpu.serve() as emulated:
        run([q, q, q], 0.0, False, [q])
    assert emulated.launched == ["attention_forward", "attention_backward"]
