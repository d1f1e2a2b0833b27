"""``gated_sums`` and ``dice`` as a GPU runs them, on the emulator, with float64 as the judge."""

from __future__ import annotations

from collections.abc import Callable

import emulated_gpu
import pytest
import torch
from torch import Tensor

from recast.runtime.layers.dice import dice
from recast.runtime.layers.gated_sums import gated_sums
from recast.runtime.tolerances import excess

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
Call = Callable[[list[Tensor]], list[Tensor]]


def run(call: Call, inputs: list[Tensor]) -> list[Tensor]:
    """The results, and the gradients of all inputs that got one."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    outs = call(leaves)
    g = torch.Generator().manual_seed(1)
    torch.autograd.backward(outs, [torch.randn(o.shape, generator=g).to(o.dtype) for o in outs])
    return [*(o.detach() for o in outs), *(t.grad for t in leaves if t.grad is not None)]


def compare(call: Call, inputs: list[Tensor], launched: list[str]) -> None:
    with emulated_gpu.serve() as emulated:
        found = run(call, inputs)
    assert emulated.launched == launched
    plain, truth = run(call, inputs), run(call, [t.double() for t in inputs])
    assert len(found) == len(plain) == len(truth)
    scale = max(float(t.abs().max()) for t in truth)
    for a, b, c in zip(found, plain, truth, strict=True):
        assert a.dtype == b.dtype
        assert excess(a, b, c, scale=scale) <= 1


def rand(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=g).to(dtype)


@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize(("dim", "dtype"), [(40, F32), (7, F32), (16, F16), (140, F32)])
def test_gates_over_stacks_and_vectors(dim: int, dtype: torch.dtype, softmax: bool) -> None:
    """Vectors with elements between them, one gate wider than the lanes of a sample."""
    experts = [rand(21, 3, dim + 8, dtype=dtype)[:, :, :dim], rand(21, dim, dtype=dtype)]
    chosen = [0, 3, 1, 1, 2] + [k % 4 for k in range(37)]
    gates = [rand(21, 5, dtype=dtype), rand(37, 21, dtype=dtype).t()]

    def call(given: list[Tensor]) -> list[Tensor]:
        found: list[Tensor] = gated_sums.target(given[:2], given[2:], chosen, softmax, False)
        return found

    compare(call, [*experts, *gates], ["gated_forward", "gated_backward"])


def test_more_vectors_than_fit() -> None:
    """In shared memory; gates read them where they are."""
    vectors, gates = rand(5, 40, 320), [rand(5, 40), rand(5, 3)]

    def call(given: list[Tensor]) -> list[Tensor]:
        chosen = [*range(40), 7, 8, 7]
        found: list[Tensor] = gated_sums.target(given[:1], given[1:], chosen, True, False)
        return found

    compare(call, [vectors, *gates], ["gated_forward", "gated_backward"])


@pytest.mark.parametrize(
    ("rows", "width", "alphas", "dtype", "of_alpha"),
    [
        (70, 36, 36, F32, F32),
        (300, 7, 1, F32, F32),
        (70, 136, 136, BF16, F32),
        (5, 1030, 1030, F32, F32),
    ],
)
def test_dice(
    rows: int, width: int, alphas: int, dtype: torch.dtype, of_alpha: torch.dtype
) -> None:
    """More columns than a block has threads, and parameters that mixed precision keeps wide."""
    inputs = [rand(rows, width, dtype=dtype), rand(rows, width + 8, dtype=dtype)[:, :width]]
    compare(
        lambda given: [dice.target(*given)],
        [*inputs, rand(alphas, dtype=of_alpha)],
        ["dice_forward", "dice_backward", *["dice_alpha"] * (alphas == width)],
    )


@pytest.mark.parametrize(("product", "given"), [(True, BF16), (True, F32), (False, BF16)])
def test_gates_under_autocast(product: bool, given: torch.dtype) -> None:
    """Kernels where torch would round nothing before it multiplies; else torch, with its dtypes."""
    inputs = [rand(9, 16, dtype=given), rand(9, 16, dtype=given) + 1, rand(9, 2, dtype=given)]

    def call(leaves: list[Tensor]) -> list[Tensor]:
        with torch.autocast("cpu", BF16, enabled=leaves[0].dtype != torch.float64):
            found: list[Tensor] = gated_sums.target(leaves[:2], leaves[2:], [0, 1], True, product)
        return found

    ours = ["gated_forward", "gated_backward"] if product and given == BF16 else []
    compare(call, inputs, ours)


def test_far_gates() -> None:
    """Neither overflows: the sigmoid of a large number is 0 or 1, never NaN."""
    gate = torch.tensor([[-200.0, -90.0, 90.0, 200.0]])
    with emulated_gpu.serve() as emulated:
        out = dice.target(torch.ones(1, 4), gate, torch.full((1,), 0.5))
    assert emulated.launched == ["dice_forward"]
    assert out.tolist() == [[0.5, 0.5, 1.0, 1.0]]


def test_results_do_not_depend_on_the_order_of_blocks() -> None:
    def call(given: list[Tensor]) -> list[Tensor]:
        sums: list[Tensor] = gated_sums.target(given[:2], given[2:3], [0, 1], True, False)
        return [dice.target(sums[0], given[0], given[3])]

    inputs, runs = [rand(90, 8), rand(90, 8), rand(90, 2), rand(8)], []
    for workers, seed in ((1, 0), (2, 7)):
        with emulated_gpu.serve(workers, seed):
            runs.append(run(call, inputs))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
