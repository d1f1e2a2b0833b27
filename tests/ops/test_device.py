"""The extension is an extra: without it every op works, and one can read why it is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recast.runtime import OPS, device


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """A process that has loaded nothing yet, finds nothing installed and has an empty cache."""
    monkeypatch.setattr(device, "_tried", False)
    monkeypatch.setattr(device, "_loaded", None)
    monkeypatch.setattr(device, "_why", None)
    monkeypatch.setattr(device, "_installed", lambda: None)
    monkeypatch.setenv("RECAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RECAST_KERNELS", raising=False)
    yield monkeypatch


def works() -> bool:
    table, ids = torch.randn(7, 3), torch.tensor([[1, 2], [6, 6]])
    (out,) = OPS["embedding_bags"].target(
        [table], [ids], [None], [None], [0], ["sum"], [None], [False], [False]
    )
    return bool(torch.equal(out, table[ids].sum(1)))


def test_no_compiler(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("CXX", "a-compiler-that-is-not-there")
    assert device.extension() is None
    why = device.why_missing()
    assert why == "no C++ compiler (a-compiler-that-is-not-there) on PATH to build it with"
    assert works()
    rows = OPS["embedding_bags"].usable()
    assert [name for name, usable, _ in rows if usable] == ["cpu/torch"]
    assert rows[0] == ("cpu/avx512", False, why)


def test_a_compiler_that_fails(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "broken-c++"
    lines = ["#!/bin/sh", '[ "$1" = --version ] && exit 0', "echo 'x.cpp:1: error: no' >&2; exit 1"]
    script.write_text("\n".join(lines))
    script.chmod(0o755)
    bare.setenv("CXX", str(script))
    assert device.extension() is None
    assert device.why_missing() == "broken-c++ failed: x.cpp:1: error: no"
    assert works()
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_no_sources(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bare.setattr(device, "_SOURCES", tmp_path)
    assert device.extension() is None
    assert "installed without it" in str(device.why_missing())


@pytest.mark.parametrize("edits", [1, 3])
def test_sources_that_change_while_they_are_compiled(
    bare: pytest.MonkeyPatch, tmp_path: Path, edits: int
) -> None:
    """A stand-in for a compiler writes to a source, as an editor would, then "links" what it saw:
    the library under a key must be of the sources that the key stands for.
    """
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "one.cpp").write_text("0")
    script = tmp_path / "c++"
    script.write_text(f"""#!/bin/sh
for last; do :; done
case "$1" in
  --version) ;;
  -shared) cp {tmp_path}/seen "$last" ;;
  *) n=$(cat {folder}/one.cpp); echo $n > {tmp_path}/seen
     if [ $n -lt {edits} ]; then echo $((n + 1)) > {folder}/one.cpp; fi; touch "$last" ;;
esac
""")
    script.chmod(0o755)
    bare.setenv("CXX", str(script))
    bare.setattr(device, "_SOURCES", folder)
    assert device.extension() is None
    kept = list((tmp_path / "cache").rglob("_C*"))
    if edits == 3:
        assert not kept
        assert device.why_missing() == "their sources changed while they were compiled, 3 times"
        return
    (library,) = kept
    assert library.read_text() == "1\n"
    assert library.parent.name == device._key(str(script))
    assert str(device.why_missing()).startswith("ImportError: ")  # it came as far as being loaded


def test_a_cache_that_cannot_be_written(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    assert device.extension() is None
    why = str(device.why_missing())
    assert why.startswith(f"they cannot be built in {tmp_path / 'cache'}") and "RECAST_CACHE" in why
    assert works()


def test_a_compiler_that_says_nothing() -> None:
    with pytest.raises(Exception, match="false failed: exit code 1, and no message"):
        device._compile(["false"])


def test_switched_off(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("RECAST_KERNELS", "torch")
    assert device.extension() is None
    assert device.why_missing() == "RECAST_KERNELS=torch"
    assert works()


@pytest.mark.parametrize("name", ["fused", "cublaslt", "plain", "sse"])
def test_a_name_that_is_for_use_alone(bare: pytest.MonkeyPatch, name: str) -> None:
    """In the environment it would hold all ops to a kernel that most of them do not have."""
    bare.setenv("RECAST_KERNELS", name)
    assert device.extension() is None and device.held() is None
    why = f"RECAST_KERNELS={name}: unknown, one of avx512, avx2, portable, torch"
    assert device.why_missing() == why


def test_use() -> None:
    if device.extension() is None:
        pytest.skip(str(device.why_missing()))
    before = device.extension().isa()
    with pytest.raises(RuntimeError, match="inside"), device.use("torch"):
        assert device.extension() is None
        assert device.why_missing() == "switched off"
        raise RuntimeError("inside")
    with device.use("portable"):
        assert device.extension().isa() == "portable"
    assert device.extension().isa() == before
    with pytest.raises(ValueError, match="unknown kernel 'sse'"), device.use("sse"):
        pass


def test_instruction_sets_agree() -> None:
    """Lookups give the same bits whatever the instruction set; products differ by rounding only."""
    if device.extension() is None:
        pytest.skip(str(device.why_missing()))
    g = torch.Generator().manual_seed(2)
    table, ids = torch.randn(50, 77, generator=g), torch.randint(0, 50, (20, 9), generator=g)
    weights = torch.randn(20, 9, generator=g)
    results = []
    for isa in device.ISAS:
        if device.why_not(isa)():
            continue
        with device.use(isa):
            results.append(
                OPS["embedding_bags"].target(
                    [table], [ids] * 4, [None] * 4, [None, weights, None, None], [0] * 4,
                    ["sum", "sum", "mean", "max"], [None, 3, 3, None], [False] * 4, [False] * 4,
                )
            )  # fmt: skip
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


def test_a_sanitizer_has_a_build_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """``make sanitize`` chooses it; `extension` then does not take the installed one."""
    keys = set()
    for name in ("", "address", "thread"):
        monkeypatch.setenv("RECAST_SANITIZER", name)
        keys.add(device._key(device._compiler()))
    assert len(keys) == 3
    monkeypatch.setenv("RECAST_SANITIZER", "memory")
    with pytest.raises(device._Missing, match="RECAST_SANITIZER=memory: it is address or thread"):
        device.library()
