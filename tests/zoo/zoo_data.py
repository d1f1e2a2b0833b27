"""What models of the zoo are built for: fields of ids, numbers and histories, drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Rows of the tables: sixteen fields, and ten small ones for models whose tables grow with the
# square of the fields.
ROWS = (
    1200, 18000, 2500, 90000, 1600, 4500, 45000, 900, 2200, 9000, 1300, 28000, 3600, 1100, 7500,
    2400,
)  # fmt: skip
FEW = (1100, 2300, 1400, 2800, 900, 5200, 1250, 1050, 9500, 2600)
NUMBERS, DIM, HISTORY, DEEP = 4, 16, 10, (128, 64)
ITEMS, KINDS, TAGS = 20000, 1000, 2000

Draw = torch.Generator
Inputs = Callable[[int, Draw], tuple[Any, ...]]  # (rows, generator) -> arguments of the model
Made = tuple[nn.Module, Inputs]


@dataclass(frozen=True)
class Subject:
    """One model of a library, and how its batches are drawn."""

    name: str  # "torchfm/DCN"
    make: Callable[[], Made]

    def build(self, seed: int = 0) -> tuple[nn.Module, Callable[[int, int], tuple[Any, ...]]]:
        """The model in eval mode with visible weights, and ``batch(rows, seed)``."""
        torch.manual_seed(seed)
        model, inputs = self.make()
        visible(model, seed)
        return model.eval(), lambda rows, s: inputs(rows, Draw().manual_seed(1 + s))


def visible(model: nn.Module, seed: int) -> None:
    """Draw weights with which every part of the model affects its output.

    Libraries start from zeros and from embeddings of 1e-4, so that all outputs are nearly equal and
    a wrong rewrite would go unnoticed.
    """
    g = Draw().manual_seed(100 + seed)
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    table_of = {id(m.weight): m for m in tables}
    with torch.no_grad():
        for norm in norms:
            if norm.running_mean is not None:
                norm.running_mean.normal_(0, 0.1, generator=g)
                norm.running_var.uniform_(0.7, 1.3, generator=g)
        for p in model.parameters():
            if p.is_floating_point() and p.numel():
                _draw(p, table_of.get(id(p)), g)


def _draw(p: Tensor, table: nn.Embedding | nn.EmbeddingBag | None, g: Draw) -> None:
    """Draw ``p`` anew if it is a table, or a parameter that starts too small to be seen."""
    largest = float(p.abs().max())
    if table is not None:
        p.normal_(0, 0.1, generator=g)
        if table.padding_idx is not None:
            p[table.padding_idx] = 0
    elif p.dim() < 2 and largest == 0:
        p.normal_(0, 0.05, generator=g)
    elif p.dim() >= 2 and largest < 0.01:
        p.normal_(0, max(p.shape[-2:]) ** -0.5, generator=g)


# ---------------------------------------------------------------- columns


def ids(rows: int, most: int, g: Draw, least: int = 0) -> Tensor:
    """(rows,) ids in ``least`` .. ``most``."""
    return torch.randint(least, most, (rows,), generator=g)


def history(rows: int, most: int, g: Draw, length: int = HISTORY) -> tuple[Tensor, Tensor]:
    """(rows, length) ids, padded with zeros, and how many ids each row has."""
    count = torch.randint(1, length + 1, (rows,), generator=g)
    drawn = torch.randint(1, most, (rows, length), generator=g)
    return drawn * (torch.arange(length) < count.unsqueeze(1)), count


def columns(sizes: Sequence[int], least: int = 0) -> Inputs:
    """One (rows, fields) matrix of ids."""
    return lambda rows, g: (torch.stack([ids(rows, n, g, least) for n in sizes], 1),)


def packed(sizes: Sequence[int], numbers: int = NUMBERS, tags: int = 0, least: int = 0) -> Inputs:
    """One matrix of floats: ids, then numbers, then ``tags`` columns of a history."""

    def draw(rows: int, g: Draw) -> tuple[Any, ...]:
        parts = [ids(rows, n, g, least).unsqueeze(1) for n in sizes]
        parts.append(torch.rand(rows, numbers, generator=g))
        if tags:
            parts.append(history(rows, TAGS, g, tags)[0])
        return (torch.cat([part.float() for part in parts], 1),)

    return draw


def named(sizes: Sequence[int], numbers: int = NUMBERS, prefix: str = "C") -> Inputs:
    """One dict of columns: ``C0``, ``C1`` .. and ``I0``, ``I1`` .."""

    def draw(rows: int, g: Draw) -> tuple[Any, ...]:
        found = {f"{prefix}{k}": ids(rows, n, g) for k, n in enumerate(sizes)}
        return ({**found, **{f"I{k}": torch.rand(rows, generator=g) for k in range(numbers)}},)

    return draw


def joined(first: Inputs, more: Callable[[int, Draw], dict[str, Tensor]]) -> Inputs:
    """The dict of ``first`` with further columns."""

    def draw(rows: int, g: Draw) -> tuple[Any, ...]:
        (found,) = first(rows, g)
        return ({**found, **more(rows, g)},)

    return draw


def listed(library: str, models: Iterable[tuple[str, Callable[[], Made]]]) -> list[Subject]:
    """Subjects under the name of their library."""
    return [Subject(f"{library}/{name}", make) for name, make in models]
