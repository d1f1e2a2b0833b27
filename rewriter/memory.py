"""The hint added to an out-of-memory error: which tables fill the device, what shrinks them."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

_SHOWN = 3
_SPARE = 0.9  # usable share of a device's memory; the rest is the allocator's and the driver's
_TRAINED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[torch.optim.Optimizer]] = (
    weakref.WeakKeyDictionary()
)


def trains(root: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """From now on count the state of ``optimizer`` as memory of ``root``."""
    _TRAINED[root] = weakref.ref(optimizer)


@contextlib.contextmanager
def explained(root: nn.Module) -> Iterator[None]:
    """Add :func:`hint` to an out-of-memory error that is raised inside."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        explain(error, root)
        raise


def explain(error: Exception, root: nn.Module) -> None:
    """Add :func:`hint` to an out-of-memory error, once."""
    note = f"  try  {hint(root)}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def explain_of(root: weakref.ref[nn.Module], error: Exception) -> None:
    """:func:`explain` for a model held weakly: nothing once it is gone."""
    held = root()
    if held is not None:
        explain(error, held)


def hint(root: nn.Module) -> str:
    """Which tables take how much memory, with optimizer state, and what makes them smaller.

    State that the first step will allocate counts as well. Says on how many devices the tables
    would fit where they are on a device of known memory, given what else is on it now.
    """
    from recast.rewriter.cli.bench import size  # only needed when a device is full

    found = {
        id(weight): (f"{path}.weight".lstrip("."), weight)
        for path, module in root.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        and (weight := module._parameters.get("weight")) is not None
    }
    tables = sorted(found.values(), key=lambda item: -item[1].nbytes)
    if not tables:
        return "the model has no embedding tables: a smaller batch needs less"
    weights = [weight for _, weight in tables]
    total, (made, coming) = sum(w.nbytes for w in weights), _state(root, weights)
    largest = ", ".join(f"{name} {size(weight.nbytes)}" for name, weight in tables[:_SHOWN])
    count = "1 table" if len(tables) == 1 else f"{len(tables)} tables"
    which = f"the {_SHOWN} largest: {largest}" if len(tables) > _SHOWN else largest
    beside = "without optimizer state"
    if made or coming:
        later = f", {size(coming)} of it still to be made" if coming else ""
        beside = f"and {size(made + coming)} of optimizer state{later}"
    ranks = _ranks(weights, total + made, total + made + coming)
    many = "N" if ranks is None else str(ranks)
    enough = "" if ranks is None else f": on {ranks} the tables fit beside what else is there now"
    return (
        f"{count}, {size(total)} {beside} ({which}). Shard them over more devices:"
        f" recast.optimize(..., world_size={many}) under torchrun{enough};"
        f" `recast plan SPEC --world-size {many}` tells what fits where. Or store them in 16 bits"
    )


def _state(root: nn.Module, weights: Sequence[Tensor]) -> tuple[int, int]:
    """Bytes of the optimizer's state for these tables: already allocated, and still to come."""
    ref = _TRAINED.get(root)
    optimizer = None if ref is None else ref()
    if optimizer is None:
        return 0, 0
    own, made, coming = {id(w) for w in weights}, 0, 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in own:
                continue
            held = optimizer.state.get(p)
            if held:
                made += sum(t.nbytes for t in held.values() if isinstance(t, Tensor) and t.dim())
            elif "betas" in group:
                coming += p.nbytes * (3 if group.get("amsgrad") else 2)
            elif group.get("momentum"):
                coming += p.nbytes
    return made, coming


def _ranks(weights: Sequence[Tensor], now: int, then: int) -> int | None:
    """How many devices tables of ``then`` bytes need; None when unknown.

    ``now`` of these bytes are allocated already. Everything else is taken to stay on every device
    as it is now, and the tables to be cut evenly.
    """
    devices = {w.device for w in weights}
    known = _memory(next(iter(devices))) if len(devices) == 1 else None
    if known is None:
        return None
    held, whole = known
    room = whole * _SPARE - max(0, held - now)
    return max(2, math.ceil(then / room)) if room > 0 else None


def _memory(device: torch.device) -> tuple[int, int] | None:
    """``(bytes in use by this process's tensors, bytes of the device)``; None unless on CUDA."""
    if device.type != "cuda":
        return None
    whole: int = torch.cuda.get_device_properties(device).total_memory
    return torch.cuda.memory_allocated(device), whole
