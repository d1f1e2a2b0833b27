"""report.html: one file, nothing from the network, and a browser shows it."""

from __future__ import annotations

import builtins
import re
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from test_report import report

from recast.errors import UsageError
from recast.rewriter.report import draw

pytest.importorskip("jinja2", reason="jinja2 is not installed")

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-sync", "--disable-background-networking", "--disable-component-update",
    "--hide-scrollbars",
)  # fmt: skip


class Page(HTMLParser):
    """Addresses a page would load, and whether its elements nest."""

    VOID = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href")]
        if tag in ("script", "link", "iframe", "object"):
            self.loads.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_one_file_that_loads_nothing(tmp_path: Path) -> None:
    path = report().to_html(tmp_path / "report.html")
    text = path.read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.loads == []
    assert page.open == []
    assert "url(" not in text
    assert set(re.findall(r"https?://[\w./]+", text)) <= {
        "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink",
    }  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_what_the_model_says_is_text(tmp_path: Path) -> None:
    """Names and reasons come from the user's code: they are escaped."""
    found = report()
    found.model = "<script>alert(1)</script>"
    text = found.to_html(tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert "also used by &lt;add&gt;" in text


def test_everything_is_on_the_page(tmp_path: Path) -> None:
    text = report().to_html(tmp_path / "r.html").read_text(encoding="utf-8")
    for told in ("26 of 27", "25 calls", "embs.{0..25}", "dlrm.py:41", "max_norm writes",
                 "drop max_norm", "KeyError", "one constant was lifted", "gate.py:12",
                 "graph DLRM(x: f32[B])", "share it as you would share the code"):  # fmt: skip
        assert told in text
    if draw.can_layout():
        assert text.count("<svg") == 2


def test_without_layout_the_page_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "_pygraphviz", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    text = report().to_html(tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<svg" not in text
    assert "neither the package pygraphviz nor the program dot is installed" in text


def test_without_jinja2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "jinja2":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UsageError, match="needs the package jinja2"):
        report().to_html(tmp_path / "r.html")


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@needs_browser
def test_a_browser_opens_the_page(tmp_path: Path) -> None:
    path = report().to_html(tmp_path / "report.html")
    text = browse(tmp_path, path, "--dump-dom").stdout.decode("utf-8")
    assert "What was rewritten" in text
    assert text.count("<svg") == (2 if draw.can_layout() else 0)


@needs_browser
def test_a_browser_draws_the_page(tmp_path: Path) -> None:
    """The screenshot has ink on it: text, cards and boxes, not one flat colour."""
    path = report().to_html(tmp_path / "report.html")
    shot = tmp_path / "shot.png"
    browse(tmp_path, path, f"--screenshot={shot}", "--window-size=1280,900")
    pixels = png_bytes(shot)
    assert len(set(pixels[k : k + 4] for k in range(0, len(pixels), 97))) > 40


def browse(folder: Path, page: Path, *flags: str) -> subprocess.CompletedProcess[bytes]:
    assert CHROMIUM is not None
    profile = folder / "profile"
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, check=True, timeout=90)


def png_bytes(path: Path) -> bytes:
    """The decompressed image data of a PNG."""
    raw, at, data = path.read_bytes(), 8, b""
    while at < len(raw):
        (length,) = struct.unpack(">I", raw[at : at + 4])
        if raw[at + 4 : at + 8] == b"IDAT":
            data += raw[at + 8 : at + 8 + length]
        at += 12 + length
    return zlib.decompress(data)


def test_what_to_change_is_a_column_only_where_something_is(tmp_path: Path) -> None:
    told = report()
    assert "what to change" in told.to_html(tmp_path / "a.html").read_text()
    told.journal.missed = [m for m in told.journal.missed if not m.tries]
    page = told.to_html(tmp_path / "b.html").read_text()
    assert "head_0" in page and "what to change" not in page
