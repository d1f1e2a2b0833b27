"""One rank of a training run with dynamic tables in the memory of a GPU.

    torchrun --nproc-per-node 2 tests/gpu/dynamic_ranks_on_gpu.py gloo cuda    # on one GPU
    torchrun --nproc-per-node 2 tests/gpu/dynamic_ranks_on_gpu.py nccl cuda    # on two

Twelve steps; outputs and rows are held against the plain model over ids numbered beforehand, on the
CPU in float32, with float64 as the judge. Then a checkpoint is written, loaded into another model,
and both go on alike.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "dynamic"))
from dynamicranks import ADAGRAD, HOW, made, steps, steps_of, twin

import recast
from recast.runtime import tolerances
from recast.runtime.dynamic.cuda_table import CudaTable
from recast.runtime.dynamic.table import DynamicTable

STEPS, MORE = 12, 3


def wanted(world: int) -> tuple[Any, Any, list[Any]]:
    """The plain model, the judge and the outputs of both, before there are ranks."""
    plain, opt = twin(ADAGRAD, torch.float32)
    judge = copy.deepcopy(plain).double()
    batches = steps_of(world, STEPS)
    outs = steps(plain, opt, batches), steps(judge, ADAGRAD(judge.parameters()), batches)
    return plain, judge, list(zip(*outs, strict=True))


def near(got: torch.Tensor, plain: torch.Tensor, judge: torch.Tensor) -> None:
    assert tolerances.excess(got.cpu(), plain.detach(), judge.detach()) <= tolerances.CHAIN


def main(backend: str, kind: str, world: int) -> None:
    plain, judge, outs = wanted(world)
    dist.init_process_group(backend)
    rank = dist.get_rank()
    index = rank % torch.cuda.device_count() if kind == "cuda" else None
    device = torch.device(kind, index)
    if kind == "cuda":
        torch.cuda.set_device(device)
    options: dict[str, Any] = {"dtype": torch.float32, "device": device, "plan": None}
    fast, opt = made(ADAGRAD, **options)
    table = CudaTable if kind == "cuda" else DynamicTable
    assert all(type(t) is table for t in recast.dynamic.tables(fast).values())
    batches = steps_of(world, STEPS + MORE)
    own = steps(fast, opt, batches[:STEPS], rank, device=device)
    found: list[Any] = [None] * world
    dist.all_gather_object(found, own)
    for k, both in enumerate(outs):
        near(torch.cat([one[k] for one in found]), *both)
    for name in HOW:
        rows = recast.dynamic.export(fast.get_submodule(name), ranks="all")
        part = recast.dynamic.export(fast.get_submodule(name))
        assert 0 < len(part.ids) < len(rows.ids) or world == 1
        ids = rows.ids.cpu()
        near(rows.rows, plain.rows(name, ids), judge.rows(name, ids))
    where: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(where, 0)
    recast.checkpoint.save(Path(where[0]) / "rows", fast, opt, step=STEPS)
    other, other_opt = made(ADAGRAD, seed=9, **options)
    recast.checkpoint.load(Path(where[0]) / "rows", other, other_opt)
    here = steps(fast, opt, batches[STEPS:], rank, device=device)
    there = steps(other, other_opt, batches[STEPS:], rank, device=device)
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    print(f"rank {rank}: {backend}, {world} ranks on {kind}: dynamic tables as one process")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    import os

    main(sys.argv[1], sys.argv[2], int(os.environ["WORLD_SIZE"]))
