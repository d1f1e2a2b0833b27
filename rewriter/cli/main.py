"""The command ``recast``: the same nouns as the Python API, one verb each.

The result goes to stdout, to be piped, or read by a program with ``--json``; progress, warnings and
errors go to stderr. Results are deterministic; times are at the right, and ``--no-times`` removes
them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from recast import __version__
from recast.errors import DiffError, PlanError, RecastError, VerifyError
from recast.rewriter import crash

from . import env
from . import list as cli_list
from . import plan as cli_plan
from . import verbs as cli_verbs
from .terminal import complain, lead_nowhere, open_streams, plain_warnings
from .usage import BAD_QUESTION, INTERRUPTED, NO, OUR_FAULT, YES, Parser

_EPILOG = """\
SPEC names a model: file.py:attr or package.module:attr. attr is a module, or a function that
returns a model, (model, example), (model, example, loss) or (model, example, loss, forms).

to begin with:
  recast explain examples/dlrm.py:model     what would be rewritten, and what not, and why
  recast diff examples/dlrm.py:model        are the numbers the same?
  recast bench examples/dlrm.py:model       how fast is it?

`recast VERB --help` explains the options of a command.

environment:
  RECAST_KERNELS=torch|portable|avx2|avx512   use these CPU kernels only
  RECAST_CACHE=DIR                            where compiled code is kept (~/.cache/recast)
  RECAST_CHECKED=1                            ids outside their table raise on a GPU too

exit codes:
  0    yes
  1    no: the numbers differ, slower than asked, no plan fits
  2    the question is wrong: usage, a model that cannot be imported, or raises by itself;
       of explain and optimize also: nothing of the model can be captured
  3    a fault of recast's own; it writes a folder with all that is needed to repeat it
  130  interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    with open_streams():
        return _run(list(sys.argv[1:] if argv is None else argv))


def _run(arguments: list[str]) -> int:
    try:
        parser = _parser()
        args, rest = parser.parse_known_args(arguments)
        if rest:
            parser.prog = f"recast {args.verb}"  # whose help tells what it takes
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
    except SystemExit as stop:  # argparse has printed the reason, or its help
        return int(stop.code or 0)
    try:
        with plain_warnings(args):
            return int(args.run(args))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone: `recast ... | head`
        lead_nowhere(sys.stdout)
        return YES
    except SystemExit as stop:
        complain(
            f"recast {args.verb}: the model ended the program, with exit code {stop.code}\n"
            "  try  raise an exception in forward, which is told with its line"
        )
        return BAD_QUESTION
    except RecastError as error:
        return _refuse(error, args, arguments)
    except Exception as error:
        return _our_fault(error, args, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="recast",
        description="A compiler for PyTorch recommendation models.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"recast {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    cli_verbs.add(verbs)
    cli_plan.add(verbs)
    cli_list.add(verbs)
    return parser


def _refuse(error: RecastError, args: argparse.Namespace, arguments: list[str]) -> int:
    if isinstance(error, VerifyError):
        return _our_fault(error, args, arguments)
    complain(str(error))
    return NO if isinstance(error, (DiffError, PlanError)) else BAD_QUESTION


def _our_fault(error: Exception, args: argparse.Namespace, arguments: list[str]) -> int:
    folder = crash.write(error, args, arguments, lambda: env.text(cli_list.environment()))
    lines = [
        str(error) if isinstance(error, RecastError) else f"recast: {type(error).__name__}: {error}"
    ]
    if not isinstance(error, RecastError):
        lines.append(f"  at   {crash.place(error)}")
        lines.append("  why  this is a defect of recast, not of your model")
        lines.append(
            "  try  --without PASS, if a pass is at fault   |   report it, with this folder:"
        )
    lines.append(f"  reproducer: {folder}")
    complain("\n".join(lines))
    return OUR_FAULT


if __name__ == "__main__":
    raise SystemExit(main())
