"""The command ``recast``: the same nouns as the Python API, one verb each.

stdout is the result and can be piped, or read by a program with ``--json``; stderr is progress,
warnings and errors. Results are deterministic; times stand at the right and leave with
``--no-times``.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from recast.errors import DiffError, RecastError, UsageError, VerifyError

from . import cli_plan
from .terminal import busy, counting, emit, plain_warnings, quiet_stdout

if TYPE_CHECKING:
    from .report import Report

YES, NO, BAD_QUESTION, OUR_FAULT, INTERRUPTED = 0, 1, 2, 3, 130

_EPILOG = """\
SPEC names a model: package.module:attr or file.py:attr, where attr is a Module, or a function that
returns a model, (model, example) or (model, example, loss); --arg name=value gives its arguments.

examples:
  recast explain examples/dlrm.py:model
  recast optimize examples/dlrm.py:model -o out --format text,svg,html
  recast diff examples/dlrm.py:model --steps 3 --passes default,sabotage-...
  recast list passes

exit codes: 0 yes; 1 the answer is no (diff exceeded, slower than asked); 2 bad question (usage, the
model cannot be imported or captured); 3 our fault (a reproducer folder is written); 130 interrupted
"""

_FORMATS = {
    "text": "graph.txt",
    "python": "graph.py",
    "json": "graph.json",
    "dot": "graph.dot",
    "svg": "graph.svg",
    "html": "report.html",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parser().parse_args(arguments)
    except SystemExit as stop:  # argparse has said why, or printed its help
        return int(stop.code or 0)
    try:
        with plain_warnings(args):
            code: int = args.run(args)
            sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away: `recast ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return YES
    except RecastError as error:
        return _refuse(error, args, arguments)
    except Exception as error:
        return _our_fault(error, args, arguments)


# ---------------------------------------------------------------- verbs


def _explain(args: argparse.Namespace) -> int:
    compiled = _compile(args)[1]
    report = compiled.report
    text = report.text(times=not args.no_times)
    hints = [f"next: {_command(args, 'diff')}", f"write it: {_command(args, 'optimize')} -o out"]
    emit(args, "\n".join([text, "", *hints]), _without_times(args, report.to_dict()))
    return _captured(report)


def _optimize(args: argparse.Namespace) -> int:
    from . import output

    formats = _formats(args.format)
    compiled = _compile(args)[1]
    report = compiled.report
    written = output.write(compiled, Path(args.output), {f: _FORMATS[f] for f in formats})
    lines = [report.text(times=not args.no_times), "", *(f"wrote {p}" for p in written)]
    data = _without_times(args, report.to_dict()) | {"wrote": [str(p) for p in written]}
    emit(args, "\n".join([*lines, f"next: {_command(args, 'diff')}"]), data)
    return _captured(report)


def _captured(report: Report) -> int:
    """A model of which nothing can be traced runs as it was; to a script that is no success."""
    return BAD_QUESTION if report.captured == "none" else YES


def _diff(args: argparse.Namespace) -> int:
    from . import api

    try:
        subject, compiled = _compile(args)
    except VerifyError as error:
        return _caught(args, error)
    options: dict[str, Any] = {"steps": args.steps, "seed": args.seed, "loss": subject.loss}
    again = ["--steps", str(args.steps), "--seed", str(args.seed)]
    again += ["--dtype", args.dtype] if args.dtype else []
    options |= {"dtype": _dtype(args.dtype), "command": _command(args, "diff", *again)}
    with busy(args, "comparing outputs, gradients and steps"), quiet_stdout():
        found = api.diff(subject.model, compiled, _example(subject), **options)
    emit(args, str(found), found.to_dict())
    return YES if found.ok else NO


def _caught(args: argparse.Namespace, error: VerifyError) -> int:
    """The verifier stopped a saboteur: the answer is no. Of a pass of ours it is our fault."""
    if not any(p.name.startswith("sabotage-") for p in _pipeline(args)):
        raise error
    emit(args, str(error), {"ok": False, "verify": {"what": error.what, "why": error.why}})
    return NO


def _bisect(args: argparse.Namespace) -> int:
    from recast.runtime import tolerances

    from . import api
    from .bisect import bisect
    from .capture import capture

    subject, passes = _question(args)
    example = _example(subject)

    def build(fuel: int | None) -> Any:
        captured = capture(subject.model, subject.example)
        return api.link(captured, passes, fuel=fuel, strict=args.strict)

    options = {"steps": args.steps, "seed": args.seed, "loss": subject.loss, "limits": tolerances}
    try:
        with (
            busy(args, "searching for the first rewrite that breaks the numbers"),
            quiet_stdout(),
        ):
            culprit = bisect(subject.model, build, example, **options)
    except VerifyError as error:
        return _caught(args, error)
    if culprit is None:
        emit(args, "no rewrite breaks the numbers", {"ok": True})
        return YES
    emit(args, str(culprit), {"ok": False, **culprit.to_dict()})
    return NO


def _bench(args: argparse.Namespace) -> int:
    from . import api, bench, env

    subject, passes = _question(args)
    batch = bench.first_batch(_example(subject))
    plain, twin = subject.model, bench.duplicate(subject.model)
    with quiet_stdout(), busy(args, "capturing and rewriting"):
        if args.inference:
            fast = api.optimize(twin, example=subject.example, passes=passes, strict=args.strict)
            steps = [bench.inference_step(plain, batch), bench.inference_step(fast, batch)]
            words = "forward in eval mode, no gradients"
        else:
            make = bench.OPTIMIZERS[args.optimizer]
            opts = [make(m.parameters(), lr=args.lr) for m in (plain, twin)]
            fast, _ = api.optimize(
                twin, opts[1], example=subject.example, passes=passes, strict=args.strict
            )
            models = zip((plain, fast), opts, strict=True)
            steps = [bench.training_step(m, batch, subject.loss, o) for m, o in models]
            words = f"training step: forward, backward, {make.__name__}"
    with counting(args, args.rounds) as progress, quiet_stdout():
        timings = bench.compare(steps[0], steps[1], rounds=args.rounds, progress=progress)
    found = bench.Bench(type(subject.model).__name__, words, *timings, machine=env.machine())
    emit(args, str(found), found.to_dict())
    return NO if args.at_least is not None and found.speedup < args.at_least else YES


def _list(args: argparse.Namespace) -> int:
    data = {"passes": _list_passes, "ops": _list_ops}[args.what]()
    width = max(len(str(entry["name"])) for entry in data)
    emit(args, "\n".join(f"{e['name']:<{width}}  {_details(e)}".rstrip() for e in data), data)
    return YES


def environment() -> dict[str, Any]:
    """What this machine has: versions, cores, and every kernel, usable or why not."""
    from recast.runtime import OPS, cuda_launch

    from . import env

    return env.collect(OPS, cuda_launch.facts())


def _env(args: argparse.Namespace) -> int:
    from . import env

    found = environment()
    emit(args, env.text(found), found)
    return YES


# ---------------------------------------------------------------- their parts


def _question(args: argparse.Namespace) -> tuple[Any, tuple[Any, ...]]:
    """The subject of SPEC and the pipeline; a wrong pass is told before the model is loaded."""
    from . import spec

    passes = _pipeline(args)
    with quiet_stdout():
        return spec.load(args.spec, args.arg), passes


def _compile(args: argparse.Namespace) -> tuple[Any, Any]:
    """The subject of SPEC and its optimised twin."""
    from . import api

    subject, passes = _question(args)
    with quiet_stdout(), busy(args, "capturing and rewriting"):
        if args.dump:
            return subject, _dumping(subject, passes, args)
        compiled = api.optimize(
            subject.model, example=subject.example, passes=passes, strict=args.strict
        )
    return subject, compiled


def _dumping(subject: Any, passes: tuple[Any, ...], args: argparse.Namespace) -> Any:
    """Optimise, and write the graph as captured and after every pass that changed its text."""
    from . import api, dump, output
    from .capture import capture

    captured = capture(subject.model, subject.example)
    before = output.text(captured, captured.name)
    compiled = api.link(
        captured,
        passes,
        strict=args.strict,
        after=lambda p, graph: dump.text(graph, captured.root, captured.name),
    )
    steps = [(s.name, s.text) for s in compiled.report.journal.steps if s.text]
    folder = Path(args.dump)
    folder.mkdir(parents=True, exist_ok=True)
    for k, (name, text) in enumerate([("capture", before), *steps]):
        (folder / f"{k:02}-{name}.txt").write_text(text, encoding="utf-8")
    return compiled


def _pipeline(args: argparse.Namespace) -> tuple[Any, ...]:
    from . import api

    passes = api.pipeline_of(args.passes)
    unwanted = [name for text in args.without for name in text.split(",") if name]
    known = [p.name for p in passes]
    for name in unwanted:
        if name not in known:
            raise UsageError(
                f"--without: there is no pass {name!r} in this pipeline",
                why=f"it is {', '.join(known) or 'empty'}",
                tries=get_close_matches(name, known, n=2) or ("recast list passes",),
            )
    return tuple(p for p in passes if p.name not in unwanted)


def _formats(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in _FORMATS:
            raise UsageError(
                f"--format: there is no format {name!r}",
                why=f"formats are {', '.join(_FORMATS)}",
                tries=get_close_matches(name, list(_FORMATS), n=2),
            )
    return names


def _dtype(name: str | None) -> Any:
    import torch

    return None if name is None else {"bf16": torch.bfloat16, "fp16": torch.float16}[name]


def _command(args: argparse.Namespace, verb: str, *options: str) -> str:
    """A command line about the same question."""
    words = ["recast", verb, args.spec, *options]
    for name, values in (("--arg", args.arg), ("--without", args.without)):
        words += [word for value in values for word in (name, value)]
    if args.passes is not None:
        words += ["--passes", args.passes]
    return shlex.join(words)


def _example(subject: Any) -> Any:
    if subject.example is None:
        raise UsageError(
            f"spec: {subject.text} gives no example batch",
            why="this verb runs the model",
            tries=("return (model, example) from the function that SPEC names",),
        )
    return subject.example


def _list_passes() -> list[dict[str, Any]]:
    from recast import passes as library

    default = list(dict.fromkeys(p.name for p in library.PIPELINE))
    rest = sorted(set(library.REGISTRY) - set(default))
    entries = []
    for name in [*default, *rest]:
        made = library.REGISTRY[name]
        doc = (made.__doc__ or "").strip().splitlines()
        options = {
            f.name.replace("_", "-"): _option(f.default) for f in fields(cast(Any, made)) if f.init
        }
        entry = {"name": name, "default": name in default, "equation": doc[0] if doc else ""}
        entries.append(entry | {"options": options})
    return entries


def _option(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) else None


def _list_ops() -> list[dict[str, Any]]:
    from recast.runtime import OPS

    return [
        {
            "name": name,
            "schema": op.schema,
            "kernels": [{"kernel": k, "usable": ok, "why": why} for k, ok, why in op.usable()],
        }
        for name, op in sorted(OPS.items())
    ]


def _details(entry: dict[str, Any]) -> str:
    if "schema" in entry:
        kernels = [k["kernel"] for k in entry["kernels"] if k["usable"]]
        return f"{', '.join(kernels) or 'reference'}   {entry['schema']}"
    options = ",".join(f"{k}={v}" for k, v in entry["options"].items())
    mark = "" if entry["default"] else "(not in default) "
    return mark + entry["equation"] + (f"   {{{options}}}" if options else "")


def _without_times(args: argparse.Namespace, data: dict[str, Any]) -> dict[str, Any]:
    if not args.no_times:
        return data
    steps = [{k: v for k, v in step.items() if k != "seconds"} for step in data["steps"]]
    return {k: v for k, v in data.items() if k != "seconds"} | {"steps": steps}


# ---------------------------------------------------------------- errors


def _refuse(error: RecastError, args: argparse.Namespace, arguments: list[str]) -> int:
    if isinstance(error, VerifyError):
        return _our_fault(error, args, arguments)
    sys.stderr.write(f"{error}\n")
    return NO if isinstance(error, DiffError) else BAD_QUESTION


def _our_fault(error: Exception, args: argparse.Namespace, arguments: list[str]) -> int:
    from . import crash, env

    folder = crash.write(error, args, arguments, lambda: env.text(environment()))
    lines = [
        str(error) if isinstance(error, RecastError) else f"recast: {type(error).__name__}: {error}"
    ]
    if not isinstance(error, RecastError):
        lines.append(f"  at   {crash.place(error)}")
        lines.append("  why  this is a defect of recast, not of your model")
        lines.append(
            "  try  --without PASS to go round it   |   recast explain SPEC --passes normalize"
        )
    lines.append(f"  reproducer: {folder}")
    sys.stderr.write("\n".join(lines) + "\n")
    return OUR_FAULT


# ---------------------------------------------------------------- usage


class _Parser(argparse.ArgumentParser):
    """argparse, with its errors in our four lines."""

    def error(self, message: str) -> Any:
        self.exit(BAD_QUESTION, f"{self.prog}: {message}\n  try  {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="recast",
        description="A compiler for PyTorch recommendation models.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_Parser)
    _verb(verbs, "explain", _explain, "what would be rewritten, what nearly, and why not")
    optimize = _verb(verbs, "optimize", _optimize, "rewrite, and write the result to a folder")
    optimize.add_argument(
        "-o", "--output", default="out", metavar="DIR", help="folder (default out)"
    )
    optimize.add_argument(
        "--format",
        default="text,json,html",
        help=f"any of {','.join(_FORMATS)} (default %(default)s)",
    )
    diff = _verb(verbs, "diff", _diff, "prove that the optimised model computes the same")
    diff.add_argument("--steps", type=_positive, default=3, help="optimizer steps (default 3)")
    diff.add_argument("--seed", type=int, default=0, help="of the random weighting (default 0)")
    diff.add_argument("--dtype", choices=("bf16", "fp16"), help="compare copies in this dtype")
    bisect = _verb(verbs, "bisect", _bisect, "find the first rewrite that breaks the numbers")
    bisect.add_argument("--steps", type=_positive, default=1, help="optimizer steps (default 1)")
    bisect.add_argument("--seed", type=int, default=0, help="of the random weighting (default 0)")
    _bench_options(_verb(verbs, "bench", _bench, "time a step of both, in turn"))
    cli_plan.add(verbs, _common)
    listing = verbs.add_parser("list", help="passes or ops", description="List passes or ops.")
    listing.add_argument("what", choices=("passes", "ops"))
    _common(listing, _list)
    env = verbs.add_parser(
        "env", help="versions, machine, usable kernels", description="What this machine has."
    )
    _common(env, _env)
    return parser


def _bench_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=_positive, default=20, help="of each (default 20)")
    parser.add_argument(
        "--optimizer", choices=("adagrad", "sgd"), default="adagrad", help="default %(default)s"
    )
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate (default 0.01)")
    parser.add_argument("--inference", action="store_true", help="forward only, in eval mode")
    parser.add_argument(
        "--at-least", type=float, metavar="X", help="exit 1 when not X times as fast as plain"
    )


def _verb(
    verbs: Any, name: str, run: Callable[[argparse.Namespace], int], help: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=help,
        description=help.capitalize() + ".",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("spec", metavar="SPEC", help="package.module:attr or file.py:attr")
    parser.add_argument(
        "--arg", action="append", default=[], metavar="NAME=VALUE", help="an argument of SPEC"
    )
    parser.add_argument(
        "--passes", metavar="TEXT", help="a pipeline: 'default', 'normalize,fuse-mlp{max-layers=4}'"
    )
    parser.add_argument(
        "--without", action="append", default=[], metavar="PASS", help="leave out a pass"
    )
    parser.add_argument(
        "--dump", metavar="DIR", help="write the graph after every pass: 00-capture.txt ..."
    )
    parser.add_argument("--strict", action="store_true", help="stop at a rule that raises")
    parser.add_argument(
        "--no-times", action="store_true", help="leave out what varies between runs"
    )
    _common(parser, run)
    return parser


def _common(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    parser.add_argument("--json", action="store_true", help="the result as JSON on stdout")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress, no warnings")
    parser.set_defaults(run=run)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
