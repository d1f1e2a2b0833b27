"""Every planted fault is found and named, and its correct twin is clean."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import simt_build
import torch
from simt_build import Kernels, LaunchError

RUNNER = str(Path(__file__).with_name("fault_runner.py"))
OVERRUNS = {
    # faulty kernel: its correct twin, what the report must say
    "shared_overrun": ("shared_within", "use-after-poison"),
    "variable_overrun": ("variable_within", "use-after-poison"),
    "tensor_overrun": ("tensor_within", "heap-buffer-overflow"),
    "local_overrun": ("local_within", "stack-buffer-overflow"),
    "index_overflow": ("index_wide", "signed integer overflow"),
    "vector_misaligned": ("vector_aligned", "misaligned address"),  # last: the processor stops it
}
RACES = {
    "barrier_missing": "barrier_there",
    "second_barrier_missing": "second_barrier_there",
    "shuffle_for_barrier": "warp_barrier_there",
    "blocks_add_plainly": "blocks_add_atomically",
    "blocks_add_after_barrier": "blocks_add_atomically",
    "fence_missing": "fence_there",
    "copy_without_barrier": "copy_with_barrier",
}
MISUSES = {
    "shuffle_from_returned": ("shuffle_among_staying", r"reads lane 16, which has returned"),
    "shuffle_outside_mask": (
        "shuffle_among_staying",
        r"reads lane \d+, which is not in the mask 0000ffff",
    ),
    "mask_without_caller": ("mask_of_caller", r"lane 16 is not in its own mask 0000ffff"),
    "masks_disagree": (
        "mask_of_caller",
        r"deadlock; 32 threads, first \(0, 0, 0\), wait in __shfl_xor_sync at \S+faults.cu:\d+ "
        r"of lanes ffffffff, of which 0000ffff came",
    ),
    "collectives_disagree": ("mask_of_caller", r"__any_sync at .*are in __shfl_xor_sync at"),
    "barrier_in_branch": (
        "barrier_in_uniform_branch",
        r"returns while thread \(0, 0, 0\) waits for it in __syncthreads at",
    ),
    "barrier_after_return": ("barrier_there", r"waits for it in|24 of .* 64 threads have returned"),
    "barriers_differ": ("barrier_there", r"in another, __syncthreads at \S+faults.cu:\d+"),
    "barrier_against_warp": (
        "barrier_there",
        r"32 threads, first \(0, 0, 0\), wait in __syncthreads .*; "
        r"32 threads, first \(1, 0, 0\), wait in __syncwarp .* of which aaaaaaaa came",
    ),
    "spin_for_nobody": ("spin_for_another", r"repeat atomic operations, waiting for what none"),
    "copy_never_awaited": ("copy_with_barrier", r"returns before waiting for its async"),
    "copy_misaligned": ("copy_with_barrier", r"async_copy_16 at .*: an address is no multiple"),
    "load_misaligned": (
        "tensor_within",
        r"load at .*pack.cuh:\d+: address \S+ is no multiple of 16",
    ),
    "store_misaligned": ("tensor_within", r"store at .*: address \S+ is no multiple of 16"),
    "variables_too_large": ("variable_within", r"up to 'second' take 65536 bytes; 49152 is"),
    "matrix_by_half_a_warp": ("tensor_within", r"mma_bf16 .*lanes ffff0000 have returned"),
}


def reports(sanitizer: str, names: list[str]) -> dict[str, str]:
    """What a sanitizer that goes on after reports says during the launch of each kernel."""
    run = simt_build.sanitized(sanitizer, RUNNER, *names, goes_on=True)
    parts = re.split(r"^== (\w+)$", run.stdout, flags=re.M)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert set(names) <= set(found), run.stdout
    return found


def test_overruns_are_found() -> None:
    twins = [twin for twin, _ in OVERRUNS.values()]
    found = reports("address", [*twins, *OVERRUNS])
    assert {twin: found[twin] for twin in twins} == dict.fromkeys(twins, "\n")
    for name, (_, says) in OVERRUNS.items():
        assert says in found[name], (name, found[name])
        assert name in found[name] and "faults.cu:" in found[name], found[name]


def test_races_are_found() -> None:
    found = reports("thread", [*dict.fromkeys(RACES.values()), *RACES])
    assert {twin: found[twin] for twin in RACES.values()} == dict.fromkeys(RACES.values(), "\n")
    for name in RACES:
        assert "data race" in found[name] and f" {name} " in found[name], (name, found[name])


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", MISUSES)
def test_misuses_are_found(faults: Kernels, name: str, seed: int) -> None:
    twin, says = MISUSES[name]
    out = torch.zeros(128)
    faults.launch(twin, 2, 64, 256, out, seed=seed)
    with pytest.raises(LaunchError, match=rf"kernel {name}, block \(\d, 0, 0\)") as error:
        faults.launch(name, 2, 64, 256, out, seed=seed)
    if seed == 0:
        assert re.search(says, str(error.value)), str(error.value)
    faults.launch(twin, 2, 64, 256, out, seed=seed, workers=2)  # the emulator still works


@pytest.mark.parametrize(
    "grid, block, shared, says",
    [
        (1, 1025, 0, "1024, and 64 along z, is the most"),
        (1, (1, 1, 65), 0, "1024, and 64 along z, is the most"),
        (1, 0, 0, "size 0"),
        (0, 32, 0, "size 0"),
        ((1, 65536), 32, 0, "65535"),
        (1, 32, 227 * 1024 + 1, "232448 is the most"),
    ],
)
def test_limits(
    faults: Kernels, grid: int | tuple[int, ...], block: int | tuple[int, ...], shared: int,
    says: str,
) -> None:  # fmt: skip
    with pytest.raises(LaunchError, match=f"kernel tensor_within: .*{says}"):
        faults.launch("tensor_within", grid, block, shared, torch.zeros(128))


def test_the_largest_launch(faults: Kernels) -> None:
    out = torch.zeros(1024)
    faults.launch("tensor_within", 1, 1024, 227 * 1024, out)
    assert torch.equal(out, torch.ones(1024))


def test_arguments_are_checked(faults: Kernels, collectives: Kernels) -> None:
    ints = torch.zeros(32, dtype=torch.int32)
    with pytest.raises(LaunchError, match="no kernel is named nobody"):
        faults.launch("nobody", 1, 32, 0)
    with pytest.raises(TypeError, match="tensor_within takes 1 arguments, not 0"):
        faults.launch("tensor_within", 1, 32, 0)
    with pytest.raises(TypeError, match=r"argument 0: torch.int32 for f32\*"):
        faults.launch("tensor_within", 1, 32, 0, ints)
    with pytest.raises(TypeError, match=r"argument 2: Tensor for i32"):
        collectives.launch("shuffles", 1, 32, 0, ints, ints, ints)
    with pytest.raises(TypeError, match=r"argument 2: 2147483648 does not fit into i32"):
        collectives.launch("shuffles", 1, 32, 0, ints, ints, 2**31)
    with pytest.raises(TypeError, match=r"argument 2: float for i32"):
        collectives.launch("shuffles", 1, 32, 0, ints, ints, 32.0)


@pytest.mark.long
@pytest.mark.parametrize("sanitizer", simt_build.SANITIZERS)
def test_all_else_is_clean(sanitizer: str) -> None:
    """The other tests of this folder, watched."""
    here = Path(__file__).parent
    tests = [str(here / f"test_{name}.py") for name in ("collectives", "atomics", "intrinsics")]
    run = simt_build.rerun(sanitizer, *tests)
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout and "skipped" not in run.stdout


@pytest.mark.long
def test_a_fault_fails_a_watched_test_run(tmp_path: Path) -> None:
    """`rerun` returns an exit code other than 0 if the sanitizer reports anything."""
    source = os.fspath(Path(RUNNER).with_name("faults.cu"))
    test = tmp_path / "test_racy.py"
    test.write_text(
        "import pathlib, simt_build, torch\n"
        "def test_racy():\n"
        f"    kernels = simt_build.kernels(pathlib.Path({source!r}))\n"
        "    kernels.launch('barrier_missing', 1, 64, 256, torch.zeros(64))\n"
    )
    run = simt_build.rerun("thread", str(test))
    assert run.returncode == 66, run.stdout
    assert "1 passed" in run.stdout and "data race" in run.stdout
