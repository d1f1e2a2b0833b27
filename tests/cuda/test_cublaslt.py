"""Products by cublasLt: the hand-written declarations, and every call against a stand-in."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cublaslt_stand_in
import pytest
import simt_build
import torch
from cublaslt_stand_in import Library
from torch import Tensor

from recast.errors import KernelError
from recast.runtime import device
from recast.runtime.gpu import cublaslt, cuda_launch
from recast.runtime.gpu.cublaslt import Epilogue
from recast.runtime.mlp import mask as mlp_mask
from recast.runtime.tolerances import excess

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

pytestmark = pytest.mark.skipif(
    device.extension() is None, reason=f"the extension: {device.why_missing()}"
)


@pytest.fixture
def library() -> Iterator[Library]:
    with cublaslt_stand_in.serve() as served:
        yield served


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def nvidia_s_headers() -> Path | None:
    """The folder of the real cublasLt.h: of the package nvidia-cublas or a toolkit."""
    beside = simt_build.cuda_headers()
    homes = (os.environ.get(name) for name in ("CUBLAS_INCLUDE", "CUDA_HOME", "CUDA_PATH"))
    folders = [beside, *(Path(h) for h in homes if h), *(Path(h) / "include" for h in homes if h)]
    folders.append(Path("/usr/local/cuda/include"))
    return next((f for f in folders if (f / "cublasLt.h").is_file()), None)


def test_the_declarations_are_nvidia_s() -> None:
    found = nvidia_s_headers()
    if found is None:
        pytest.skip("no cublasLt.h here: it comes with nvidia-cublas or the whole toolkit")
    source = Path(__file__).with_name("cublaslt_abi_check.cpp")
    run = subprocess.run(
        ["g++", "-std=c++17", "-fsyntax-only", f"-I{simt_build.CSRC}", "-isystem", str(found),
         "-isystem", str(simt_build.cuda_headers()), str(source)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


def test_epilogues_and_types_are_numbered_alike_in_python() -> None:
    text = (simt_build.CSRC / "cublaslt_abi.h").read_text()
    declared = {name: int(value) for name, value in re.findall(r"\bk(\w+) = (\d+),", text)}
    names = {e: "".join(w.capitalize() for w in e.name.split("_")) for e in Epilogue}
    names |= {Epilogue.NONE: "Default", Epilogue.BGRAD: "BgradB"}
    assert {e: declared[name] for e, name in names.items()} == {e: int(e) for e in Epilogue}
    types = {F32: "Float32", F16: "Float16", BF16: "Bfloat16"}
    assert {t: declared[name] for t, name in types.items()} == cublaslt._TYPES


def test_the_real_library_takes_every_descriptor() -> None:
    """It makes and fills them without a GPU; only the handle it refuses to make."""
    headers = nvidia_s_headers()
    folders = [] if headers is None else [headers.parent / "lib", headers.parent / "lib64"]
    found = next((f / "libcublasLt.so.13" for f in folders if f.is_dir()), None)
    if found is None or not found.exists() or torch.cuda.is_available():
        pytest.skip("no libcublasLt.so.13 here, or a GPU")
    library = device.extension().CublasLt(str(found.resolve()))
    for epilogue in Epilogue:
        for dtype, out in ((F32, F32), (F16, F16), (BF16, F32)):
            types = (cublaslt._TYPES[dtype], cublaslt._TYPES[out], dtype is F32)
            with pytest.raises(RuntimeError, match=r"^cublasLtCreate: .*NOT_INITIALIZED$"):
                library.plan(
                    0, 8, 4, 8, True, False, *types, 8, 8, 8, int(epilogue), 128, 256, 256, 256,
                    256, 256, cublaslt.WORKSPACE, False, 0,
                )  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 7), (2, 9, 130), (33, 16, 24)], ids=str)
def test_a_product(library: Library, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Both operands as they lie or transposed, and rows further apart than they are long."""
    n, k, m = shape
    wide = rand(n, k + 3).to(dtype)
    for a in (rand(n, k).to(dtype), rand(k, n).to(dtype).t(), wide[:, :k]):
        for b in (rand(k, m, seed=1).to(dtype), rand(m, k, seed=1).to(dtype).t()):
            for of_out in {dtype, F32}:
                out = torch.full((n, m), float("nan"), dtype=of_out)
                ready = cublaslt.product(a, b, out, Epilogue.NONE)
                assert ready is not None
                ready.run(0.5)
                truth = 0.5 * a.double() @ b.double()
                plain = (0.5 * a.float() @ b.float()).to(of_out)
                assert excess(out, plain, truth) <= 1


def test_forward_epilogues(library: Library) -> None:
    x, weight, bias = rand(6, 5), rand(131, 5, seed=1), rand(131, seed=2)
    for epilogue in (Epilogue.RELU, Epilogue.RELU_BIAS, Epilogue.RELU_AUX, Epilogue.RELU_AUX_BIAS):
        biased, masked = "BIAS" in epilogue.name, "AUX" in epilogue.name
        mask = mlp_mask.empty(6, 131, x) if masked else None
        out = torch.empty(6, 131)
        used = bias if biased else None
        ready = cublaslt.product(x, weight.t(), out, epilogue, used, mask)
        assert ready is not None
        ready.run()
        plain = torch.nn.functional.linear(x, weight, used)
        torch.testing.assert_close(out, plain.relu())
        if mask is not None:
            assert torch.equal(mlp_mask.unpack(mask, 131), plain > 0)


def test_backward_epilogues(library: Library) -> None:
    dy, weight, below = rand(6, 4), rand(4, 9, seed=1), rand(6, 9, seed=2)
    bits = torch.zeros(6, 16, dtype=torch.uint8)
    for c in range(9):
        bits[:, c // 8] |= (below[:, c] > 0).to(torch.uint8) << c % 8
    truth = 1.25 * (dy @ weight) * (below > 0)
    for epilogue in (Epilogue.DRELU, Epilogue.DRELU_BGRAD):
        out, sums = torch.empty(6, 9), torch.empty(9)
        used = sums if epilogue is Epilogue.DRELU_BGRAD else None
        ready = cublaslt.product(dy, weight, out, epilogue, used, bits)
        assert ready is not None
        ready.run(1.25)
        torch.testing.assert_close(out, truth)
        if used is not None:
            torch.testing.assert_close(sums, truth.sum(0))
    out, sums = torch.empty(4, 9), torch.empty(4)
    ready = cublaslt.product(dy.t(), below, out, Epilogue.BGRAD, sums)
    assert ready is not None
    ready.run()
    torch.testing.assert_close(out, dy.t() @ below)
    torch.testing.assert_close(sums, dy.sum(0))


@pytest.fixture
def matmul() -> Iterator[object]:
    """torch's settings for products on CUDA, which end as they were."""
    settings = torch.backends.cuda.matmul
    before, precision = settings.fp32_precision, torch.get_float32_matmul_precision()
    yield settings
    torch.set_float32_matmul_precision(precision)
    settings.fp32_precision = before


def test_tf32_as_torch_s_settings_say(library: Library, matmul: Any) -> None:
    a, b, out = torch.full((2, 1), 1 + 2**-12), torch.ones(1, 3), torch.empty(2, 3)
    for setting, value in (("ieee", 1 + 2**-12), ("tf32", 1.0), ("none", 1 + 2**-12)):
        matmul.fp32_precision = setting
        ready = cublaslt.product(a, b, out, Epilogue.NONE)
        assert ready is not None
        ready.run()
        assert (out == value).all()
    for name, value in (("high", True), ("highest", False), ("medium", True)):
        torch.set_float32_matmul_precision(name)
        assert cublaslt.tf32(F32) is value and not cublaslt.tf32(BF16)
    matmul.allow_tf32 = False
    assert not cublaslt.tf32(F32)


def test_a_product_is_prepared_once(library: Library) -> None:
    a, b, out = rand(4, 8), rand(8, 8), torch.empty(4, 8)
    products = [cublaslt.product(a, b, out, Epilogue.NONE) for _ in range(2)]
    assert products[0] is not None and products[1] is not None
    assert products[0].product is products[1].product
    other = cublaslt.product(a[:3], b, out[:3], Epilogue.NONE)
    assert other is not None and other.product is not products[0].product


def refused(ready: cublaslt.Ready | None) -> str:
    assert ready is not None
    with pytest.raises(KernelError) as caught:
        ready.run()
    return str(caught.value)


def test_errors_name_the_status_and_the_product(library: Library) -> None:
    a, b, out, bias = rand(4, 8), rand(8, 8), torch.empty(4, 8), rand(8)
    narrow = torch.zeros(4, 8, dtype=torch.uint8)  # rows of 64 bits
    with pytest.raises(KernelError, match=r"m 8, n 4, k 8 .*134.*INVALID_VALUE"):
        cublaslt.product(a, b, out, Epilogue.RELU_AUX_BIAS, bias, narrow)
    with pytest.raises(KernelError, match="INVALID_VALUE"):
        cublaslt.product(a, b, torch.empty(3, 8), Epilogue.BIAS)
    with library.set("fail", 13):
        text = refused(cublaslt.product(a, b, out, Epilogue.NONE))
    assert "cublasLtMatmul" in text and "CUBLAS_STATUS_EXECUTION_FAILED" in text
    assert 'use("plain")' in text


def test_less_alignment_than_promised_is_refused(library: Library) -> None:
    """The plan of aligned operands must not be taken for others: they get one of their own."""
    room = torch.zeros(129)
    start = -(room.data_ptr() // 4) % 64
    a, b, out = room[start : start + 32].view(4, 8), rand(8, 8), torch.empty(4, 8)
    first = cublaslt.product(a, b, out, Epilogue.NONE)
    shifted = room[start + 1 : start + 33].view(4, 8)
    second = cublaslt.product(shifted, b, out, Epilogue.NONE)
    assert first is not None and second is not None and first.product is not second.product
    second.run()
    wrong = first._replace(addresses=second.addresses)
    assert "INVALID_VALUE" in refused(wrong)


def test_a_wrong_product_is_noticed(library: Library) -> None:
    """The stand-in forgets opA: the comparison above can fail."""
    x, weight, out = rand(6, 6), rand(6, 6, seed=1), torch.empty(6, 6)
    with library.set("no_transpose", 1):
        ready = cublaslt.product(x, weight.t(), out, Epilogue.NONE)
        assert ready is not None
        ready.run()
    plain = x @ weight.t()
    assert excess(out, plain, x.double() @ weight.t().double()) > 1


def test_algorithms_by_rank(library: Library) -> None:
    a, b, out = rand(4, 8), rand(8, 8), torch.empty(4, 8)
    first, second, third = (
        cublaslt.product(a, b, out, Epilogue.NONE, rank=rank) for rank in range(3)
    )
    assert first is not None and second is not None and third is None
    assert first.product.algorithm != second.product.algorithm
    second.run()
    torch.testing.assert_close(out, a @ b)


def test_no_algorithm(library: Library) -> None:
    a, b, out = rand(4, 8), rand(8, 8), torch.empty(4, 8)
    with library.set("refuse", int(Epilogue.RELU)):
        assert cublaslt.product(a, b, out, Epilogue.RELU) is None
        assert cublaslt.product(a, b, out, Epilogue.NONE) is not None


def test_without_the_library(tmp_path: Path) -> None:
    x = rand(2, 2)
    assert not cublaslt.serves(x)
    if cuda_launch.why_not() is not None:
        assert cublaslt.why_not() == cuda_launch.why_not()
    with (
        pytest.raises(KernelError, match="no stand-in"),
        cublaslt.stand_in(tmp_path / "libnothing.so"),
    ):
        pass
    (tmp_path / "empty.c").write_text("int nothing;\n")
    empty = tmp_path / "libempty.so"
    subprocess.run(["g++", "-shared", "-o", empty, tmp_path / "empty.c"], check=True)
    with pytest.raises(KernelError, match="cublasLtGetVersion"), cublaslt.stand_in(empty):
        pass
    assert not cublaslt.serves(x)
