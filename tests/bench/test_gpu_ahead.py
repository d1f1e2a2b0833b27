"""What a GPU needs, compiled without one: kernels as a launch would ask for them, the extension."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu import ahead
from gpu.ahead import command, extension
from gpu.ahead.compiling import compiling
from gpu.harness import worker
from gpu.harness.items import Item

from recast.errors import KernelError
from recast.runtime import OPS, device
from recast.runtime.gpu import gpu, kernel_cache, nvrtc
from recast.runtime.gpu.cuda_launch import Kernel

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RECAST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def call() -> None:
    """Forward and backward of an op."""
    x = torch.randn(5, 3, 4, requires_grad=True)
    OPS["fm_interaction"].target([x[:, k] for k in range(3)], 0.5, True).sum().backward()


@pytest.mark.skipif(nvrtc.why_missing() is not None, reason=nvrtc.why_missing() or "")
def test_what_is_launched_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the architecture asked for; a launch there finds it and compiles nothing."""
    asked: list[Kernel] = []
    with compiling(["sm_90"], 132) as found:
        monkeypatch.setattr(found, "warm", lambda k, w=found.warm: (asked.append(k), w(k)))
        call()
    assert found.launched == [k.name for k in asked] and len(found.launched) == 2
    entries, size = kernel_cache.default().size()
    assert entries == len({k.program for k in asked}) and size > 1000
    monkeypatch.setattr(nvrtc, "compile", lambda *_: pytest.fail("it is compiled again"))
    for kernel in asked:
        made = kernel_cache.binary(kernel.program, "sm_90")
        assert made.cubin[:4] == b"\x7fELF" and kernel.name.encode() in made.cubin
    with compiling(["sm_90"], 132):
        call()


def test_only_what_does_not_compile_fails(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are wrong where nothing is launched, which no item may be blamed for."""

    def wrong() -> None:
        raise AssertionError("0.5 is not 0.25")

    with compiling(["sm_90"], 132) as found:
        items = command._quietly(lambda d, t: [Item("a", wrong)], found, CPU, False)
        assert [dict(item.run() or {}) for item in items] == [
            {"detail": "AssertionError: 0.5 is not 0.25"}
        ]

        def refuse(*_: object) -> None:
            raise KernelError("x.cu does not compile for sm_90", why="no semicolon")

        monkeypatch.setattr(kernel_cache, "binary", refuse)
        (item,) = command._quietly(lambda d, t: [Item("a", call)], found, CPU, False)
        with pytest.raises(RuntimeError, match=r"x.cu does not compile for sm_90: no semicolon"):
            item.run()
    assert gpu.serving(torch.ones(1)) is None


def test_groups_are_those_of_both_commands() -> None:
    names = command.groups()
    assert {"op mlp", "graphs", "bench tiny", "bench ops", "bench more of small"} <= {*names}
    assert not {*command.APART} & {*names} and worker.PARENT


def test_a_cache_from_elsewhere_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless there is none, or another is named."""
    monkeypatch.setenv("RECAST_CACHE", "")  # so that what use() sets is undone
    monkeypatch.delenv("RECAST_CACHE")
    monkeypatch.setattr(ahead, "CACHE", tmp_path / "gpu-cache")
    ahead.use()
    assert "RECAST_CACHE" not in os.environ
    (tmp_path / "gpu-cache").mkdir()
    ahead.use()
    assert os.environ["RECAST_CACHE"] == str(tmp_path / "gpu-cache")
    monkeypatch.setenv("RECAST_CACHE", "other")
    ahead.use()
    assert os.environ["RECAST_CACHE"] == "other"


LOADS = """
from pathlib import Path
from recast.runtime import device
device._installed = lambda: None
device.library = lambda: Path({library!r})
print(device.extension().__file__, device.why_missing())
"""


def test_an_extension_from_elsewhere_is_loaded(cache: Path, tmp_path: Path) -> None:
    """Without a compiler; one that cannot be loaded is passed over, with a warning."""
    own = device.extension()
    if own is None:
        pytest.skip(str(device.why_missing()))
    place = device.made_ahead()
    assert place.is_relative_to(cache) and place.name == Path(own.__file__).name
    assert device.made_ahead(".cpython-399-x86_64-linux-gnu.so").parent != place.parent

    def loaded() -> subprocess.CompletedProcess:
        code = LOADS.format(library=own.__file__)
        return subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
            env={**os.environ, "CXX": "no-compiler"}, check=True,
        )  # fmt: skip

    place.parent.mkdir(parents=True)
    shutil.copy(own.__file__, place)
    assert loaded().stdout.split() == [str(place), "None"]
    place.write_bytes(b"of another machine")
    done = loaded()
    assert done.stdout.split() == [own.__file__, "None"]
    assert "compiled ahead cannot be loaded" in done.stderr


def test_a_python_that_cannot_be_built_for_is_told(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no-python does not run"):
        extension.build(str(tmp_path / "no-python"))
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\necho \'[".cpython-399.so", "{tmp_path}"]\'\n')
    bare.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"has no headers: there is no Python\.h in"):
        extension.build(str(bare))


def test_the_extension_is_compiled_for_another_python(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With that one's headers, at the place where that one looks; once."""
    (tmp_path / "Python.h").touch()
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\necho \'[".cpython-399.so", "{tmp_path}"]\'\n')
    other.chmod(0o755)
    commands: list[list[str]] = []

    def compiled(command: list[str]) -> None:
        commands.append(command)
        Path(command[-1]).write_text("made")

    monkeypatch.setattr(device, "_compile", compiled)
    for _ in range(2):
        assert extension.build(str(other)) == ".cpython-399.so"
        made = device.made_ahead(".cpython-399.so")
        assert made.name == "_C.cpython-399.so" and made.read_text() == "made"
    *units, link = commands
    assert len(units) > 10 and all(f"-I{tmp_path}" in unit for unit in units)
    assert "-shared" in link
