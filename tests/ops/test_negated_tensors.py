"""Ops that are called by hand get tensors whose memory holds their values negated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from recast.runtime import OPS


def negated(x: Any) -> Any:
    """Equal tensors with the negative bit."""
    if isinstance(x, list):
        return [negated(y) for y in x]
    floats = isinstance(x, Tensor) and x.is_floating_point() and x.numel()
    return torch._neg_view(-x.detach()) if floats else x


def detached(x: Any) -> Any:
    if isinstance(x, list):
        return [detached(y) for y in x]
    return x.detach().clone() if isinstance(x, Tensor) else x


def results(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else [t for t in out if isinstance(t, Tensor)]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", sorted(OPS))
def test_they_are_read_as_what_they_are(name: str, inference: bool) -> None:
    op = OPS[name]
    for sample in op.samples():
        found = []
        for how in (detached, negated):
            args = [how(arg) for arg in sample.args]
            torch.manual_seed(0)
            with torch.inference_mode(inference):
                found.append(results(op.target(*args)))
        for plain, of_negated in zip(*found, strict=True):
            torch.testing.assert_close(of_negated, plain, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_gradients_and_autocast() -> None:
    target = OPS["dot_interaction"].target
    li, lj = torch.tril_indices(3, 3, -1)
    features = torch.randn(6, 3, 4)
    grads = []
    for leaf in (features.clone(), -features):
        leaf.requires_grad_()
        x = leaf if not grads else torch._neg_view(leaf)
        with torch.autocast("cpu", torch.bfloat16):
            both = [target([t], None, li, lj, 0) for t in (x, features)]
        torch.testing.assert_close(*both, rtol=2**-6, atol=2**-6)
        target([x], None, li, lj, 0).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(-grads[1], grads[0])
