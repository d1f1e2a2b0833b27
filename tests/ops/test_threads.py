"""Kernels on several threads: the same bits, also side by side; a failed allocation is an error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from threaded_calls import CALLS
from torch import Tensor

from recast.runtime import device

HERE = Path(__file__).parent
# Sums of torch's own over threads, and its sigmoid at the ends of their parts.
OWN_BITS = ("dice", "gru")
# Which results are torch's own matrix products: on an AMD EPYC with AVX-512 (700, 600) @ (600, 20)
# has other bits on three threads than on one.
PRODUCTS = {"linear_cross_entropy": (1, 2)}  # the gradients of input and weight
# Calls whose tasks allocate, so that a failure is one within a loop over threads.
ALLOCATE = {
    "embedding_bags", "embedding_bags stacked", "compressed_interaction", "cross_vector",
    "cross_matrix", "dot_interaction", "fm_interaction", "pair_products", "field_attention",
    "gated_sums", "gru", "mlp", "mlp served", "silu_attention",
}  # fmt: skip


@pytest.fixture(autouse=True)
def forced() -> Iterator[None]:
    """No call is left to torch because it is small."""
    if device.extension() is None:
        pytest.skip("no C++ kernels")
    before = torch.get_num_threads()
    with device.use(device.extension().isa()):
        yield
    torch.set_num_threads(before)


def same(name: str, found: list[Tensor], right: list[Tensor]) -> None:
    for k, (a, b) in enumerate(zip(found, right, strict=True)):
        if name in OWN_BITS:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        elif k in PRODUCTS.get(name, ()):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * float(b.abs().max()))
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", CALLS)
def test_any_number_of_threads_gives_the_same_bits(name: str) -> None:
    torch.set_num_threads(1)
    right = CALLS[name]()()
    torch.set_num_threads(3)
    same(name, CALLS[name]()(), right)


def test_threads_of_python_call_at_once() -> None:
    """Kernels release the GIL, and keep scratch memory for each thread."""
    torch.set_num_threads(2)
    right = {name: make()() for name, make in CALLS.items()}
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda name: CALLS[name]()(), [*CALLS, *reversed(CALLS)])
        for name, results in zip([*CALLS, *reversed(CALLS)], found, strict=True):
            same(name, results, right[name])


@pytest.mark.skipif("RECAST_SANITIZER" in os.environ, reason="sanitizers replace operator new")
def test_an_allocation_that_fails_in_a_loop_is_an_error(tmp_path: Path) -> None:
    """Not the end of the process; and an optimizer's step changes all rows or none."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None or not device.extension().threads:
        pytest.skip("needs g++, and kernels with threads")
    hook = tmp_path / "failing_new.so"
    source = HERE / "failing_new.cpp"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", source, "-o", hook, "-ldl"], check=True)
    path = os.pathsep.join([str(HERE), *sys.path])
    environment = {**os.environ, "LD_PRELOAD": str(hook), "PYTHONPATH": path}
    run = subprocess.run(
        [sys.executable, HERE / "starved_calls.py", hook],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(run.stdout)
    assert found.pop("whole step") >= 1
    assert found.pop("ids") >= 1
    assert {name for name, (_, in_parallel) in found.items() if in_parallel} >= ALLOCATE
