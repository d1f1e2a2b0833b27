"""What a command asks about one model: its SPEC and passes, and the command line to repeat it."""

from __future__ import annotations

import argparse
import shlex
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from recast.errors import UsageError
from recast.rewriter import api, api_stored
from recast.rewriter.api_link import link
from recast.rewriter.arguments import check_model
from recast.rewriter.capture.capture_model import capture
from recast.rewriter.report import dump, output
from recast.runtime.ranks import materialise

from . import arguments, spec
from .terminal import busy, complain, quiet_stdout
from .usage import path


def model_options(parser: argparse.ArgumentParser) -> None:
    """The options that every such command takes."""
    parser.add_argument(
        "spec", metavar="SPEC", help="the model: file.py:attr or package.module:attr"
    )
    parser.add_argument(
        "--arg", action="append", default=[], metavar="NAME=VALUE", help=arguments.HELP
    )
    parser.add_argument(
        "--passes",
        metavar="TEXT",
        help="the passes to run: 'default', '' for none, 'normalize,fuse-mlp' (recast list passes)",
    )
    parser.add_argument(
        "--without", action="append", default=[], metavar="PASS",
        help="leave out one pass; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--strict", action="store_true", help="stop if a rule raises, rather than skip the rule"
    )


def dump_option(parser: argparse.ArgumentParser) -> None:
    """For commands that load the model once, with :func:`optimised`."""
    parser.add_argument(
        "--dump",
        type=path,
        metavar="DIR",
        help="write the graph after every pass that changed it: DIR/00-capture.txt and so on; of"
        " further forms in DIR/forms.0 and so on",
    )


def times_option(parser: argparse.ArgumentParser) -> None:
    """For commands that show a report."""
    parser.add_argument(
        "--no-times",
        action="store_true",
        help="leave out times and estimates, which vary between runs",
    )


def question(args: argparse.Namespace) -> tuple[Any, tuple[Any, ...]]:
    """The subject of SPEC, and the pipeline; wrong passes are reported before the model loads."""
    passes = pipeline(args)
    with quiet_stdout():
        subject = spec.load(args.spec, args.arg)
    check_model(subject.model)
    return subject, passes


def with_memory(subject: Any) -> None:
    """Initialise a model on meta, as ``optimize`` does, for commands that capture it themselves."""
    if materialise.on_meta(subject.model):
        materialise.materialise(subject.model, {})


def optimised(args: argparse.Namespace) -> tuple[Any, Any]:
    """The subject of SPEC and its optimised twin."""
    subject, passes = question(args)
    with quiet_stdout(), busy(args, "capturing and rewriting"):
        if args.dump:
            return subject, _dumping(subject, passes, args)
        compiled = api.optimize(
            subject.model, example=subject.example, forms=list(subject.forms), passes=passes,
            strict=args.strict,
        )  # fmt: skip
    return subject, compiled


def _dumping(subject: Any, passes: tuple[Any, ...], args: argparse.Namespace) -> Any:
    """Optimise, and write the graph as captured and after every pass that changed its text."""
    with_memory(subject)
    captured = capture(subject.model, subject.example, forms=subject.forms)
    before = [output.text(one, one.name) for one in (captured, *captured.forms)]
    compiled = link(
        captured,
        api_stored.agreed(captured, passes),
        strict=args.strict,
        after=lambda p, graph: dump.text(graph, captured.root, captured.name),
    )
    folder, count = Path(args.dump), 0
    try:
        for k, report in enumerate((compiled.report, *compiled.report.forms)):
            steps = [(s.name, s.text) for s in report.journal.steps if s.text]
            place = folder / f"forms.{k - 1}" if k else folder
            place.mkdir(parents=True, exist_ok=True)
            for at, (name, text) in enumerate([("capture", before[k]), *steps]):
                (place / f"{at:02}-{name}.txt").write_text(text, encoding="utf-8")
            count += len(steps) + bool(k)
    except OSError as error:
        raise UsageError(
            f"--dump: cannot write to the folder {folder}", why=str(error.strerror or error),
            tries=("--dump FOLDER, one that can be written",),
        ) from error  # fmt: skip
    if not args.quiet:
        complain(f"wrote {folder / '00-capture.txt'}, and {count} after it")
    return compiled


def pipeline(args: argparse.Namespace) -> tuple[Any, ...]:
    """The passes asked for. Raises UsageError for an unknown one."""
    passes = api.pipeline_of(args.passes)
    unwanted = [name for text in args.without for name in text.split(",") if name]
    known = [p.name for p in passes]
    for name in unwanted:
        if name not in known:
            raise UsageError(
                f"--without: there is no pass {name!r} in this pipeline",
                why=f"it is {', '.join(known[:8]) or 'empty'}{' ...' if len(known) > 8 else ''}",
                tries=get_close_matches(name, known, n=2) or ("recast list passes",),
            )
    return tuple(p for p in passes if p.name not in unwanted)


def command(args: argparse.Namespace, verb: str, *options: str) -> str:
    """A command line that asks ``verb`` about the same model and passes."""
    words = ["recast", verb, args.spec, *options]
    for name, values in (("--arg", args.arg), ("--without", args.without)):
        words += [word for value in values for word in (name, value)]
    if args.passes is not None:
        words += ["--passes", args.passes]
    return shlex.join(words)


def example(subject: Any) -> Any:
    """The example batch of SPEC. Raises UsageError if it has none."""
    if subject.example is None:
        raise UsageError(
            f"spec: {subject.text} gives no example batch",
            why="this command runs the model",
            tries=("return (model, example) from the function that SPEC names",),
        )
    return subject.example
