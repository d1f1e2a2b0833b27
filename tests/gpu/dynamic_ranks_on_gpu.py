"""One rank of a training run with dynamic tables in the memory of a GPU, or there and below.

    torchrun --nproc-per-node 2 tests/gpu/dynamic_ranks_on_gpu.py gloo cuda          # on one GPU
    torchrun --nproc-per-node 2 tests/gpu/dynamic_ranks_on_gpu.py nccl cuda          # on two
    torchrun --nproc-per-node 2 tests/gpu/dynamic_ranks_on_gpu.py gloo cuda tiers    # few rows
    torchrun --nproc-per-node 2 tests/gpu/dynamic_ranks_on_gpu.py gloo emulated tiers

Twelve steps; outputs and rows are compared with the plain model over ids numbered beforehand, on
the CPU in float32, with float64 as the judge. Then a checkpoint is written and loaded into another
model, and both go on alike. With ``tiers`` the GPU holds a part of the rows of each rank, memory
another, and a disk the rest if the package rocksdict is installed.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "dynamic"))
from devicetiers import tiers
from dynamicranks import ADAGRAD, HOW, made, steps, steps_of, twin

import recast
from recast.runtime import tolerances
from recast.runtime.dynamic.cuda_table import CudaTable
from recast.runtime.dynamic.cuda_tiered import TieredCudaTable
from recast.runtime.dynamic.table import DynamicTable
from recast.runtime.gpu import gpu

STEPS, MORE = 12, 3
ROWS, DISK = 20, 1 << 21  # of a rank with tiers: rows on the GPU, bytes on disk
ON_DISK = importlib.util.find_spec("rocksdict") is not None


def wanted(world: int, many: int) -> tuple[Any, Any, list[Any]]:
    """The plain model, the judge and the outputs of both, before there are ranks."""
    plain, opt = twin(ADAGRAD, torch.float32, many)
    judge = copy.deepcopy(plain).double()
    batches = steps_of(world, STEPS, many=many)
    outs = steps(plain, opt, batches), steps(judge, ADAGRAD(judge.parameters()), batches)
    return plain, judge, list(zip(*outs, strict=True))


def near(got: torch.Tensor, plain: torch.Tensor, judge: torch.Tensor) -> None:
    assert tolerances.excess(got.cpu(), plain.detach(), judge.detach()) <= tolerances.CHAIN


def tiered(folder: Path, world: int) -> dict[str, Any]:
    """Tables with room for ``ROWS`` rows of each rank on its GPU, and for the others below."""
    device, host, *_ = tiers(folder if ON_DISK else None, 16, ROWS, 3 if ON_DISK else 300, DISK)
    shares = [recast.Device(world * device.budget), recast.Host(world * host.budget)]
    shares += [recast.Disk(folder, world * DISK)] if ON_DISK else []
    return {
        "user": recast.Dynamic(tiers=shares, seed=5),
        "items": recast.Dynamic(tiers=shares, evict="lfu", seed=5),
    }


def shared_folder(rank: int) -> Path:
    """One that all ranks know."""
    where: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(where, 0)
    return Path(where[0])


def main(backend: str, kind: str, world: int, below: bool) -> None:
    many = 45 * world if below else 30  # users, and items
    with gpu.emulate(None):
        plain, judge, outs = wanted(world, many)
    dist.init_process_group(backend)
    rank = dist.get_rank()
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device(kind, rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    folder = shared_folder(rank)

    def one(name: str, **more: Any) -> tuple[Any, Any]:
        options: dict[str, Any] = {"dtype": torch.float32, "device": device, **more}
        if below:
            return made(ADAGRAD, tiered(folder / name, world), rows=world * ROWS, **options)
        return made(ADAGRAD, plan=None, **options)

    table = DynamicTable if kind == "cpu" else TieredCudaTable if below else CudaTable
    fast, opt = one("first")
    tables = recast.dynamic.tables(fast)
    assert all(type(t) is table for t in tables.values())
    batches = steps_of(world, STEPS + MORE, many=many)
    own = steps(fast, opt, batches[:STEPS], rank, device=device)
    found: list[Any] = [None] * world
    dist.all_gather_object(found, own)
    for k, both in enumerate(outs):
        near(torch.cat([each[k] for each in found]), *both)
    for name in HOW:
        rows = recast.dynamic.export(fast.get_submodule(name), ranks="all")
        part = recast.dynamic.export(fast.get_submodule(name))
        assert 0 < len(part.ids) < len(rows.ids) or world == 1
        ids = rows.ids.cpu()
        near(rows.rows, plain.rows(name, ids), judge.rows(name, ids))
        assert not below or len(ids) > world * ROWS, "more than the GPUs have room for"
    if below:
        promoted = sum(t.counters()["promoted"] for t in tables.values())
        assert promoted > 0, "rows came up again"
    recast.checkpoint.save(folder / "rows", fast, opt, step=STEPS)
    other, other_opt = one("other", seed=9)
    recast.checkpoint.load(folder / "rows", other, other_opt)
    here = steps(fast, opt, batches[STEPS:], rank, device=device)
    there = steps(other, other_opt, batches[STEPS:], rank, device=device)
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    places = " with memory and disk below" if ON_DISK else " with memory below"
    print(
        f"rank {rank}: {backend}, {world} ranks on {kind}: dynamic tables"
        f"{places if below else ''} as one process"
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    backend, kind, *more = sys.argv[1:]
    with contextlib.ExitStack() as served:
        if kind == "emulated":
            import emulated_gpu

            served.enter_context(emulated_gpu.serve())
        main(backend, kind, int(os.environ["WORLD_SIZE"]), more == ["tiers"])
