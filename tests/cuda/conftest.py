"""What the tests of host code for a GPU share."""

from __future__ import annotations

from collections.abc import Iterator

import cublaslt_stand_in
import emulated_gpu
import pytest
import torch
from emulated_chains import Machine

from recast.runtime import device


@pytest.fixture
def emulated() -> Iterator[emulated_gpu.Emulated]:
    """The kernels of a GPU on the emulator, and what was launched there."""
    with emulated_gpu.serve() as served:
        yield served


@pytest.fixture(params=device.WAYS)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """An emulated GPU with a cublasLt, restricted to one way of computing products."""
    with (
        cublaslt_stand_in.serve() as library,
        emulated_gpu.serve() as gpu,
        device.use(request.param),
    ):
        yield Machine(library, gpu)


@pytest.fixture
def cublaslt_machine() -> Iterator[Machine]:
    """The same, restricted to cublasLt."""
    with (
        cublaslt_stand_in.serve() as library,
        emulated_gpu.serve() as gpu,
        device.use("cublaslt"),
    ):
        yield Machine(library, gpu)


@pytest.fixture
def tf32() -> Iterator[None]:
    """Products of float32 may be TF32."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    yield
    matmul.fp32_precision = before


@pytest.fixture
def conv_tf32() -> Iterator[None]:
    """Convolutions of float32 may be TF32, as by torch's default."""
    torch.backends.cudnn.allow_tf32 = True
    yield
    torch.backends.cudnn.allow_tf32 = False
