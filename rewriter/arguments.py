"""What ``optimize`` asks of its arguments before it does anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from recast.errors import NotBuiltError, UsageError


def not_built(**given: Any) -> None:
    """Refuse arguments whose part does not exist yet: they are never ignored."""
    parts = {
        "plan": "many devices", "topology": "many devices", "sharding": "many devices",
        "wire": "many devices", "tables": "dynamic tables",
    }  # fmt: skip
    for name, value in given.items():
        if value is not None:
            raise NotBuiltError(
                f"optimize: {name}={value!r} is not built yet",
                why=f"{name} comes with {parts[name]}, which this version does not have",
                tries=(f"leave {name} out",),
            )


def check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"optimize: the model is a {type(model).__name__}, not an nn.Module",
            why="a graph is captured from the forward of a module",
            tries=("recast.optimize(model, optimizer, example=batch)",),
        )


def check_mode(mode: object) -> None:
    if mode not in ("default", "graph"):
        raise UsageError(
            f"optimize: mode={mode!r}",
            why="there are two modes",
            tries=('"default"', '"graph" (CUDA graphs)'),
        )


def check_example(model: nn.Module, example: object) -> None:
    """An example is run, which a model without memory cannot do."""
    if example is not None and any(p.is_meta for p in model.parameters()):
        raise NotBuiltError(
            "optimize: the model is on the meta device, and an example is given",
            why="an example is run to capture the model; meta tensors hold no numbers",
            tries=("optimize(model) without an example", "model.to_empty(device='cpu') first"),
        )


def check_optimizer(model: nn.Module, optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"optimize: the optimizer is a {type(optimizer).__name__}",
            why="the second argument is a torch.optim.Optimizer; batches go to example=",
            tries=("optimize(model, optimizer, example=batch)",),
        )
    own = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if own and not any(id(p) in own for p in held):
        raise UsageError(
            f"optimize: none of the optimizer's {len(held)} parameters belong to the model",
            why="it was built over another model, or over a copy of this one",
            tries=(f"{type(optimizer).__name__}(model.parameters(), ...)",),
        )


def check_precision(
    asked: object, known: Sequence[str], model: nn.Module, optimizer: object
) -> None:
    """Tables below float32 are for inference."""
    if asked is None:
        return
    if asked not in known:
        raise UsageError(
            f"optimize: precision={asked!r} is no precision of tables",
            tries=[f"precision={name!r}" for name in known],
        )
    if optimizer is None and not model.training:
        return
    raise UsageError(
        f"optimize: precision={asked!r} for a model that trains",
        why=f"tables in {asked} are stored for inference and have no gradient",
        tries=(
            "optimize(model.eval(), precision=...) for serving, without an optimizer",
            "leave precision out, to train",
            "embedding.to(torch.bfloat16): tables of that dtype train",
        ),
    )


def check_semantics(asked: object, optimizer: object) -> None:
    if asked not in ("exact", "lazy"):
        raise UsageError(
            f"optimize: sparse_semantics={asked!r} is neither 'exact' nor 'lazy'",
            tries=("sparse_semantics='exact', the plain numbers", "sparse_semantics='lazy'"),
        )
    if asked == "lazy" and optimizer is None:
        raise UsageError(
            "optimize: sparse_semantics='lazy' without an optimizer",
            why="it says how Adam and AdamW step the tables",
            tries=("optimize(model, optimizer, sparse_semantics='lazy')",),
        )


def world_size(asked: int | None) -> int:
    """The number of ranks: of the process group when not asked for, else 1."""
    group = torch.distributed.is_available() and torch.distributed.is_initialized()
    present = torch.distributed.get_world_size() if group else 1
    ranks = present if asked is None else asked
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise UsageError(f"optimize: world_size={asked!r} is not a number of ranks")
    if 1 < ranks < present:
        raise UsageError(
            f"optimize: world_size={ranks}, but the process group has {present} ranks",
            why="every rank of the group takes part, or each alone",
            tries=(f"world_size={present}", "world_size=1 for one whole model on each rank"),
        )
    if 1 < ranks == present:
        raise NotBuiltError(
            f"optimize: sharding over {ranks} ranks is not built yet",
            why="tables and their communication come with many devices",
            tries=("world_size=1, and DistributedDataParallel around the result",),
        )
    return ranks


def launch(ranks: int) -> UsageError:
    return UsageError(
        f"forward: this model is made for {ranks} ranks, and no process group of that size runs",
        why="world_size is larger than the process group; the model can be read, dumped and saved",
        tries=(f"torchrun --nproc-per-node {ranks} train.py", "optimize(..., world_size=1)"),
    )
