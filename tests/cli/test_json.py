"""What ``--json`` writes is what docs/json.md says: a key more or less here is one there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from recast.rewriter.cli import main as cli

SPEC = f"{Path(__file__).parent / 'small.py'}:model"
PAGE = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
IN_ROWS = {"explain": ("rewrites", "missed"), "diff": ("rows",)}
ASKED: dict[str, list[str]] = {
    "explain": [SPEC],
    "optimize": [SPEC, "--format", "text"],
    "diff": [SPEC, "--steps", "1", "--passes", "default,sabotage-swap-tables"],
    "bisect": [SPEC, "--passes", "default,sabotage-swap-tables"],
    "bench": [SPEC, "--rounds", "1"],
    "plan": [SPEC],
    "simulate": ["--model", "tiny", "--devices", "1"],
    "list passes": [],
    "list ops": [],
    "env": [],
}


def _written(command: str, capsys: pytest.CaptureFixture[str]) -> Any:
    cli.main([*command.split(), *ASKED[command], "--json", "-q"])
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    return found[0] if isinstance(found, list) else found


def _documented(command: str) -> set[str]:
    line = re.search(rf"^\| `{command}` \| (.*) \|$", PAGE, re.MULTILINE)
    assert line, command
    own = re.split("; (?:if no plan fits|if SPEC|if a pass|or, like)", line[1])[0]  # another answer
    keys = set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", own)))
    return keys - {"explain"} | (_documented("explain") if command == "optimize" else set())


@pytest.mark.parametrize("command", ASKED)
def test_the_keys_are_those_of_the_page(
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    found = _written(command, capsys)
    assert set(found) == _documented(command)
    for name in IN_ROWS.get(command, ()):
        for entry in found[name][:1]:
            sentence = PAGE.partition("\nAn entry of")[2].partition("\n\n")[0]
            part = next(p for p in re.split(r";\s", sentence) if f"`{name}`" in p)
            words = set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", part)))
            assert set(entry) == words - {name, "diff"}
