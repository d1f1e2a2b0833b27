"""A pack is stored by one instruction, even if another branch stores its elements one by one. A
compiler may split both, and every result of a lookup then takes four times the stores.
"""

from __future__ import annotations

import re

import pytest

from recast.runtime.gpu import nvrtc

WHY_MISSING = nvrtc.why_missing()
LOOKUPS = {"LANES": 4, "CHUNKS": 1, "MAX": 0, "BAGS": 4, "LONG": 0}


def ptx(source: str, **macros: int) -> str:
    """What NVRTC makes of a source before it makes machine code."""
    binding = nvrtc._nvrtc()
    program = nvrtc.program(source, defines={f"RECAST_{k}": v for k, v in macros.items()})
    text, folders = program.source.read_bytes(), nvrtc.include_folders(program)
    handle = nvrtc._ok(binding.nvrtcCreateProgram(text, source.encode(), 0, None, None))
    given = [*nvrtc.flags(program, "sm_90"), *(f"--include-path={p}" for p in folders)]
    nvrtc._ok(binding.nvrtcCompileProgram(handle, len(given), [o.encode() for o in given]))
    found = nvrtc._read(binding.nvrtcGetPTXSize, binding.nvrtcGetPTX, handle).decode()
    nvrtc._ok(binding.nvrtcDestroyProgram(handle))
    return found


@pytest.mark.skipif(WHY_MISSING is not None, reason=f"NVRTC: {WHY_MISSING}")
@pytest.mark.parametrize(("out", "whole"), [(0, r"\.v4\.\w32"), (2, r"\.v2\.\w32")])
@pytest.mark.parametrize("source", ["embedding_forward.cu", "embedding_samples.cu"])
def test_rows_of_a_result(source: str, out: int, whole: str) -> None:
    macros = LOOKUPS if source == "embedding_forward.cu" else {}
    code = ptx(source, TABLE=0, OUT=out, VEC=4, BLOCK=256, **macros)
    stores = re.findall(rf"\bst\.global{whole}", code)
    element = r"\bst(?:\.global)?\.\w+\s+\[%\w+\+" + ("12" if out == 0 else "6")
    # The first has both, for a result that does not start where a pack may.
    elements = len(stores) if source == "embedding_forward.cu" else 0
    assert len(stores) >= 2 and len(re.findall(element, code)) == elements
