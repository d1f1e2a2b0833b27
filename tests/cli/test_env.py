"""``recast env``: what it says of a machine, and that it leaves the driver alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recast.rewriter.cli import env


class FakeOp:
    def usable(self) -> list[tuple[str, bool, str]]:
        return [("cpu/avx512", False, "this CPU has no AVX-512"), ("cpu/torch", True, "always")]


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("the driver was touched")


def test_without_the_library_the_driver_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(env, "_has_driver", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", never)
    monkeypatch.setattr(torch.cuda, "device_count", never)
    assert env.gpu() == "none: torch is built for CUDA 13.0, but there is no libcuda.so.1"


def test_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(env, "_has_driver", never)
    assert env.gpu() == "none: this torch is built without CUDA"


def test_why_a_kernel_is_not_usable_is_told() -> None:
    text = env.text(
        env.collect({"bags": FakeOp(), "plain": type("P", (), {"usable": lambda s: []})()})
    )
    assert [line.split() for line in text.splitlines()[-5:]] == [
        ["bags"],
        ["no", "cpu/avx512", "this", "CPU", "has", "no", "AVX-512"],
        ["yes", "cpu/torch", "always"],
        ["plain"],
        ["yes", "reference", "plain", "torch"],
    ]


def test_kernels_that_are_usable_in_the_same_cases_share_a_row() -> None:
    def usable(_: object) -> list[tuple[str, bool, str]]:
        isas = [(f"cpu/{isa}", True, "float32") for isa in ("avx512", "avx2")]
        return [*isas, ("cuda/cuda", True, "float32"), ("cpu/torch", True, "anything else")]

    text = env.text(env.collect({"bags": type("P", (), {"usable": usable})()}))
    assert [line.split() for line in text.splitlines()[-3:]] == [
        ["yes", "cpu/avx512,avx2", "float32"],
        ["yes", "cuda/cuda", "float32"],
        ["yes", "cpu/torch", "anything", "else"],
    ]


def test_without_a_gpu_its_kernels_are_left_out_and_the_reason_told_once() -> None:
    facts = {"usable": False, "why": "no driver", "nvrtc": "13.0", "archs": []}
    facts["cache"] = {"folder": "cache", "entries": 0, "bytes": 0, "limit": 1}

    def usable(_: object) -> list[tuple[str, bool, str]]:
        return [("cuda/cuda", False, "no driver"), ("cpu/torch", True, "always")]

    found = env.collect({"bags": type("P", (), {"usable": usable})()}, facts)
    found["gpu"] = "none: no driver"
    assert env.text(found).count("no driver") == 2, "in the lines of gpu and cuda"
    assert "cuda/cuda" not in env.text(found)
    found["gpu"] = "1 x an old one"
    assert "no   cuda/cuda" in env.text(found)


def test_settings_that_hold_kernels_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECAST_KERNELS", "portable")
    monkeypatch.delenv("RECAST_CHECKED", raising=False)
    found = env.collect({})
    assert found["set"] == {"RECAST_KERNELS": "portable"}
    assert "  set   RECAST_KERNELS=portable" in env.text(found).splitlines()
    monkeypatch.delenv("RECAST_KERNELS")
    assert "  set " not in env.text(env.collect({}))


def test_no_name_of_user_host_or_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is pasted into bug reports."""
    import getpass
    import platform

    text = env.text(env.collect({}))
    assert platform.node() not in text
    assert "/" not in text.replace("cpu/", "")
    assert getpass.getuser() not in text.split()


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (
            {},
            "cuda  not usable: there is no libcuda.so.1; NVRTC 13.0",
        ),
        (
            {"usable": True, "why": None, "driver": "13.1", "archs": ["sm_80", "sm_90"]},
            "cuda  usable, driver 13.1, sm_80 sm_90; NVRTC 13.0",
        ),
        (
            {"nvrtc": None, "nvrtc_why": "no libnvrtc"},
            "cuda  not usable: there is no libcuda.so.1; no NVRTC: no libnvrtc",
        ),
    ],
)
def test_what_is_told_of_cuda(changed: dict[str, Any], line: str) -> None:
    cuda = {
        "usable": False, "why": "there is no libcuda.so.1", "nvrtc": "13.0", "nvrtc_why": None,
        "driver": None, "archs": [],
        "cache": {"folder": "$RECAST_CACHE/cuda", "entries": 3, "bytes": 1_540_000,
                  "limit": 256_000_000},
    } | changed  # fmt: skip
    said = env.text(env.collect({}, cuda)).splitlines()
    assert f"  {line}" in said
    assert "  cache $RECAST_CACHE/cuda, 3 compiled kernels, 1.5 of 256 MB" in said


def test_what_is_told_of_compiled_sources() -> None:
    builds = {"folder": "$RECAST_CACHE", "bytes": 84_000_000, "limit": 2_000_000_000}
    said = env.text(env.collect({}, None, builds)).splitlines()
    assert "  cache $RECAST_CACHE, compiled C++, 84.0 of 2000 MB" in said


def test_the_runtime_tells_all_of_it() -> None:
    """The keys above are those of the runtime, and on this machine they make a page."""
    from recast.runtime.gpu import cuda_launch

    found = env.collect({}, cuda_launch.facts())
    assert set(found["cuda"]) == {
        "usable", "why", "nvrtc", "nvrtc_why", "driver", "archs", "cache",
    }  # fmt: skip
    assert "\n  cuda  " in env.text(found)


def test_an_unknown_package_is_not_installed() -> None:
    assert env._version("no-such-package-anywhere") == "not installed"
