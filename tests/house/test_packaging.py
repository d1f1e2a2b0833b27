"""The wheel: one import package, every file once, with the kernels if there is a compiler, and
without them if there is none.

The contents of a distribution are checked in every run, on one that is packed in this process with
nothing compiled; long runs build and try the wheels that a user would build.
"""

from __future__ import annotations

import ast
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from email import message_from_string
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from scikit_build_core import build as backend

import recast

ROOT = Path(__file__).parents[2]
FOLDERS = ("recast", "rewriter", "passes", "runtime")
# Building takes minutes, longer beside other tests, and is part of the test that comes first.
LONG = (pytest.mark.long, pytest.mark.timeout(1800))


def long(test: Callable[..., None]) -> Callable[..., None]:
    for mark in LONG:
        test = mark(test)
    return test


def run(command: list[str], **options: object) -> str:
    """Standard output of ``command``; all its output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sources() -> set[str]:
    """Every file of the package by its installed name, build products left out."""
    found = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            name = path.relative_to(ROOT).as_posix()
            links = {f"recast/{layer}" for layer in FOLDERS[1:]}
            linked = any((name + "/").startswith(link + "/") for link in links)
            if path.is_dir() or linked or "__pycache__" in name or path.suffix in {".so", ".pyc"}:
                continue
            found.add(name if folder == "recast" else f"recast/{name}")
    kernels = (path.name for path in (ROOT / "csrc" / "cuda").iterdir())
    return found | {f"recast/runtime/cuda/{name}" for name in kernels}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution of the checkout, and the wheel of one that compiles nothing."""
    out = tmp_path_factory.mktemp("packed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        backend.build_sdist(str(out))
        backend.build_wheel(str(out), {"wheel.cmake": "false", "build-dir": str(out / "build")})
    return out


def once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], object]) -> Path:
    """The folder ``name``, which ``build`` fills once: other processes of this run wait for it."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    out, whole = base / name, base / f"{name}.whole"
    with (base / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            build(out)
            whole.touch()
    return out


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution of the checkout, and the wheel built from it."""

    def build(out: Path) -> None:
        run([sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)], cwd=out)

    return once(tmp_path_factory, "dist", build)


@pytest.fixture(scope="module")
def without_compiler(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that a machine without a C++ compiler builds from the same source."""

    def build(out: Path) -> None:
        (source,) = built.glob("*.tar.gz")
        env = {**os.environ, "CXX": str(out / "no-such-compiler")}
        pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(out), str(source)]
        run(pip, env=env, cwd=out)

    return once(tmp_path_factory, "pure", build)


def wheel_names(folder: Path) -> list[str]:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as z:
        return z.namelist()


def installed(folder: Path, target: Path, code: str) -> str:
    """Run ``code`` where only the wheel and torch can be imported, in another folder."""
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as z:
        z.extractall(target)
    paths = [str(target), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    # -S: no .pth files, or an editable install of the checkout would be found first
    start = f"import sys; sys.path[1:1] = {paths!r}\n"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return run(
        [sys.executable, "-W", "error", "-S", "-c", start + code], cwd=target.parent, env=env
    )


BOTH = ["packed", pytest.param("built", marks=LONG)]


@pytest.mark.parametrize("wheel", BOTH)
def test_every_file_once(request: pytest.FixtureRequest, wheel: str) -> None:
    names = wheel_names(request.getfixturevalue(wheel))
    assert len(names) == len(set(names))
    packed = {n for n in names if n.startswith("recast/") and not n.endswith(".so")}
    assert packed == sources()
    assert "recast/py.typed" in packed
    assert any(n.endswith((".html", ".jinja")) for n in packed), "the report's template"


@pytest.mark.parametrize("wheel", BOTH)
def test_one_package_at_the_root(request: pytest.FixtureRequest, wheel: str) -> None:
    names = wheel_names(request.getfixturevalue(wheel))
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"recast"}


@pytest.mark.parametrize("source", BOTH)
def test_source_distribution_holds_no_copies(request: pytest.FixtureRequest, source: str) -> None:
    (archive,) = request.getfixturevalue(source).glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {n.split("/", 1)[1] for n in tar.getnames() if "/" in n}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names
    kernels = {p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc").rglob("*") if p.is_file()}
    assert kernels <= names and "csrc/CMakeLists.txt" in kernels
    assert {f"runtime/{p.name}" for p in (ROOT / "runtime").glob("*.py")} <= names
    assert not [n for n in names if n.startswith(("recast/rewriter", "recast/passes", "out/"))]


def metadata(folder: Path) -> tuple[Any, str]:
    """What the wheel says of itself: its METADATA as a message, and its entry points."""
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as z:
        (info,) = {n.split("/")[0] for n in z.namelist() if ".dist-info/" in n}
        read = [z.read(f"{info}/{name}").decode() for name in ("METADATA", "entry_points.txt")]
    return message_from_string(read[0]), read[1]


def test_what_it_says_of_itself(packed: Path) -> None:
    told, entry_points = metadata(packed)
    assert (told["Name"], told["Version"]) == ("torch-recast", recast.__version__)
    assert told["Requires-Python"] == ">=3.11" and told["License-Expression"] == "Apache-2.0"
    assert told.get_payload().startswith("# Recast")
    name, _, target = entry_points.splitlines()[1].partition("=")
    module, _, attribute = target.strip().partition(":")
    assert name.strip() == "recast" and callable(getattr(import_module(module), attribute))


EXTRAS = {
    "cuda": "cuda-bindings", "jinja2": "jinja2", "markupsafe": "jinja2", "pygraphviz": "pygraphviz",
    "rocksdict": "rocksdict",
}  # fmt: skip


def test_what_it_imports_is_declared(packed: Path) -> None:
    """At import: what the three dependencies bring. Later, if at all: what extras do."""
    told = metadata(packed)[0].get_all("Requires-Dist")
    needed = {re.split(r"[^\w-]", line)[0] for line in told if "extra ==" not in line}
    assert needed == {"numpy", "rich", "torch"}
    own = {"recast", "pytest"} | sys.stdlib_module_names  # pytest loads its plugin itself
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            at_import = {name for node in tree.body for name in imported(node)}
            ever = {name for node in ast.walk(tree) for name in imported(node)}
            assert at_import <= needed | own, path
            assert ever <= needed | own | set(EXTRAS), path
    assert all(any(line.startswith(name) for line in told) for name in EXTRAS.values())


def imported(node: ast.AST) -> list[str]:
    """The packages that a statement imports by their own name."""
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module.partition(".")[0]]
    return []


@long
@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler here")
def test_wheel_with_kernels(built: Path, tmp_path: Path) -> None:
    kernels = [n for n in wheel_names(built) if n.endswith(".so")]
    assert len(kernels) == 1 and kernels[0].startswith("recast/runtime/_C.")
    code = """
import importlib, recast, recast.rewriter, recast.passes, recast.runtime
from recast.runtime import _C, OPS
from recast.rewriter import ir
print(recast.__file__, ir.__file__, _C.__file__)
used = [name for op in OPS.values() for name, usable, _ in op.usable() if usable]
assert len(used) >= 2, [op.usable() for op in OPS.values()]
for name in ("rewriter", "passes", "runtime"):
    assert importlib.util.find_spec(name) is None
"""
    paths = installed(built, tmp_path / "site", code).split()
    assert all(path.startswith(str(tmp_path / "site" / "recast")) for path in paths)


@long
@pytest.mark.parametrize("wheel", ["built", "without_compiler"])
def test_kernel_sources_are_found_where_installed(
    request: pytest.FixtureRequest, wheel: str, tmp_path: Path
) -> None:
    code = """
import json
from recast.runtime.gpu import nvrtc
print(nvrtc.folder())
print(json.dumps([path.name for path in nvrtc.sources()]))
if nvrtc.why_missing() is None:
    sort = nvrtc.program("row_sort.cu", defines={"RECAST_WIDE_KEY": 0})
    assert nvrtc.compile(sort, "sm_90").cubin
"""
    said = installed(request.getfixturevalue(wheel), tmp_path / "site", code).splitlines()
    assert said[0] == str(tmp_path / "site" / "recast" / "runtime" / "cuda")
    assert json.loads(said[1]) == sorted(p.name for p in (ROOT / "csrc" / "cuda").glob("*.cu"))


@long
def test_wheel_without_kernels_still_works(without_compiler: Path, tmp_path: Path) -> None:
    assert not [n for n in wheel_names(without_compiler) if n.endswith(".so")]
    code = """
import torch, recast
from recast.runtime import OPS
from torch import nn
torch.manual_seed(0)
bag = nn.Sequential(nn.EmbeddingBag(10, 4, mode="sum"), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
ids = torch.randint(10, (6, 3))
fast = recast.optimize(bag, example=(ids,))
torch.testing.assert_close(fast(ids), bag(ids))
fast(ids).mean().backward()
print([why for op in OPS.values() for _, usable, why in op.usable() if not usable])
"""
    said = installed(without_compiler, tmp_path / "site", code)
    assert "without it" in said, "a kernel that is missing says why"


@long
def test_command_is_installed() -> None:
    """`recast` and `python -m recast` are the same command."""
    script = Path(sysconfig.get_path("scripts")) / "recast"
    said = run([sys.executable, "-m", "recast", "--help"])
    assert "explain" in said
    if script.exists():
        assert run([str(script), "--help"]) == said
