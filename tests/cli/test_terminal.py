"""What goes to stderr, and when."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable

import pytest

from recast.errors import RecastWarning
from recast.rewriter.cli import terminal


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


def test_the_golden_fixture_can_fail(
    golden: Callable[[str, str], None], request: pytest.FixtureRequest
) -> None:
    if request.config.getoption("--regen"):
        pytest.skip("files are being written")
    with pytest.raises(pytest.fail.Exception, match="to accept it: pytest --regen"):
        golden("report/full.txt", "something else")
    with pytest.raises(pytest.fail.Exception, match="there is no golden file"):
        golden("no/such/file.txt", "something")
