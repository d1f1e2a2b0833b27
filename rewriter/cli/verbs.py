"""The verbs that take one model: ``explain``, ``optimize``, ``diff``, ``bisect`` and ``bench``."""

from __future__ import annotations

import argparse
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from recast.errors import UsageError, VerifyError
from recast.rewriter import api
from recast.rewriter.api_diff import diff
from recast.rewriter.api_link import link
from recast.rewriter.capture.capture_model import capture
from recast.rewriter.diff.bisect import bisect
from recast.rewriter.diff.equivalence import batches_of
from recast.rewriter.report import output
from recast.rewriter.report.report import Report
from recast.runtime import tolerances

from . import bench, env
from .blame import blaming
from .model_args import (
    command,
    dump_option,
    example,
    model_options,
    optimised,
    pipeline,
    question,
    times_option,
    with_memory,
)
from .terminal import busy, columns, counting, emit, quiet_stdout
from .usage import (
    BAD_QUESTION,
    NO,
    YES,
    Run,
    common,
    count,
    factor,
    path,
    positive,
    rate,
    seed,
    verb,
)

_SPEC = """\
attr is a module, or a function that returns a model, (model, example), (model, example, loss) or
(model, example, loss, forms): example is one batch, loss(output) a scalar, and forms a list of
batches for calls of other forms, without labels for example; loss may be None.

exit codes: 0 yes; 1 no; 2 the question is wrong; 3 a fault of recast's own (recast --help)
"""
_EXAMPLES = {
    "explain": (
        "examples/dlrm.py:model",
        "examples/dlrm.py:model --arg tables=4 --without fuse-mlp",
    ),
    "optimize": ("examples/dlrm.py:model -o out --format text,svg,html",),
    "diff": (
        "examples/dlrm.py:model --steps 10",
        "examples/dlrm.py:model --passes default,sabotage-low-precision    (must say no)",
    ),
    "bisect": (
        "examples/dlrm.py:model",
        "examples/dlrm.py:model --passes default,sabotage-low-precision",
    ),
    "bench": ("examples/dlrm.py:model", "examples/dlrm.py:model --inference --at-least 1.2"),
}
_FORMATS = {
    "text": "graph.txt",
    "python": "graph.py",
    "json": "graph.json",
    "dot": "graph.dot",
    "svg": "graph.svg",
    "html": "report.html",
}


def add(verbs: Any) -> None:
    """Add all of them and their options to the parser."""

    def one(name: str, run: Run, help: str, description: str) -> argparse.ArgumentParser:
        examples = "\n".join(f"  recast {name} {line}" for line in _EXAMPLES[name])
        parser = verb(verbs, name, help, f"{_SPEC}\nexamples:\n{examples}\n", description)
        model_options(parser)
        common(parser, run)
        return parser

    explain = one(
        "explain", _explain, "what would be rewritten, what nearly, and why not",
        "Say what would be rewritten, what nearly, and why not. Writes nothing.",
    )  # fmt: skip
    optimize = one(
        "optimize", _optimize, "write the rewritten graph and a report to a folder",
        "Write the rewritten graph and a report to a folder, to be read or compared. To train with"
        " the\nresult, call recast.optimize in your program.",
    )  # fmt: skip
    optimize.add_argument(
        "-o", "--output", type=path, default="out", metavar="DIR", help="the folder (default out)"
    )
    optimize.add_argument(
        "--format",
        default="text,json,html",
        metavar="NAMES",
        help=f"any of {', '.join(_FORMATS)}, with commas between (default %(default)s)",
    )
    differ = one(
        "diff", _diff, "are the numbers the same?",
        "Compare the optimised model with the plain one: outputs, gradients, and parameters after"
        " some\noptimizer steps. The judge is the plain model in float64. Exit code 0: equal within"
        " the limits\nof rounding; 1: not equal, and the first place where they differ.",
    )  # fmt: skip
    search = one(
        "bisect", _bisect, "find the first rewrite that breaks the numbers",
        "Find the first rewrite that breaks the numbers, by running diff with fewer and fewer of"
        " them.",
    )  # fmt: skip
    for parser, steps in ((differ, 3), (search, 1)):
        parser.add_argument(
            "--steps", type=count, default=steps, metavar="N",
            help="optimizer steps to compare; 0: none (default %(default)s)",
        )  # fmt: skip
        parser.add_argument(
            "--seed", type=seed, default=0, metavar="N",
            help="of dropout, and of the random weights of outputs if SPEC gives no loss (default"
            " %(default)s)",
        )  # fmt: skip
    differ.add_argument(
        "--optimizer", choices=tuple(bench.OPTIMIZERS), default="adagrad",
        help="what the steps are taken with (default %(default)s)",
    )  # fmt: skip
    differ.add_argument(
        "--dtype", choices=("bf16", "fp16"), help="compare copies of both models in this dtype"
    )
    _bench_options(
        one(
            "bench",
            _bench,
            "time a step, beside the plain model",
            "Time a training step of the plain and of the optimised model, in turn.",
        )
    )
    for parser in (explain, optimize, differ):
        dump_option(parser)
    for parser in (explain, optimize):
        times_option(parser)


def _bench_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds", type=positive, default=20, metavar="N",
        help="how often each is timed (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--optimizer", choices=tuple(bench.OPTIMIZERS),
        help="what the training step ends with (default adagrad)",
    )  # fmt: skip
    parser.add_argument("--lr", type=rate, help="learning rate (default 0.01)")
    parser.add_argument(
        "--inference", action="store_true",
        help="time the forward instead, in eval mode without gradients",
    )  # fmt: skip
    parser.add_argument(
        "--at-least",
        type=factor,
        metavar="X",
        help="exit code 1 if it is not X times as fast as plain",
    )


def _explain(args: argparse.Namespace) -> int:
    subject, compiled = optimised(args)
    report = compiled.report
    text = report.text(times=not args.no_times, width=columns())
    hints = [_next(args, subject), f"write it: {command(args, 'optimize')} -o out"]
    emit(args, "\n".join([text, "", *hints]), _without_times(args, report.to_dict()))
    return _captured(report)


def _optimize(args: argparse.Namespace) -> int:
    formats = _formats(args.format)
    subject, compiled = optimised(args)
    report = compiled.report
    written = output.write(compiled, Path(args.output), {f: _FORMATS[f] for f in formats})
    lines = [
        report.text(times=not args.no_times, width=columns()),
        "",
        *(f"wrote {p}" for p in written),
    ]
    data = _without_times(args, report.to_dict()) | {"wrote": [str(p) for p in written]}
    emit(args, "\n".join([*lines, _next(args, subject)]), data)
    return _captured(report)


def _next(args: argparse.Namespace, subject: Any) -> str:
    if subject.example is None:
        return (
            "next: return (model, example) from the function that SPEC names, to prove and time it"
        )
    return f"next: {command(args, 'diff')}"


def _captured(report: Report) -> int:
    """A model of which nothing can be traced runs unchanged; for a script that is not a success."""
    return BAD_QUESTION if report.captured == "none" else YES


def _diff(args: argparse.Namespace) -> int:
    try:
        subject, compiled = optimised(args)
    except VerifyError as error:
        return _caught(args, error)
    asked: dict[str, Any] = {"steps": args.steps, "seed": args.seed, "loss": subject.loss}
    again = ["--steps", str(args.steps), "--seed", str(args.seed)]
    if args.optimizer != "adagrad":  # which is diff's own
        make = bench.OPTIMIZERS[args.optimizer]
        asked["optimizer"] = lambda parameters: make(parameters, lr=0.01)
        again += ["--optimizer", args.optimizer]
    again += ["--dtype", args.dtype] if args.dtype else []
    asked |= {"dtype": _dtype(args.dtype), "command": command(args, "diff", *again)}
    comparing = busy(args, "comparing outputs, gradients and steps")
    with comparing, quiet_stdout(), blaming(subject):
        found = diff(subject.model, compiled, example(subject), **asked)
        further = _diff_of_forms(subject, compiled, asked)
    texts, data, ok = [found.text(width=columns())], found.to_dict(), found.ok
    if further is not None:
        texts += ["further forms of call", further.text(width=columns())]
        ok = ok and further.ok
        data |= {"ok": ok, "forms": further.to_dict()}
    emit(args, "\n\n".join(texts), data)
    return YES if ok else NO


def _diff_of_forms(subject: Any, compiled: Any, asked: dict[str, Any]) -> Any:
    """The diff of calls of further forms, whose outputs are not those that the loss takes; None if
    there are none.
    """
    batches = [b for form in subject.forms for b in batches_of(form, subject.model)]
    if not batches:
        return None
    return diff(subject.model, compiled, batches, **{**asked, "steps": 0, "loss": None})


def _caught(args: argparse.Namespace, error: VerifyError) -> int:
    """The verifier stopped a pass: for a saboteur the answer is no, else it is our fault."""
    if not any(p.name.startswith("sabotage-") for p in pipeline(args)):
        raise error
    emit(args, str(error), {"ok": False, "verify": {"what": error.what, "why": error.why}})
    return NO


def _bisect(args: argparse.Namespace) -> int:
    subject, passes = question(args)
    batch = example(subject)
    with_memory(subject)

    def build(fuel: int | None) -> Any:
        captured = capture(subject.model, subject.example)
        return link(captured, passes, fuel=fuel, strict=args.strict)

    asked = {"steps": args.steps, "seed": args.seed, "loss": subject.loss, "limits": tolerances}
    try:
        with (
            busy(args, "searching for the first rewrite that breaks the numbers"),
            quiet_stdout(),
            blaming(subject),
        ):
            culprit = bisect(subject.model, build, batch, **asked)
    except VerifyError as error:
        return _caught(args, error)
    if culprit is None:
        emit(args, "no rewrite breaks the numbers", {"ok": True})
        return YES
    emit(args, str(culprit), {"ok": False, **culprit.to_dict()})
    return NO


def _bench(args: argparse.Namespace) -> int:
    for flag, value in (("--optimizer", args.optimizer), ("--lr", args.lr)):
        if args.inference and value is not None:
            raise UsageError(
                f"recast bench: {flag} with --inference",
                why="a forward without gradients has no optimizer",
                tries=(f"leave {flag} out", "leave --inference out, to time a training step"),
            )
    subject, passes = question(args)
    batch = batches_of(example(subject), subject.model)[0]
    plain, twin = subject.model, bench.duplicate(subject.model)
    asked: api.Options = {"example": subject.example, "forms": list(subject.forms),
                          "passes": passes, "strict": args.strict}  # fmt: skip
    with quiet_stdout(), busy(args, "capturing and rewriting"):
        if args.inference:
            fast = api.optimize(twin, **asked)
            steps = [bench.inference_step(plain, batch), bench.inference_step(fast, batch)]
            words = "forward in eval mode, no gradients"
        else:
            _can_train(plain)
            make = bench.OPTIMIZERS[args.optimizer or "adagrad"]
            lr = 0.01 if args.lr is None else args.lr
            opts = [make(m.parameters(), lr=lr) for m in (plain, twin)]
            fast, _ = api.optimize(twin, opts[1], **asked)
            models = zip((plain, fast), opts, strict=True)
            steps = [bench.training_step(m, batch, subject.loss, o) for m, o in models]
            words = f"training step: forward, backward, {make.__name__}"
    blames = blaming(subject, trains=not args.inference)
    with counting(args, args.rounds) as progress, quiet_stdout(), blames:
        timings = bench.compare(steps[0], steps[1], rounds=args.rounds, progress=progress)
    found = bench.Bench(type(subject.model).__name__, words, *timings, machine=env.machine())
    slow = args.at_least is not None and found.speedup < args.at_least
    wanted = f"\n  no: --at-least {args.at_least:g} was asked for" if slow else ""
    emit(args, f"{found}{wanted}", found.to_dict())
    return NO if slow else YES


# ---------------------------------------------------------------- their parts


def _can_train(model: torch.nn.Module) -> None:
    """Raise UsageError for a model that has nothing to train."""
    if not any(p.requires_grad for p in model.parameters()):
        frozen = " to train: all are frozen" if any(True for _ in model.parameters()) else ""
        raise UsageError(
            f"recast bench: {type(model).__name__} has no parameters{frozen}",
            why="what is timed is a training step",
            tries=("--inference",),
        )


def _formats(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UsageError("--format names no format", tries=tuple(_FORMATS))
    for name in names:
        if name not in _FORMATS:
            raise UsageError(
                f"--format: there is no format {name!r}",
                why=f"formats are {', '.join(_FORMATS)}",
                tries=get_close_matches(name, list(_FORMATS), n=2),
            )
    return names


def _dtype(name: str | None) -> Any:
    return None if name is None else {"bf16": torch.bfloat16, "fp16": torch.float16}[name]


def _without_times(args: argparse.Namespace, data: dict[str, Any]) -> dict[str, Any]:
    if not args.no_times:
        return data
    steps = [{k: v for k, v in step.items() if k != "seconds"} for step in data["steps"]]
    return {k: v for k, v in data.items() if k != "seconds"} | {"steps": steps}
