"""The memory of a GPU as a tier above that of the host and the disk: how rows move.

A row is in exactly one place: in a slot of the GPU's id table, with its record in the slab, or
below, in ``tiers.host``. Rows that a batch needs and the GPU lacks are promoted before the lookup.
A row that loses its slot to one of them, or to a new id, is demoted with weights, optimizer state,
score and the step of its last lookup. So the optimizer sees every row as if all were on the GPU,
and the numbers are the same.

The host waits for the GPU once per step to learn what is missing, and a second time if anything is.
With prefetching it asks one step ahead (:meth:`DeviceTier.ahead`), beside the GPU's work, and a
thread reads the records meanwhile. That moves no row, so it may be wrong about what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recast.errors import TierError, UsageError
from recast.runtime.dynamic.cuda import _SIGN, IdTable
from recast.runtime.dynamic.cuda_batch import TOOK, Batch
from recast.runtime.tiers import records as form
from recast.runtime.tiers.engine import Ids, Records
from recast.runtime.tiers.host import DISK, MEMORY, NOWHERE, HostRows
from recast.runtime.tiers.records import Layout
from recast.runtime.tiers.tier import Slabs, Tier


class OnHost:
    """The id table of a GPU for code that writes checkpoints: on the host, and waiting."""

    def __init__(self, table: IdTable) -> None:
        self.table = table

    def find(self, ids: Tensor, rows: Tensor, threads: int) -> None:
        rows.copy_(self.table.rows_of(ids.to(self.table.gpu.device)))

    def stored(self, since: int, make: object) -> tuple[Tensor, ...]:
        return tuple(x.cpu() for x in self.table.stored(since))

    def __len__(self) -> int:
        return len(self.table)

    @property
    def step(self) -> int:
        return self.table.step

    @property
    def looked_up(self) -> int:
        return self.table.looked_up


class DeviceTier(Tier):
    """The tiers below a GPU. Callers hold the table's lock.

    Attributes:
        device: lookups in training whose row was on the GPU; ``memory``, ``disk`` and ``new`` count
            the others.
        missing: whether the last batch had ids that were not on the GPU.
        broken: what failed while rows were in transit; reset when all rows are loaded again.
    """

    def __init__(
        self, name: str, table: IdTable, kind: Layout, slabs: Slabs, below: HostRows, policy: str,
        ttl: int, path: Path,
    ) -> None:  # fmt: skip
        super().__init__(
            name, OnHost(table), table.capacity, kind, slabs, below.capacity, policy, ttl, False,
            lambda: below,  # type: ignore[arg-type, return-value]
        )  # fmt: skip
        self.table, self.rows_below, self._path = table, below, path
        self.device = 0
        self.missing = False
        self.broken = ""

    @property
    def store(self) -> HostRows:  # type: ignore[override]
        return self.rows_below

    @property
    def path(self) -> Path:
        return self._path

    def close(self) -> None:
        self.store.close()

    def fill(self, ids: Tensor, scores: Tensor, stamps: Tensor) -> Tensor:
        device = self.table.gpu.device
        given = [x.to(device).contiguous() for x in (ids, scores, stamps)]
        rows = self.table.load(*given, strict=False).cpu()
        return torch.where(rows <= self.table.capacity, rows, 0)

    # ------------------------------------------------------------ lookups

    def bring(self, weight: Tensor, ids: Tensor) -> None:
        """Promote all of ``ids`` that are below to the GPU, and make room below for the rows that
        they displace.

        Raises:
            UsageError: no room, on the GPU or below.
            TierError: the disk does not work.
        """
        absent = self._absent(ids)
        self.missing = len(absent) > 0
        padding = self.table.padding
        self.device += len(ids) - len(absent)
        if padding is not None:
            self.device -= int((ids == padding).sum())
        if not len(absent):
            return
        wanted, lookups = (x.cpu().numpy() for x in torch.unique(absent, return_counts=True))
        where = self._up(weight, wanted, stores=True)
        self.memory += int(lookups[where == MEMORY].sum())
        self.disk += int(lookups[where == DISK].sum())
        self.new += int(lookups[where == NOWHERE].sum())

    def lift(self, weight: Tensor, ids: Tensor) -> None:
        """Promote all of ``ids`` that are below to the GPU, for a lookup that stores no new id."""
        absent = torch.unique(self._absent(ids)).cpu().numpy()
        if len(absent):
            self._up(weight, absent, stores=False)

    def _absent(self, ids: Tensor) -> Tensor:
        """Those of ``ids`` that are not on the GPU; the others are pinned there for this step."""
        self.check()
        self.ready = ()
        rows = self.table.rows_of(ids)
        absent = ids[rows < 0]
        if len(absent):
            self.table.pin(rows)
        return absent

    def _up(self, weight: Tensor, wanted: Ids, *, stores: bool) -> Any:
        """Promote ``wanted``. ``stores``: ids that are nowhere will need a row on the GPU too."""
        where, got = self._fetch(wanted)
        up = wanted[where != NOWHERE]
        more = len(wanted) - len(up) if stores else 0  # each promoted row leaves room below
        if more > self.store.capacity - len(self.store):
            more = min(len(wanted), len(self.table)) - len(up)
        self.store.reserve(more, up)
        try:
            for at in range(0, len(up), self.table.guests):
                part = slice(at, at + self.table.guests)
                self._place(weight, up[part], got[part])
        finally:
            self._count()
        return where

    def check(self) -> None:
        """Raise TierError if rows have been lost in transit."""
        if self.broken:
            raise TierError(
                f"{self.name}: rows were lost on their way between the GPU and memory",
                why=f"{self.broken}, while they were in neither",
                tries=("recast.checkpoint.load of the last checkpoint",),
            )

    @contextmanager
    def _on_the_way(self) -> Iterator[None]:
        """Inside it, rows are in transit: an error means that they are lost."""
        try:
            yield
        except BaseException as error:
            self.broken = self.broken or f"{type(error).__name__}: {error}"
            raise

    def _fetch(self, ids: Ids, *, drop: bool = True) -> tuple[Any, Records]:
        self.check()
        where, got = self.store.fetch(ids)
        expired = self._has_expired(form.known(got)[1])
        if expired.any():
            if drop:
                self.store.remove(ids[where != NOWHERE][expired])
                self.expired += int(expired.sum())
                self._count()
            where[np.flatnonzero(where != NOWHERE)[expired]] = NOWHERE
            got = got[~expired]
        return where, got

    def peek(self, ids: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """The indices of those of the distinct ``ids`` (n,) that are below, and field ``name`` of
        their records; both on the device of ``ids``.
        """
        wanted, order = torch.sort(ids)
        where, got = self._fetch(wanted.cpu().numpy(), drop=False)
        field = self.kind.of(name)
        assert field is not None
        places = order[torch.from_numpy(where != NOWHERE).to(ids.device)]
        return places, form.column(field, got).to(ids.device)

    def ahead(self, ids: Tensor) -> None:
        """Start to read the records of those of ``ids`` (a tensor on the GPU) that are below."""
        if not len(self.store):
            return
        with self.table.gpu.in_parallel([ids]):
            both = _begin_copy(torch.stack([ids, self.table.rows_of(ids)]))

        def missing() -> Ids:
            on_host, rows = both().numpy()
            return np.unique(on_host[rows < 0])

        self.store.ahead(missing)

    # ------------------------------------------------------------ changing places

    def _place(self, weight: Tensor, ids: Ids, got: Records) -> None:
        table = self.table
        scores = torch.from_numpy(np.ascontiguousarray(self.scores(form.known(got))))
        scores = scores.to(table.gpu.device)
        given = table.policy == "given"
        kept = table._counts.clone(), table.clock.clone()
        used, table._used = table._used, 0  # guest rows are not written to here
        self.store.remove(ids)
        try:
            on_gpu = torch.from_numpy(ids).to(scores.device)
            batch = table.find_or_insert(on_gpu, scores if given else None)
        except BaseException:
            with self._on_the_way():
                self.store.add(ids, got)
            raise
        finally:
            table._used = used
        with self._on_the_way():
            table._counts.copy_(kept[0]), table.clock.copy_(kept[1])  # not a lookup
            self.rescue(weight, batch)
            found = batch.rows <= table.capacity
            fits = found.cpu().numpy()
            rows, scores = batch.rows[found], scores[found]
            table.scores.view(-1)[table.place_of(rows)] = scores ^ _SIGN if given else scores
            _scatter(self.kind, self.slabs(weight), rows, got[fits])
            self.promoted += int(fits.sum())
            if not fits.all():
                self.store.add(ids[~fits], got[~fits])
        if not fits.all():
            raise self.too_full(int((~fits).sum()))

    def rescue(self, weight: Tensor, batch: Batch) -> None:
        """Demote ids that lost their rows to ``batch``, before those rows are overwritten."""
        with self._on_the_way():
            self._rescue(weight, batch)

    def _rescue(self, weight: Tensor, batch: Batch) -> None:
        assert batch.gone is not None and batch.facts is not None
        took = ((batch.what & TOOK) != 0).nonzero().squeeze(1)
        rows = batch.rows[took]
        ids, facts = batch.gone[took].cpu().numpy(), batch.facts[took].cpu()
        scores, stamps = facts.t().contiguous().numpy()
        scores = scores ^ _SIGN if self.table.policy == "given" else scores
        stay = ~self._has_expired(stamps)
        if not stay.any():
            return
        rows = rows[torch.from_numpy(stay).to(rows.device)]
        block = _gather(self.kind, self.slabs(weight), rows)
        self._begin_states(rows, block)
        ages = np.full(len(ids), self.store.halved, np.int64)
        form.write_known(block, np.stack([scores, stamps, ages])[:, stay])
        self.store.add(ids[stay], block)
        self.demoted += int(stay.sum())
        self._count()

    def too_full(self, n: int) -> UsageError:
        return UsageError(
            f"{self.name}: {n} rows found no place on the GPU: their buckets are full of rows that"
            " were looked up since the last optimizer step",
            why=f"{self.rows} rows are there in buckets of {self.table.slots}; rows that were below"
            " are there still, and nothing of them is lost",
            tries=("a larger recast.Device budget", "smaller batches", "optimizer.step()"),
        )

    def _count(self) -> None:
        self.records = self.below = len(self.store)

    # ------------------------------------------------------------ rows that are no more

    def erase(self, ids: Tensor) -> int:
        """Remove those of ``ids`` that are below; returns how many."""
        self.ready, self.order = (), None
        wanted = torch.unique(ids).cpu().numpy()
        where, _ = self._fetch(wanted)
        self.store.remove(wanted[where != NOWHERE])
        self._count()
        return int((where != NOWHERE).sum())

    def scores(self, facts: np.ndarray) -> np.ndarray:
        return self.store.scores(facts)

    def advance(self, looked_up: int) -> None:
        """Begin the next step. ``looked_up``: with "lfu" the table's count before it, else 0."""
        self.ready, self.unstepped, self.order = (), None, None
        if looked_up and self.index.looked_up < looked_up:
            self.store.age()

    def begin(self, records: int) -> None:
        super().begin(records)
        self.store.halved, self.broken = 0, ""

    # ------------------------------------------------------------ for the report

    def add_to(self, counted: dict[str, int]) -> dict[str, int]:
        """The counters of the GPU's table with those of all tiers."""
        store, size = self.store, self.kind.size
        disk = store.disk
        return {
            **counted,
            "evicted": store.dropped,
            "expired": counted["expired"] + self.expired,
            "on_device": self.device, "in_memory": self.memory, "on_disk": self.disk,
            "new": self.new, "demoted": self.demoted, "promoted": self.promoted,
            "ahead": store.early, "down": self.demoted * size, "up": self.promoted * size,
            "read": 0 if disk is None else disk.traffic.read * disk.kind.size,
            "written": 0 if disk is None else disk.traffic.written * disk.kind.size,
        }  # fmt: skip

    def told(self) -> list[str]:
        """The tiers, in a sentence."""
        store, disk = self.store, self.store.disk
        counts = self.device, self.memory, self.disk, self.new
        shares = [100 * n / max(sum(counts), 1) for n in counts]
        mib = self.kind.size / 2**20
        rooms = f"{len(self.index)} of {self.rows} rows on the GPU, {len(store.index)} of"
        rooms += f" {store.rows} in memory"
        if disk is not None:
            rooms += f", {disk.below} of {disk.capacity} on disk"
        lines = [
            f"  {rooms}; lookups: {shares[0]:.1f} % on the GPU, {shares[1]:.1f} % in memory,"
            f" {shares[2]:.1f} % on disk, {shares[3]:.1f} % new",
            f"  {self.demoted} rows went down ({self.demoted * mib:.1f} MiB), {self.promoted} came"
            f" up ({self.promoted * mib:.1f} MiB, {store.early} ahead), {store.dropped} dropped",
        ]
        if disk is not None:
            lines.append(
                f"  {disk.demoted} rows went to disk"
                f" ({disk.traffic.written * disk.kind.size / 2**20:.1f} MiB),"
                f" {disk.traffic.read} were read"
                f" ({disk.traffic.read * disk.kind.size / 2**20:.1f} MiB)"
            )
        return lines


def _gather(kind: Layout, slabs: dict[str, Tensor], rows: Tensor) -> Records:
    """Records of ``rows`` of the slabs, in one copy to the host, with headers still empty."""
    n = len(rows)
    parts = [
        slabs[f.name].detach().index_select(0, rows).view(n, -1).view(torch.uint8)
        for f in kind.fields
    ]
    out = np.empty((n, kind.size), np.uint8)
    out[:, form.HEADER :] = torch.cat(parts, 1).cpu().numpy()
    return out


def _scatter(kind: Layout, slabs: dict[str, Tensor], rows: Tensor, records: Records) -> None:
    """Write records to ``rows`` of the slabs, in one copy from the host."""
    n = len(rows)
    whole = torch.from_numpy(np.ascontiguousarray(records)).to(rows.device)
    for f in kind.fields:
        part = whole[:, f.first : f.last].clone(memory_format=torch.contiguous_format)
        part = part.view(f.dtype).view(n, *f.shape)
        slabs[f.name].detach().index_copy_(0, rows, part)


def _begin_copy(tensor: Tensor) -> Callable[[], Tensor]:
    """Start to copy ``tensor`` to the host on the current stream; returns a function that waits and
    returns the copy.
    """
    if not tensor.is_cuda:
        return lambda: tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def there() -> Tensor:
        done.synchronize()
        return copy

    return there
