"""What goes to stderr, and when."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from recast.errors import RecastWarning, UsageError
from recast.rewriter.cli import main as cli
from recast.rewriter.cli import terminal

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("quiet", [False, True])
def test_warnings_are_lines_on_stderr(quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.plain_warnings(argparse.Namespace(quiet=quiet)):
        warnings.simplefilter("always")
        warnings.warn("slower than it\ncould be", RecastWarning, stacklevel=1)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == ("" if quiet else "warning: slower than it\n  could be\n")


@pytest.mark.parametrize("quiet", [False, True])
def test_progress_is_for_terminals(
    quiet: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stderr, never on stdout; nothing when it is not a terminal, or with -q."""
    for tty in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda tty=tty: tty, raising=False)
        args = argparse.Namespace(quiet=quiet)
        with terminal.busy(args, "thinking"), terminal.counting(args, 2) as progress:
            progress(1)
        out, err = capsys.readouterr()
        assert out == ""
        if quiet or not tty:
            assert err == ""


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_locale_without_arrows(
    encoding: str, errors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text has a question mark for each; JSON, which programs read, loses nothing."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding, errors))
    with terminal.open_streams():
        terminal.emit(argparse.Namespace(json=False), "linear ← bot", None)
        terminal.emit(argparse.Namespace(json=True), "", {"linear ←": "é"})
    assert sys.stdout.errors == errors
    text, _, data = raw.getvalue().decode(encoding).partition("\n")
    assert text == ("linear ← bot" if encoding == "utf-8" else "linear ? bot")
    assert json.loads(data) == {"linear ←": "é"}


def test_streams_that_the_shell_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    with terminal.open_streams(), terminal.busy(argparse.Namespace(quiet=False), "thinking"):
        terminal.emit(argparse.Namespace(json=False), "a", None)
    assert sys.stdout is None and sys.stderr is None


def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(UsageError, match="No space left on device"):
            terminal.emit(argparse.Namespace(json=False), "a", None)


def test_an_answer_stays_when_nobody_reads_the_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in ``recast diff SPEC 2>&1 >report | head -1``; with a full disk too."""
    read, write = os.pipe()
    os.close(read)
    for stream in (os.fdopen(write, "w"), open("/dev/full", "w")):  # noqa: SIM115
        with stream:
            monkeypatch.setattr(sys, "stderr", stream)
            assert cli.main(["explain", "nowhere.py:model"]) == 2


def test_the_golden_fixture_can_fail(
    golden: Callable[[str, str], None], request: pytest.FixtureRequest
) -> None:
    if request.config.getoption("--regen"):
        pytest.skip("files are being written")
    with pytest.raises(pytest.fail.Exception, match="to accept it: pytest --regen"):
        golden("report/full.txt", "something else")
    with pytest.raises(pytest.fail.Exception, match="there is no golden file"):
        golden("no/such/file.txt", "something")


@pytest.mark.parametrize("width", [None, 20])
def test_a_terminal_is_not_overrun(
    width: int | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results and errors are wrapped for a terminal alone; a file or a program gets whole lines."""
    monkeypatch.setenv("COLUMNS", str(width))
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: width is not None, raising=False)
    text = "  why  a reason of more than twenty columns"
    terminal.emit(argparse.Namespace(json=False), text, None)
    terminal.complain(text)
    for got in capsys.readouterr():
        assert " ".join(got.split()) == text.strip().replace("  ", " ")
        assert (max(map(len, got.splitlines())) <= 20) is (width is not None)


@pytest.mark.parametrize("verb", [[], ["explain"], ["diff"], ["plan"], ["simulate"], ["list"]])
def test_the_help_fits_a_terminal(
    verb: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same words as in a file."""

    def told(width: int, shown_there: bool) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: shown_there, raising=False)
        assert cli.main([*verb, "--help"]) == 0
        return capsys.readouterr().out

    for width in (60, 80):
        shown = told(width, True)
        assert max(map(len, shown.splitlines())) <= width
        assert shown.split() == told(width, False).split()
    assert told(200, True) == told(200, False)


def test_json_has_no_nan_and_no_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    data = {"rows": [(float("inf"), 1.5), {"at": float("nan")}]}
    terminal.emit(argparse.Namespace(json=True), "", data)
    told = capsys.readouterr().out
    assert json.loads(told, parse_constant=pytest.fail) == {"rows": [[None, 1.5], {"at": None}]}


@pytest.mark.parametrize("command", [["-m", "recast", "env"], ["-c", "import recast"]])
def test_ctrl_c_while_torch_is_loaded(command: list[str], tmp_path: Path) -> None:
    """It ends the command without a traceback; a program that imports recast gets its interrupt."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt\n")
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode in (130, -2)
    assert done.stdout == ""
    assert ("KeyboardInterrupt" in done.stderr) is (command[0] == "-c")
    assert done.stderr == "" or command[0] == "-c"
