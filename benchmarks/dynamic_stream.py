"""Streams of raw ids: is the AUC as good as with preprocessed ids, and does a small table keep the
right ones?

    python benchmarks/dynamic_stream.py
    python benchmarks/dynamic_stream.py --stream movietweetings_100k.parquet --passes 2

First: late flights from New York in order of time, every field as the 64-bit hash of its text; or
the rows of a parquet file in their order (``label``, ids ``c_*``, the first id of bags ``b_*``,
numbers ``d_*``), which needs pyarrow. The dynamic model gets these ids; the plain one has its
vocabulary numbered beforehand, and starts with the same rows. Both train on the first nine tenths
and are tested on the rest; the limit is the difference between two runs of the plain model that sum
their batches in another order. Exit code 1 when it is exceeded.

Then: zipf ids whose popularity drifts, in tables that hold a fraction of them. The share of a
batch's distinct ids that are stored when it comes; also in two tables that know the future:
Belady's, and one that always holds the best fixed set between two drifts. And the same over 4 parts
with a quarter of the rows each, as on 4 ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import flights

import recast
from recast.rewriter.diff import auc
from recast.runtime.dynamic.table import DynamicTable
from recast.runtime.ranks.hashed import part_of

DIM, BATCH = 16, 1024


@dataclass(frozen=True)
class Stream:
    """``ids`` i64 (rows, fields) of any value, ``dense`` (rows, n), ``label`` (rows,); by time."""

    name: str
    ids: Tensor
    dense: Tensor
    label: Tensor

    def batches(self, first: float, end: float) -> list[auc.Batch]:
        n = len(self.label)
        return [
            ((self.ids[at : at + BATCH], self.dense[at : at + BATCH]), self.label[at : at + BATCH])
            for at in range(int(first * n), int(end * n) - 1, BATCH)
        ]


def of_flights() -> Stream:
    frame = flights.table()
    ids = [flights.hashed(frame[name]) for name in flights.IDS]
    dense = frame[list(flights.DENSE)].astype(np.float64)
    dense = ((dense - dense.mean()) / dense.std(ddof=0)).fillna(0.0)
    late = (frame.arr_delay > flights.LATE).to_numpy(np.float32)
    return Stream(
        "flights", torch.stack(ids, 1), torch.from_numpy(dense.to_numpy(np.float32)),
        torch.from_numpy(late),
    )  # fmt: skip


def of_parquet(path: str) -> Stream:
    """The rows of a parquet file in their order; the first id of each bag."""
    frame = pd.read_parquet(path)
    names = [c for c in frame if c[:2] in ("c_", "b_")]
    columns = []
    for name in names:
        one = frame[name].map(lambda v: v[0] if len(v) else 0) if name[0] == "b" else frame[name]
        columns.append(flights.hashed(one))
    dense = frame[[c for c in frame if c.startswith("d_")]].to_numpy(np.float32, copy=True)
    label = frame.label.to_numpy(np.float32, copy=True)
    return Stream(
        Path(path).stem, torch.stack(columns, 1), torch.from_numpy(dense), torch.from_numpy(label)
    )


class Model(nn.Module):
    def __init__(self, rows: Sequence[int], dense: int) -> None:
        super().__init__()
        self.emb = nn.ModuleList(nn.Embedding(n, DIM) for n in rows)
        self.top = nn.Sequential(
            nn.Linear(len(rows) * DIM + dense, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(),
            nn.Linear(64, 1),
        )  # fmt: skip

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        rows = [emb(ids[:, k]) for k, emb in enumerate(self.emb)]
        out: Tensor = self.top(torch.cat([*rows, dense], 1)).squeeze(1)
        return out


class Numbered(nn.Module):
    """The plain model behind a vocabulary that was made beforehand."""

    def __init__(self, model: nn.Module, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.model, self.known = model, list(known)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        numbers = [torch.searchsorted(k, ids[:, f].contiguous()) for f, k in enumerate(self.known)]
        out: Tensor = self.model(torch.stack(numbers, 1), dense)
        return out


def adagrad(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.02, eps=1e-6)


def same_auc(stream: Stream, passes: int) -> bool:
    torch.manual_seed(0)
    known = [torch.unique(column) for column in stream.ids.unbind(1)]
    model = Model([64] * len(known), stream.dense.shape[1])
    plain = Model([len(k) for k in known], stream.dense.shape[1])
    plain.top.load_state_dict(model.top.state_dict())
    tables = {
        f"emb.{f}": recast.Dynamic(
            max_rows=2 * len(k) + 64, initial=recast.dynamic.Initial("normal", 0.0, 0.05)
        )
        for f, k in enumerate(known)
    }
    train, test = stream.batches(0.0, 0.9), stream.batches(0.9, 1.0)
    fast = recast.optimize(model, example=train[0][0], tables=tables)
    for f, k in enumerate(known):
        rows = recast.dynamic.tables(fast)[f"emb.{f}"].initial_rows(k)
        plain.emb[f].weight = nn.Parameter(rows)
    report = auc.trained(
        Numbered(plain, known), fast, train * passes, test,
        make=adagrad, loss=F.binary_cross_entropy_with_logits,
    )  # fmt: skip
    new = sum(len(np.setdiff1d(b, a)) for a, b in _ids_of(train, test))
    print(
        f"{stream.name}: {len(stream.label):,} rows in time, {len(known)} raw fields of"
        f" {sum(map(len, known)):,} ids, {new:,} of them first met in the test\n  {report}"
    )
    return report.ok


def _ids_of(train: list[auc.Batch], test: list[auc.Batch]) -> list[tuple[np.ndarray, np.ndarray]]:
    parts = [torch.cat([args[0] for args, _ in part]).numpy() for part in (train, test)]
    return [(parts[0][:, f], parts[1][:, f]) for f in range(parts[0].shape[1])]


# ---------------------------------------------------------------- what a small table keeps


def drifting(many: int, steps: int, batch: int, every: int, share: float) -> list[Tensor]:
    """The distinct ids of each batch: zipf (exponent 1) over ``many``; every ``every`` steps a
    ``share`` of them swap ranks.
    """
    draw = torch.Generator().manual_seed(0)
    raw = torch.randint(-(2**62), 2**62, (many,), generator=draw)
    high = float(np.log(many + 1.0))
    found = []
    for step in range(steps):
        if step and step % every == 0:
            moved = torch.randperm(many, generator=draw)[: int(share * many)]
            raw[moved] = raw[moved[torch.randperm(len(moved), generator=draw)]]
        place = (torch.rand(batch, generator=draw) * high).exp().long() - 1
        found.append(torch.unique(raw[place.clamp(0, many - 1)]))
    return found


def table_hits(batches: list[Tensor], rows: int, evict: recast.Dynamic, parts: int = 1) -> float:
    """Share of ids that are stored when their batch comes, from the middle of the stream on."""
    how = recast.Dynamic(max_rows=rows // parts, evict=evict.evict)
    initial = recast.dynamic.Initial("normal", 0.0, 0.05)
    tables = [DynamicTable(f"t{p}", DIM, how, rows // parts, initial) for p in range(parts)]
    weights = [torch.nn.Parameter(torch.zeros(t.slab_rows, DIM)) for t in tables]
    hits = asked = 0
    for step, ids in enumerate(batches):
        part = part_of(ids, parts)
        for p, (table, weight) in enumerate(zip(tables, weights, strict=True)):
            own = ids[part == p]
            before = table.counters()["hits"]
            table.find(weight, [own], True)
            if step >= len(batches) // 2:
                hits += table.counters()["hits"] - before
                asked += len(own)
            table.advance(weight)
    return hits / asked


def fixed_hits(batches: list[Tensor], rows: int, every: int) -> float:
    """The share of a table that always holds the best fixed set between two drifts."""
    hits = asked = 0
    for first in range(len(batches) // 2, len(batches), every):
        stretch = torch.cat(batches[first : first + every])
        _, counts = torch.unique(stretch, return_counts=True)
        hits += int(torch.sort(counts, descending=True).values[:rows].sum())
        asked += len(stretch)
    return hits / asked


def belady_hits(batches: list[Tensor], rows: int) -> float:
    """The share of a table that keeps the ids that come again soonest: no table that stores ids
    only when they are looked up does better.
    """
    later: dict[int, list[int]] = {}
    for step, ids in enumerate(batches):
        for i in ids.tolist():
            later.setdefault(i, []).append(step)
    for steps in later.values():
        steps.reverse()
    kept: set[int] = set()
    hits = asked = 0
    for step, batch in enumerate(batches):
        now = batch.tolist()
        if step >= len(batches) // 2:
            hits += sum(i in kept for i in now)
            asked += len(now)
        for i in now:
            later[i].pop()
        kept = {i for i in kept.union(now) if later[i]}
        if len(kept) > rows:
            kept = set(sorted(kept, key=lambda i: later[i][-1])[:rows])
    return hits / asked


def keeping(given: argparse.Namespace) -> None:
    batches = drifting(given.ids, given.steps, given.batch, given.every, given.share)
    rows = given.rows
    print(
        f"zipf over {given.ids:,} ids, {given.share:.0%} of which change places every"
        f" {given.every} steps of {given.batch} lookups; tables of {rows:,} rows"
    )
    ways: dict[str, Callable[[], float]] = {
        "Belady, knows the future": lambda: belady_hits(batches, rows),
        "best fixed set of each stretch": lambda: fixed_hits(batches, rows, given.every),
        "lfu": lambda: table_hits(batches, rows, recast.Dynamic(max_rows=1, evict="lfu")),
        "lru": lambda: table_hits(batches, rows, recast.Dynamic(max_rows=1, evict="lru")),
        "lfu, 4 parts": lambda: table_hits(
            batches, rows, recast.Dynamic(max_rows=1, evict="lfu"), 4
        ),
    }
    for name, measure in ways.items():
        print(f"  {name:32} {measure():7.2%} of distinct ids of a batch hit")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stream", help="a parquet file, in place of the flights")
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--no-auc", action="store_true")
    parser.add_argument("--no-cache", action="store_true")
    parser.add_argument("--ids", type=int, default=200_000)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--share", type=float, default=0.02)
    given = parser.parse_args()
    if not given.no_cache:
        keeping(given)
    if given.no_auc:
        return 0
    stream = of_parquet(given.stream) if given.stream else of_flights()
    return 0 if same_auc(stream, given.passes) else 1


if __name__ == "__main__":
    sys.exit(main())
