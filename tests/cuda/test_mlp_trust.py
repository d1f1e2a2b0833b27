"""How cublasLt's algorithms treat sums that are exactly 0 or NaN, and what is done about it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from emulated_chains import BF16, F16, F32, MLP, Machine, chain, replayed
from torch.nn import functional as F

from recast.runtime import device
from recast.runtime.mlp import mask as mlp_mask
from recast.runtime.mlp import products as mlp_products
from recast.runtime.mlp import relu_trust
from recast.runtime.recorded import recording

pytestmark = pytest.mark.skipif(
    device.extension() is None, reason=f"the extension: {device.why_missing()}"
)


def forget() -> None:
    """What algorithms have answered."""
    relu_trust._known.clear()
    mlp_products._begins.clear()


@pytest.mark.parametrize("bit", [0, 1])
@pytest.mark.parametrize("kind", ["bias", "no bias", "bf16", "fp16"])
def test_no_gradient_passes_at_exactly_zero(cublaslt_machine: Machine, kind: str, bit: int) -> None:
    """Whichever bit cublasLt sets there is tested, and its masks are used only if they fit."""
    dtype = {"bf16": BF16, "fp16": F16}.get(kind, F32)
    x = torch.zeros(4, 5, dtype=dtype).requires_grad_()
    small = partial(torch.randint, -3, 4, dtype=dtype)  # so that nothing is rounded
    weight, last = (small(s).requires_grad_() for s in ((9, 5), (2, 9)))
    full = torch.cat([torch.zeros(6), torch.ones(3)]).to(dtype).requires_grad_()
    bias, aux = (None, "RELU_AUX") if kind == "no bias" else (full, "RELU_AUX_BIAS")
    wanted = [t for t in (x, bias) if t is not None]
    forget()
    with cublaslt_machine.library.set("zero_bit", bit):
        for _ in range(2):
            out = MLP.target(
                x, [weight, bias, last, None], [], ["linear", "relu", "linear"], [], []
            )
            upstream = small(out.shape)
            found = torch.autograd.grad(out, wanted, upstream)
            plain = F.linear(F.relu(F.linear(x, weight, bias)), last)
            truth = torch.autograd.grad(plain, wanted, upstream)
            torch.testing.assert_close(out, plain)
            for a, b in zip(found, truth, strict=True):
                torch.testing.assert_close(a, b)
            assert not found[-1].flatten()[: 5 if bias is None else 6].any()
    products = cublaslt_machine.products()
    assert products.count(aux) == (2 if bit else 4)  # two are questions
    assert products.count(aux.replace("_AUX", "")) == (4 if bit else 0)
    forget()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
def test_no_gradient_passes_where_a_bias_cancels_the_product(
    cublaslt_machine: Machine, dtype: torch.dtype
) -> None:
    """Sums that are exactly 0, in any order of their terms, none of which is 0."""
    x = F.one_hot(torch.arange(64) % 5).to(dtype)
    weight, bias = torch.full((9, 5), -0.5, dtype=dtype), torch.full((9,), 0.5, dtype=dtype)
    wanted = [t.requires_grad_() for t in (x, weight, bias)]
    last = torch.ones(2, 9, dtype=dtype)
    forget()
    with cublaslt_machine.library.set("zero_bit", 1):
        out = MLP.target(x, [weight, bias, last, None], [], ["linear", "relu", "linear"], [], [])
        found = torch.autograd.grad(out, wanted, torch.ones_like(out))
    forget()
    assert not any(bool(grad.any()) for grad in found)


@pytest.mark.parametrize("hides", [0, 1])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_relu_of_nan_is_nan(machine: Machine, p: float, hides: int) -> None:
    """Whatever cublasLt makes of it: one that hides it is not trusted with relu."""
    x, params, *rest = chain(64, [5, 9, 7, 2], p)
    x[3, 2], x[5] = float("nan"), float("inf")
    params[2][4, 1] = float("nan")
    wanted = [t.requires_grad_() for t in params]
    forget()
    with machine.library.set("no_nan", hides):
        for _ in range(2):
            out = MLP.target(x, params, *rest)
            with replayed(mlp_mask.masks(out)):
                plain = MLP.reference(x, params, *rest)
            assert plain.isnan().any() and torch.equal(out.isnan(), plain.isnan())
            with torch.no_grad():
                inferred = MLP.target(x, params, *rest)
            assert p or torch.equal(inferred.isnan(), plain.isnan())
        upstream = torch.randn_like(out)
        found = torch.autograd.grad(out, wanted, upstream)
    # The mask of a product may be 0 at NaN, so it may end there; but no step passes unseen.
    assert found[-2].isnan().any()
    products = machine.products()
    if hides:  # questions only, of training and of inference
        assert not set(products) & {"RELU_AUX_BIAS"} or products.count("RELU_AUX_BIAS") == 4
        assert products.count("RELU_BIAS") in (0, 4)
    forget()


def test_nothing_is_asked_while_a_graph_is_recorded(cublaslt_machine: Machine) -> None:
    """Nothing can be tested during a capture: an unknown algorithm is not trusted with the mask."""
    args = chain(6, [5, 9, 2], 0.0)
    for p in args[1]:
        p.requires_grad_()
    forget()
    with recording.recording():
        MLP.target(*args)
    assert cublaslt_machine.products() == ["BIAS"]
    MLP.target(*args)
    with recording.recording():
        MLP.target(*args)
    assert cublaslt_machine.products() == ["RELU_AUX_BIAS"] * 4  # two are questions
