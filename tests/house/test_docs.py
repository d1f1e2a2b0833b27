"""The documents are true: every Python block runs, printed output is what is shown, every command
exists.

A ``python`` block directly followed by a ``text`` block must print that text, and the
output under a ``$ recast ...`` line of a ``console`` block must be what the command says; ``...``
stands for anything. Blocks of one document share their names, as in one session.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch

from recast.rewriter.cli import main as cli

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    p.relative_to(ROOT).as_posix()
    for p in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *(ROOT / folder / "README.md" for folder in ("benchmarks", "passes")),
    ]
)
VARYING = re.compile(r"^(optimize took).*")  # a line of the report that no two runs share
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int
    start: int
    end: int


def blocks(document: str) -> list[Block]:
    source = (ROOT / document).read_text()
    return [
        Block(m[1], m[2], source[: m.start()].count("\n") + 2, m.start(), m.end())
        for m in BLOCK.finditer(source)
    ]


def sessions() -> list[str]:
    return [d for d in DOCUMENTS if any(b.language == "python" for b in blocks(d))]


@pytest.fixture
def same(request: pytest.FixtureRequest) -> Callable[[str, str, str], None]:
    """Compare what ``document`` shows with the real output; ``--regen`` replaces it."""

    def check(document: str, want: str, got: str) -> None:
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        if doctest.OutputChecker().check_output(want, got, flags):
            return
        if request.config.getoption("--regen"):
            lines = (VARYING.sub(r"\1 ...", line).rstrip() for line in got.rstrip("\n").split("\n"))
            source = (ROOT / document).read_text()
            (ROOT / document).write_text(source.replace(want, "\n".join(lines) + "\n", 1))
            return
        shown = f"{document} shows\n{want}\nbut the output is\n{got}\nto accept it: make golden"
        pytest.fail(shown, pytrace=False)

    return check


def run(block: Block, document: str, names: dict[str, object]) -> None:
    if block.text.lstrip().startswith(">>>"):
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        parsed = doctest.DocTestParser().get_doctest(
            block.text, names, document, document, block.line
        )
        said: list[str] = []
        runner.run(parsed, out=said.append, clear_globs=False)
        assert not runner.failures, "".join(said)
        names.update(parsed.globs)
    else:
        code = "\n" * (block.line - 1) + block.text  # so that a traceback names the line
        exec(compile(code, document, "exec"), names)


@pytest.mark.parametrize("document", sessions())
def test_python_blocks(
    document: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    same: Callable[[str, str, str], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    torch.manual_seed(0)
    source = (ROOT / document).read_text()
    names: dict[str, object] = {"__name__": "document"}
    found = blocks(document)
    for block, following in zip(found, [*found[1:], None], strict=True):
        if block.language != "python":
            continue
        run(block, document, names)
        said = capsys.readouterr().out
        if (
            following
            and following.language == "text"
            and not source[block.end : following.start].strip()
        ):
            same(document, following.text, said)


def shown() -> list[tuple[str, int, str, str | None]]:
    """``(document, line, command, output or None)`` of every command in a document."""
    found: list[tuple[str, int, str, str | None]] = []
    for document in DOCUMENTS:
        for block in blocks(document):
            if block.language in ("sh", "bash"):
                for k, line in enumerate(block.text.splitlines()):
                    command = " ".join(shlex.split(line, comments=True))
                    if command:
                        found.append((document, block.line + k, command, None))
            elif block.language == "console":
                for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
                    command, _, output = part.partition("\n")
                    found.append((document, block.line, command, output))
    return found


COMMANDS = shown()


@pytest.mark.parametrize(
    ("document", "command"), [(d, c) for d, _, c, _ in COMMANDS], ids=lambda v: v.replace(" ", "_")
)
def test_command_exists(
    document: str, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    program, *arguments = shlex.split(command)
    if program == "make":
        made = re.findall(r"^([\w-]+):.*?## ", (ROOT / "Makefile").read_text(), re.M)
        assert set(arguments) <= set(made)
    elif program == "recast":
        assert cli.main([arguments[0], "--help"]) == 0
        specs = [a.partition(":")[0] for a in arguments if re.fullmatch(r"[\w/.]+\.py:\w+", a)]
        options = {a.partition("=")[0] for a in arguments if a.startswith("--")}
        assert all((ROOT / path).exists() for path in specs)
        usage = capsys.readouterr().out
        assert options <= set(re.findall(r"--[\w-]+", usage))
    elif program == "python":
        assert arguments[0] in ("-m", "-c") or (ROOT / arguments[0]).exists()
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for name in re.findall(r"\[([\w,]+)\]", command):
            assert set(name.split(",")) <= set(extras["optional-dependencies"])
    elif program.startswith(".venv/bin/"):
        assert shutil.which(Path(program).name, path=str(Path(sys.executable).parent))
    else:
        beside = str(Path(sys.executable).parent)  # torchrun, which comes with torch
        known = shutil.which(program) or shutil.which(program, path=beside)
        assert (ROOT / program).exists() or known, f"what is {program}?"


def docstring_commands() -> list[tuple[str, str]]:
    """``(file, command)`` of the commands in the docstrings of benchmarks and examples."""
    found = []
    for path in sorted([*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("examples/**/*.py")]):
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        lines = (line.strip() for line in doc.splitlines())
        name = path.relative_to(ROOT).as_posix()
        found += [(name, x) for x in lines if re.match(r"(python|torchrun|recast|make) [\w.-]", x)]
    return found


def test_commands_of_docstrings_exist() -> None:
    """Their files do, and the options stand in these or in the folders that they import."""
    makefile = (ROOT / "Makefile").read_text()
    assert len(docstring_commands()) > 40
    for name, command in docstring_commands():
        words = shlex.split(command.partition("[")[0], comments=True)
        if words[0] == "make":
            assert f"\n{words[1]}:" in makefile, f"{name}: {command}"
            continue
        (path,) = (ROOT / w.partition(":")[0] for w in words if re.match(r"(bench|ex)\w+/", w))
        assert path.exists(), f"{name}: {command}"
        if words[0] == "recast":
            continue
        files = [path] if path.is_file() else [*path.glob("*.py")]
        files += (ROOT / "benchmarks/gpu").rglob("*.py") if "gpu_" in path.name else []
        source = "".join(file.read_text() for file in files)
        known = {*re.findall(r'"(--[\w-]+)"', source), "--nproc-per-node"}
        if 'f"--{' in source:  # options made from names
            known |= {f"--{word}" for word in re.findall(r'"(\w+)"', source)}
        assert {w for w in words if w.startswith("--")} <= known, f"{name}: {command}"


SHOWN = [(d, c, out) for d, _, c, out in COMMANDS if out]


@pytest.mark.parametrize(
    ("document", "command", "output"), SHOWN, ids=[c.replace(" ", "_") for _, c, _ in SHOWN]
)
def test_output_is_what_is_shown(
    document: str, command: str, output: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    same: Callable[[str, str, str], None],
) -> None:  # fmt: skip
    monkeypatch.chdir(ROOT)
    program, *arguments = shlex.split(command)
    assert program == "recast", "only our own output is shown"
    cli.main(arguments)
    same(document, output, capsys.readouterr().out)


def test_links_lead_somewhere() -> None:
    sources = {document: BLOCK.sub("", (ROOT / document).read_text()) for document in DOCUMENTS}
    links = [
        (document, target)
        for document, source in sources.items()
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", source)
    ]
    assert len(links) > 10
    for document, target in links:
        assert ((ROOT / document).parent / target).exists(), f"{document}: {target}"


def test_folders_of_the_layout_exist() -> None:
    """Every folder in the tables of CONTRIBUTING exists."""
    named = re.findall(r"^\| `([\w./]+/)` ", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert len(named) >= 8
    assert all((ROOT / name).exists() for name in named)


def test_every_name_that_a_report_can_print_is_told() -> None:
    """Passes on demand too, and rules of other names than their pass."""
    from recast import passes
    from recast.rewriter.rule import Rule

    source = (ROOT / "docs" / "rules.md").read_text()
    names = {name for name in passes.REGISTRY if not name.startswith("sabotage-")}
    for module in pkgutil.iter_modules(passes.__path__):
        for held in vars(importlib.import_module(f"recast.passes.{module.name}")).values():
            several = held if isinstance(held, (list, tuple)) else [held]
            names |= {rule.name for rule in several if isinstance(rule, Rule)}
    assert {"quantise-tables", "join-split", "draw-dropout", "fuse-mlp"} <= names
    assert {name for name in names if f"`{name}`" not in source} == set()
    options = {field.name for p in passes.PIPELINE for field in fields(p)}
    assert "everywhere" in options
    assert {o for o in options if f"{o.replace('_', '-')}=" not in source} == set()


def test_table_of_rules_is_the_pipeline() -> None:
    """Every rule of the default pipeline that rewrites has its row in docs/rules.md."""
    from recast import passes

    source = (ROOT / "docs" / "rules.md").read_text()
    for p in passes.PIPELINE:
        assert f"| `{p.name}` " in source, p.name
