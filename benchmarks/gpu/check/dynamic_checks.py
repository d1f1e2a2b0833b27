"""Dynamic tables on a GPU, with or without tiers below, against plain tables of numbered ids; and
ranks that share one GPU, in processes of their own."""

from __future__ import annotations

import copy
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import recast
from gpu import ROOT
from gpu.check.recorded_run import recorded_step
from gpu.harness.items import Item
from gpu.harness.runner import program
from recast.runtime import tolerances
from recast.runtime.dynamic.cuda_table import CudaTable
from recast.runtime.dynamic.cuda_tiered import TieredCudaTable
from recast.runtime.gpu import gpu

MANY, ROWS, DISK = 45, 20, 1 << 21  # ids; with tiers, rows on the GPU and bytes on disk
ON_DISK = importlib.util.find_spec("rocksdict") is not None
Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.2),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.3),
    "row-wise Adagrad": lambda p: recast.optim.RowWiseAdagrad(p, lr=0.1),
}


def dynamic(device: torch.device, tiny: bool) -> Iterator[Item]:
    """Tables of raw ids: all rows on the GPU, or few there and the others in memory and on disk."""
    steps = 12
    for name, make in OPTIMIZERS.items():
        yield Item(f"rows on the device, {name}", partial(_dynamic, make, steps, device, False))
        if tiny:
            break
    make = OPTIMIZERS["Adagrad"]
    aged = {name: recast.Dynamic(max_rows=160, evict="lfu", seed=5) for name in ("user", "items")}
    yield Item(
        "rows of which the rarest go", partial(_dynamic, make, steps, device, False, how=aged)
    )
    # More than one block counts at a time.
    yield Item("thousands of ids", partial(_dynamic, make, 4, device, False, size=3000))
    below = "memory and disk" if ON_DISK else "memory"
    yield Item(f"rows in {below} below", partial(_dynamic, make, steps, device, True))
    yield Item("recorded", partial(_dynamic, make, steps, device, False, recorded=True))


def _dynamic(
    make: Make,
    count: int,
    device: torch.device,
    below: bool,
    recorded: bool = False,
    how: dict[str, Any] | None = None,
    size: int | None = None,
) -> dict[str, object]:
    """``size``: samples in every batch; None: a few, a different number each time."""
    sys.path[:0] = [str(ROOT / "tests" / "dynamic")]
    from dynamickit import Stream
    from dynamicranks import HOW, made, steps_of, twin

    many = MANY if below else 30
    batches = [parts[0] for parts in steps_of(1, count, many=many)]
    if size is not None:
        stream = Stream(1, many)
        batches = [stream.batch(size) for _ in range(count)]
    if recorded:  # each size would have a recording of its own: two items a sample
        stream, g = Stream(1, many), torch.Generator().manual_seed(0)
        batches = [
            (
                users,
                stream.things[torch.randint(many, (12,), generator=g)],
                torch.arange(6) * 2,
                days,
            )
            for users, _, _, days in (stream.batch(6) for _ in range(count))
        ]
    with gpu.emulate(None):  # beside it, plain tables of numbered ids on the CPU
        plain, own = twin(make, torch.float32, many)
        judge = copy.deepcopy(plain).double()
        wanted = [_outputs(plain, own, batches), _outputs(judge, make(judge.parameters()), batches)]
    with tempfile.TemporaryDirectory() as folder:
        how = _tiered(Path(folder)) if below else how or HOW
        fast, opt = made(make, how, dtype=torch.float32, device=device)
        tables = recast.dynamic.tables(fast)
        kind = TieredCudaTable if below else CudaTable
        assert all(type(t) is kind for t in tables.values()), "another kind of table"
        given = [tuple(t.to(device) for t in batch) for batch in batches]
        run = _recorded if recorded else _outputs
        worst = 0.0
        for out, a, b in zip(run(fast, opt, given), *wanted, strict=True):
            worst = max(worst, _share(out, a, b))
        for name in HOW:
            rows = recast.dynamic.export(fast.get_submodule(name))
            ids = rows.ids.cpu()
            assert len(ids) > (ROWS if below else 0), "fewer rows than were asked for"
            worst = max(worst, _share(rows.rows, plain.rows(name, ids), judge.rows(name, ids)))
        ids = recast.dynamic.export(fast.get_submodule("user")).ids[:2]
        assert tables["user"].erase(ids) == len(ids), "erased"
        if below:
            promoted = sum(t.counters()["promoted"] for t in tables.values())
            assert promoted > 0, "no row came up again"
        recast.checkpoint.save(Path(folder) / "kept", fast, opt, step=count)
    assert worst <= 1, f"{worst:.2f} of the limit"
    return {"share of the limit": round(worst, 3)}


def _share(got: Tensor, plain: Tensor, judge: Tensor) -> float:
    off = tolerances.excess(got.detach().cpu(), plain.detach(), judge.detach())
    return float(off / tolerances.CHAIN)


def _loss(out: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out, labels.to(out.dtype))


def _outputs(model: Any, optimizer: Any, batches: list[Any]) -> list[Tensor]:
    """The loss before each step."""
    from dynamicranks import labels

    found = []
    for batch in batches:
        optimizer.zero_grad()
        loss = _loss(model(*batch), labels(batch))
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found


def _recorded(model: Any, optimizer: Any, batches: list[Any]) -> list[Tensor]:
    """Likewise, as recorded steps."""
    from dynamicranks import labels

    step = recorded_step(model, _loss, optimizer, batches[0][0].device)
    found = [step(batch, labels(batch)).clone() for batch in batches]
    assert step.recorded, "nothing was recorded"
    return found


def _tiered(folder: Path) -> dict[str, Any]:
    """Room for ``ROWS`` rows of each table on the device."""
    from devicetiers import tiers

    shares = tiers(folder if ON_DISK else None, 16, ROWS, 3 if ON_DISK else 300, DISK)
    return {
        "user": recast.Dynamic(tiers=shares, seed=5),
        "items": recast.Dynamic(tiers=shares, evict="lfu", seed=5),
    }


# ---------------------------------------------------------------- ranks

Run = tuple[str, str, int, tuple[str, ...]]  # program, backend, how many, further words


def ranks(device: torch.device, tiny: bool) -> Iterator[Item]:
    """Ranks that share a GPU, or have one each if there are several: the numbers of one process."""
    plain, rows = "ranks_on_gpu.py", "dynamic_ranks_on_gpu.py"
    runs: list[Run] = [(plain, "gloo", 1, ())]
    if device.type == "cuda":
        runs = [(plain, "nccl", 1, ()), (plain, "gloo", 2, ()), (plain, "gloo", 4, ())]
        runs += [(rows, "gloo", 2, ()), (rows, "gloo", 2, ("tiers",)), (rows, "gloo", 4, ())]
        if torch.cuda.device_count() > 1:
            runs += [(rows, "nccl", 2, ())]
    for script, backend, count, more in runs:
        what = "dynamic tables" if script == rows else "tables"
        label = f"{what}{' with tiers' if more else ''} over {count} ranks, {backend}"
        yield Item(label, partial(_ranks, (script, backend, count, more), device), limit=200)


def _ranks(run: Run, device: torch.device) -> dict[str, object]:
    script, backend, count, more = run
    asked = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    asked += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    asked += [str(ROOT / "tests" / "gpu" / script), backend, device.type, *more]
    status, said = program(asked, 190, OMP_NUM_THREADS="1")
    told = [line for line in said.splitlines() if "as one process" in line]
    assert status == 0 and told, f"status {status}: {said[-1200:]}"
    return {"detail": told[-1]}
