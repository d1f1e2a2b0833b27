"""What a GPU can do, as measured, and the least that a step must do: bytes and operations.

A floor is the larger of two times: bytes over the copy bandwidth, and operations over the matrix
rate, both measured in this run. It assumes perfect reuse on the chip, and that nothing else takes
time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from gpu.bench.timing import Clock
from gpu.harness.item_log import Row
from gpu.harness.items import Item

Floor = dict[str, float]


@dataclass(frozen=True)
class Rates:
    """Bytes and operations per second, as measured."""

    copy: float
    matrix: dict[str, float]  # by dtype: "float32" as the precision settings say

    def ms(self, moved: float, flops: float, dtype: str) -> float:
        """The larger of the two, in milliseconds."""
        return max(moved / self.copy, flops / self.matrix[dtype]) * 1e3

    def floor(self, moved: float, flops: float, dtype: str) -> Floor:
        """That, and both separately, which give a kernel's share of either rate."""
        return {
            "ms": self.ms(moved, flops, dtype),
            "copy ms": moved / self.copy * 1e3,
            "matrix ms": flops / self.matrix[dtype] * 1e3,
            "GB": moved / 1e9,
            "GFLOP": flops / 1e9,
        }


def items(device: torch.device, tiny: bool) -> Iterator[Item]:
    """The rates, in a process of their own: one that has used a GPU keeps some of its memory."""
    yield Item("rates", partial(_rates, device, tiny), limit=60)


def _rates(device: torch.device, tiny: bool) -> Row:
    found = rates(device, tiny)
    return {"copy": found.copy, "matrix": found.matrix}


def words(rated: Row) -> dict[str, object]:
    """The rates that :func:`items` found, in readable form."""
    matrix = {f"{k} TFLOP/s": round(v / 1e12, 1) for k, v in rated["matrix"].items()}
    return {"copy TB/s": round(rated["copy"] / 1e12, 3), **matrix}


def rates(device: torch.device, tiny: bool) -> Rates:
    """A copy of gigabytes, and square products of random numbers."""
    n = 1 << (16 if tiny else 30)
    source, target = (torch.empty(n, dtype=torch.uint8, device=device) for _ in range(2))
    moved = best(lambda: target.copy_(source), device)
    found = {}
    size = 64 if tiny else 8192
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        name = str(dtype).removeprefix("torch.")
        found[name] = 2.0 * size**3 / best(partial(torch.mm, a, b), device)
    return Rates(2.0 * n / moved, found)


def best(work: Callable[[], object], device: torch.device) -> float:
    """The median of some runs, in seconds."""
    clock, ms = Clock(device), list[float]()
    for _ in range(3):
        work()
    for _ in range(10):
        clock.time(ms, work, 1)
    clock.read()
    return statistics.median(ms) / 1e3


# ---------------------------------------------------------------- what a step must do


def lookup_bytes(
    ids: Iterable[tuple[int, Tensor]],
    dims: Sequence[int],
    outputs: int,
    *,
    state: float,
    width: int,
) -> float:
    """Bytes of all lookups of a step, forward, backward and update.

    ids: (table, ids) of every input; each id is read twice, each distinct row once forward and
    twice (read, write) in the update, with ``state`` more numbers a weight likewise; each of the
    ``outputs`` elements is written forward and its gradient read, ``width`` bytes each.
    """
    by_table: dict[int, list[Tensor]] = {}
    moved = 2.0 * outputs * width
    for table, given in ids:
        by_table.setdefault(table, []).append(given.reshape(-1))
        moved += 2.0 * given.numel() * given.element_size()
    for table, parts in by_table.items():
        distinct = torch.cat(parts).unique().numel()
        moved += distinct * dims[table] * 4.0 * (1 + 2 + 2 * state)
    return moved


def chain_work(sizes: Sequence[int], batch: int, width: int) -> tuple[float, float]:
    """(bytes, operations) of an MLP, forward and backward.

    The input is read twice and its gradient written; of each hidden element, the value is written,
    read forward and read backward, and so is its gradient.
    """
    macs = sum(a * b for a, b in pairwise(sizes))
    moved = batch * width * (3.0 * sizes[0] + 6.0 * sum(sizes[1:]))
    return moved, 6.0 * batch * macs


def linears(model: nn.Module) -> list[int]:
    """The sizes of a chain of linear layers."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return [layers[0].in_features, *(m.out_features for m in layers)]
