"""``field_attention`` as a GPU runs it, on the emulator, with float64 as the judge."""

from __future__ import annotations

import emulated_gpu
import pytest
import torch
from torch import Tensor

from recast.runtime.layers.field_attention import field_attention
from recast.runtime.mlp import mask as mlp_mask
from recast.runtime.tolerances import excess

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def heads(dim: int, values: int, dtype: torch.dtype, queries: int, keys: int) -> list[Tensor]:
    """q, k and v of five heads, with elements between rows, two of them side by side in memory."""
    g = torch.Generator().manual_seed(dim + keys)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    q = rand(1, queries, 5, dim + 3)[..., :dim].transpose(1, 2)
    return [q, rand(1, 5, keys, dim), rand(5, 1, keys, values + 1)[..., 1:].transpose(0, 1)]


def run(inputs: list[Tensor], p: float, weights: bool, up: list[Tensor]) -> list[Tensor]:
    """The results, and the gradients of q, k and v."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    torch.manual_seed(3)
    outs = field_attention.target(*leaves, 0.4, p, True, weights)
    torch.autograd.backward(outs, [u.to(o.dtype) for u, o in zip(up, outs, strict=True)])
    return [*(o.detach() for o in outs), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize(
    ("dim", "values", "dtype", "queries", "keys", "weights"),
    [(5, 7, F32, 13, 39, True), (8, 3, F32, 40, 6, False), (16, 9, BF16, 3, 70, True)],
)
def test_forward_and_backward(
    dim: int, values: int, dtype: torch.dtype, queries: int, keys: int, weights: bool
) -> None:
    """More queries and keys than a block has threads, in several blocks."""
    inputs = heads(dim, values, dtype, queries, keys)
    g = torch.Generator().manual_seed(1)
    up = [torch.randn(1, 5, queries, values, generator=g)]
    up += [torch.randn(1, 5, queries, keys, generator=g)] * weights
    up = [u.to(dtype) for u in up]
    with emulated_gpu.serve() as emulated:
        found = run(inputs, 0.0, weights, up)
    assert emulated.launched == ["attention_forward", "attention_backward"]
    plain = run(inputs, 0.0, weights, up)
    truth = run([t.double() for t in inputs], 0.0, weights, up)
    for a, b, c in zip(found, plain, truth, strict=True):
        assert a.dtype == dtype
        assert excess(a, b, c) <= 1


@pytest.mark.parametrize("weights", [False, True])
def test_under_autocast(weights: bool) -> None:
    inputs = heads(8, 8, BF16, 6, 7)
    up = [torch.ones(1, 5, 6, 8), *[torch.ones(1, 5, 6, 7)] * weights]
    with emulated_gpu.serve() as emulated, torch.autocast("cpu", BF16):
        found = run(inputs, 0.0, weights, up)
    assert bool(emulated.launched) != weights
    with torch.autocast("cpu", BF16):
        plain = run(inputs, 0.0, weights, up)
    truth = run([t.double() for t in inputs], 0.0, weights, [u.double() for u in up])
    scale = max(float(t.abs().max()) for t in truth)
    for a, b, c in zip(found, plain, truth, strict=True):
        assert a.dtype == b.dtype
        assert excess(a, b, c, scale=scale) <= 1


def test_the_mask_is_told() -> None:
    """With it, plain torch gives the same result."""
    q, k, v = heads(8, 8, F32, 6, 7)
    with emulated_gpu.serve():
        (out,) = field_attention.target(q.requires_grad_(), k, v, 0.4, 0.3, True, False)
    (mask,) = mlp_mask.masks(out)
    a = torch.softmax(0.4 * q @ k.transpose(2, 3), 3) * mask / 0.7
    assert 0 < float(mask.float().mean()) < 1
    torch.testing.assert_close(out, a @ v)


def test_results_do_not_depend_on_the_order_of_blocks() -> None:
    inputs, up = heads(8, 8, F32, 40, 40), [torch.ones(1, 5, 40, 8)]
    runs = []
    for workers, seed in ((1, 0), (2, 7)):
        with emulated_gpu.serve(workers, seed):
            runs.append(run(inputs, 0.2, False, up))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize(("dim", "keys"), [(33, 5), (32, 400)])
def test_vectors_and_heads_that_are_too_long_go_to_torch(dim: int, keys: int) -> None:
    inputs = heads(dim, dim, F32, 3, keys)
    with emulated_gpu.serve() as emulated:
        run(inputs, 0.0, False, [torch.ones(1, 5, 3, dim)])
    assert not emulated.launched
