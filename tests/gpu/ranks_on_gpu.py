"""One rank of a training run whose ranks share a device; rank 0 compares it with one process.

    torchrun --nproc-per-node 1 tests/gpu/ranks_on_gpu.py nccl cuda
    torchrun --nproc-per-node 2 tests/gpu/ranks_on_gpu.py gloo cuda

NCCL needs a GPU for each rank, so on one GPU it runs with one rank, whose tables are sharded all
the same: everything is sent, to itself. Gloo lets several ranks share one GPU. Five
steps of the model with every kind of lookup, tables of every scheme, and an int8 wire.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))
from every import COLUMNS, Every, after, batch, grads, plain_run, planned, step
from judged import adagrad, compare

import recast
from recast import passes as library
from recast.rewriter import api
from recast.rewriter.api_link import link
from recast.rewriter.capture.capture_model import capture
from recast.rewriter.spread import model as spread
from recast.runtime.ranks import shards
from recast.runtime.rows import optimizer as row_optimizer

SIZES = {1: [6], 2: [4, 3], 4: [3, 0, 5, 4]}
WIRES = ("fp32", "int8")


def moved(values: Any, device: torch.device) -> Any:
    return tuple(v.to(device) for v in values)


def spread_model(model: nn.Module, optimizer: Any, example: Any, world: int, wire: str) -> Any:
    """``recast.optimize``, which leaves the tables of a single rank whole: here they are spread."""
    plan = planned(model, world, COLUMNS)
    if world > 1:
        return recast.optimize(model, optimizer, example=example, plan=plan, wire=wire)
    captured = capture(model, example, inplace=False)
    own = library.OverlapLookups, library.GatherInDots
    chosen = tuple(p for p in api.pipeline_of(None) if not isinstance(p, own))
    compiled = link(captured, chosen, strict=True)
    spread.spread(compiled, captured, optimizer, 1, spread.Spread(plan=plan, wire=wire))
    row_optimizer.attach(optimizer, lazy=False)
    return compiled, optimizer


def train(model: nn.Module, wire: str, device: torch.device) -> Any:
    """What ``compare`` wants of this rank, on the CPU."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = SIZES[world]
    model = copy.deepcopy(model).to(device)
    example = moved(batch([5, 4], 0)[0], device)
    fast, optimizer = spread_model(model, adagrad(model.parameters()), example, world, wire)
    assert "wait_rows" in str(fast)
    found: dict[str, Tensor] = {}
    for k in range(5):
        optimizer.zero_grad()
        inputs, label = batch(sizes, rank, seed=k)
        given = moved(inputs, device), label.to(device)
        found[f"output {k}"] = step(fast, given, sum(sizes), world)
        if k == 0:
            found |= grads(fast)
        optimizer.step()
    found |= after(fast, optimizer)
    whole = fast.full_state_dict(ranks="all")
    assert {n: t.shape for n, t in whole.items()} == {n: t.shape for n, t in model_shapes.items()}
    parts = {n: own for n, p in fast.named_parameters() if (own := shards.of(p)) is not None}
    return {n: t.to_dense().cpu() for n, t in found.items()}, parts


def near(results: list[Any], plain: dict[str, Tensor]) -> None:
    """Outputs through an int8 wire: each number of a row within 1/254 of its largest."""
    for k in range(5):
        got = torch.cat([found[f"output {k}"] for found, _ in results])
        assert (got - plain[f"output {k}"]).abs().max() < 0.1, k
        assert not torch.equal(got, plain[f"output {k}"])


def main(backend: str, kind: str) -> None:
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    world = dist.get_world_size()
    torch.manual_seed(world)
    model = Every()
    model_shapes.update(model.state_dict())
    for wire in WIRES:
        results: list[Any] = [None] * world
        dist.all_gather_object(results, train(model, wire, device))
        if dist.get_rank() == 0:
            plain = plain_run(model, adagrad, SIZES[world])
            if wire == "fp32":
                truth = plain_run(model, adagrad, SIZES[world], dtype=torch.float64)
                compare(results, plain, truth)
            else:
                near(results, plain)
            print(f"{backend}, {world} ranks on {kind}, {wire}: as one process")
    dist.barrier()
    dist.destroy_process_group()


model_shapes: dict[str, Tensor] = {}
if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
