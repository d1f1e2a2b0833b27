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


def run_joined(
    step: Any, call: Call, dtypes: Sequence[torch.dtype]
) -> tuple[list[Tensor], Failure]:
    """Run the C++ ``step`` of ``call``: its outputs, and the first wrong value that it met.

    ``dtypes``: of the output of each lookup. Outputs of one width and dtype share one allocation.
    """
    outs, wholes = _apart(step, call, dtypes)
    return [outs[k] for k in range(len(outs))], step.run_joined(wholes, device.threads())


def run_stacked(
    step: Any, call: Call, dtypes: Sequence[torch.dtype]
) -> tuple[list[Tensor], Failure] | None:
    """The same with the lookups of each of ``call.stacks`` as one tensor (bags, lookups, dim): the
    stacks, and behind them the outputs of all other lookups. None if those of a stack differ.
    """
    sizes = step.stacked(call.stacks)
    if sizes is None:
        return None
    stacks = [
        kept_memory.empty((bags, len(places), dim), dtypes[places[0]])
        for places, (bags, dim) in zip(call.stacks, sizes, strict=True)
    ]
    outs, wholes = _apart(step, call, dtypes)
    failure = step.run_joined([*wholes, *stacks], device.threads())
    return [*stacks, *(outs[k] for k in sorted(outs))], failure


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


def _apart(
    step: Any, call: Call, dtypes: Sequence[torch.dtype]
) -> tuple[dict[int, Tensor], list[Tensor]]:
    """The outputs of the lookups that are in no stack, by number, and the tensors they share."""
    outs: dict[int, Tensor] = {}
    wholes = []
    for places, bags, rows, dim in step.joined():
        first = places[0]
        shape = (rows, dim) if len(places) > 1 else (*_shape(call, first, rows), dim)
        whole = kept_memory.empty(shape, dtypes[first])
        wholes.append(whole)
        parts = torch.unsafe_split_with_sizes(whole, bags) if len(places) > 1 else (whole,)
        outs.update(zip(places, parts, strict=True))
    return outs, wholes


def _shape(call: Call, k: int, rows: int) -> tuple[int, ...]:
    """The shape of the output of lookup ``k`` without its width."""
    return tuple(call.ids[k].shape) if call.layout.mode[k] == "none" else (rows,)


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
