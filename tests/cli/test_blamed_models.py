"""A model that raises by itself is told with its line, and exit code 2: no fault of ours."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from recast.rewriter.cli import bench
from recast.rewriter.cli import main as cli

SOURCE = """
import torch
from torch import nn

class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        raise RuntimeError("no backward here")

class Net(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what, self.norm, self.linear = what, nn.BatchNorm1d(3), nn.Linear(3, 3)

    def forward(self, x):
        if self.what == "ends":
            raise SystemExit(5)
        if self.what == "trains":
            assert not self.training, "not to be trained"
        x = self.linear(x)
        if self.what == "argmax":
            return x.argmax(1)
        return self.norm(x) if self.what == "norm" else Bad.apply(x) if self.what == "back" else x

def model(what="", rows=4, frozen=False):
    net = Net(what).requires_grad_(not frozen)
    return net, torch.ones(rows, 3)

def apart():
    return Net(""), torch.ones(4, 3), lambda out: out.detach().mean()

def meta():
    with torch.device("meta"):
        return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 1)), torch.arange(3, device="cpu")

def lazy():
    return nn.LazyLinear(3), torch.ones(4, 3)
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "cli_raising.py").write_text(SOURCE)

    def call(verb: str, attr: str, *arguments: str) -> tuple[int, str, str]:
        code = cli.main([verb, f"cli_raising.py:{attr}", *arguments])
        sys.modules.pop("cli_raising", None)
        return code, *capsys.readouterr()

    return call


QUICK = {"diff": ["--steps", "1"], "bench": ["--rounds", "1"], "bisect": []}


@pytest.mark.parametrize("verb", QUICK)
@pytest.mark.parametrize(
    ("what", "line", "why"),
    [
        ("norm", "cli_raising.py:27", "ValueError: Expected more than 1 value per channel"),
        ("trains", "cli_raising.py:23", "AssertionError: not to be trained"),
        ("back", "cli_raising.py:12", "RuntimeError: no backward here"),
    ],
)
def test_it_is_the_model_s(run: Run, verb: str, what: str, line: str, why: str) -> None:
    code, out, err = run(verb, "model", "--arg", f"what={what}", "--arg", "rows=1", *QUICK[verb])
    assert (code, out) == (2, "")
    assert err.startswith("spec: the model of cli_raising.py:model raises in a step of training\n")
    assert f"  at   {line} " in err and f"  why  {why}" in err


def test_what_the_plain_model_does_not_raise_is_ours(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(bench, "compare", broken)
    code, _, err = run("bench", "model", "--rounds", "1")
    assert code == 3 and "RuntimeError: a defect" in err


@pytest.mark.parametrize("verb", ["explain", *QUICK])
def test_a_model_that_ends_the_program(run: Run, verb: str) -> None:
    code, out, err = run(verb, "model", "--arg", "what=ends", *QUICK.get(verb, []))
    assert (code, out) == (2, "")
    assert err.startswith(f"recast {verb}: the model ended the program, with exit code 5\n")


@pytest.mark.parametrize(
    ("attr", "arguments", "said"),
    [
        ("model", ["what=argmax"], "the loss of Net has no gradient"),
        ("model", ["frozen=true"], "Net has no parameters to train: all are frozen"),
        ("apart", [], "the loss of Net has no gradient"),
    ],
)
def test_nothing_to_train(run: Run, attr: str, arguments: list[str], said: str) -> None:
    given = [word for one in arguments for word in ("--arg", one)]
    code, _, err = run("bench", attr, *given, "--rounds", "1")
    assert code == 2 and f"recast bench: {said}" in err and "try  --inference" in err


def test_the_line_of_a_loss_is_its_own(run: Run) -> None:
    assert "  at   cli_raising.py:34\n" in run("diff", "apart")[2]


def test_every_command_takes_or_refuses_the_same_models(run: Run) -> None:
    for verb in ("diff", "bench", "bisect", "plan", "explain"):
        code, _, err = run(verb, "lazy", *QUICK.get(verb, []))
        assert code == 2 and "weight has no size yet" in err
    assert run("bisect", "meta")[0] == 0
    assert run("explain", "meta", "--dump", "steps")[0] == 0
