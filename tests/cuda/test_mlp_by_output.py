"""The gradient of a relu from its output, which is kept in any case: no mask is made or kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cublaslt_stand_in
import emulated_gpu
import pytest
import torch
from emulated_chains import BF16, F32, MLP, Machine, chain, compare, leaves
from torch import Tensor
from torch.nn import functional as F

from recast.runtime import device

pytestmark = pytest.mark.skipif(
    device.extension() is None, reason=f"the extension: {device.why_missing()}"
)


@pytest.fixture
def machine() -> Iterator[Machine]:
    """One that is held to torch's products, behind which outputs are the faster way."""
    with (
        cublaslt_stand_in.serve() as library,
        emulated_gpu.serve() as gpu,
        device.use("plain"),
    ):
        yield Machine(library, gpu)


def saved(out: Tensor) -> list[Tensor]:
    node: Any = out.grad_fn
    return [t for t in node.saved_tensors if t is not None]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("last", [False, True], ids=["linear last", "relu last"])
@pytest.mark.parametrize("shape", [(70,), (5, 3), ()], ids=str)
def test_chains(machine: Machine, shape: tuple[int, ...], last: bool, dtype: torch.dtype) -> None:
    x, *rest = chain(70, [13, 24, 17, 3], 0.0, last=last)
    x = x[: torch.Size(shape).numel()].view(*shape, 13)
    compare(MLP, (x, *rest), dtype)
    assert "mlp_activate" in machine.gpu.launched  # relu behind a product, without a mask
    assert "mlp_mask_gradient" not in machine.gpu.launched
    assert machine.gpu.launched.count("mlp_output_gradient") == 2 + last


def test_nothing_more_is_kept(machine: Machine) -> None:
    """The output of a layer and the input of the next are one tensor."""
    x, params, *rest = chain(64, [8, 16, 24, 2], 0.0, last=True)
    for p in params:
        p.requires_grad_()
    out = MLP.target(x, params, *rest)
    rows = {t.data_ptr(): t.shape[1] for t in saved(out) if t.dim() == 2 and len(t) == 64}
    assert sorted(rows.values()) == [2, 8, 16, 24]


def test_a_result_that_was_written_to_is_noticed(machine: Machine) -> None:
    """As torch notices it of its relu."""
    x, *rest = chain(6, [5, 9, 7], 0.0, last=True)
    leaf = x.requires_grad_()
    for call in (MLP.target, MLP.reference):
        out = call(leaf, *rest)
        out.detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward(torch.ones_like(out))


@pytest.mark.parametrize(
    ("trained", "masks"),
    [({0}, 2), ({2, 4, 6}, 2), ({1, 3}, 1), ({1, 5}, 1), ({5}, 0), ({1, 3, 5}, 0)],
    ids=str,
)
def test_an_output_that_nobody_keeps_gets_a_mask(
    machine: Machine, trained: set[int], masks: int
) -> None:
    """0: the input; then weights and biases in turn. A frozen layer does not keep its input."""
    x, params, *rest = chain(6, [5, 9, 7, 2], 0.0)
    every = [x, *params]
    wanted = [every[i].requires_grad_() for i in sorted(trained)]
    out = MLP.target(x, params, *rest)
    assert sum(t.dtype == torch.uint8 for t in saved(out)) == masks
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, wanted, upstream)
    plain = torch.autograd.grad(MLP.reference(x, params, *rest), wanted, upstream)
    for a, b in zip(found, plain, strict=True):
        torch.testing.assert_close(a, b)


def test_what_stands_behind_a_relu_may_overwrite_it(machine: Machine) -> None:
    """So only a linear layer, or the end, lets the output stand for a mask."""
    for step in (["tanh"], ["relu"], ["sigmoid", "linear"]):
        x, params, *_ = chain(6, [5, 9, 7], 0.0)
        steps = ["linear", "relu", *step]
        args: tuple[Any, ...] = (x, params[: 2 * steps.count("linear")], [], steps, [], [])
        compare(MLP, args, F32)
        wanted = [t.requires_grad_() for t in leaves(args)]
        out = MLP.target(*args)
        assert sum(t.dtype == torch.uint8 for t in saved(out)) == 1
        torch.autograd.grad(out, wanted, torch.ones_like(out))


@pytest.mark.parametrize("outputs", [1, 2])
def test_no_gradient_passes_at_exactly_zero(machine: Machine, outputs: int) -> None:
    x = torch.zeros(4, 5).requires_grad_()
    weight, last = torch.randn(9, 5).requires_grad_(), torch.randn(outputs, 9).requires_grad_()
    bias = torch.cat([torch.zeros(6), torch.ones(3)]).requires_grad_()
    out = MLP.target(x, [weight, bias, last, None], [], ["linear", "relu", "linear"], [], [])
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, [x, bias], upstream)
    plain = F.linear(F.relu(F.linear(x, weight, bias)), last)
    for a, b in zip(found, torch.autograd.grad(plain, [x, bias], upstream), strict=True):
        torch.testing.assert_close(a, b)
    assert not found[1][:6].any()
