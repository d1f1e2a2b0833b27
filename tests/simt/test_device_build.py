"""The same sources are CUDA: NVRTC compiles them, with every instruction of intrinsics.cuh."""

from __future__ import annotations

from pathlib import Path

import pytest

from recast.runtime.gpu import nvrtc

WHY_MISSING = nvrtc.why_missing()


@pytest.mark.skipif(WHY_MISSING is not None, reason=f"NVRTC: {WHY_MISSING}")
@pytest.mark.parametrize("source", ["collectives.cu", "faults.cu"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_sources_compile_for_a_gpu(source: str, arch: str) -> None:
    file = Path(__file__).with_name(source)
    include = f"--include-path={nvrtc.folder()}"
    built = nvrtc.compile(nvrtc.program(file, options=(include,)), arch)
    assert built.cubin.startswith(b"\x7fELF")
    assert built.log == ""
