"""How much tables that are stored in fewer bits change the outputs of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recast.rewriter.compiled.copies import same_random_numbers, seed_all
from recast.rewriter.compiled.trees import flatten, rebuild

if TYPE_CHECKING:
    from recast.rewriter.capture.capture_model import Captured

Call = tuple[tuple[Any, ...], dict[str, Any]]
Floats = list[torch.Tensor]  # the outputs of a call that are floating point


@dataclass(frozen=True)
class Effect:
    """How far outputs are from others: the most, the sum of all and their number; and the largest
    of the others.
    """

    most: float = 0.0
    total: float = 0.0
    count: int = 0
    largest: float = 0.0

    @staticmethod
    def between(wanted: Iterable[Floats], got: Iterable[Floats]) -> Effect:
        """That of ``got``, of each call, in place of ``wanted``."""
        most = total = largest = 0.0
        count = 0
        for theirs, ours in zip(wanted, got, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                error = _apart(a.double(), b.double())
                most, total = max(most, float(error.max())), total + float(error.sum())
                largest, count = max(largest, float(b.abs().max())), count + b.numel()
        return Effect(most, total, count, largest)

    @staticmethod
    def of_all(found: Sequence[Effect]) -> Effect:
        """That of the calls of all ``found``."""
        return Effect(
            max(one.most for one in found), sum(one.total for one in found),
            sum(one.count for one in found), max(one.largest for one in found),
        )  # fmt: skip

    def told(self) -> str:
        """A sentence for the report."""
        return (
            f"on the example, outputs differ by at most {self.most:.2g}"
            f" ({self.total / max(self.count, 1):.2g} on average); the largest is"
            f" {self.largest:.2g}"
        )


def _apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How far each number is from the other: not at all if both are the same infinity or NaN, and
    infinitely far if one alone is NaN.
    """
    same = (a == b) | (a.isnan() & b.isnan())
    return (a - b).abs().masked_fill(same, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)


def calls_of(captured: Captured) -> list[Call]:
    """The calls of the example, and of each further form."""
    return [
        one.signature.unbind(batch)
        for one in (captured, *captured.forms)
        if one.signature is not None
        for batch in one.batches or ()
    ]


def sentence(plain: nn.Module, fast: nn.Module, calls: Sequence[Call]) -> str:
    """How far the outputs of ``fast`` are from those of ``plain``, both in eval mode."""
    return Effect.between(outputs(plain, calls), outputs(fast, calls)).told()


def outputs(model: nn.Module, calls: Iterable[Call]) -> Iterator[Floats]:
    """What ``model`` computes in each of the ``calls``, without gradients."""
    for call in calls:
        with torch.no_grad(), same_random_numbers():
            args, kwargs = rebuild(call, torch.clone)  # forward may write to its arguments
            seed_all(0)
            found = _floats(model(*args, **kwargs))
        yield found


def _floats(output: Any) -> Floats:
    leaves: list[Any] = []
    flatten(output, leaves, [])
    return [t for t in leaves if t.is_floating_point() and t.numel()]
