"""What a case is, and the list of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = (10, 6)  # the two batch sizes of build()


@dataclass(frozen=True)
class Case:
    """``make()`` a seeded model, ``batch(rows, seed)`` its arguments, ``loss(output)`` a scalar."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[Any, ...]]
    loss: Callable[[Any], Tensor]
    lookups: int  # embedding lookups in its forward
    random: bool = False  # it draws random numbers in train mode


CASES: dict[str, Case] = {}

# torch warns at the first sparse gradient unless this default is asked for; here warnings fail.
torch.sparse.check_sparse_tensor_invariants.disable()


def build(name: str, rows: tuple[int, int] = ROWS, seed: int = 0) -> tuple[nn.Module, list, Any]:
    """``(model, [batch of rows[0], batch of rows[1]], loss)``; the model is new at each call."""
    case = CASES[name]
    return case.make(), [case.batch(rows[0], seed), case.batch(rows[1], seed + 1)], case.loss


def click_loss(output: Any) -> Tensor:
    """Binary cross entropy of every output (probabilities or logits) against fixed labels."""
    tensors = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, Tensor)]
    total = torch.zeros((), dtype=tensors[0].dtype)
    for k, t in enumerate(tensors):
        label = (torch.arange(t.numel(), device=t.device) % (k + 3) == 0).to(t.dtype).view_as(t)
        total = total + F.binary_cross_entropy_with_logits(t, label) * (k + 1)
    return total


def case(
    name: str, batch: Callable[[int, int], tuple[Any, ...]], lookups: int, random: bool = False
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Register a builder under ``name``."""

    def register(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def seeded() -> nn.Module:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(7)
                return make()

        CASES[name] = Case(name, seeded, batch, click_loss, lookups, random)
        return make

    return register
