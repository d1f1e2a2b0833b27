"""Lookups in float16 and bfloat16 tables: sums in float32, rounded once, as in torch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from recast.runtime import OPS, device, tolerances
from recast.runtime.op import Sample

BAGS = OPS["embedding_bags"]
STORED = OPS["quantised_embedding_bags"].target
HALVES = [torch.float16, torch.bfloat16]
DTYPES = pytest.mark.parametrize("dtype", HALVES, ids=lambda d: str(d).removeprefix("torch."))


@pytest.fixture(params=device.ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if why := device.why_not(request.param)():
        pytest.skip(why)
    with device.use(request.param):
        yield request.param


def cast(args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """A copy of ``args`` with its floats in ``dtype``; strides are kept."""

    def one(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return copy.deepcopy(value).to(dtype).requires_grad_()
        return value

    return tuple([one(x) for x in a] if isinstance(a, list) else a for a in args)


def evaluate(call: Any, args: tuple[Any, ...], upstream: list[Tensor]) -> list[Tensor]:
    """Outputs, then the gradients of all floats."""
    leaves = [t for a in args for t in a if isinstance(t, Tensor) and t.is_floating_point()]
    outs = call(*args)
    into = [u.to(o.dtype) for u, o in zip(upstream, outs, strict=True)]
    grads = torch.autograd.grad(outs, leaves, into, allow_unused=True)
    dense = [
        torch.zeros_like(t) if g is None else g.to_dense() if g.layout != torch.strided else g + 0
        for g, t in zip(grads, leaves, strict=True)
    ]
    return [*outs, *dense]


@DTYPES
@pytest.mark.parametrize("sample", BAGS.samples(), ids=lambda s: s.label)
def test_against_float64(sample: Sample, dtype: torch.dtype, isa: str) -> None:
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        shapes = [o.shape for o in BAGS.reference(*sample.args)]
    upstream = [torch.randn(s, generator=g).to(dtype) for s in shapes]
    ours = evaluate(BAGS.target, cast(sample.args, dtype), upstream)
    plain = evaluate(BAGS.reference, cast(sample.args, dtype), upstream)
    wide = cast(cast(sample.args, dtype), torch.float64)
    truth = evaluate(BAGS.reference, wide, upstream)
    scale = max((float(t.detach().abs().max()) for t in truth if t.numel()), default=1)
    for k, (a, b, c) in enumerate(zip(ours, plain, truth, strict=True)):
        assert a.dtype == dtype and a.shape == b.shape
        assert tolerances.excess(a, b, c, scale=scale) <= 1, k


@DTYPES
def test_the_kernels_take_them(dtype: torch.dtype) -> None:
    """They do not leave them to torch."""
    module = device.extension()
    if module is None:
        pytest.skip(str(device.why_missing()))
    layout = module.EmbeddingLayout([0], [0], [None], [False])
    table, ids = torch.randn(9, 5).to(dtype), torch.randint(0, 9, (4, 3))
    assert module.embedding_step(layout, [table], [ids], [None], [None]) is not None
    assert module.embedding_step(layout, [table.double()], [ids], [None], [None]) is None


@DTYPES
def test_subclasses_are_read_by_their_attributes(dtype: torch.dtype) -> None:
    """As every tensor is if torch has no DLPack exchange table."""

    class Own(torch.Tensor):
        pass

    module = device.extension()
    if module is None:
        pytest.skip(str(device.why_missing()))
    layout = module.EmbeddingLayout([0], [0], [None], [False])
    table, ids = torch.randn(9, 5).to(dtype), torch.randint(0, 9, (4, 3))
    outs = []
    for kind in (Tensor, Own):
        given = [[table.as_subclass(kind)], [ids.as_subclass(kind)], [None], [None]]
        step = module.embedding_step(layout, *given)
        outs.append(torch.empty(4, 5, dtype=dtype))
        assert step.shapes() == [(4, 5)]
        assert step.run([outs[-1]], [], 1) is None
    assert torch.equal(*outs)


@DTYPES
def test_every_number_is_read_exactly(dtype: torch.dtype, isa: str) -> None:
    """All 65536 of them, infinities, NaNs and subnormal numbers among them, in wide rows."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    table = bits.view(dtype).reshape(-1, 32)
    name = "fp16" if dtype is torch.float16 else "bf16"
    ids = torch.arange(len(table)).reshape(-1, 1)
    for width in (32, 31, 5):  # whole registers, and what is left over
        rows = table[:, :width].contiguous()
        (got,) = STORED([rows], [ids], [None], [None], [0], ["sum"], [None], [False], [name],
                        [width], False)  # fmt: skip
        wanted = rows.float() + 0.0
        assert torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(got.nan_to_num(), wanted.nan_to_num())


@DTYPES
@pytest.mark.parametrize("width", [1, 7, 16, 31, 64, 129])
def test_sums_are_rounded_to_nearest_once(dtype: torch.dtype, isa: str, width: int) -> None:
    g = torch.Generator().manual_seed(width)
    exponents = torch.randint(-30, 17, (400, width), generator=g)
    table = torch.ldexp(torch.randn(400, width, generator=g), exponents).to(dtype)
    table[7, 0], table[9, 0] = float("inf"), float("nan")
    ids = torch.randint(0, 400, (500, 2), generator=g)
    (got,) = BAGS.target([table], [ids], [None], [None], [0], ["sum"], [None], [False], [False])
    wanted = (table[ids[:, 0]].float() + table[ids[:, 1]].float()).to(dtype)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(), wanted.nan_to_num())


@DTYPES
@pytest.mark.parametrize("threads", [1, 3])
def test_instruction_sets_and_threads_agree(dtype: torch.dtype, threads: int) -> None:
    g = torch.Generator().manual_seed(2)
    table = torch.randn(900, 77, generator=g).to(dtype)
    ids, weights = torch.randint(0, 900, (800, 9), generator=g), torch.randn(800, 9, generator=g)
    args = (
        [table], [ids] * 4, [None] * 4, [None, weights.to(dtype), None, None], [0] * 4,
        ["sum", "sum", "mean", "max"], [None, 3, 3, None], [False] * 4, [False] * 4,
    )  # fmt: skip
    before = torch.get_num_threads()
    wanted = BAGS.target(*args)
    for name in device.ISAS:
        if device.why_not(name)():
            continue
        torch.set_num_threads(threads)
        try:
            with device.use(name):
                got = BAGS.target(*args)
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@DTYPES
def test_mixed_dtypes_in_one_call(dtype: torch.dtype) -> None:
    """Each output in the dtype of its table."""
    tables = [torch.randn(9, 8), torch.randn(9, 8).to(dtype), torch.randn(9, 8)]
    ids = [torch.randint(0, 9, (5, 3)) for _ in tables]
    outs = BAGS.target(tables, ids, [None] * 3, [None] * 3, [0, 1, 2], ["sum"] * 3, [None] * 3,
                       [False] * 3, [False] * 3)  # fmt: skip
    for out, table, i in zip(outs, tables, ids, strict=True):
        assert out.dtype == table.dtype
        torch.testing.assert_close(out, table.float()[i].sum(1).to(table.dtype))
