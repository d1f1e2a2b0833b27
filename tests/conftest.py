"""Fixtures of all tests.

``golden("name.txt", text)`` compares with ``tests/golden/name.txt``; ``pytest --regen`` writes
these files anew, and ``git diff`` then shows what a change does.
"""

from __future__ import annotations

import difflib
import gc
import importlib
import os
import sys
import zlib
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch

from recast.runtime import device
from recast.runtime.mlp import mlp

# Without a GPU, torch records the whole stack at each seed, for every kind of device that might be
# initialised later: a third of a millisecond, some hundred thousand times.
if not torch.accelerator.is_available():
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        kind.manual_seed_all = lambda seed: None

# We use TF32 where torch's convolutions do, which is its default: tests ask for it explicitly.
torch.backends.cudnn.allow_tf32 = False

GOLDEN = Path(__file__).parent / "golden"
CACHE = os.environ.get("RECAST_CACHE")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regen", action="store_true", help="write the files of tests/golden anew")
    parser.addoption("--long", action="store_true", help="run the tests that are marked long too")
    parser.addoption("--every-case", action="store_true", help="all cases of tests marked sampled")
    parser.addoption("--models", type=int, default=24, help="how many random models to try")
    parser.addoption(
        "--mutants", type=int, default=0, help="how many mutants of each optimised model to try"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--mutants"):
        sys.path.append(str(Path(__file__).parent / "mutants"))
        trials = importlib.import_module("trials")
        config.pluginmanager.register(trials.Mutating(config.getoption("--mutants")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    left = {item for item in items if item.get_closest_marker("long")}
    if not config.getoption("--every-case"):
        left |= _beyond_the_sample([item for item in items if item not in left])
    if left:
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=list(left))


def _beyond_the_sample(items: list[pytest.Item]) -> set[pytest.Item]:
    """Of tests that are marked sampled(n), all cases but n: which ones depends on their names
    alone, so it is the same in each process and at each run.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left: set[pytest.Item] = set()
    for some in cases.values():
        (mark,) = {mark.args for item in some for mark in item.iter_markers("sampled")}
        left.update(sorted(some, key=lambda item: zlib.crc32(item.nodeid.encode()))[mark[0] :])
    return left


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: to look through it, for garbage or for who refers to
    something, takes a second each time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    """A test that leaves what all later ones of its process would go by fails, alone.

    With another cache they would compile anew, with another default dtype they would fail.
    """
    yield
    cache, dtype = os.environ.get("RECAST_CACHE"), torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    if cache != CACHE:
        os.environ.pop("RECAST_CACHE", None)
        if CACHE is not None:
            os.environ["RECAST_CACHE"] = CACHE
        pytest.fail(f"RECAST_CACHE was {CACHE}, the test left {cache}")
    if dtype != torch.float32:
        pytest.fail(f"the test left {dtype} as the default dtype")


@pytest.fixture(autouse=True)
def fused_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of the tests are small; their chains run on the fused kernel all the same."""
    monkeypatch.setattr(mlp, "FUSED_FROM", 0.0)


@pytest.fixture
def known_calls() -> None:
    """For tests of calls that need not be examined: some Pythons do not tell of writes to dicts."""
    watched = getattr(device.extension(), "WatchedDicts", None)
    if watched is None or not watched([]).usable:
        pytest.skip("CPython 3.13.0 does not tell of attributes that are set, or there is no C++")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with the golden file of that name."""

    def check(name: str, text: str) -> None:
        file = GOLDEN / name
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--regen"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            return
        if not file.is_file():
            pytest.fail(f"there is no golden file {name}; write it with: pytest --regen")
        expected = file.read_text(encoding="utf-8")
        if text != expected:
            lines = difflib.unified_diff(
                expected.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm=""
            )
            pytest.fail("\n".join([*lines, "to accept it: pytest --regen"]), pytrace=False)

    return check
