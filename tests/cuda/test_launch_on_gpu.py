"""Launching on a real GPU: correct numbers, on torch's stream, and in a captured graph."""

from __future__ import annotations

import ctypes
from pathlib import Path

import ptxas
import pytest
import torch

from recast.errors import KernelError
from recast.runtime.gpu import cuda_launch, nvrtc

WHY_MISSING = nvrtc.why_missing()
WHY_NOT = cuda_launch.why_not()
on_gpu = pytest.mark.skipif(WHY_NOT is not None, reason=f"GPU: {WHY_NOT}")

SOURCE = """\
// out[i] = factor * x[i] + shift, by way of dynamic shared memory.
template <class T> __global__ void axpb(T* out, const T* x, long long n, float factor, int shift) {
  extern __shared__ float held[];
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) held[threadIdx.x] = x[i];
  __syncthreads();
  if (i < n) out[i] = factor * held[threadIdx.x] + shift;
}
"""


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> cuda_launch.Kernel:
    monkeypatch.setenv("RECAST_CACHE", str(tmp_path))
    (tmp_path / "axpb.cu").write_text(SOURCE)
    program = nvrtc.program(tmp_path / "axpb.cu", kernels=("axpb<float>",))
    return cuda_launch.Kernel(program, "axpb<float>")


def run(kernel: cuda_launch.Kernel, out: torch.Tensor, x: torch.Tensor, shared: int) -> None:
    arguments = [
        ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.numel()),
        ctypes.c_float(1.5), ctypes.c_int32(-2),
    ]  # fmt: skip
    blocks = (x.numel() + 255) // 256
    cuda_launch.launch(kernel, (blocks, 1, 1), (256, 1, 1), shared, arguments)


@pytest.mark.skipif(WHY_MISSING is not None, reason=f"NVRTC: {WHY_MISSING}")
@pytest.mark.parametrize("arch", ptxas.ARCHS)
def test_the_kernel_of_these_tests_compiles(kernel: cuda_launch.Kernel, arch: str) -> None:
    assert kernel.name in nvrtc.compile(kernel.program, arch).symbols


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("shared", [1024, 100_000])
def test_right_numbers_on_any_stream(kernel: cuda_launch.Kernel, shared: int) -> None:
    x = torch.randn(1_000_003, device="cuda")
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        out = torch.full_like(x, torch.nan)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(kernel, out, x, shared)
        torch.cuda.current_stream().wait_stream(stream)
        torch.testing.assert_close(out, 1.5 * x - 2)


@pytest.mark.gpu
@on_gpu
def test_in_a_captured_graph(kernel: cuda_launch.Kernel) -> None:
    x, out = torch.randn(4096, device="cuda"), torch.empty(4096, device="cuda")
    graph = torch.cuda.CUDAGraph()
    cuda_launch.warm(kernel, shared=60_000)
    with torch.cuda.graph(graph):
        x.mul_(2)
        run(kernel, out, x, 60_000)
        with pytest.raises(KernelError, match="first used inside a graph capture"):
            cuda_launch.warm(kernel, shared=80_000)
    for _ in range(3):
        expected = 1.5 * (2 * x) - 2
        graph.replay()
        torch.testing.assert_close(out, expected)


@pytest.mark.gpu
@on_gpu
def test_in_the_thread_of_autograd(kernel: cuda_launch.Kernel) -> None:
    class Op(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            out = torch.empty_like(grad)
            run(kernel, out, grad.contiguous(), 1024)
            return out

    x = torch.randn(1000, device="cuda", requires_grad=True)
    upstream = torch.randn(1000, device="cuda")
    Op.apply(x).backward(upstream)
    torch.testing.assert_close(x.grad, 1.5 * upstream - 2)
