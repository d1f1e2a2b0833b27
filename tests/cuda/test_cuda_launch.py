"""Launching: the driver is not called where there is none, and called correctly where there is.

There is no GPU here, so a stand-in for the driver's library judges: the real binding calls it, and
it notes its arguments.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import ptxas
import pytest
import torch

from recast.runtime import op
from recast.runtime.gpu import cuda_launch, nvrtc

WHY_MISSING = nvrtc.why_missing()
needs_nvrtc = pytest.mark.skipif(WHY_MISSING is not None, reason=f"NVRTC: {WHY_MISSING}")
needs_cc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to build the stand-in")

SOURCE = """\
template <class T> __global__ void scale(T* x, int a, long long b, float c) {
  x[threadIdx.x] = x[threadIdx.x] * c + a + b;
}
"""
BEGIN = """\
import ctypes, json, pathlib, sys
import torch
from recast.errors import KernelError
from recast.runtime.gpu import cuda_launch
from recast.runtime.gpu import nvrtc
program = nvrtc.program(pathlib.Path("scale.cu").resolve(), kernels=("scale<float>",))
kernel = cuda_launch.Kernel(program, "scale<float>")
def opened():
    return "libcuda.so" in pathlib.Path("/proc/self/maps").read_text()
def refused(call):
    try:
        call()
    except KernelError as error:
        return str(error)
"""
# What torch would say on a machine with one Hopper GPU.
GPU = """
from types import SimpleNamespace
torch.version.cuda, gpu = "13.0", torch.cuda
gpu.is_available, gpu.device_count, gpu.current_device = lambda: True, lambda: 1, lambda: 0
gpu.get_device_capability = lambda device=0: (9, 0)
gpu.current_stream = lambda device=None: SimpleNamespace(cuda_stream=77)
cuda_launch._raw = None
capturing = False
gpu.is_current_stream_capturing = lambda: capturing
gpu.init = lambda: None
arguments = [ctypes.c_void_p(0x1234567890), ctypes.c_int32(-5), ctypes.c_int64(1 << 40),
             ctypes.c_float(2.5)]
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-in."""
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("driver_stub.c")
    target = folder / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", str(source), "-o",
               str(target), "-ldl"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def run(code: str, folder: Path, driver: Path | None) -> tuple[list[object], list[str]]:
    """What ``code`` printed as json, line by line, and what the driver noted."""
    (folder / "scale.cu").write_text(SOURCE)
    noted = folder / "driver.log"
    environment = os.environ | {"RECAST_CACHE": str(folder), "DRIVER_STUB_LOG": str(noted)}
    if driver is not None:
        environment["LD_LIBRARY_PATH"] = str(driver)
    done = subprocess.run([sys.executable, "-c", BEGIN + code], cwd=folder, env=environment,
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return lines, noted.read_text().splitlines() if noted.exists() else []


# ---------------------------------------------------------------- the gate


@pytest.mark.skipif(cuda_launch._has_driver(), reason="this machine has a driver")
def test_without_the_library_nothing_is_called(tmp_path: Path) -> None:
    """A torch built for CUDA on a machine without a driver."""
    code = """
torch.version.cuda = "13.0"
torch.cuda.is_available = lambda: sys.exit("torch was asked")
launch = lambda: cuda_launch.launch(kernel, (1, 1, 1), (32, 1, 1), 0, [])
calls = [launch, lambda: cuda_launch.warm(kernel), lambda: cuda_launch.arch(0)]
print(json.dumps([cuda_launch.why_not(), *map(refused, calls)]))
facts = cuda_launch.facts()
print(json.dumps([facts["usable"], facts["why"], facts["driver"], facts["archs"], opened()]))
"""
    (first, second), _ = run(code, tmp_path, None)
    why = "there is no libcuda.so.1"
    error = f"no CUDA kernels here\n  why  {why}\n  try  `recast env`"
    assert first == [why, error, error, error]
    assert second == [False, why, None, [], False]


@pytest.mark.parametrize("others, usable", [((7, 5), False), ((8, 0), True)])
def test_kernels_are_listed_as_usable_where_one_device_can_run_them(
    monkeypatch: pytest.MonkeyPatch, others: tuple[int, int], usable: bool
) -> None:
    capabilities = [(7, 5), others]
    monkeypatch.setattr(cuda_launch, "why_not", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    kernels = [op.Kernel(name, name, "always", lambda: None) for name in ("cuda", "cpu")]
    listed = replace(op.OPS["dice"], kernels=tuple(kernels)).usable()
    why = "always" if usable else "cuda:0 is sm_75, and the kernels need sm_80 or later"
    assert listed == [("cuda/cuda", usable, why), ("cpu/cpu", True, "always")]


@needs_cc
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch itself opens the driver")
def test_a_torch_without_cuda_does_not_open_the_driver(tmp_path: Path, driver: Path) -> None:
    code = """
import os, recast
os.environ["RECAST_KERNELS"] = "torch"  # building those of the CPU is not the subject
torch.version.cuda = None
model = torch.nn.Sequential(torch.nn.EmbeddingBag(10, 4, mode="sum"), torch.nn.Linear(4, 4))
recast.optimize(model, example=(torch.randint(10, (6, 3)),))
print(json.dumps([cuda_launch.why_not(), refused(lambda: cuda_launch.warm(kernel)), opened()]))
ctypes.CDLL("libcuda.so.1")
print(json.dumps(opened()))
"""
    ((why, error, opened), control), noted = run(code, tmp_path, driver)
    assert why == "this torch is built without CUDA" and why in error and opened is False
    assert control is True and noted == ["opened"], "this test can fail"


@needs_cc
@pytest.mark.long
def test_a_driver_without_a_device_is_opened_and_not_called(tmp_path: Path, driver: Path) -> None:
    code = """
torch.version.cuda, torch.cuda.is_available = "13.0", lambda: False
print(json.dumps([cuda_launch.why_not(), refused(lambda: cuda_launch.warm(kernel))]))
"""
    ((why, error),), noted = run(code, tmp_path, driver)
    assert why == "torch sees no CUDA device" and why in error
    assert noted == ["opened"]


@needs_nvrtc
@pytest.mark.long
def test_compiling_needs_no_driver(tmp_path: Path) -> None:
    code = f"""
from recast.runtime.gpu import kernel_cache
sizes = [len(kernel_cache.binary(program, arch).cubin) for arch in {ptxas.ARCHS}]
print(json.dumps([all(sizes), opened()]))
"""
    if cuda_launch._has_driver():
        pytest.skip("this machine has a driver, and NVRTC opens it of its own accord")
    assert run(code, tmp_path, None)[0] == [[True, False]]


# ---------------------------------------------------------------- the calls


@needs_cc
@needs_nvrtc
def test_room_is_asked_for_where_a_kernel_has_shared_variables_too(
    tmp_path: Path, driver: Path
) -> None:
    """Together they may be 48 KiB without asking; the kernels of the stand-in have one of them."""
    code = """
for shared in (47 << 10, (47 << 10) + 16, 48 << 10):
    cuda_launch.launch(kernel, (1, 1, 1), (32, 1, 1), shared, arguments)
"""
    _, noted = run(GPU + code, tmp_path, driver)
    asked = [line for line in noted if line.startswith("attribute")]
    assert asked == [f"attribute 8 {(47 << 10) + 16}", f"attribute 8 {48 << 10}"]


@needs_cc
@needs_nvrtc
def test_what_a_launch_tells_the_driver(tmp_path: Path, driver: Path) -> None:
    code = """
print(json.dumps(cuda_launch.why_not()))
for shared, stream in ((0, None), (0, 0), (100_000, 5), (60_000, None)):
    cuda_launch.launch(kernel, (1, 2, 3), (32, 1, 1), shared, arguments, stream)
cuda_launch.launch(kernel, (0, 2, 3), (32, 1, 1), 0, arguments)
print(json.dumps(cuda_launch.facts()))
"""
    (why, facts), noted = run(GPU + code, tmp_path, driver)
    assert why is None
    parameters = "0x1234567890 -5 1099511627776 2.5"
    assert noted[noted.index("retain 0") :] == [
        "retain 0", "push 100", "module 1", "function _Z5scaleIfEvPT_ixf", "pop",
        "bind 100",
        f"launch 1,2,3 32,1,1 0 stream 77: {parameters}",
        f"launch 1,2,3 32,1,1 0 stream 0: {parameters}",
        "push 100", "attribute 8 100000", "pop",
        f"launch 1,2,3 32,1,1 100000 stream 5: {parameters}",
        f"launch 1,2,3 32,1,1 60000 stream 77: {parameters}",
    ]  # fmt: skip
    assert isinstance(facts, dict)
    assert facts["usable"] and facts["driver"] == "13.0" and facts["archs"] == ["sm_90"]
    assert facts["cache"]["entries"] == 1


@pytest.mark.long
@needs_cc
@needs_nvrtc
def test_a_capture_loads_nothing(tmp_path: Path, driver: Path) -> None:
    code = """
launch = lambda shared: cuda_launch.launch(kernel, (1, 1, 1), (32, 1, 1), shared, arguments)
capturing = True
print(json.dumps(refused(lambda: launch(0))))
capturing = False
cuda_launch.warm(kernel, shared=70_000)
capturing = True
launch(70_000)
print(json.dumps(refused(lambda: launch(80_000))))
capturing = False
print(json.dumps([cuda_launch.load_refused(), cuda_launch.load_refused()]))
capturing = True
launch(80_000)
print(json.dumps(refused(lambda: launch(1 << 20))))
capturing = False
print(json.dumps(cuda_launch.load_refused()))
"""
    (cold, more, loaded, much, nothing), noted = run(GPU + code, tmp_path, driver)
    for error in (cold, more, much):
        assert "first used inside a graph capture" in str(error) and "run the step once" in error
    assert loaded == [True, False] and nothing is False, "once; and what the device cannot have"
    assert [line.split()[0] for line in noted[noted.index("retain 0") :]] == [
        "retain", "push", "module", "function", "attribute", "pop", "bind", "launch",
        "push", "attribute", "pop", "launch", "push", "attribute", "pop",
    ]  # fmt: skip


@pytest.mark.long
@needs_cc
@needs_nvrtc
def test_what_the_driver_refuses_is_told(tmp_path: Path, driver: Path) -> None:
    code = """
print(json.dumps(refused(lambda: cuda_launch.warm(kernel, shared=1 << 20))))
print(json.dumps(refused(lambda: cuda_launch.warm(cuda_launch.Kernel(program, "other")))))
"""
    (shared, name), noted = run(GPU + code, tmp_path, driver)
    assert "asking for 1048576 bytes of shared memory for scale<float>" in shared
    assert "why  CUDA_ERROR_INVALID_VALUE" in shared
    assert "looking up other in scale.cu" in name and "why  CUDA_ERROR_NOT_FOUND" in name
    assert noted.count("push 100") == noted.count("pop") == 2, "the context is left in any case"


@pytest.mark.long
@needs_cc
@needs_nvrtc
def test_each_thread_has_the_context(tmp_path: Path, driver: Path) -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
def launch(k):
    cuda_launch.launch(kernel, (k + 1, 1, 1), (32, 1, 1), 0, arguments)
with ThreadPoolExecutor(8) as pool:
    list(pool.map(launch, range(64)))
print(json.dumps(None))
"""
    _, noted = run(GPU + code, tmp_path, driver)
    calls = [line.split()[0] for line in noted]
    assert calls.count("module") == calls.count("function") == 1
    launches = {line.split()[1] for line in noted if line.startswith("launch")}
    assert launches == {f"{k + 1},1,1" for k in range(64)}
    assert calls.index("bind") < calls.index("launch")
