"""The products of linear layers: both libraries against float64, and which of them is taken."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recast.runtime import tolerances
from recast.runtime.mlp import gemm

SHAPES = [(1, 3, 2), (65, 13, 512), (64, 257, 31), (33, 40, 1), (0, 8, 4), (70, 1, 600)]
LIBRARIES = ["torch", "onednn"]


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every product goes to one library, whatever its size and whatever the processor."""
    taken = request.param == "onednn"
    if taken and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(gemm, "why_not_onednn", lambda: None if taken else "held to torch's")
    monkeypatch.setattr(gemm, "in_halves", lambda: False)
    monkeypatch.setattr(gemm, "WORTH_ONEDNN", 1.0)
    return str(request.param)


def tensors(rows: int, wide: int, high: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows + wide)
    x, grad = torch.randn(rows, wide, generator=g), torch.randn(rows, high, generator=g)
    return x, torch.randn(high, wide, generator=g), torch.randn(high, generator=g), grad


def near(ours: Tensor, plain: Tensor, truth: Tensor, terms: int) -> None:
    assert ours.dtype is torch.float32
    assert tolerances.excess(ours, plain, truth, scale=max(terms, 1) ** 0.5) <= 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_products(shape: tuple[int, int, int], strided: bool, library: str) -> None:
    x, weight, bias, grad = tensors(*shape)
    if strided:
        x, weight, grad = (t.repeat(1, 2)[:, : t.shape[1]] for t in (x, weight, grad))
    wide = [t.double() for t in (x, weight, bias, grad)]
    out = torch.nn.functional.linear(x, weight, bias)
    truth = torch.nn.functional.linear(*wide[:3])
    near(gemm.linear(x, weight, bias), out, truth, shape[1])
    near(gemm.linear(x, weight, bias, relu=True), out.relu(), truth.relu(), shape[1])
    near(gemm.linear(x, weight, None), x @ weight.t(), wide[0] @ wide[1].t(), shape[1])
    near(gemm.of_input(grad, weight), grad @ weight, wide[3] @ wide[1], shape[2])
    of_weight = gemm.of_weight(grad, x)
    near(of_weight, grad.t() @ x, wide[3].t() @ wide[0], shape[0])
    assert of_weight.is_contiguous(), "or torch copies it when it becomes a .grad"


def test_inputs_of_more_dimensions(library: str) -> None:
    x, weight, bias, _ = tensors(12, 40, 30)
    out = gemm.linear(x.view(3, 4, 40), weight, bias)
    assert out.shape == (3, 4, 30)
    assert torch.equal(out.view(12, 30), gemm.linear(x, weight, bias))


def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The products that oneDNN is given from now on."""
    found: list[str] = []
    onednn = gemm._onednn

    def spy(x: Tensor, weight: Tensor, bias: Tensor | None, then: str = "none") -> Tensor:
        found.append(then)
        return onednn(x, weight, bias, then)

    monkeypatch.setattr(gemm, "_onednn", spy)
    return found


def test_what_onednn_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large products in fp32, unless the user switched it off."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(gemm, "why_not_onednn", lambda: None)
    monkeypatch.setattr(gemm, "in_halves", lambda: False)
    found = calls(monkeypatch)
    x, weight, bias, _ = tensors(128, 256, 128)
    gemm.linear(x, weight, bias, relu=True)
    assert found == ["relu"]
    gemm.linear(x[:2], weight, bias)
    gemm.linear(x.double(), weight.double(), bias.double())
    gemm.linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16())
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    gemm.linear(x, weight, bias)
    assert found == ["relu"]


def test_what_onednn_is_given_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger products only, and no gradients of weights."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(gemm, "why_not_onednn", lambda: None)
    monkeypatch.setattr(gemm, "in_halves", lambda: True)
    found = calls(monkeypatch)
    x, weight, bias, grad = tensors(512, 256, 256)
    gemm.linear(x[:256], weight, bias)
    gemm.of_input(grad[:256], weight)
    gemm.of_weight(grad, x)
    assert found == []
    gemm.linear(x, weight, bias, relu=True)
    gemm.of_input(grad, weight)
    assert found == ["relu", "none"]


@pytest.mark.parametrize(
    ("vendor", "family", "capability", "halves"),
    [
        ("AuthenticAMD", 25, "AVX512", True),
        ("AuthenticAMD", 26, "AVX512", False),
        ("AuthenticAMD", 25, "AVX2", False),
        ("GenuineIntel", 6, "AVX512", False),
    ],
)
def test_processors_that_halve(
    vendor: str, family: int, capability: str, halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 97\n"
    monkeypatch.setattr(gemm.Path, "exists", lambda _: True)
    monkeypatch.setattr(gemm.Path, "read_text", lambda _: text)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert gemm.in_halves.__wrapped__() == halves


@pytest.mark.parametrize("vendor", ["GenuineIntel", "AuthenticAMD"])
def test_intel_keeps_its_own(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm.Path, "exists", lambda _: True)
    monkeypatch.setattr(gemm.Path, "read_text", lambda _: f"vendor_id : {vendor}\n")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    why = gemm.why_not_onednn.__wrapped__()
    assert why == ("MKL takes AVX-512 on this processor" if vendor == "GenuineIntel" else None)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert gemm.why_not_onednn.__wrapped__() == "this processor has no AVX-512"
