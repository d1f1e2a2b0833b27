"""Text for a terminal of some width: long lines broken where they may be, continued below."""

from __future__ import annotations

import re
import textwrap

_COMMANDS = ("next: ", "write it: ", "to repeat: ")  # one line each, to be copied
_CHOICES = "   |   "  # between the things to try
_BOUND = "\N{NO-BREAK SPACE}"
_SHARE = 0.45  # of the width: a column that begins later is too narrow to continue in
_COLUMN = re.compile(r"(?<=  )(?=\S)")


def wrapped(text: str, width: int) -> str:
    """``text`` in lines of at most ``width`` columns; words and commands that are longer stay."""
    return "\n".join(part for line in text.split("\n") for part in _parts(line, width))


def words(text: str, width: int) -> list[str]:
    """``text`` in lines of at most ``width`` columns, broken between words, but not behind an
    arrow; at least one line.
    """
    bound = text.replace("← ", f"←{_BOUND}")
    found = textwrap.wrap(bound, max(width, 1), break_long_words=False, break_on_hyphens=False)
    return [line.replace(_BOUND, " ") for line in found] or [""]


def _parts(line: str, width: int) -> list[str]:
    if len(line) <= width or line.startswith(_COMMANDS):
        return [line]
    indent = " " * _hanging(line, width)
    if _CHOICES in line:  # commands, most of them
        first, *more = line.split(_CHOICES)
        return [first, *(indent + one for one in more)]
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False,
        replace_whitespace=False, expand_tabs=False,
    )  # fmt: skip


def _hanging(line: str, width: int) -> int:
    """Where the last column begins that leaves room to continue in; else just past the indent."""
    columns = [m.start() for m in _COLUMN.finditer(line) if m.start() <= _SHARE * width]
    indent = len(line) - len(line.lstrip())
    return columns[-1] if columns and columns[-1] > indent else indent + 2
