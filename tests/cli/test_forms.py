"""A SPEC that gives ``forms``: each command knows the further forms of call."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recast.rewriter.cli import main as cli
from recast.rewriter.cli import verbs

SOURCE = """
import torch
from torch import nn
from torch.nn import functional as F

class Labelled(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.user = nn.Embedding(11, 4)
        self.top = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids, label=None):
        out = self.top(self.user(ids)).squeeze(1)
        return out.sigmoid() if label is None else (F.mse_loss(out, label), out)

def model():
    ids, label = torch.arange(8), torch.rand(8)
    return Labelled(), (ids, label), lambda out: out[0], [(ids,)]
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "cli_formed.py").write_text(SOURCE)

    def call(verb: str, *arguments: str) -> tuple[int, str, str]:
        code = cli.main([verb, "cli_formed.py:model", *arguments])
        sys.modules.pop("cli_formed", None)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_explain_and_its_dumps(run: Run, tmp_path: Path) -> None:
    code, out, err = run("explain", "--dump", "steps")
    assert code == 0
    assert "form  forms[0] (label is None): captured whole" in out
    written = sorted(str(p.relative_to(tmp_path / "steps")) for p in tmp_path.rglob("*.txt"))
    assert written[0] == "00-capture.txt" and "forms.0/00-capture.txt" in written
    assert err == f"wrote steps/00-capture.txt, and {len(written) - 1} after it\n"
    first, last = (sorted((tmp_path / "steps/forms.0").iterdir())[k].read_text() for k in (0, -1))
    assert "sigmoid" in first and "recast.mlp" not in first and "recast.mlp" in last
    assert len(json.loads(run("explain", "--json")[1])["forms"]) == 1


def test_optimize_writes_the_graph_of_each(run: Run, tmp_path: Path) -> None:
    code, _, _ = run("optimize", "--format", "text,python,json")
    assert code == 0
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {
        f"graph{form}.{kind}" for form in ("", ".forms.0") for kind in ("txt", "py", "json")
    } == names


def test_diff_compares_each(run: Run) -> None:
    code, out, _ = run("diff", "--steps", "1")
    assert code == 0
    assert "\n\nfurther forms of call\n\ndiff of Labelled" in out
    assert out.count("equal within limits") == 2
    data = json.loads(run("diff", "--steps", "1", "--json")[1])
    assert data["ok"] and data["forms"]["ok"] and data["forms"]["steps"] == 0


def test_diff_says_no_where_a_form_alone_differs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = verbs._diff_of_forms

    def spoilt(subject: Any, compiled: Any, asked: Any) -> Any:
        for graph in compiled.forms[0].graphs.values():
            (node,) = (n for n in graph.nodes if n.name.startswith("sigmoid"))
            node.target = torch.tanh
        compiled.forms[0]._runner.build()
        return real(subject, compiled, asked)

    monkeypatch.setattr(verbs, "_diff_of_forms", spoilt)
    code, out, _ = run("diff", "--steps", "0", "--json")
    assert (code, json.loads(out)["ok"]) == (1, False)


def test_bench_and_bisect_call_the_example(run: Run) -> None:
    assert run("bench", "--rounds", "1")[0] == 0
    assert run("bench", "--rounds", "1", "--inference")[0] == 0
    assert run("bisect")[0] == 0
    assert run("plan", "--world-size", "2")[0] == 0
