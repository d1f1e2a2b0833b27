"""field_attention of so many queries and keys that its CPU kernels do the queries in blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from recast.runtime import device
from recast.runtime.layers.field_attention import field_attention, reference

QUERIES, KEYS = 150, 97  # two blocks of each kernel's, of unequal height; the last register is part


def _given(form: str) -> list[Any]:
    g = torch.Generator().manual_seed(3)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    args: list[Any] = [rand(2, 2, QUERIES, 5), rand(2, 2, KEYS, 5), rand(2, 2, KEYS, 11), 0.4]
    if form == "far scores":  # each is rounded by more than e^88 can hold
        args = [args[0] * 1e5, args[1] * 1e5, args[2], 0.3]
    args += [0.3 if form == "dropout, weights" else 0.0, True, form == "dropout, weights"]
    if form == "masks":
        some = torch.rand(2, 1, QUERIES, KEYS, generator=g) < 0.4
        args += [rand(QUERIES, KEYS), some, -4.0]
    elif form == "no key is left":
        bias = rand(2, 1, QUERIES, 1).expand(-1, -1, -1, KEYS).clone()
        bias[:, :, 70:80] = -torch.inf
        args += [bias, None, 0.0, True]
    return args


def _run(call: Any, args: list[Any], dtype: torch.dtype) -> list[Tensor]:
    """The results and the gradients of all floats."""
    cast = [
        t.to(dtype).requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t
        for t in args
    ]
    leaves = [t for t in cast if isinstance(t, Tensor) and t.requires_grad]
    torch.manual_seed(5)
    outs = call(*cast)
    g = torch.Generator().manual_seed(7)
    up = [torch.randn(t.shape, generator=g).to(dtype) for t in outs]
    return [*outs, *torch.autograd.grad(outs, leaves, up)]


@pytest.mark.parametrize(
    "form", ["plain", "dropout, weights", "masks", "no key is left", "far scores"]
)
@pytest.mark.parametrize("isa", device.ISAS)
def test_blocks_of_queries(form: str, isa: str) -> None:
    """Dropout's mask is that of float32, so there the judge is the same definition in float32."""
    why = device.why_not(isa)()
    if why is not None:
        pytest.skip(why)
    args = _given(form)
    judge = torch.float32 if "dropout" in form else torch.float64
    with device.use(isa):
        ours = _run(field_attention.target, args, torch.float32)
    for a, b in zip(ours, _run(reference, args, judge), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-4)
