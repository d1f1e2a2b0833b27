"""Maps of packages, in their docstrings and in ``passes/README.md``, name every module."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAPPED = (
    "benchmarks/gpu",
    "benchmarks/gpu/bench",
    "benchmarks/gpu/check",
    "benchmarks/gpu/harness",
    "benchmarks/peers",
    "rewriter/capture",
    "rewriter/compiled",
    "rewriter/diff",
    "rewriter/report",
    "rewriter/spread",
    "rewriter/cli",
    "runtime/recorded",
)


def missing(folder: Path, text: str) -> list[str]:
    """The modules and packages of ``folder`` that ``text`` does not name."""
    parts = [p.stem for p in folder.glob("*.py") if not p.stem.startswith("__")]
    parts += [p.parent.name for p in folder.glob("*/__init__.py")]
    words = set(re.findall(r"\w+", text))
    return sorted(name for name in parts if name not in words)


@pytest.mark.parametrize("package", MAPPED)
def test_docstring_of_a_package_names_all_its_modules(package: str) -> None:
    folder = ROOT / package
    doc = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    assert missing(folder, doc) == []


def test_readme_of_the_passes_names_all_files_that_are_no_pass_themselves() -> None:
    text = (ROOT / "passes" / "README.md").read_text()
    pipeline = (ROOT / "passes" / "__init__.py").read_text()
    assert missing(ROOT / "passes", text + pipeline) == []


def test_a_module_that_is_not_named_is_found(tmp_path: Path) -> None:
    for name in ("__init__.py", "told.py", "untold.py", "inner/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert missing(tmp_path, "told, innermost") == ["inner", "untold"]
