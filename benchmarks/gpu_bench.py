"""How fast on this GPU, beside eager PyTorch, torch.compile, and the floor of the machine.

    python benchmarks/gpu_bench.py                       # within 8 minutes; make gpu-bench
    python benchmarks/gpu_bench.py --groups tiny dlrm
    python benchmarks/gpu_bench.py --resume build/bench  # what an earlier call did not get to
    python benchmarks/gpu_bench.py --dry-run             # the same code on the emulator, tiny

Peers run in the same process and take turns; times are medians of CUDA events. float32 products
are TF32, for all. Each group has a process of its own. Of Small, whose tables fill the memory,
peers are measured one after the other, each gone before the next.
Writes ``<date>-<gpu>-gpu-bench.json`` and ``.md``, as it goes.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "models"))

import gpu_needs  # noqa: F401 (first: it tells what is missing)

# isort: split
import gpu_groups
import gpu_parts
import gpu_progress
import gpu_synthetic
import torch
import torch.nn.functional as F
from gpu_groups import ROOT, Group, Item
from gpu_measure import (
    Rates,
    Variant,
    chain_work,
    linears,
    lookup_bytes,
    measure,
    rates,
    rows,
)
from gpu_parts import BATCH, compiled, effort
from gpu_synthetic import Config, Synthetic
from mlperf_dlrm import BOTTOM, DLRM, ROWS, TOP
from torch import Tensor, nn

import recast
from recast.runtime import fastest, recording
from recast.runtime.training_step import TrainingStep

BUDGET = 460.0
BATCHES = 10
LOSS = F.binary_cross_entropy_with_logits
Batch = tuple[Any, Tensor]
Found = dict[str, object]


def groups() -> dict[str, Group]:
    return {
        "dropout": partial(gpu_parts.dropout, RATES),
        "ops": partial(gpu_parts.ops, RATES),
        "dlrm": dlrm,
        "tiny": partial(synthetic, gpu_synthetic.TINY, 1.2),
        "small": partial(synthetic, gpu_synthetic.SMALL, 4.5),
    }


# ---------------------------------------------------------------- whole steps


def _loop(
    forward: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    data: Sequence[Batch],
    low: torch.dtype | None,
    device: torch.device,
) -> Callable[[int], None]:
    """A training loop's body."""

    def step(k: int) -> None:
        inputs, labels = data[k]
        with torch.autocast(device.type, low or torch.bfloat16, enabled=low is not None):
            loss = LOSS(forward(*inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _recorded(
    fast: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Sequence[Batch],
    low: torch.dtype | None,
    device: torch.device,
    in_turn: bool = False,
) -> Callable[[int], object]:
    recorder = None
    if device.type == "cpu":
        sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]
        from tape import TapeRecorder

        recorder = TapeRecorder(optimizer)
    step = TrainingStep(fast, LOSS, optimizer, autocast=low, recorder=recorder)

    def run(k: int) -> object:
        with recording.in_turn() if in_turn else contextlib.nullcontext():
            return step(*data[k])

    return run


def _shared(
    make: Callable[[nn.Module], torch.optim.Optimizer],
    model: nn.Module,
    like: torch.optim.Optimizer,
) -> torch.optim.Optimizer:
    """An optimizer over ``model`` with the very state of ``like``: memory for one.

    Some make their state at once: this one is made for parameters without memory.
    """
    parameters = list(model.parameters())
    hollow = nn.ParameterList(nn.Parameter(torch.empty_like(p, device="meta")) for p in parameters)
    optimizer = make(hollow)
    real = dict(zip(hollow, parameters, strict=True))
    for group in optimizer.param_groups:
        group["params"] = [real[p] for p in group["params"]]
    optimizer.state.clear()
    for p in parameters:
        if p in like.state:
            optimizer.state[p] = like.state[p]
    return optimizer


def _variants(
    plain: nn.Module,
    sparse: nn.Module,
    make: Callable[[nn.Module], torch.optim.Optimizer],
    data: Sequence[Batch],
    low: torch.dtype | None,
    device: torch.device,
    tiny: bool,
    dense: bool,
    gathers: bool = False,
) -> list[Variant]:
    """``plain`` and ``sparse`` hold the same parameters; all variants train them.

    ``dense``: torch.compile of the whole beside them; ``gathers``: and ours with gather-in-dots.
    """
    ours = make(plain)
    fast, ours = recast.optimize(plain, ours, example=data[0][0])
    eager = _shared(make, sparse, ours)
    found = [
        Variant("recast", _loop(fast, ours, data, low, device)),
        Variant("recast graph", _recorded(fast, ours, data, low, device)),
        # What it gains that ids are sorted while the forward runs.
        Variant("recast graph, sorts in turn", _recorded(fast, ours, data, low, device, True)),
        Variant("eager sparse", _loop(sparse, eager, data, low, device)),
    ]
    if device.type == "cuda" and sum(p.numel() for p in plain.parameters()) < 2e9:
        again, _ = recast.optimize(plain, ours, example=data[0][0], mode="graph")
        found.insert(1, Variant('recast mode="graph"', _loop(again, ours, data, low, device)))
    # Compilers do not take sparse gradients: with them, only what is not a lookup is compiled.
    part = copy.copy(sparse)
    part._modules = dict(sparse._modules)
    for name in ("mlp", "bottom", "top"):
        if name in part._modules:
            part._modules[name] = _Called(compiled(getattr(sparse, name), tiny))
    if gathers:
        words = "default,gather-in-dots"
        again, _ = recast.optimize(plain, ours, example=data[0][0], passes=words)
        found.append(
            Variant("recast graph, gather-in-dots", _recorded(again, ours, data, low, device))
        )
    found.append(Variant("compiled, sparse", _loop(part, eager, data, low, device)))
    if dense:
        whole = copy.deepcopy(plain)
        own = make(whole)
        found.append(Variant("torch.compile", _loop(compiled(whole, tiny), own, data, low, device)))
    return found


class _Called(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = [function]  # in a list: its parameters are another's

    def forward(self, x: Tensor) -> Tensor:
        return self.function[0](x)


def _twin(make: Callable[[bool], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Two models of one set of parameters, the second with ``sparse=True`` tables."""
    plain = make(False)
    with torch.device("meta"):
        sparse = make(True)
    there = dict(plain.named_modules())
    for path, module in sparse.named_modules():
        module._parameters = there[path]._parameters
        module._buffers = there[path]._buffers
    return plain, sparse


def synthetic(config: Config, bar: float, device: torch.device, tiny: bool) -> Iterator[Item]:
    """Tiny and Small: ids in order of rank and shuffled, fp32 and bf16 outputs."""
    config = config.scaled(60) if tiny else config
    for low in (None, torch.bfloat16):
        for shuffle in (False, True):
            words = f"{'bf16' if low else 'fp32'}, {'shuffled' if shuffle else 'ranked'} ids"
            yield Item(
                f"{config.name}, {words}",
                partial(_synthetic, config, bar, low, shuffle, device, tiny),
            )


def _synthetic(
    config: Config, bar: float, low: torch.dtype | None, shuffle: bool, device: torch.device,
    tiny: bool,
) -> Found:  # fmt: skip
    size = 8 if tiny else BATCH
    torch.manual_seed(0)

    def make(sparse: bool) -> nn.Module:
        with torch.device(device) if not sparse else contextlib.nullcontext():
            return Synthetic(config, sparse)

    plain, sparse = _twin(make)
    data = [
        gpu_synthetic.batch(config, size, k, device, alpha=1.05, shuffle=shuffle)
        for k in range(3 if tiny else BATCHES)
    ]

    def adagrad(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(
            model.parameters(), lr=0.001, initial_accumulator_value=0.1, eps=1e-7
        )

    small = sum(p.numel() for p in plain.parameters()) < 2e9
    found = _variants(
        plain, sparse, adagrad, data, low, device, tiny, dense=small and not shuffle and low is None
    )
    apart = not small  # what each keeps for itself does not fit beside the others
    measure(found, device, batches=len(data), apart=apart, **effort(tiny, 6))
    dims = [t.embedding_dim for t in plain.tables]
    inputs = list(zip(plain.of_input, data[0][0][1], strict=True))
    width = 2 if low else 4
    moved = lookup_bytes(inputs, dims, size * sum(dims[t] for t, _ in inputs), state=1, width=width)
    floor = _floor(moved, [linears(plain.mlp)], size, low)
    case = f"{config.name}, {'bf16' if low else 'fp32'}, {'shuffled' if shuffle else 'ranked'}"
    told = {"published A100 ms": config.published_ms} if config.published_ms else {}
    return {"rows": rows(case, found, floor, bar), **told, "chosen": fastest.timings()}


def _floor(moved: float, chains: Sequence[Sequence[int]], batch: int, low: Any) -> dict[str, float]:
    """Lookups, then chains, one after the other."""
    dtype = "bfloat16" if low else "float32"
    work = [chain_work(sizes, batch, 2 if low else 4) for sizes in chains]
    lookups = RATES.ms(moved, 0.0, dtype)
    products = sum(RATES.ms(m, f, dtype) for m, f in work)
    return {
        "ms": lookups + products,
        "lookups ms": lookups,
        "products ms": products,
        "lookups GB": moved / 1e9,
        "GFLOP": sum(f for _, f in work) / 1e9,
    }


def dlrm(device: torch.device, tiny: bool) -> Iterator[Item]:
    """MLPerf's DLRM, one id a field, tables of at most 10 M rows, fp32 tables, bf16 compute."""
    for shuffle in (False, True):
        words = "shuffled" if shuffle else "ranked"
        yield Item(f"MLPerf DLRM, {words} ids", partial(_dlrm, shuffle, device, tiny))


def _dlrm(shuffle: bool, device: torch.device, tiny: bool) -> Found:
    sizes = [min(n, 60 if tiny else 10_000_000) for n in ROWS]
    bottom, top = ((16, 8), (16, 1)) if tiny else (BOTTOM, TOP)
    batch = 8 if tiny else BATCH
    torch.manual_seed(0)

    def make(sparse: bool) -> nn.Module:
        with torch.device(device) if not sparse else contextlib.nullcontext():
            net = DLRM(sizes, bottom, top)
        for emb in net.emb:
            emb.sparse = sparse
        return net

    plain, sparse = _twin(make)
    offsets = torch.arange(batch, device=device)
    data = []
    for k in range(3 if tiny else BATCHES):
        g = torch.Generator(device).manual_seed(k)
        ids = [gpu_synthetic.power_law(n, (batch,), 1.05, g) for n in sizes]
        if shuffle:
            ids = [gpu_synthetic.shuffled(i, n) for i, n in zip(ids, sizes, strict=True)]
        dense = torch.rand(batch, 13, generator=g, device=device)
        labels = torch.randint(2, (batch,), generator=g, device=device).float()
        data.append(((dense, ids, [offsets] * len(sizes)), labels))

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    low = torch.bfloat16
    found = _variants(plain, sparse, sgd, data, low, device, tiny, dense=False, gathers=True)
    measure(found, device, batches=len(data), **effort(tiny, 8))
    dim, f = bottom[-1], len(sizes) + 1
    moved = lookup_bytes(
        enumerate(data[0][0][1]), [dim] * len(sizes), batch * dim * len(sizes), state=0, width=2
    )
    # The dots: each feature read and its gradient written; products of all pairs, thrice.
    floor = _floor(moved, [linears(plain.bottom), linears(plain.top)], batch, low)
    dots = RATES.ms(batch * f * dim * 2.0 * 3, 6.0 * batch * f * f * dim, "bfloat16")
    floor = {**floor, "ms": floor["ms"] + dots, "dots ms": dots}
    words = "shuffled" if shuffle else "ranked"
    lines = rows(f"MLPerf DLRM, {words}", found, floor, 3.0)
    return {"rows": lines, "published A100 ms": 14.4, "chosen": fastest.timings()}


# ---------------------------------------------------------------- the command

RATES = Rates(1.0, {})  # of this machine: measured once, given to all groups


def main() -> int:
    global RATES
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--groups", nargs="*", metavar="NAME", help=f"of {', '.join(groups())}")
    p.add_argument("--only", metavar="REGEX", help="items whose name it matches")
    p.add_argument("--budget", type=float, default=BUDGET, help="seconds, default %(default)s")
    p.add_argument("--dry-run", action="store_true", help="tiny, on the emulator; needs no GPU")
    p.add_argument("--resume", type=Path, metavar="FOLDER", help="keep items there, and go on")
    p.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    p.add_argument("--group", help=argparse.SUPPRESS)
    p.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    p.add_argument("--rates", help=argparse.SUPPRESS)
    o = p.parse_args()
    gpu_groups.ends_when_told()
    device = torch.device("cpu" if o.dry_run else "cuda")
    torch.set_float32_matmul_precision("high")  # TF32, as the published runs
    if o.group is not None:
        RATES = Rates(**json.loads(o.rates))
        with contextlib.ExitStack() as inside:
            if o.dry_run:
                sys.path.insert(0, str(ROOT / "tests"))
                import emulated_gpu

                inside.enter_context(emulated_gpu.serve())
            return gpu_groups.work(groups()[o.group], o.lines, device, o.dry_run, o.only)
    if not o.dry_run and not torch.cuda.is_available():
        print("torch sees no CUDA device; `--dry-run` tries the measurements themselves")
        return 2
    return _bench_all(o, device)


def _bench_all(o: argparse.Namespace, device: torch.device) -> int:
    started = time.monotonic()
    lacks = [f"missing: {line}" for line in gpu_groups.missing()]
    print(*lacks, sep="\n", end="\n" if lacks else "")
    measured = rates(device, o.dry_run)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the groups are other processes
    options = ["--rates", json.dumps({"copy": measured.copy, "matrix": measured.matrix})]
    options += [*(["--dry-run"] if o.dry_run else []), *(["--only", o.only] if o.only else [])]
    names, machine = o.groups or list(groups()), gpu_groups.machine(device)
    on = machine | {
        "copy TB/s": round(measured.copy / 1e12, 3),
        **{f"{k} TFLOP/s": round(v / 1e12, 1) for k, v in measured.matrix.items()},
    }

    def record(items: Sequence[gpu_groups.Row], left: str) -> Path:
        more = "\n\n".join(filter(None, [*lacks, left]))
        text = _page(items, more, time.monotonic() - started)
        return gpu_groups.write(o.out, "gpu-bench", "Steps and parts on a GPU", on, items, text)

    with tempfile.TemporaryDirectory() as kept:
        kind = {**machine, "dry run": o.dry_run}
        items = gpu_groups.run(
            Path(__file__), names, gpu_progress.folder_of(o.resume, Path(kept), kind), jobs=1,
            options=options, budget=o.budget - (time.monotonic() - started),
            resume=o.resume is not None,
            progress=gpu_progress.Progress(names, record, each=True),
        )  # fmt: skip
    print(record(items, "").read_text())
    lines = [row for r in items for row in r.get("rows", [])]
    return 1 if not lines or any(r["status"] == "failed" for r in items) else 0


def _page(items: Sequence[gpu_groups.Row], left: str, seconds: float) -> str:
    failed = [r for r in items if r["status"] == "failed"]
    lines = [row for r in items for row in r.get("rows", [])]
    return "\n\n".join(
        [
            gpu_groups.table([_short(r) for r in lines if "ms" in r]),
            *(f"- {r['case']}: {r['variant']}: {r['why not']}" for r in lines if "why not" in r),
            *(f"- **{r['name']}**: {r.get('detail', '')}" for r in failed),
            *([left] if left else []),
            f"{seconds:.0f} s",
        ]
    )


def _short(row: dict[str, Any]) -> dict[str, object]:
    beside = [f"{v} x {k.removeprefix('beside ')}" for k, v in row.items() if "beside" in k]
    met = {True: "met", False: "NOT met"}.get(row.get("met"), "")
    return {
        "case": row["case"],
        "variant": row["variant"],
        "ms": row["ms"],
        "times the floor": row.get("times the floor", ""),
        "host ms": row.get("host ms", ""),
        "faster": ", ".join(beside),
        "must": f"{row['must ms']} {met}" if "must ms" in row else "",
    }


if __name__ == "__main__":
    sys.exit(main())
