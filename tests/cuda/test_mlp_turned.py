"""TF32 gradients by products of a transposed operand: the kernel that transposes, the products."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import cublaslt_stand_in
import emulated_gpu
import pytest
import torch
from emulated_chains import BF16, F32, MLP, Machine, cast, chain, leaves
from emulated_gpu import Emulated
from torch import Tensor

from recast.runtime import device, fastest
from recast.runtime.mlp import mask as mlp_mask
from recast.runtime.mlp import products as mlp_products
from recast.runtime.mlp import turned as mlp_turned
from recast.runtime.mlp.mask import Gate
from recast.runtime.recorded import recording

pytestmark = pytest.mark.skipif(
    device.extension() is None, reason=f"the extension: {device.why_missing()}"
)
COPY = ", turned"


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Numbers that TF32 represents exactly, so that only sums are rounded."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.bfloat16().float()


@pytest.mark.parametrize(
    "shape", [(1, 1), (4, 4), (64, 64), (3, 200), (65, 67), (130, 5), (200, 132)], ids=str
)
def test_turned(emulated: Emulated, shape: tuple[int, int]) -> None:
    """Bit for bit, wherever the rows start, and with zeros after the rows of the copy."""
    rows, columns = shape
    wide = rand(rows + 1, columns + 4)
    wide[0, 0], wide[0, 1] = torch.nan, -0.0
    flat = wide.flatten()
    for matrix in (
        wide[:rows, :columns].contiguous(), wide[:rows, :columns], wide[1:, 1 : columns + 1],
        flat[1 : 1 + rows * columns].view(rows, columns), rand(columns, rows).t(),
    ):  # fmt: skip
        found = mlp_turned.turned(emulated, matrix)
        whole = found.t().as_strided((columns, -(-rows // 4) * 4), (found.stride(1), 1))
        assert torch.equal(found.view(torch.int32), matrix.view(torch.int32))
        assert found.stride(0) == 1 and found.stride(1) % 4 == 0 and found.data_ptr() % 16 == 0
        assert not whole[:, rows:].any() and whole.is_contiguous()
    assert set(emulated.launched) == {"transpose"}


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tf32: None) -> Iterator[Machine]:
    """A machine for which products of transposed operands are the fastest, by algorithm 2."""

    def seconds(way: Any) -> float:
        mine = isinstance(way, functools.partial) and way.keywords.get("turned")
        return 2.0 - way.args[0] if mine else 3.0

    monkeypatch.setattr(fastest, "_chosen", {})
    monkeypatch.setattr(fastest, "_times", {})
    monkeypatch.setattr(fastest, "timer_of", lambda like: seconds)
    monkeypatch.setattr(mlp_products, "MANY", 64)
    with cublaslt_stand_in.serve() as library, emulated_gpu.serve() as gpu:
        yield Machine(library, gpu)


def chosen(kind: str) -> set[str]:
    return {way for key, way in fastest._chosen.items() if key[0] == kind}  # type: ignore[index]


SHAPES = [(65, 3, 5), (70, 13, 30), (64, 64, 130), (100, 2, 2)]
GATES = ["none", "bits", "dropout", "output"]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradient_of_an_input(timed: Machine, shape: tuple[int, int, int], gate: str) -> None:
    """Beside float64, of operands that lie apart too."""
    rows, out, width = shape
    weight, y = rand(out, width, seed=2), rand(rows, width, seed=3)
    bits = mlp_mask.empty(rows, width, y)
    mlp_mask.activate(timed.gpu, y, None, bits, relu=True)
    by = {
        "none": None, "bits": Gate(bits), "dropout": Gate(bits, None, 1.25),
        "output": Gate(None, y.relu()),
    }[gate]  # fmt: skip
    for dy in (rand(rows, out), rand(rows, out + 3)[:, :out]):
        found = mlp_products.input_gradient(timed.gpu, dy, weight, by, None if by is None else F32)
        dx = dy.double() @ weight.double()
        if by is not None:
            dx = torch.where(y > 0, dx * by.scale, 0.0)
            if found.finish is not None:
                found.finish()
            assert found.sums is not None
            torch.testing.assert_close(found.sums.double(), dx.sum(0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.x.double(), dx, rtol=1e-5, atol=1e-5)
    kind = "input gradient" if gate in ("bits", "dropout") else "product"
    assert chosen(kind) == {f"cublaslt second{COPY}"}
    assert timed.gpu.launched.count("transpose") > 2


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradient_of_a_weight(timed: Machine, shape: tuple[int, int, int], bias: bool) -> None:
    rows, out, width = shape
    x, found = rand(rows, width + 4, seed=1)[:, :width], torch.full((out, width), torch.nan)
    sums = torch.full((out,), torch.nan) if bias else None
    for dy in (rand(rows, out), rand(rows, out + 3)[:, :out], rand(out, rows).t()):
        mlp_products.weight_gradient(dy, x, found, sums)()
        exact = dy.double().t() @ x.double()
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
        if sums is not None:
            torch.testing.assert_close(sums.double(), dy.double().sum(0), rtol=1e-4, atol=1e-4)
    assert chosen("weight gradient") == {f"cublaslt second{COPY}"}
    assert timed.products()[-1] == ("BGRAD" if bias else "NONE")


def test_sums_apart(timed: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """DRELU of a transposed weight, and a sum of columns."""

    def seconds(way: Any) -> float:
        apart = isinstance(way, functools.partial) and way.args[1:] == (True,)
        return 1.0 if apart and way.keywords.get("turned") else 2.0

    monkeypatch.setattr(fastest, "timer_of", lambda like: seconds)
    y, dy, weight = rand(70, 9, seed=1), rand(70, 5, seed=2), rand(5, 9, seed=3)
    bits = mlp_mask.empty(70, 9, y)
    mlp_mask.activate(timed.gpu, y, None, bits, relu=True)
    found = mlp_products.input_gradient(timed.gpu, dy, weight, Gate(bits), F32)
    assert chosen("input gradient") == {f"cublaslt, sums apart{COPY}"}
    assert timed.products()[-1] == "DRELU"
    dx = torch.where(y > 0, dy.double() @ weight.double(), 0.0)
    torch.testing.assert_close(found.x.double(), dx, rtol=1e-5, atol=1e-5)
    assert found.sums is not None
    torch.testing.assert_close(found.sums.double(), dx.sum(0), rtol=1e-4, atol=1e-4)


def step(args: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients, and the masks that were drawn."""
    wanted = [t.requires_grad_() for t in leaves(args)]
    torch.manual_seed(1)
    out = MLP.target(*args)
    masks = mlp_mask.masks(out)
    return list(torch.autograd.grad(out, wanted, torch.ones_like(out))), masks


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("widths", [[13, 24, 17, 3], [5, 7], [12, 16, 2]], ids=str)
def test_chains(timed: Machine, widths: list[int], p: float) -> None:
    """What the products of operands as they lie give; also after the weights changed, and while a
    step is recorded, when nothing can be chosen.
    """
    args = cast(chain(70, widths, p), F32)
    step(args)
    assert all(way.endswith(COPY) for kind in ("product", "weight gradient")
               for way in chosen(kind))  # fmt: skip
    for change in (0.0, 0.5):
        with torch.no_grad():
            for t in args[1]:
                t.add_(change)
        timed.gpu.launched.clear()
        found, masks = step(args)
        turns = timed.gpu.launched.count("transpose")
        assert turns >= len(widths) - 1
        with recording.recording():
            again, _ = step(args)
        assert timed.gpu.launched.count("transpose") == 2 * turns
        with device.use("cublaslt"):
            plain, others = step(args)
        assert timed.gpu.launched.count("transpose") == 2 * turns
        assert all(map(torch.equal, masks, others))
        for a, b, c in zip(found, again, plain, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-5)


def test_nothing_else_is_turned(timed: Machine) -> None:
    """Not in bf16, not in float32 that is no TF32, and not for few rows."""
    args = chain(70, [13, 24, 3], 0.0)
    step(cast(args, BF16))
    step((args[0][:63], *args[1:]))
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    step(args)
    assert "transpose" not in timed.gpu.launched
    assert not any(COPY in str(row) for row in fastest.timings())


def test_it_is_told(timed: Machine) -> None:
    step(chain(70, [13, 24, 16, 3], 0.0))
    rows = {str(r["key"]).split("'")[1]: r for r in fastest.timings()}
    for kind in ("product", "weight gradient", "input gradient"):
        assert rows[kind]["chosen"] == f"cublaslt second{COPY}"
        assert rows[kind][f"cublaslt{COPY}"] == 2000.0 and rows[kind]["plain"] == 3000.0
