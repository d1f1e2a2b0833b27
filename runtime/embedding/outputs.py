"""The outputs of lookups, in as few allocations as possible: 26 in one take 6 us, apart 28.

Those that share one are not views of each other: ``unsafe_split`` gives each its own version
counter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from recast.runtime import device, kept_memory
from recast.runtime.embedding.call import Call, Stacks

Failure = tuple[int, bool, int] | None  # lookup, whether it is an offset, position


def run_new(step: Any, dtypes: list[torch.dtype]) -> tuple[list[Tensor], Failure]:
    """Run the C++ ``step``: its outputs, of stacks before those of the other lookups, and the first
    wrong value that it met.

    ``dtypes``: of the output of each lookup. Outputs of one width and dtype share one allocation,
    and each stack is one tensor (bags, lookups, dim).
    """
    found: tuple[list[Tensor], Failure] = step.run_new(dtypes, kept_memory.empty, device.threads())
    return found


def unstacked(stacks: Stacks, values: Sequence[Tensor | None], lookups: int) -> list[Tensor | None]:
    """One value per lookup, from those of the stacks and of the lookups in none."""
    found: list[Tensor | None] = [None] * lookups
    for places, value in zip(stacks, values, strict=False):
        if value is not None:
            for k, part in zip(places, value.unbind(1), strict=True):
                found[k] = part
    inside = {k for places in stacks for k in places}
    others = [k for k in range(lookups) if k not in inside]
    for k, value in zip(others, values[len(stacks) :], strict=True):
        found[k] = value
    return found


def allocate(
    call: Call,
    shapes: Sequence[tuple[int, int]],
    dtypes: Iterable[torch.dtype],
    where: torch.device,
    apart: bool,
    only: Sequence[int] | None = None,
) -> list[Tensor]:
    """One output (bags, dim) per lookup, or per lookup in ``only``. Outputs of one width and dtype
    share one allocation unless they must be ``apart``.
    """
    kinds, mode, ids = list(dtypes), call.layout.mode, call.ids
    outs: dict[int, Tensor] = {}
    alike: dict[tuple[int, torch.dtype], list[int]] = {}
    wanted = range(len(shapes)) if only is None else only
    apart = apart or len(wanted) == 1
    for k in wanted:  # in a small batch this takes as long as the lookups
        if mode[k] == "none" and ids[k].dim() != 1:
            shape = (*ids[k].shape, shapes[k][1])
            outs[k] = torch.empty(shape, dtype=kinds[k], device=where)
        elif apart:
            outs[k] = torch.empty(shapes[k], dtype=kinds[k], device=where)
        else:
            kind = shapes[k][1], kinds[k]
            if kind in alike:
                alike[kind].append(k)
            else:
                alike[kind] = [k]
    for (dim, dtype), lookups in alike.items():
        counts = [shapes[k][0] for k in lookups]
        whole = torch.empty((sum(counts), dim), dtype=dtype, device=where)
        outs.update(zip(lookups, torch.unsafe_split_with_sizes(whole, counts), strict=True))
    return [outs[k] for k in wanted]
