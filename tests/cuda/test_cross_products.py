"""Cross networks choose products among all algorithms, in TF32 with transposed operands too."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import cublaslt_stand_in
import emulated_gpu
import pytest
import torch
from emulated_chains import Machine
from torch import Tensor

from recast.runtime import device, fastest
from recast.runtime.interactions.cross_matrix import cross_matrix
from recast.runtime.interactions.cross_mixture import cross_mixture
from recast.runtime.mlp import products as mlp_products
from recast.runtime.op import Op, Sample

pytestmark = pytest.mark.skipif(
    device.extension() is None, reason=f"the extension: {device.why_missing()}"
)
COARSE = 2**-8  # of a norm: some roundings of TF32 behind each other


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tf32: None) -> Iterator[Machine]:
    """A machine for which transposed operands are the fastest, then cublasLt's second algorithm."""

    def seconds(way: Any) -> float:
        if not isinstance(way, functools.partial):
            return 4.0
        return 1.0 if way.keywords.get("turned") else 3.0 - way.args[0]

    monkeypatch.setattr(fastest, "_chosen", {})
    monkeypatch.setattr(fastest, "timer_of", lambda like: seconds)
    monkeypatch.setattr(mlp_products, "MANY", 1)
    with cublaslt_stand_in.serve() as library, emulated_gpu.serve() as gpu:
        yield Machine(library, gpu)


def run(call: Any, args: Any, dtype: torch.dtype) -> list[Tensor]:
    """The result, and the gradients of all inputs."""
    leaves: dict[int, Tensor] = {}

    def one(value: Any) -> Any:
        if isinstance(value, list):
            return [one(v) for v in value]
        if not isinstance(value, Tensor):
            return value
        made = value.detach().to(dtype, copy=True).requires_grad_()
        return leaves.setdefault(id(value), made)

    out = call(*[one(value) for value in args])
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad(out, [*leaves.values()], upstream.to(dtype), allow_unused=True)
    return [out.detach(), *(g for g in found if g is not None)]


SAMPLES = [
    pytest.param(op, sample, id=f"{op.name}-{sample.label}")
    for op in (cross_matrix, cross_mixture)
    for sample in op.samples()
    if sample.args[0].numel() and sample.label != "drop"
]


@pytest.mark.parametrize(("op", "sample"), SAMPLES)
def test_every_sample(timed: Machine, op: Op, sample: Sample) -> None:
    found = run(op.target, sample.args, torch.float32)
    truth = run(op.reference, sample.args, torch.float64)
    for a, b in zip(found, truth, strict=True):
        assert a.shape == b.shape
        assert float((a.double() - b).norm()) <= COARSE * float(b.norm()) + 1e-12


@pytest.mark.parametrize("op", [cross_matrix, cross_mixture], ids=lambda op: op.name)
def test_what_is_chosen(timed: Machine, op: Op) -> None:
    for sample in op.samples():
        run(op.target, sample.args, torch.float32)
    ways: dict[str, set[str]] = {}
    for key, way in fastest._chosen.items():
        ways.setdefault(key[0], set()).add(way)  # type: ignore[index]
    assert ways["linear"] == {"cublaslt second"}
    for kind in ("product", "weight gradient"):
        assert "cublaslt, turned" in ways[kind]
