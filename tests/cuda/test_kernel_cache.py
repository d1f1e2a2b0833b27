"""The kernel cache: right under damage, under races, and bounded."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from recast.errors import KernelError
from recast.runtime.gpu import kernel_cache, nvrtc
from recast.runtime.gpu.kernel_cache import Cache

WHY_MISSING = nvrtc.why_missing()
needs_nvrtc = pytest.mark.skipif(WHY_MISSING is not None, reason=f"NVRTC: {WHY_MISSING}")
CONTENT = bytes(range(256)) * 4


def never() -> bytes:
    raise AssertionError("built although it was there")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cuda")


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the library logs, from warnings on."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    monkeypatch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
    monkeypatch.setattr(logging.getLogger("recast"), "handlers", [handler])
    return said


def entry(cache: Cache, key: str) -> Path:
    return cache.folder / f"{key}.kernel"


def test_built_once(cache: Cache) -> None:
    assert cache.fetch("a", lambda: CONTENT) == CONTENT
    assert cache.fetch("a", never) == CONTENT
    assert Cache(cache.folder).fetch("a", never) == CONTENT
    assert cache.fetch("b", lambda: b"") == b"" == cache.fetch("b", never)


@pytest.mark.parametrize("length", [0, 3, 8, 39, 40, 41, 500, -1])
def test_a_truncated_entry_is_built_anew(cache: Cache, length: int, logged: list[str]) -> None:
    cache.fetch("a", lambda: CONTENT)
    path = entry(cache, "a")
    path.write_bytes(path.read_bytes()[:length])
    assert cache.fetch("a", lambda: b"new") == b"new"
    assert any("damaged" in one for one in logged)
    assert cache.fetch("a", never) == b"new"


@pytest.mark.parametrize("place", [0, 7, 8, 39, 40, 300, -1])
def test_a_corrupt_entry_is_built_anew(cache: Cache, place: int) -> None:
    cache.fetch("a", lambda: CONTENT)
    damaged = bytearray(entry(cache, "a").read_bytes())
    damaged[place] ^= 1
    entry(cache, "a").write_bytes(damaged)
    assert cache.fetch("a", lambda: b"new") == b"new"
    assert cache.fetch("a", never) == b"new"


def test_an_entry_under_a_false_name(cache: Cache) -> None:
    cache.fetch("a", lambda: CONTENT)
    entry(cache, "b").write_bytes(entry(cache, "a").read_bytes())
    assert cache.fetch("b", lambda: b"new") == b"new"
    assert cache.fetch("a", never) == CONTENT


def test_a_build_that_fails_leaves_nothing(cache: Cache) -> None:
    def fails() -> bytes:
        raise KernelError("no")

    with pytest.raises(KernelError):
        cache.fetch("a", fails)
    assert cache.size() == (0, 0)
    assert cache.fetch("a", lambda: CONTENT) == CONTENT


def test_half_written_files_are_ignored_and_removed_when_old(cache: Cache) -> None:
    cache.folder.mkdir()
    old, fresh = cache.folder / "old.part", cache.folder / "fresh.part"
    for path in (old, fresh):
        path.write_bytes(CONTENT)
    os.utime(old, (time.time() - 7200,) * 2)
    assert cache.fetch("a", lambda: b"new") == b"new"
    assert not old.exists() and fresh.exists()
    assert cache.size()[0] == 1


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cuda", limit=3 * (len(CONTENT) + 40))
    for age, key in ((30, "a"), (20, "b"), (10, "c")):
        cache.fetch(key, lambda: CONTENT)
        os.utime(entry(cache, key), (time.time() - age,) * 2)
    cache.fetch("a", never)
    cache.fetch("d", lambda: CONTENT)
    assert {p.stem for p in cache.folder.glob("*.kernel")} == {"a", "c", "d"}
    assert cache.size() == (3, cache.limit)


def test_one_entry_past_the_limit_is_kept(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cuda", limit=10)
    cache.fetch("a", lambda: CONTENT)
    cache.fetch("b", lambda: CONTENT)
    assert cache.fetch("b", never) == CONTENT
    assert cache.size()[0] == 1


def test_entries_that_may_not_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that users share, in which each may remove only their own entries."""
    cache = Cache(tmp_path, limit=100)
    cache.fetch("a" * 40, lambda: b"x" * 80)
    whole = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith("a"):
            raise PermissionError(1, "Operation not permitted", str(path))
        whole(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    assert cache.fetch("b" * 40, lambda: b"y" * 80) == b"y" * 80
    assert cache.fetch("c" * 40, lambda: b"z" * 80) == b"z" * 80
    assert sorted(p.name[0] for p in tmp_path.glob("*.kernel")) == ["a", "c"]


def test_where_nothing_can_be_written(tmp_path: Path, logged: list[str]) -> None:
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "cuda")
    assert cache.fetch("a", lambda: CONTENT) == CONTENT
    assert cache.fetch("a", lambda: b"again") == b"again"
    assert sum("cannot be kept" in one for one in logged) == 1, "told once"
    assert cache.size() == (0, 0)


def test_the_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RECAST_CACHE", str(tmp_path))
    assert kernel_cache.default().folder == tmp_path / "cuda"
    assert kernel_cache.facts()["folder"] == "$RECAST_CACHE/cuda"
    monkeypatch.delenv("RECAST_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_cache.default().folder == tmp_path / "recast" / "cuda"
    assert kernel_cache.facts()["folder"] == "$XDG_CACHE_HOME/recast/cuda"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert kernel_cache.facts()["folder"] == "~/.cache/recast/cuda"


# ---------------------------------------------------------------- several processes

PROCESSES = 6


@pytest.fixture(scope="module")
def processes() -> Iterator[multiprocessing.pool.Pool]:
    """Processes that are forks of one that has imported all, so that they start at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["recast.runtime.gpu.kernel_cache"])
    with context.Pool(PROCESSES) as pool:
        yield pool


def fetch_one(folder: str, number: int) -> tuple[bytes, int]:
    """Fetch the key that all want; how often this process built it."""
    builds = 0

    def build() -> bytes:
        nonlocal builds
        builds += 1
        time.sleep(0.3)  # long enough for the others to arrive
        return CONTENT

    return Cache(Path(folder)).fetch("a", build), builds


def fetch_many(folder: str, number: int) -> int:
    """Fetch 40 keys in an order of its own from a cache that holds ten, damaging some on the way.

    How many answers were wrong.
    """
    cache = Cache(Path(folder), limit=10 * (len(CONTENT) + 40))
    wrong = 0
    for step in range(200):
        key = (step * (2 * number + 1)) % 40
        expected = CONTENT[key:]
        wrong += cache.fetch(f"{key:02x}", lambda: expected) != expected  # noqa: B023
        if step % 17 == number:
            path = cache.folder / f"{key:02x}.kernel"
            with suppress(FileNotFoundError):  # another process may just have evicted it
                path.write_bytes(path.read_bytes()[:100])
    return wrong


def compile_one(folder: str, source: str) -> bytes:
    program = nvrtc.program(source)
    os.environ["RECAST_CACHE"] = folder  # of this process, which ends with the test
    return kernel_cache.binary(program, "sm_90").cubin


def test_processes_that_want_one_kernel_build_it_once(
    processes: multiprocessing.pool.Pool, tmp_path: Path
) -> None:
    work = [(str(tmp_path), number) for number in range(PROCESSES)]
    answers = processes.starmap(fetch_one, work, chunksize=1)
    assert {content for content, _ in answers} == {CONTENT}
    assert sum(builds for _, builds in answers) == 1


def test_processes_that_evict_and_damage(
    processes: multiprocessing.pool.Pool, tmp_path: Path
) -> None:
    work = [(str(tmp_path), number) for number in range(PROCESSES)]
    assert processes.starmap(fetch_many, work, chunksize=1) == [0] * PROCESSES
    assert Cache(tmp_path).size()[0] <= 10 + PROCESSES
    assert not list(tmp_path.glob("*.part"))


@needs_nvrtc
def test_processes_that_compile(processes: multiprocessing.pool.Pool, tmp_path: Path) -> None:
    source = tmp_path / "k.cu"
    source.write_text('extern "C" __global__ void k(int* x) { *x = 1; }\n')
    work = [(str(tmp_path), str(source))] * PROCESSES
    assert len(set(processes.starmap(compile_one, work, chunksize=1))) == 1
    assert Cache(tmp_path / "cuda").size()[0] == 1


# ---------------------------------------------------------------- keys

SOURCE = """\
#include <cuda_fp16.h>
#include "outer.cuh"
#ifdef NEVER
#  include "never.cuh"
#endif
template <int N> __global__ void k(int* x) { *x = N + ONE; }
"""


@pytest.fixture
def program(tmp_path: Path) -> nvrtc.Program:
    (tmp_path / "k.cu").write_text(SOURCE)
    (tmp_path / "outer.cuh").write_text('#include "inner.cuh"\n')
    (tmp_path / "inner.cuh").write_text("#define ONE 1\n")
    (tmp_path / "never.cuh").write_text("")
    return nvrtc.program(tmp_path / "k.cu", kernels=("k<2>",))


@needs_nvrtc
def test_the_key_is_of_all_that_matters(
    program: nvrtc.Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [kernel_cache.key(program, "sm_90")]

    def differs(other: nvrtc.Program = program, arch: str = "sm_90") -> None:
        keys.append(kernel_cache.key(other, arch))
        assert keys[-1] not in keys[:-1]

    differs(arch="sm_80")
    differs(replace(program, defines=(("A", "1"),)))
    differs(replace(program, defines=(("A", "2"),)))
    differs(replace(program, options=("-lineinfo",)))
    differs(replace(program, kernels=("k<3>",)))
    for name in ("k.cu", "outer.cuh", "inner.cuh", "never.cuh"):
        path = program.source.with_name(name)
        path.write_text(path.read_text() + "// more\n")
        differs()
    headers = nvrtc.toolkit().include
    assert "cuda_fp16.h" in {name for name, _ in kernel_cache._texts(program)}
    assert (headers / "cuda_fp16.h").read_bytes() in {c for _, c in kernel_cache._texts(program)}
    monkeypatch.setattr(nvrtc, "version", lambda: "13.99")
    differs()


@needs_nvrtc
def test_the_key_is_of_nothing_else(program: nvrtc.Program, tmp_path: Path) -> None:
    before = kernel_cache.key(program, "sm_90")
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in (*tmp_path.glob("*.cu"), *tmp_path.glob("*.cuh")):
        (moved / path.name).write_text(path.read_text())
    (moved / "unrelated.cuh").write_text("#error\n")
    assert kernel_cache.key(replace(program, source=moved / "k.cu"), "sm_90") == before


@needs_nvrtc
def test_a_kernel_from_the_cache_is_the_kernel(
    program: nvrtc.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECAST_CACHE", str(tmp_path))
    made = nvrtc.compile(program, "sm_90")
    assert kernel_cache.binary(program, "sm_90") == made
    monkeypatch.setattr(nvrtc, "compile", never)
    assert kernel_cache.binary(program, "sm_90") == made
    with pytest.raises(TypeError):  # another architecture is another entry: never() is called
        kernel_cache.binary(program, "sm_80")
