"""Run-time compilation: machine code without a GPU, and errors that say where."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from pathlib import Path

import ptxas
import pytest

from recast.errors import KernelError, UsageError
from recast.runtime.gpu import nvrtc

WHY_MISSING = nvrtc.why_missing()
needs_nvrtc = pytest.mark.skipif(WHY_MISSING is not None, reason=f"NVRTC: {WHY_MISSING}")

SOURCE = """\
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "twice.cuh"
template <typename T, int N> __global__ void scale(T* x) { x[threadIdx.x] = twice(x[N]); }
#if FLAG
extern "C" __global__ void plain(float* x) { x[threadIdx.x] *= FACTOR; }
#endif
"""
HEADER = "template <typename T> __device__ T twice(T x) { return x + x; }\n"


@pytest.fixture
def program(tmp_path: Path) -> nvrtc.Program:
    (tmp_path / "scale.cu").write_text(SOURCE)
    (tmp_path / "twice.cuh").write_text(HEADER)
    return nvrtc.program(tmp_path / "scale.cu", defines={"FLAG": True, "FACTOR": 3})


def test_the_declared_packages_suffice() -> None:
    """Where the extra is installed nothing may be missing, or the tests below would all skip."""
    for name in ("cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime"):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed")
    assert WHY_MISSING is None


@needs_nvrtc
@pytest.mark.parametrize("arch", ptxas.ARCHS)
def test_machine_code_for_one_architecture(program: nvrtc.Program, arch: str) -> None:
    made = nvrtc.compile(program, arch)
    assert made.cubin[:4] == b"\x7fELF"
    assert b"plain" in made.cubin
    others = [nvrtc.compile(program, other).cubin for other in ptxas.ARCHS if other != arch]
    assert made.cubin not in others


@needs_nvrtc
def test_the_same_question_has_the_same_answer(program: nvrtc.Program) -> None:
    assert nvrtc.compile(program, "sm_90") == nvrtc.compile(program, "sm_90")


@needs_nvrtc
def test_defines_and_options_specialise(program: nvrtc.Program) -> None:
    base = nvrtc.compile(program, "sm_90").cubin
    other = nvrtc.program(program.source, defines={"FLAG": True, "FACTOR": 5})
    assert nvrtc.compile(other, "sm_90").cubin != base
    without = nvrtc.program(program.source, defines={"FLAG": False})
    assert b"plain" not in nvrtc.compile(without, "sm_90").cubin
    lines = replace(program, options=("-lineinfo",))
    assert len(nvrtc.compile(lines, "sm_90").cubin) > len(base)


@needs_nvrtc
def test_template_instances_by_name(program: nvrtc.Program) -> None:
    names = ("scale<float, 4>", "scale<__half, 8>", "scale<__nv_bfloat16, 8>")
    made = nvrtc.compile(replace(program, kernels=names), "sm_90")
    assert set(made.symbols) == set(names)
    assert len(set(made.symbols.values())) == len(names)
    for symbol in made.symbols.values():
        assert symbol.encode() in made.cubin


def test_programs_that_are_equal_are_one(tmp_path: Path) -> None:
    one = nvrtc.program(tmp_path / "a.cu", defines={"B": 1, "A": True})
    assert one == nvrtc.program(str(tmp_path / "a.cu"), defines={"A": 1, "B": "1"})
    assert hash(one) == hash(nvrtc.program(tmp_path / "a.cu", defines={"A": "1", "B": 1}))
    assert nvrtc.program("rows.cu").source == nvrtc.folder() / "rows.cu"


@needs_nvrtc
@pytest.mark.parametrize(
    ("text", "where", "why"),
    [
        ("\n__global__ void k(int* x) { *x = y; }\n", "bad.cu:2", 'identifier "y" is undefined'),
        ('#include "no.cuh"\n', "bad.cu:1", 'cannot open source file "no.cuh"'),
        ('#include "broken.cuh"\n', "broken.cuh:1", "expected a declaration"),
        ("#error no DIM\n", "bad.cu:1", "#error directive: no DIM"),
        ("__device__ int f() { return a; }\n#error two\n", "bad.cu:1", "of 2 errors"),
    ],
)
def test_an_error_says_where_and_why(tmp_path: Path, text: str, where: str, why: str) -> None:
    (tmp_path / "bad.cu").write_text(text)
    (tmp_path / "broken.cuh").write_text("}\n")
    with pytest.raises(KernelError) as caught:
        nvrtc.compile(nvrtc.program(tmp_path / "bad.cu", defines={"DIM": 4}), "sm_90")
    error = caught.value
    assert error.what == "bad.cu does not compile for sm_90 with -DDIM=4"
    assert error.where == where
    assert why in error.why
    assert len(str(error).splitlines()) == 4
    (log,) = error.__notes__
    assert Path(where.split(":")[0]).name in log


@needs_nvrtc
def test_an_unknown_template_instance(program: nvrtc.Program) -> None:
    with pytest.raises(KernelError, match=r"scale\.cu does not compile") as caught:
        nvrtc.compile(replace(program, kernels=("shrink<float>",)), "sm_90")
    assert caught.value.where == "kernels" and "shrink" in caught.value.why


@needs_nvrtc
def test_what_this_compiler_does_not_know(program: nvrtc.Program) -> None:
    with pytest.raises(KernelError, match=r"knows sm_75 to sm_\d+, not sm_999"):
        nvrtc.compile(program, "sm_999")
    with pytest.raises(KernelError, match="unrecognized option --faster"):
        nvrtc.compile(replace(program, options=("--faster",)), "sm_90")
    assert set(ptxas.ARCHS) <= set(nvrtc.archs())


def test_never_intermediate_code(program: nvrtc.Program) -> None:
    with pytest.raises(UsageError, match="'compute_90' is no architecture"):
        nvrtc.compile(program, "compute_90")


def test_a_source_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="no kernel source no-such\\.cu"):
        nvrtc.compile(nvrtc.program("no-such.cu"), "sm_90")


def test_without_the_toolkit(monkeypatch: pytest.MonkeyPatch, program: nvrtc.Program) -> None:
    monkeypatch.setattr(nvrtc, "_toolkits", lambda: iter(()))
    nvrtc._load.cache_clear()
    try:
        assert "no libnvrtc" in str(nvrtc.why_missing())
        with pytest.raises(KernelError, match=r"try  pip install 'torch-recast\[cuda\]'"):
            nvrtc.compile(program, "sm_90")
    finally:
        nvrtc._load.cache_clear()


def test_a_toolkit_by_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A toolkit counts with its library and headers only; installed packages come first."""
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(nvrtc.shutil, "which", lambda name: None)
    monkeypatch.setattr(nvrtc, "_DEFAULT", tmp_path / "none")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libnvrtc.so.13").write_bytes(b"")
    with pytest.raises(KernelError, match="no CUDA compiler"):
        nvrtc.toolkit()
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_fp16.h").write_text("")
    expected = nvrtc.Toolkit(tmp_path / "lib64" / "libnvrtc.so.13", tmp_path / "include")
    assert nvrtc.toolkit() == expected


def test_a_library_that_does_not_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = nvrtc.Toolkit(tmp_path / "libnvrtc.so.13", tmp_path)
    broken.library.write_bytes(b"no library")
    monkeypatch.setattr(nvrtc, "_toolkits", lambda: iter((broken,)))
    nvrtc._load.cache_clear()
    try:
        assert str(nvrtc.why_missing()).startswith("OSError: ")
    finally:
        nvrtc._load.cache_clear()
