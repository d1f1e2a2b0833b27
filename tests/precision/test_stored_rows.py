"""Rows below float32: their formats, their errors, and lookups that read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from recast.errors import DtypeError, IdError, InputError, UsageError
from recast.runtime import OPS, device, tolerances
from recast.runtime.embedding import precision as formats

BAGS = OPS["embedding_bags"]
OP = OPS["quantised_embedding_bags"]
STEPS = {"int8": 255, "int4": 15}


@pytest.fixture(params=[*device.ISAS, "torch"])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    if name in device.ISAS and (why := device.why_not(name)()):
        pytest.skip(why)
    with device.use(name):
        yield name


def rows(count: int, dim: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, dim, generator=g) * torch.rand(count, 1, generator=g)


# ---------------------------------------------------------------- formats


@pytest.mark.parametrize("precision", formats.PRECISIONS)
@pytest.mark.parametrize("dim", [1, 2, 7, 16, 33, 64])
def test_rows_are_near(precision: str, dim: int) -> None:
    weight = rows(50, dim)
    packed = formats.pack(weight, precision)
    assert packed.element_size() * packed.shape[1] == formats.row_bytes(precision, dim)
    stored = formats.unpack(packed, precision, dim)
    assert stored.dtype == torch.float32 and stored.shape == weight.shape
    error = (stored - weight).abs()
    if precision in STEPS:
        span = weight.amax(1) - weight.amin(1)
        # Half a step; in int4, bias and scale are rounded to float16 besides.
        slack = 2**-10 * (span + weight.abs().amax(1)) if precision == "int4" else 2**-22
        assert bool((error.amax(1) <= span / STEPS[precision] / 2 + slack).all())
    else:
        unit = 2**-11 if precision == "fp16" else 2**-8
        assert bool((error <= weight.abs() * unit + 2**-24).all())
    found = formats.loss(weight, packed, precision)
    assert found.most == pytest.approx(float(error.max()), abs=1e-12)
    assert found.mean == pytest.approx(float(error.double().mean()), rel=1e-6)


@pytest.mark.parametrize("precision", formats.PRECISIONS)
def test_rows_of_one_number_are_exact(precision: str) -> None:
    weight = torch.tensor([[0.0], [1.0], [-2.5]]).expand(3, 9)
    stored = formats.unpack(formats.pack(weight, precision), precision, 9)
    assert torch.equal(stored, weight)


@pytest.mark.parametrize("precision", formats.PRECISIONS)
def test_empty_tables(precision: str) -> None:
    weight = torch.empty(0, 6)
    packed = formats.pack(weight, precision)
    assert formats.unpack(packed, precision, 6).shape == (0, 6)
    assert formats.loss(weight, packed, precision) == (0.0, 0.0)


def test_packing_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = rows(41, 10)
    whole = {p: formats.pack(weight, p) for p in formats.PRECISIONS}
    monkeypatch.setattr(formats, "_PART", 35)
    for precision, packed in whole.items():
        assert torch.equal(formats.pack(weight, precision), packed)


@pytest.mark.parametrize("dim", [8, 64])
def test_torch_reads_the_same_rows(dim: int) -> None:
    """int8 and int4 are the formats of torch.ops.quantized."""
    weight = rows(40, dim)
    reads = {
        "int8": torch.ops.quantized.embedding_bag_byte_unpack,
        "int4": torch.ops.quantized.embedding_bag_4bit_unpack,
    }
    packs = {
        "int8": torch.ops.quantized.embedding_bag_byte_prepack,
        "int4": torch.ops.quantized.embedding_bag_4bit_prepack,
    }
    for precision, unpack in reads.items():
        packed = formats.pack(weight, precision)
        ours = formats.unpack(packed, precision, dim)
        torch.testing.assert_close(ours, unpack(packed), rtol=1e-6, atol=1e-6)
        theirs = unpack(packs[precision](weight))
        torch.testing.assert_close(
            (ours - weight).abs().amax(1), (theirs - weight).abs().amax(1), rtol=0.1, atol=1e-3
        )


# ---------------------------------------------------------------- lookups


def stored(args: tuple[Any, ...], precision: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments of both ops for the same lookups, the plain one over the unpacked rows."""
    weights, *lookups, sparse = args[:9]
    dims = [w.shape[1] for w in weights]
    packed = [formats.pack(w, precision) for w in weights]
    wide = [formats.unpack(p, precision, d) for p, d in zip(packed, dims, strict=True)]
    low = (packed, *lookups, [precision] * len(weights), dims, False)
    return low, (wide, *lookups, sparse)


@pytest.mark.parametrize("precision", formats.PRECISIONS)
@pytest.mark.parametrize("sample", BAGS.samples(), ids=lambda s: s.label)
def test_lookups(sample: Any, precision: str, kernel: str) -> None:
    """The results of embedding_bags over the unpacked rows: bit for bit if C++ kernels run."""
    low, plain = stored(sample.args, precision)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            ours = OP.target(*low)
            wanted = BAGS.target(*plain)
            for a, b in zip(ours, wanted, strict=True):
                assert a.dtype == torch.float32 and not a.requires_grad
                if kernel == "torch":
                    assert tolerances.excess(a, b, b.double()) <= 1
                else:
                    assert torch.equal(a, b)
    for a, b in zip(OP.reference(*low), wanted, strict=True):
        assert tolerances.excess(a, b, b.double()) <= 1


def test_threads() -> None:
    weight, before = rows(3000, 40), torch.get_num_threads()
    ids = torch.randint(0, 3000, (900, 7), generator=torch.Generator().manual_seed(1))
    args = [ids], [None], [None], [0], ["sum"], [None], [False], ["int4"], [40], False
    outs = []
    for count in (1, 3):
        torch.set_num_threads(count)
        try:
            outs.append(OP.target([formats.pack(weight, "int4")], *args)[0])
        finally:
            torch.set_num_threads(before)
    assert torch.equal(*outs)


def test_gradient_of_sample_weights() -> None:
    weight, ids = rows(9, 6), torch.tensor([[1, 8, 1], [0, 2, 2]])
    upstream = torch.randn(2, 6)
    factors = torch.randn(2, 3)
    low, plain = stored(
        ([weight], [ids], [None], [factors], [0], ["sum"], [2], [False], [False]), "int8"
    )
    found = []
    for target, args in ((OP.target, low), (BAGS.target, plain)):
        leaf = factors.clone().requires_grad_()
        (out,) = target(*args[:3], [leaf], *args[4:])
        found += torch.autograd.grad(out, leaf, upstream)
    torch.testing.assert_close(*found)


def look_up(ids: Tensor, **changes: Any) -> list[Tensor]:
    given = {
        "offsets": None, "weights": None, "mode": "sum", "padding": None, "precision": "int8",
        "dim": 6, "training": False,
    } | changes  # fmt: skip
    return OP.target(
        [formats.pack(rows(10, 6), "int8")], [ids], [given["offsets"]], [given["weights"]], [0],
        [given["mode"]], [given["padding"]], [False], [given["precision"]], [given["dim"]],
        given["training"],
    )  # fmt: skip


def test_errors(kernel: str) -> None:
    good = torch.tensor([[1, 2]])
    with pytest.raises(IdError, match=r"id 10 of lookup 0 .* outside its 10 rows"):
        look_up(torch.tensor([[1, 10]]))
    with pytest.raises(IdError, match=r"offsets of lookup 0 .* start at 1"):
        look_up(torch.tensor([1, 2]), offsets=torch.tensor([1]))
    with pytest.raises(DtypeError, match=r"ids of lookup 0 .* are float32"):
        look_up(good.float())
    with pytest.raises(DtypeError, match=r"per_sample_weights of lookup 0 .* are float64"):
        look_up(good, weights=torch.ones(1, 2, dtype=torch.float64))
    with pytest.raises(InputError, match="unknown pooling mode 'median'"):
        look_up(good, mode="median")
    with pytest.raises(InputError, match="unknown precision 'int2'"):
        look_up(good, precision="int2")
    with pytest.raises(InputError, match=r"table 0 has shape .10, 14., but 7 columns in int8 take"):
        look_up(good, dim=7)
    with pytest.raises(UsageError, match="in train mode") as raised:
        look_up(good, training=True)
    assert "model.eval()" in raised.value.tries[0]
