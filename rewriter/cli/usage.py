"""The parser of the command line, and the options that its verbs have in common."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable
from typing import Any

from recast.rewriter.report.wrap import wrapped

from .terminal import columns

YES, NO, BAD_QUESTION, OUR_FAULT, INTERRUPTED = 0, 1, 2, 3, 130

Run = Callable[[argparse.Namespace], int]  # runs a verb; returns its exit code


class Parser(argparse.ArgumentParser):
    """argparse, with errors in our four-line form."""

    def format_help(self) -> str:
        """The help, in lines that fit the terminal that it is shown in."""
        text, width = super().format_help(), columns()
        return text if width is None else _fitted(text, width)

    def error(self, message: str) -> Any:
        self.exit(BAD_QUESTION, f"{self.prog}: {message}\n  try  {self.prog} --help\n")


def _fitted(text: str, width: int) -> str:
    """``text`` in ``width`` columns. Prose, which is not indented, is broken anew where its lines
    are too long; of all else each line by itself.
    """
    parts = re.split(r"((?:^\S.*\n)+)", text, flags=re.MULTILINE)
    fit = wrapped, _prose
    return "".join(fit[k % 2](part, width) for k, part in enumerate(parts))


def _prose(lines: str, width: int) -> str:
    if all(len(line) <= width for line in lines.splitlines()):
        return lines
    return textwrap.fill(lines, width, break_long_words=False, break_on_hyphens=False) + "\n"


def verb(
    verbs: Any, name: str, help: str, epilog: str, description: str = ""
) -> argparse.ArgumentParser:
    """The parser of one verb; ``help`` is its line in the list of all, ``description`` its own."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=help,
        description=description or f"{help[0].upper()}{help[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def common(parser: argparse.ArgumentParser, run: Run) -> None:
    """The options of every verb, and what it runs."""
    parser.add_argument("--json", action="store_true", help="write the result as JSON")
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="show no progress and no warnings"
    )
    parser.set_defaults(run=run)


def rate(text: str) -> float:
    """The type of a learning rate."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a learning rate")
    return value


def factor(text: str) -> float:
    """The type of how many times as fast something is to be."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of more than 0")
    return value


def seed(text: str) -> int:
    """The type of what random numbers begin with; steps and batches are added to it."""
    value = int(text)
    if not -(2**62) < value < 2**62:
        raise argparse.ArgumentTypeError(f"{text} is not between -2^62 and 2^62")
    return value


def path(text: str) -> str:
    """The type of a file or folder. An empty one, as of a variable of the shell that is not set,
    would be the current folder, or be taken as not given.
    """
    if not text:
        raise argparse.ArgumentTypeError("its name is empty")
    return text


def count(text: str) -> int:
    """The type of an argument that is a number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return int(text)


def positive(text: str) -> int:
    """The type of an argument that is a number of at least 1."""
    value = int(text) if text.lstrip("-").isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value
