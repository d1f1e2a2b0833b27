"""Random numbers of forward on W ranks: those that one process draws for the global batch.

As with dropout (:mod:`.dropout_global`), every rank draws for the global batch from a generator in
the same state, and keeps its own rows; so the numbers do not depend on W, and the generators stay
in step::

    rows = global_rows(x, ...)                     (W,) samples of each rank
    noise = randn of the global shape              of which this rank keeps r0 to r0 + rows[rank]

Other ranks' numbers cost as much as one's own. On a GPU, or if it is not known which dimension
counts samples (``dim`` -1), each rank draws numbers of its own, independent of the others'. What
does not grow with the batch (``dim`` None) is drawn alike by all.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from recast.errors import UsageError
from recast.runtime.ranks import collectives, dropout_global


@_disable_dynamo
def draw_global_(
    made: Tensor, rows: Tensor | None, method: str, dim: int | None, unit: int, *args: object
) -> Tensor:
    """``made.method(*args)``, which fills it with random numbers, and returns it: this rank's rows
    of what one process draws.

    Args:
        made: what is drawn into, of any shape.
        rows: (W,) int64 from ``global_rows``; not read where ``dim`` is -1 or None.
        method: of torch.Tensor, such as "normal_". An argument that is a tensor has the shape of
            ``made``, as the probabilities of "bernoulli_".
        dim: the dimension that has ``unit`` rows per sample; -1: not known, None: there is none.

    Raises:
        UsageError: ``made`` has other rows than this rank's batch.
    """
    draw = getattr(Tensor, method)
    if made.is_meta:
        return made
    source: torch.Generator | None = dropout_global.generator()
    if collectives.ranks() == 1:
        source = source if made.is_cpu else None
    elif dim is None:
        source = source if made.is_cpu else dropout_global.own_generator(made.device, alike=True)
    elif dim < 0 or rows is None or not made.is_cpu:
        source = dropout_global.own_generator(made.device)
    else:
        return _of_global(made, rows, method, dim, unit, args)
    draw(made, *args, generator=source)
    return made


def _of_global(
    made: Tensor, rows: Tensor, method: str, dim: int, unit: int, args: tuple[object, ...]
) -> Tensor:
    """``made``, filled with this rank's rows of what is drawn for the global batch."""
    part = dropout_global.part_of(made, rows, dim, unit, "random numbers")
    if 0 in part.shape:  # torch draws nothing
        return made
    whole = part.empty(made.dtype)
    given = [part.spread(a, 0.5) if isinstance(a, Tensor) else a for a in args]
    getattr(Tensor, method)(whole, *given, generator=dropout_global.generator())
    with torch.no_grad():
        made.copy_(part.own(whole))
    return made


@dataclass(frozen=True)
class RandomState:
    """The states of the generators that Python code may draw from, on the CPU."""

    parts: tuple[object, ...]


@_disable_dynamo
def random_state() -> RandomState | None:
    """The present one; None on one rank."""
    if collectives.ranks() == 1:
        return None
    own = dropout_global.generator().get_state().numpy().tobytes()
    name, keys, *rest = np.random.get_state()
    return RandomState((own, random.getstate(), name, np.asarray(keys).tobytes(), *rest))


@_disable_dynamo
def refuse_drawn(before: RandomState | None, what: str, why: str, tries: Sequence[str]) -> None:
    """Raise UsageError if random numbers were drawn since :func:`random_state` gave ``before``."""
    if before is not None and random_state() != before:
        raise UsageError(what, why=why, tries=tries)


def gumbel_softmax(logits: Tensor, exponential: Tensor, tau: float, hard: bool, dim: int) -> Tensor:
    """``F.gumbel_softmax``, with its numbers, from an ``exponential`` distribution, given."""
    soft = ((logits - exponential.log()) / tau).softmax(dim)
    if not hard:
        return soft
    index = soft.max(dim, keepdim=True)[1]
    one_hot = torch.zeros_like(logits, memory_format=torch.legacy_contiguous_format)
    return one_hot.scatter_(dim, index, 1.0) - soft.detach() + soft
