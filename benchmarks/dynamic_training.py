"""Training steps with a dynamic table, compared with the same model with a plain one.

    python benchmarks/dynamic_training.py
    python benchmarks/dynamic_training.py --ids 2000000 --dim 32 --share 0.1

Lookups of zipf-distributed ids and a small network, Adagrad. Plain: ids numbered beforehand.
Dynamic: raw 64-bit ids, all of them stored; and a table with a ``share`` of the rows, which evicts
the least recently used ids. Medians of steps; the variants take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import recast


class Model(nn.Module):
    def __init__(self, rows: int, dim: int, lookups: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(rows, dim)
        self.top = nn.Sequential(nn.Linear(lookups * dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.top(self.emb(ids).flatten(1)).squeeze(1)
        return out


def stepper(given: argparse.Namespace, rows: int, how: recast.Dynamic | None, batch: Tensor) -> Any:
    model = Model(given.ids if how is None else rows, given.dim, given.lookups)
    optimizer: torch.optim.Optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    tables = None if how is None else {"emb": how}
    fast, optimizer = recast.optimize(model, optimizer, example=batch, tables=tables)

    def step(ids: Tensor) -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        fast(ids).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - start

    return fast, step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ids", type=int, default=500_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--lookups", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    torch.manual_seed(0)
    raw = torch.randint(-(2**62), 2**62, (given.ids,))

    def draw() -> Tensor:
        """Numbers of ids; the probability of k is proportional to 1 / (k + 1)."""
        rank = torch.rand(given.batch, given.lookups) * torch.log(torch.tensor(given.ids + 1.0))
        return (rank.exp().long() - 1).clamp(0, given.ids - 1)

    few = max(1000, int(given.share * given.ids))
    whole = recast.Dynamic(max_rows=given.ids, evict="lru")
    _, plain = stepper(given, given.ids, None, draw())
    stored, dynamic = stepper(given, 1000, whole, raw[draw()])
    evicting, small = stepper(given, 1000, recast.Dynamic(max_rows=few, evict="lru"), raw[draw()])
    ways: dict[str, tuple[bool, Callable[[Tensor], float]]]
    ways = {"plain": (False, plain), "dynamic": (True, dynamic), "evicting": (True, small)}

    block = given.batch * given.lookups
    start = time.perf_counter()
    for at in range(0, given.ids - block, block):
        dynamic(raw[at : at + block].view(given.batch, -1))
    dynamic(raw[-block:].view(given.batch, -1))
    filled = (time.perf_counter() - start) / given.ids
    for _ in range(max(10, 2 * few // block)):
        small(raw[draw()])

    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.steps):
        number = draw()
        for name, (is_raw, step) in ways.items():
            times[name].append(step(raw[number] if is_raw else number))
    middle = {name: statistics.median(t) for name, t in times.items()}
    for name, value in middle.items():
        print(f"{name:9} {value * 1e3:7.2f} ms a step, {value / middle['plain']:.2f} of plain")
    print(f"filling the empty table: {filled * 1e6:.1f} us an id, a step of its own included")
    for fast in (stored, evicting):
        print(*recast.dynamic.tables(fast)["emb"].told())


if __name__ == "__main__":
    main()
