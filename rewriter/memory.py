"""What to do when a device is full: tables take the memory, and can be spread or stored small."""

from __future__ import annotations

from torch import nn

_SHOWN = 3


def explain(error: Exception, root: nn.Module) -> None:
    """Add :func:`hint` to an out-of-memory error."""
    error.add_note(f"  try  {hint(root)}")


def hint(root: nn.Module) -> str:
    """Which tables take how much, and what makes them smaller; for an out-of-memory error.

    Training takes more than the tables themselves: the optimizer's state, as large as the table
    for Adagrad, and what the step holds.
    """
    from .bench import size  # which is not needed unless a device is full

    found = {
        id(module.weight): (f"{path}.weight".lstrip("."), module.weight)
        for path, module in root.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    }
    tables = sorted(found.values(), key=lambda item: -item[1].nbytes)
    if not tables:
        return "the model has no embedding tables: a smaller batch needs less"
    total = sum(weight.nbytes for _, weight in tables)
    largest = ", ".join(f"{name} {size(weight.nbytes)}" for name, weight in tables[:_SHOWN])
    count = "1 table" if len(tables) == 1 else f"{len(tables)} tables"
    which = f"the {_SHOWN} largest: {largest}" if len(tables) > _SHOWN else largest
    return (
        f"{count}, {size(total)} without optimizer state ({which}). Shard them over more devices:"
        " recast.optimize(..., world_size=N) under torchrun; `recast plan SPEC --world-size N`"
        " tells what fits where. Or store them in 16 bits"
    )
