"""The repository as a whole: terms, sizes, and nothing that ties it to one machine."""

from __future__ import annotations

import itertools
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 250_000  # bytes a file; data come from packages, the largest is a record of 144 cells

TIES = {
    "a home or scratch folder": re.compile(r"(?<![\w./-])/(?:root|home|Users|tmp|work|opt|mnt)/\w"),
    "a package index by address": re.compile(
        r"https?://(?!\w*\.?example)[\w.-]*(?:pypi|index|simple|artifactory|nexus|mirror)[\w./-]*",
        re.I,
    ),
    "a pip option naming an index": re.compile(
        r"--(?:extra-)?index-url|--find-links|--trusted-host"
    ),
    "an address on a private network": re.compile(
        r"(?<![\d.])(?:10|192\.168|172\.16)(?:\.\d+){2,3}(?![\d.])"
    ),
}


@cache
def tracked() -> tuple[Path, ...]:
    """Files git holds, or would hold; skips where this is no checkout."""
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if listing.returncode:
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in listing.stdout.split("\0") if name)
    return tuple(p for p in paths if p.is_file() and not p.is_symlink())


def text(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return ""


def ties(source: str) -> list[str]:
    return [f"{what}: {m.group()}" for what, form in TIES.items() for m in form.finditer(source)]


def test_nothing_ties_it_to_a_machine() -> None:
    here = Path(__file__).resolve()
    found = {str(p.relative_to(ROOT)): ties(text(p)) for p in tracked() if p.resolve() != here}
    assert not {name: what for name, what in found.items() if what}


@pytest.mark.parametrize(
    "line",
    [
        "see /home/ann/models.py",
        "pip install --index-url https://pypi.example.com/simple x",
        "https://mirror.corp.net/simple/torch",
        "MASTER_ADDR=10.1.2.3",
        "'/tmp/x'",
    ],
)
def test_ties_are_found(line: str) -> None:
    assert ties(line)


def test_no_large_file() -> None:
    large = {str(p.relative_to(ROOT)): p.stat().st_size for p in tracked()}
    assert not {name: size for name, size in large.items() if size > LIMIT}


def test_no_binary_file() -> None:
    assert not [str(p.relative_to(ROOT)) for p in tracked() if b"\0" in p.read_bytes()[:8192]]


def test_lines_end_as_they_should() -> None:
    """One newline at the end, no carriage returns, no trailing blanks (golden files excepted)."""
    bad = []
    for path in tracked():
        source = text(path)
        if "golden" in path.parts or path.name == "LICENSE" or not source:
            continue
        if "\r" in source or not source.endswith("\n") or re.search(r"[ \t]+$", source, re.M):
            bad.append(str(path.relative_to(ROOT)))
    assert not bad


def test_terms() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE"]
    terms = (ROOT / "LICENSE").read_text()
    assert "Apache License" in terms and "Version 2.0, January 2004" in terms
    assert len(terms.split()) > 1500, "the full text"


def test_versions_agree() -> None:
    import recast

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert recast.__version__ == project["version"]
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_constraints_meet_what_the_package_accepts() -> None:
    pins = re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.M)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    accepted = [*project["dependencies"], *itertools.chain(*extras)]
    least = dict(re.match(r"([\w-]+)>=([\d.]+)", a).groups() for a in accepted if ">=" in a)  # type: ignore[union-attr]
    assert "torch" in dict(pins)
    for name, version in pins:
        assert tuple(map(int, version.split("."))) >= tuple(map(int, least[name].split("."))), name
