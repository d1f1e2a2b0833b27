"""``recast plan`` and ``recast simulate``: where tables live, and how long a step would take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from recast.errors import PlanError, UsageError
from recast.runtime.plan import SHARDING_TYPES

from . import arguments
from .terminal import busy, columns, complain, counting, emit, quiet_stdout
from .usage import common, path, verb

_EPILOG = """\
A topology is a preset (dgx-a100), a preset with a number of ranks (dgx-a100x16), `here`, or a JSON
file.

examples:
"""
_PLAN_EXAMPLES = """\
  recast plan examples/dlrm.py:model --world-size 8
  recast plan examples/dlrm.py:model --world-size 8 --topology dgx-h100 --explain emb.0
  recast plan --tables problem.json --world-size 16 -o plan.json --picture plan.html

exit codes: 0 a plan; 1 no plan fits (it says what would help); 2 the question is wrong
"""
_SIMULATE_EXAMPLES = """\
  recast simulate --model jumbo --topology dgx-a100x128
  recast simulate --model tiny --devices 8,16
"""
_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_OPTIMIZERS = ("sgd", "adagrad", "rowwise-adagrad", "adam")


def add(verbs: Any) -> None:
    """Add both verbs and their options to the parser."""
    plan = verb(
        verbs, "plan", "where every table would live on several ranks, and why",
        _EPILOG + _PLAN_EXAMPLES,
        "Say where every table would live on several ranks, how long a step would take there by a"
        " cost\nmodel, and how far that is from the best plan. Trains nothing.",
    )  # fmt: skip
    plan.add_argument(
        "spec", metavar="SPEC", nargs="?", help="the model: file.py:attr or package.module:attr"
    )
    plan.add_argument(
        "--arg", action="append", default=[], metavar="NAME=VALUE",
        help=arguments.HELP,
    )  # fmt: skip
    plan.add_argument(
        "--tables", type=path, metavar="FILE", help="a JSON file of tables, in place of a model"
    )
    plan.add_argument(
        "--world-size", type=int, metavar="N",
        help="the number of ranks (default: those of the topology)",
    )  # fmt: skip
    plan.add_argument("--topology", metavar="NAME", help="the machines (default: this one)")
    plan.add_argument(
        "--batch", type=int, metavar="N", help="with --tables: samples of one rank (default 1024)"
    )
    plan.add_argument(
        "--optimizer", choices=_OPTIMIZERS,
        help="with SPEC: whose state takes memory (default adagrad)",
    )  # fmt: skip
    plan.add_argument(
        "--pin", action="append", default=[], metavar="TABLE=TYPE",
        help=f"fix how one table is sharded: {', '.join(SHARDING_TYPES)}; may be repeated",
    )  # fmt: skip
    plan.add_argument(
        "--dynamic", action="append", default=[], metavar="MODULE=SIZE",
        help="with SPEC: plan this embedding as a table without end, of SIZE rows at most (or"
        " bytes: 2GiB)",
    )  # fmt: skip
    for name, what in (
        (
            "column-slice",
            "cut tables of more elements by columns, into shards of at most that many",
        ),
        ("row-slice", "cut tables of at least so many elements by rows"),
        ("data-parallel", "replicate tables of at most so many elements on every rank, no others"),
    ):
        plan.add_argument(f"--{name}-threshold", type=int, metavar="N", help=what)
    plan.add_argument("-o", "--output", type=path, metavar="FILE", help="write the plan as JSON")
    plan.add_argument(
        "--picture", type=path, metavar="FILE", help="draw the load of every rank, as .svg or .html"
    )
    plan.add_argument(
        "--explain", metavar="TABLE", help="say why this table is where it is, and show no plan"
    )
    common(plan, _plan)
    simulate = verb(
        verbs, "simulate", "how long a step of published models would take on other machines",
        _EPILOG + _SIMULATE_EXAMPLES,
        "Say how long a step of published models would take on machines that you need not have, by"
        " the\nplanner's cost model, beside the times published for them.",
    )  # fmt: skip
    simulate.add_argument("--model", metavar="NAME", help="one of the models (default all)")
    simulate.add_argument(
        "--topology", default="dgx-a100", metavar="NAME", help="the machines (default %(default)s)"
    )
    simulate.add_argument(
        "--devices", metavar="N,N",
        help="numbers of ranks (default 1,8,16,32,128, or those of the topology)",
    )  # fmt: skip
    simulate.add_argument(
        "--batch", type=int, default=65536, metavar="N",
        help="samples of all ranks together (default %(default)s)",
    )  # fmt: skip
    common(simulate, _simulate)


def _plan(args: argparse.Namespace) -> int:
    from recast.runtime.planner import picture

    if args.spec is None and args.arg:
        raise UsageError(
            "recast plan: --arg without a model",
            why="it is an argument of the function that SPEC names",
            tries=("recast plan SPEC --arg NAME=VALUE", "leave --arg out"),
        )
    if args.spec is None and args.dynamic:
        raise UsageError(
            "recast plan: --dynamic without a model",
            why="a file of tables says which are dynamic",
            tries=('{"name": "user", "rows": 1000000, "dim": 64, "dynamic": true}',),
        )
    if args.spec is None and args.optimizer is not None:
        raise UsageError(
            "recast plan: --optimizer without a model",
            why="a file of tables says how many bytes of state each has",
            tries=(
                '{"name": "user", "rows": 1000000, "dim": 64, "state_element": 8}, as Adam has',
                "leave --optimizer out",
            ),
        )
    if (args.spec is None) == (args.tables is None):
        neither = args.spec is None
        raise UsageError(
            f"recast plan: {'a model or --tables is needed' if neither else 'SPEC and --tables'}",
            why=f"tables are those of a model, or of a file{'' if neither else ', not of both'}",
            tries=("recast plan SPEC --world-size 8", "recast plan --tables problem.json"),
        )
    for flag in ("world_size", "batch"):
        if (given := getattr(args, flag)) is not None:
            _positive(f"recast plan: --{flag.replace('_', '-')}", given)
    draw = None if args.picture is None else _drawing(args.picture)
    try:
        with busy(args, "planning"), quiet_stdout():
            made = _of_model(args) if args.tables is None else _of_tables(args)
    except PlanError as error:
        if args.json:
            said = {"what": error.what, "why": error.why, "try": list(error.tries)}
            emit(args, "", {"fits": False, **said})
        raise
    if args.explain is None:
        width = columns() or picture.BAR + picture.BESIDE
        text = picture.text(made, min(picture.BAR, max(width - picture.BESIDE, 8)))
    else:
        text = picture.explain(made, args.explain)
    if made.world_size == 1 and args.explain is None:
        text += "\nfor several ranks: --world-size N"
    elif args.explain is None:
        text += "\n\nwhy a table is where it is: --explain TABLE"
    wrote = []
    if args.output is not None:
        _write(args.output, lambda: made.save(args.output))
        wrote.append(args.output)
    if draw is not None:
        drawn = draw(made) + "\n"
        _write(args.picture, lambda: Path(args.picture).write_text(drawn, encoding="utf-8"))
        wrote.append(args.picture)
    emit(args, "\n".join([text, *(f"wrote {path}" for path in wrote)]), made.to_dict())
    return 0


def _drawing(path: str) -> Callable[[Any], str]:
    from recast.runtime.planner import picture

    kinds: dict[str, Callable[[Any], str]] = {".svg": picture.svg, ".html": picture.html}
    if Path(path).suffix not in kinds:
        raise UsageError(
            f"recast plan: --picture {path}",
            why="a picture is an .svg or an .html file",
            tries=("--picture plan.svg", "--picture plan.html"),
        )
    return kinds[Path(path).suffix]


def _write(path: str, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise UsageError(f"recast plan: cannot write {path}", why=str(error.strerror)) from error


def _machines(name: str | None, ranks: int | None) -> Any:
    from recast.runtime import topology

    found = topology.detect(ranks) if name in (None, "here") else topology.named(str(name))
    return found if ranks is None else found.of(ranks)


def _of_tables(args: argparse.Namespace) -> Any:
    from recast.runtime.planner import plan, spec
    from recast.runtime.topology import Topology

    loads, rest = spec.read(args.tables)
    ranks = args.world_size or rest.get("world_size")
    given = args.topology or rest.get("topology")
    machines = given if isinstance(given, Topology) else _machines(given, ranks)
    return plan(
        loads,
        machines if ranks is None else machines.of(ranks),
        batch=args.batch or rest.get("batch", 1024),
        pins=_pins(args),
        **_thresholds(args),
    )


def _of_model(args: argparse.Namespace) -> Any:
    from recast import optim
    from recast.rewriter import api
    from recast.rewriter.arguments import check_model
    from recast.runtime.plan import single

    from . import bench, spec

    if args.batch is not None:
        raise UsageError(
            "recast plan: --batch is for --tables",
            why="the example that SPEC returns says how many samples a rank has",
            tries=("leave --batch out", "--arg batch=N, where the function of SPEC takes it"),
        )
    subject = spec.load(args.spec, args.arg)
    check_model(subject.model)
    if next(subject.model.parameters(), None) is None:
        raise UsageError(
            f"recast plan: {type(subject.model).__name__} has no parameters",
            why="a plan says where the tables of a model live",
            tries=("a model with embeddings",),
        )
    machines = _machines(args.topology, args.world_size)
    make: Any = {**bench.OPTIMIZERS, "rowwise-adagrad": optim.RowWiseAdagrad, "adam": _adam()}
    optimizer = make[args.optimizer or "adagrad"](subject.model.parameters(), lr=0.01)
    fast, _ = api.optimize(
        subject.model,
        optimizer,
        example=subject.example,
        forms=list(subject.forms),
        world_size=machines.ranks,
        topology=machines if machines.ranks > 1 else None,
        tables=_dynamic(args.dynamic) or None,
        sharding=(_pins(args) | _thresholds(args)) or None,
    )
    return fast.plan if fast.plan is not None else single(())


def _adam() -> Any:
    import torch

    return torch.optim.Adam


def _positive(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**63:
        raise UsageError(f"{name} is {value!r}", why="it is a number from 1 to 2^63 - 1")
    return value


def _pins(args: argparse.Namespace) -> dict[str, Any]:
    pins = {}
    for text in args.pin:
        name, equals, kind = text.rpartition("=")
        if not equals or not name:
            raise UsageError(
                f"recast plan: --pin {text}",
                why="a pin is a table, an equals sign and a sharding type",
                tries=("--pin TABLE=row_wise",),
            )
        if kind not in SHARDING_TYPES:
            near = get_close_matches(kind, SHARDING_TYPES, n=2) or SHARDING_TYPES[:2]
            raise UsageError(
                f"recast plan: --pin {text}",
                why=f"sharding types are {', '.join(SHARDING_TYPES)}",
                tries=[f"--pin {name}={one}" for one in near],
            )
        pins[name] = kind
    return pins


def _dynamic(given: list[str]) -> dict[str, Any]:
    """The dynamic tables that ``--dynamic`` asks for. Raises UsageError."""
    from recast.runtime.dynamic.settings import Dynamic

    found = {}
    for text in given:
        name, equals, size = text.rpartition("=")
        number = size.rstrip("KMGTiB")
        unit = _UNITS.get(size[len(number) :])
        if not equals or not name or unit is None or not number.isdecimal():
            raise UsageError(
                f"recast plan: --dynamic {text}",
                why="it is the path of a module, an equals sign, and rows or bytes",
                tries=("--dynamic user=1000000", "--dynamic user=2GiB"),
            )
        rows = size == number
        found[name] = (
            Dynamic(max_rows=int(number), evict="lru")
            if rows
            else Dynamic(max_bytes=int(number) * unit, evict="lru")
        )
    return found


def _thresholds(args: argparse.Namespace) -> dict[str, Any]:
    names = ("column_slice_threshold", "row_slice_threshold", "data_parallel_threshold")
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _simulate(args: argparse.Namespace) -> int:
    from recast.runtime.planner import models, simulate
    from recast.runtime.topology import PRESETS, named

    machines = named(args.topology)
    if args.devices is not None:
        try:
            devices = [_positive("--devices", int(n)) for n in args.devices.split(",")]
        except ValueError as error:
            raise UsageError(
                f"recast simulate: --devices {args.devices}",
                why="it is numbers of ranks with commas between them",
                tries=("--devices 1,8,128",),
            ) from error
    else:
        devices = list(simulate.DEVICES) if args.topology in PRESETS else [machines.ranks]
    names = list(models.MODELS) if args.model is None else [args.model]
    batch = _positive("--batch", args.batch)
    asked = [(name, n) for name in names for n in devices]
    if args.model is None and not args.quiet:
        told = f"{len(names)} models on {args.topology}, {len(asked)} plans, may take minutes"
        complain(f"{told}; of one model: recast simulate --model {names[0]}")
    rows = []
    with counting(args, len(asked), "planning") as progress:
        for name, n in asked:
            rows.append(simulate.simulate(name, machines.of(n), batch))
            progress(len(rows))
    data = {"assumptions": simulate.ASSUMPTIONS, "rows": [row.to_dict() for row in rows]}
    emit(args, simulate.text(rows), data)
    return 0
