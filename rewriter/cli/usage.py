"""The parser of the command line, and the options that its verbs have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

YES, NO, BAD_QUESTION, OUR_FAULT, INTERRUPTED = 0, 1, 2, 3, 130

Run = Callable[[argparse.Namespace], int]  # runs a verb; returns its exit code


class Parser(argparse.ArgumentParser):
    """argparse, with errors in our four-line form."""

    def error(self, message: str) -> Any:
        self.exit(BAD_QUESTION, f"{self.prog}: {message}\n  try  {self.prog} --help\n")


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
