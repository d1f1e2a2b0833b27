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
    if made.is_meta:
        return made
    part = _part(made, rows, dim, unit)
    if not isinstance(part, dropout_global.Part):
        getattr(Tensor, method)(made, *args, generator=part)
        return made
    if 0 in part.shape:  # torch draws nothing
        return made
    whole = part.empty(made.dtype)
    given = [part.spread(a, 0.5) if isinstance(a, Tensor) else a for a in args]
    getattr(Tensor, method)(whole, *given, generator=dropout_global.generator())
    with torch.no_grad():
        made.copy_(part.own(whole))
    return made


@_disable_dynamo
def multinomial_global(
    input: Tensor, rows: Tensor | None, dim: int | None, unit: int, num_samples: int,
    replacement: bool,
) -> Tensor:  # fmt: skip
    """``torch.multinomial(input, num_samples, replacement)``: this rank's rows of what one process
    draws. ``rows``, ``dim`` and ``unit`` as for :func:`draw_global_`; raises as that does.
    """
    part = None if input.is_meta else _part(input, rows, dim, unit)
    if not isinstance(part, dropout_global.Part):
        return torch.multinomial(input, num_samples, replacement, generator=part)
    # What is drawn for a row depends on how many are drawn before it, and not on their weights.
    whole = part.spread(input, 0.5)
    drawn = torch.multinomial(whole, num_samples, replacement, generator=dropout_global.generator())
    return part.own(drawn).contiguous()


def _part(
    made: Tensor, rows: Tensor | None, dim: int | None, unit: int
) -> dropout_global.Part | torch.Generator | None:
    """Where ``made`` is in the global batch; else the generator to draw from, None: torch's own."""
    source = dropout_global.generator()
    if collectives.ranks() == 1:
        return source if made.is_cpu else None
    if dim is None:
        return source if made.is_cpu else dropout_global.own_generator(made.device, alike=True)
    if dim < 0 or rows is None or not made.is_cpu:
        return dropout_global.own_generator(made.device)
    return dropout_global.part_of(made, rows, dim, unit, "random numbers")


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


def shifted(mean: Tensor | float, std: Tensor | float, normal: Tensor) -> Tensor:
    """``torch.normal(mean, std)``, with ``normal`` for its numbers, of mean 0 and deviation 1. As
    there, the gradients of ``mean`` and ``std`` are zero.
    """
    with torch.no_grad():
        made = normal.mul_(std).add_(mean)
    never = torch.zeros((), dtype=torch.bool, device=made.device)
    for one in (mean, std):
        if isinstance(one, Tensor) and one.requires_grad:
            made = made + torch.where(never, one, 0.0)
    return made
