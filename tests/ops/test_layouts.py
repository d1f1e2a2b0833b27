"""Arguments that lie in memory as few tensors do: spread out, repeated, or copied for one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_checks import OWN_MASKS, STATEFUL, TRAINED, cast, evaluate, expected, upstream_of
from torch import Tensor
from torch.nn import functional as F

from recast.runtime import OPS, device, tolerances
from recast.runtime.op import Op, Sample

# Not those that draw masks, which follow the layout; torch itself reads statistics of a batch norm
# as if they were contiguous.
CHECKED = [op for op in TRAINED if op.name not in (*STATEFUL, *OWN_MASKS, "dropout_global")]
SAMPLES = [
    pytest.param(op, sample, id=f"{op.name}-{sample.label}")
    for op in CHECKED
    for sample in list(op.samples())[:3]
]
NONE: list[None] = [None]


def spread(t: Tensor) -> Tensor:
    """``t`` in every second place of a block, behind the first; what lies between is no value."""
    between = float("nan") if t.is_floating_point() else -1
    room = torch.full((2 * t.numel() + 1,), between, dtype=t.dtype)
    strides = [2 * s for s in torch.empty(t.shape, device="meta").stride()]
    return room.as_strided(t.shape, strides, 1).copy_(t.detach())


@pytest.mark.parametrize(("op", "sample"), SAMPLES)
def test_spread_arguments(op: Op, sample: Sample) -> None:
    if device.extension() is None:
        pytest.skip("no C++ kernels")
    made: dict[int, Tensor] = {}

    def one(value: Any) -> Any:  # a tensor that is passed twice stays one
        if isinstance(value, Tensor):
            return made.setdefault(id(value), spread(value))
        return [one(x) for x in value] if isinstance(value, list) else value

    plain, truth, scale = expected(op, sample, torch.float32)
    with device.use(device.extension().isa()):
        args = tuple(one(arg) for arg in sample.args)
        ours = evaluate(op.target, op, args, upstream_of(op, sample, torch.float32))
    for part in (0, 1):
        for a, b, c in zip(ours[part], plain[part], truth[part], strict=True):
            assert tolerances.excess(a, b, c, scale=scale) <= 1


@pytest.mark.parametrize("op", CHECKED, ids=lambda op: op.name)
def test_kernels_under_another_default_dtype(op: Op) -> None:
    """``torch.set_default_dtype`` is not that of the arguments, nor of what is made from them."""
    if device.extension() is None:
        pytest.skip("no C++ kernels")
    sample, found = next(iter(op.samples())), []
    with device.use(device.extension().isa()):
        for default in (torch.float32, torch.float64):
            upstream = upstream_of(op, sample, torch.float32)
            torch.set_default_dtype(default)
            try:
                found.append(evaluate(op.target, op, cast(sample.args, torch.float32), upstream))
            finally:
                torch.set_default_dtype(torch.float32)
    for one, other in zip(*found, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(5, 4), (3, 5, 4)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_repeated_along_the_last_dimension(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """As of ``user.unsqueeze(1).expand(-1, items)``: one element lies behind many places."""
    table, off = torch.randn(50, 7, requires_grad=True), [False]
    ids = torch.randint(0, 50, (*shape[:-1], 1), dtype=dtype).expand(shape)
    (found,) = OPS["embedding_bags"].target(
        [table], [ids], NONE, NONE, [0], ["none"], NONE, off, off
    )
    assert torch.equal(found, table[ids.long()])
    upstream = torch.randn_like(found)
    grads = [torch.autograd.grad(y, table, upstream)[0] for y in (found, table[ids.long()])]
    torch.testing.assert_close(grads[0].to_dense(), grads[1])


def test_weights_of_ids_that_are_repeated() -> None:
    """The gradient of per-sample weights, each at its own place in spite of the ids'."""
    table = torch.randn(50, 7)
    ids, weights = torch.randint(0, 50, (6, 1)).expand(6, 3), torch.randn(6, 3, requires_grad=True)
    upstream = torch.randn(6, 7)
    off = [False]
    (found,) = OPS["embedding_bags"].target(
        [table], [ids], NONE, [weights], [0], ["sum"], NONE, off, off
    )
    right = F.embedding_bag(ids.contiguous(), table, mode="sum", per_sample_weights=weights)
    grads = [torch.autograd.grad(y, weights, upstream)[0] for y in (found, right)]
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(*grads)


def test_half_numbers_below_the_normal_ones_when_others_are_flushed() -> None:
    """``torch.set_flush_denormal`` is about floats: those of float16 are normal as floats."""
    table = torch.tensor([[2.0**-24, -(2.0**-15), 3 * 2.0**-20, 1.0]]).half()
    off = [False]
    try:
        torch.set_flush_denormal(True)
        for isa in device.ISAS:
            if device.why_not(isa)() is not None:
                continue
            with device.use(isa):
                (found,) = OPS["embedding_bags"].target(
                    [table], [torch.zeros(1, 2, dtype=torch.int64)], NONE, NONE, [0], ["sum"],
                    NONE, off, off,
                )  # fmt: skip
            assert torch.equal(found.double(), 2 * table.double())
    finally:
        torch.set_flush_denormal(False)
