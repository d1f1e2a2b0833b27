"""The command line: its answers, its exit codes, and what goes to stdout and to stderr."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import recast
from recast.errors import VerifyError
from recast.rewriter import api
from recast.rewriter.cli import main as cli
from recast.rewriter.report import draw
from recast.runtime import OPS

HERE = Path(__file__).parent
SPEC = f"{HERE / 'small.py'}:model"


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """``run("explain", SPEC)`` -> exit code, stdout, stderr; in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(list(arguments))
        out, err = capsys.readouterr()
        return code, out.replace(str(HERE) + os.sep, ""), err.replace(str(HERE) + os.sep, "")

    return call


Run = Callable[..., tuple[int, str, str]]


def test_explain(run: Run, golden: Callable[[str, str], None]) -> None:
    code, out, err = run("explain", SPEC, "--no-times")
    assert (code, err) == (0, "")
    golden("cli/explain.txt", out)


def test_explain_json(run: Run) -> None:
    code, out, err = run("explain", SPEC, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["captured"] == "whole"
    assert found["lookups"] == {"found": 3, "fused": 3}
    assert found["fired"]["fuse-mlp"] == 1
    assert found["seconds"]["total"] > 0
    assert "seconds" not in json.loads(run("explain", SPEC, "--json", "--no-times")[1])


def test_without_times_two_runs_are_equal(run: Run) -> None:
    for arguments in (["explain", SPEC, "--json"], ["list", "ops"], ["list", "passes", "--json"]):
        flags = ["--no-times"] if arguments[0] == "explain" else []
        assert run(*arguments, *flags) == run(*arguments, *flags)


def test_without_a_pass(run: Run) -> None:
    _, out, _ = run("explain", SPEC, "--json", "--without", "fuse-mlp")
    assert "fuse-mlp" not in json.loads(out)["fired"]
    _, out, _ = run("explain", SPEC, "--json", "--passes", "normalize,group-embeddings")
    assert "group-embeddings" in json.loads(out)["fired"]
    assert "fuse-mlp" not in json.loads(out)["fired"]


def test_optimize_writes_every_format(run: Run, tmp_path: Path) -> None:
    forms = "text,python,json,dot" + (",svg,html" if draw.can_layout() else "")
    code, out, _ = run("optimize", SPEC, "-o", "made", "--format", forms, "--no-times")
    assert code == 0
    names = re.findall(r"^wrote made/(.*)$", out, flags=re.MULTILINE)
    assert sorted(names) == sorted(p.name for p in (tmp_path / "made").iterdir())
    assert len(names) == len(forms.split(","))
    assert (tmp_path / "made" / "graph.txt").read_text().startswith("graph Small(dense: f32[B,3]")
    assert "recast.mlp" in (tmp_path / "made" / "graph.txt").read_text()
    assert json.loads((tmp_path / "made" / "graph.json").read_text())["name"] == "Small"
    compile((tmp_path / "made" / "graph.py").read_text(), "graph.py", "exec")
    assert (tmp_path / "made" / "graph.dot").read_text().startswith("digraph")


def test_dump_writes_a_file_for_every_change(run: Run, tmp_path: Path) -> None:
    code, _, err = run("explain", SPEC, "--dump", "steps")
    files = sorted((tmp_path / "steps").iterdir())
    assert code == 0 and err == f"wrote steps/00-capture.txt, and {len(files) - 1} after it\n"
    assert [f.name[:2] for f in files] == [f"{k:02}" for k in range(len(files))]
    assert files[0].name == "00-capture.txt"
    texts = [f.read_text() for f in files]
    assert "recast." not in texts[0]
    assert "recast.mlp" in texts[-1]
    assert all(a != b for a, b in pairwise(texts))


@pytest.mark.parametrize("name", ["model", "with_loss"])
def test_diff_says_yes(run: Run, name: str) -> None:
    code, out, err = run("diff", f"{HERE / 'small.py'}:{name}", "--steps", "2")
    assert (code, err) == (0, "")
    assert "equal within limits" in out
    code, out, _ = run("diff", f"{HERE / 'small.py'}:{name}", "--steps", "1", "--json")
    assert code == 0
    assert json.loads(out)["ok"] is True


def test_diff_says_no_and_names_the_node(run: Run) -> None:
    arguments = ["--steps", "1", "--passes", "default,sabotage-swap-tables"]
    code, out, _ = run("diff", SPEC, *arguments)
    assert code == 1
    assert "NOT equal: first to part is" in out
    assert "small.py:" in out
    assert "written by sabotage-swap-tables" in out
    command = f"recast diff {'small.py:model'} --steps 1 --seed 0 --passes default,sabotage-swap"
    assert command in out
    code, out, _ = run("diff", SPEC, *arguments, "--json")
    assert code == 1
    assert json.loads(out)["ok"] is False


def test_a_saboteur_that_the_verifier_stops_is_an_answer(run: Run, tmp_path: Path) -> None:
    """The answer is no, with the pass's name: not our fault, so no reproducer is written."""
    for verb in ("diff", "bisect"):
        code, out, _ = run(verb, SPEC, "--passes", "default,sabotage-drop-bias")
        assert code == 1
        assert "sabotage-drop-bias broke an invariant" in out
    assert list(tmp_path.iterdir()) == []


def test_bisect(run: Run) -> None:
    code, out, _ = run("bisect", SPEC, "--passes", "default,sabotage-swap-tables")
    assert code == 1
    assert re.match(r"rewrite \d+ of \d+ breaks the numbers: sabotage-swap-tables", out)
    code, out, _ = run("bisect", SPEC, "--json")
    assert (code, json.loads(out)) == (0, {"ok": True})


def test_diff_without_steps_compares_no_trained_parameters(run: Run) -> None:
    """And ``bisect`` takes no step either."""
    code, out, _ = run("diff", SPEC, "--steps", "0", "--json")
    found = json.loads(out)
    assert (code, found["ok"], found["steps"]) == (0, True, 0)
    assert not any(row["group"].startswith("state") for row in found["rows"])
    assert run("bisect", SPEC, "--steps", "0")[0] == 0


@pytest.mark.parametrize(
    ("name", "state"), [("adamw", "[exp_avg_sq]"), ("rmsprop", "[square_avg]")]
)
def test_diff_with_another_optimizer(run: Run, name: str, state: str) -> None:
    """Its state is compared, and the command that repeats it names it."""
    code, out, _ = run("diff", SPEC, "--optimizer", name, "--json")
    found = json.loads(out)
    assert code == 0
    assert any(state in row["tensor"] for row in found["rows"])
    assert f" --optimizer {name}" in found["command"]


@pytest.mark.parametrize(
    "flags",
    [[], ["--inference"], *(["--optimizer", n] for n in ("sgd", "adam", "adamw", "rmsprop"))],
)
def test_bench(run: Run, flags: list[str]) -> None:
    code, out, _ = run("bench", SPEC, "--rounds", "3", "--json", *flags)
    assert code == 0
    found = json.loads(out)
    assert found["rounds"] == len(found["plain"]["seconds"]) == len(found["recast"]["seconds"]) == 3
    assert found["speedup"] == pytest.approx(
        found["plain"]["median_s"] / found["recast"]["median_s"]
    )
    assert found["plain"]["peak_bytes"] > 0


def test_bench_can_say_no(run: Run) -> None:
    code, out, _ = run("bench", SPEC, "--rounds", "1", "--at-least", "1e9")
    assert code == 1
    assert "× as fast as plain" in out
    assert "1 round, interleaved" in out
    assert out.endswith("\n  no: --at-least 1e+09 was asked for\n")
    assert run("bench", SPEC, "--rounds", "1", "--at-least", "1e-9")[0] == 0


def test_list(run: Run) -> None:
    code, out, _ = run("list", "passes", "--json")
    names = [p["name"] for p in json.loads(out)]
    assert code == 0
    assert names == list(dict.fromkeys(names))
    assert {"normalize", "group-embeddings", "fuse-mlp", "sabotage-swap-tables"} <= set(names)
    _, out, _ = run("list", "ops")
    assert [line.split()[0] for line in out.splitlines()] == sorted(OPS)


def test_env(run: Run) -> None:
    code, out, _ = run("env")
    assert code == 0
    assert re.match(r"recast \S+, CPython 3\.\d+\.\d+, ", out)
    found = json.loads(run("env", "--json")[1])
    assert set(found["kernels"]) == set(OPS)
    for kernels in found["kernels"].values():
        assert all(k["why"] for k in kernels), "a kernel says when it is taken or why it is not"


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ["explain", SPEC, "--passes", "fuse-mpl"],
            ["there is no pass 'fuse-mpl'", "try  fuse-mlp"],
        ),
        (["explain", SPEC, "--passes", "fuse-mlp{x=1}"], ["fuse-mlp has no option 'x'"]),
        (["explain", SPEC, "--without", "fuse-mpl"], ["--without: there is no pass", "fuse-mlp"]),
        (
            ["optimize", SPEC, "--format", "txt"],
            ["--format: there is no format 'txt'", "try  text"],
        ),
        (["explain", "nowhere.py:model"], ["spec: there is no file nowhere.py"]),
        (["explain", SPEC, "--arg", "rows"], ["--arg: cannot read 'rows'"]),
        (
            ["diff", f"{HERE / 'small.py'}:no_example"],
            ["gives no example batch", "try  return (mod"],
        ),
        (["bench", f"{HERE / 'small.py'}:no_example"], ["gives no example batch"]),
        (["explain", f"{HERE / 'small.py'}:wrong_example"], ["example: ", "  why  "]),
        (["plan"], ["recast plan: a model or --tables is needed\n", "  try  recast plan SPEC"]),
        (["plan", SPEC, "--tables", "x.json"], ["recast plan: SPEC and --tables", "not of both"]),
        (
            ["plan", SPEC, "--world-size", "2", "--pin", "tbles.0=row_wise"],
            ["sharding: no table is named 'tbles.0'", "try  tables.0.weight"],
        ),
        (
            ["bench", SPEC, "--inference", "--optimizer", "sgd"],
            ["--optimizer with --inference", "has no optimizer"],
        ),
        (["bench", SPEC, "--inference", "--lr", "1"], ["--lr with --inference"]),
        (["diff", SPEC.replace(":model", ":bad_loss")], ["loss returned by", "at   small.py:"]),
        (["bench", SPEC.replace(":model", ":no_scalar")], ["gave shape (", "a scalar tensor"]),
        (["bench", SPEC.replace(":model", ":number_loss")], ["gave a float", "without .item()"]),
        (["explain", SPEC.replace(".py", "")], ["is neither a .py file nor", "small.py:model"]),
        (["explain", SPEC, "--passes", "fuse-mlp{max-layers=x}"], ["max-layers is a whole"]),
        (
            ["simulate", "--model", "huge"],
            ["no model 'huge'", "why  there are tiny, small,", "  try  tiny"],
        ),
        (["explain", f"{HERE / 'small.py'}:HERE"], ["is an int, not a model", "small.py:Small"]),
        (["bench", SPEC.replace(":model", ":bare")], ["Bare has no parameters", "--inference"]),
        (["plan", SPEC.replace(":model", ":bare")], ["Bare has no parameters", "  why  "]),
        (["plan", "--tables", "x.json", "--arg", "a=1"], ["recast plan: --arg without a model"]),
        (
            ["plan", "--tables", "x.json", "--optimizer", "adam"],
            ["recast plan: --optimizer without a model", '"state_element": 8'],
        ),
        (
            ["plan", SPEC, "--world-size", "2", "--pin", "tables.0=rowwise"],
            ["recast plan: --pin tables.0=rowwise", "try  --pin tables.0=row_wise"],
        ),
        (
            ["plan", SPEC, "--world-size", "2", "--column-slice-threshold", "0"],
            ["column_slice_threshold=0 is not a number of elements"],
        ),
        (["explain", str(HERE)[:-3] + "cli:x"], ["is neither a .py file nor the name"]),
        (["explain", f"{HERE / 'small.py'}:HERE.bit_count.x"], ["has no 'HERE.bit_count.x'"]),
    ],
)
def test_bad_questions(run: Run, arguments: list[str], lines: list[str]) -> None:
    """Exit 2; four lines at most on stderr, nothing on stdout."""
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    for line in lines:
        assert line in err
    told = err.splitlines()
    assert len(told) <= 4
    assert all(re.match(r"  (at  |why |try ) ", line) for line in told[1:])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["explain"],
        ["explian", SPEC],
        ["diff", SPEC, "--steps", "-1"],
        ["diff", SPEC, "--optimizer", "lion"],
        ["list", "cats"],
        ["bench", SPEC, "--lr", "-1"],
        ["bench", SPEC, "--lr", "high"],
        ["bench", SPEC, "--dump", "steps"],  # which nothing would be written to
        ["bisect", SPEC, "--dump", "steps"],
        ["explain", SPEC, "--dump", ""],
        ["optimize", SPEC, "-o", ""],
        ["plan", "--tables", ""],
        ["plan", SPEC, "-o", ""],
        ["diff", SPEC, "--seed", "9" * 30],
        ["bisect", SPEC, "--seed", str(-(2**62))],
        ["bench", SPEC, "--at-least", "nan"],
        ["bench", SPEC, "--at-least", "0"],
    ],
)
def test_usage(run: Run, arguments: list[str]) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert re.search(r"try  recast.* --help", err)


def test_what_is_too_much_is_refused_by_the_verb(run: Run) -> None:
    code, out, err = run("list", "passes", "ops", "--all")
    assert (code, out) == (2, "")
    assert err == "recast list: unrecognized arguments: ops --all\n  try  recast list --help\n"


def test_a_model_that_is_not_captured_is_told(run: Run) -> None:
    """It runs as it was: the report says where, why and what to try; a script sees exit code 2."""
    code, out, _ = run("explain", f"{HERE / 'small.py'}:rows", "--no-times")
    assert code == 2
    assert "not captured" in out
    assert re.search(r"  at   small\.py:\d+", out)
    assert "  why  " in out
    assert "  try  " in out


def test_help_states_the_exit_codes(run: Run) -> None:
    for arguments in (["--help"], ["diff", "--help"]):
        code, out, _ = run(*arguments)
        assert code == 0
        assert re.search(r"exit codes:\s+0\s+yes;?\s+1\s+no\b", out)


def test_the_numbers_of_a_model_that_is_not_captured_are_the_same(run: Run) -> None:
    """``diff`` answers for it as it runs."""
    assert run("diff", f"{HERE / 'small.py'}:rows", "--steps", "1")[0] == 0


def test_what_the_model_prints_is_no_result(run: Run) -> None:
    code, out, err = run("explain", SPEC, "--arg", "chatty=True", "--json")
    assert code == 0
    json.loads(out)
    assert "the function says something" in err
    assert "the model says something" in err


def test_what_is_written_past_python_is_no_result(tmp_path: Path) -> None:
    """By a child process, by C's printf, which keeps it for later, and by ``sys.__stdout__``."""
    (tmp_path / "loud.py").write_text(
        "import ctypes, os, sys, torch\n"
        "class Loud(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        os.system('echo a child')\n"
        "        ctypes.CDLL(None).printf(b'native code\\n')\n"
        "        sys.__stdout__.write('the first stdout\\n')\n"
        "        return super().forward(x)\n"
        "def model():\n"
        "    return Loud(3, 2), torch.rand(4, 3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "recast", "diff", "loud.py:model", "--json"],
        capture_output=True, env=os.environ | {"PYTHONPATH": str(HERE.parent.parent)},
        cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0
    assert json.loads(done.stdout)["ok"]
    for said in (b"a child", b"native code", b"the first stdout"):
        assert said in done.stderr


def boom(*_: Any, **__: Any) -> None:
    raise KeyError("a table that was forgotten")


def test_our_fault_writes_a_reproducer(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "optimize", boom)
    code, out, err = run("explain", SPEC, "--without", "fuse-mlp")
    assert (code, out) == (3, "")
    assert err.splitlines()[0] == "recast: KeyError: 'a table that was forgotten'"
    assert "this is a defect of recast, not of your model" in err
    (folder,) = tmp_path.iterdir()
    assert f"reproducer: {folder.name}" in err
    content = {f.name: f.read_text() for f in folder.iterdir()}
    assert set(content) == {
        "command.txt", "error.txt", "versions.txt", "pipeline.txt", "graph-before.txt",
    }  # fmt: skip
    assert "a table that was forgotten" in content["error.txt"]
    assert content["command.txt"].endswith("--without fuse-mlp\n")
    assert "graph Small(" in content["graph-before.txt"]
    assert "without fuse-mlp" in content["pipeline.txt"]
    assert "torch" in content["versions.txt"]


def test_a_broken_invariant_is_our_fault(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise VerifyError("pass fuse-mlp broke an invariant: a value is used before it is made")

    monkeypatch.setattr(api, "optimize", broken)
    for verb in ("explain", "diff"):
        code, _, err = run(verb, SPEC)
        assert code == 3
        assert err.startswith("pass fuse-mlp broke an invariant")
        assert "reproducer: recast-reproducer-" in err


def test_interrupted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "optimize", interrupt)
    assert run("explain", SPEC)[0] == 130


def test_as_a_program(tmp_path: Path) -> None:
    """A process of its own: the exit code arrives, stderr is clean, a closed pipe is no error."""
    command = [sys.executable, "-m", "recast", "explain", SPEC, "--json"]
    environment = os.environ | {"PYTHONPATH": str(HERE.parent.parent)}
    done = subprocess.run(command, capture_output=True, env=environment, cwd=tmp_path, timeout=120)
    assert done.returncode == 0
    assert done.stderr == b""
    assert json.loads(done.stdout)["model"] == "Small"
    piped = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             env=environment, cwd=tmp_path)  # fmt: skip
    assert piped.stdout is not None and piped.stderr is not None
    piped.stdout.close()
    assert piped.stderr.read() == b""
    piped.stderr.close()
    assert piped.wait(timeout=120) == 0


def test_the_next_command_asks_about_the_same_model(run: Run) -> None:
    flags = ["--arg", "rows=6", "--without", "fuse-mlp", "--passes", "default"]
    _, out, _ = run("explain", SPEC, *flags, "--no-times")
    asked = " ".join(["small.py:model", *flags[:4], "--passes", "default"])
    assert f"next: recast diff {asked}\n" in out
    assert f"write it: recast optimize {asked} -o out\n" in out


def test_the_version(run: Run) -> None:
    assert run("--version") == (0, f"recast {recast.__version__}\n", "")


def test_a_dump_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    code, out, err = run("explain", SPEC, "--dump", "taken")
    assert (code, out) == (2, "")
    assert "--dump: cannot write to the folder taken" in err


@pytest.mark.parametrize("formats", ["", " , "])
def test_no_format_is_no_answer(run: Run, formats: str) -> None:
    code, out, err = run("optimize", SPEC, "--format", formats)
    assert (code, out) == (2, "")
    assert "--format names no format" in err


def test_without_an_example_the_next_step_is_to_give_one(run: Run) -> None:
    """Neither ``diff`` nor ``bench`` could run."""
    _, out, _ = run("explain", f"{HERE / 'small.py'}:no_example", "--no-times")
    assert "next: return (model, example) from the function that SPEC names" in out
    assert "next: recast diff" not in out
    assert "note  no example batch was given: no rewrite was proved" in out


def test_passes_that_are_wrong_on_purpose_stand_apart(run: Run) -> None:
    _, out, _ = run("list", "passes")
    default, rest, wrong = out.split("\n\n")
    assert "fuse-mlp " in default and "sabotage-" not in default + rest
    assert rest.startswith("not in the default pipeline:\n") and "quantise-tables " in rest
    assert all(line.startswith("sabotage-") for line in wrong.strip().splitlines()[1:])


def test_a_plan_for_one_rank_says_how_to_ask_for_more(run: Run) -> None:
    _, out, _ = run("plan", SPEC)
    assert out.endswith("for several ranks: --world-size N\n")
