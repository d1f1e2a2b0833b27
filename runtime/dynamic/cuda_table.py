"""A dynamic table in the memory of a GPU: ``table.py`` over the buckets of ``cuda.py``.

Nothing waits for the GPU in a step, and shapes depend on the size of the batch only, so a recorded
step can be replayed (``recast.TrainingStep``). What differs from the table of the host:

- an id has one bucket of at most 128 rows, and a full bucket evicts, or is full, before the table
  is; with ``evict=None`` there are 1.7 times ``max_rows`` slots, so that ``max_rows`` ids find one;
- a table that is full under ``evict=None`` says so at a later lookup, when the GPU has told of it;
- what is looked up without being stored is answered from a matrix of all rows of the call;
- ids that wait for MinCount are at most twice as many as there are rows (``cuda_candidates.py``);
- on many ranks a budget of bytes is a share from the first, so that no GPU ever holds the whole;
- tiers below it are ``cuda_tiered.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recast.errors import CheckpointError, InputError, NotBuiltError, UsageError
from recast.runtime.dynamic import cuda_candidates
from recast.runtime.dynamic.all_rows import as_loaded
from recast.runtime.dynamic.cuda import CODES, IdTable
from recast.runtime.dynamic.cuda_batch import Batch, slots_for
from recast.runtime.dynamic.cuda_candidates import Candidates
from recast.runtime.dynamic.settings import Dynamic, Initial
from recast.runtime.dynamic.table import _TABLES, DynamicTable, _flat, of
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.ranks import initial_rows
from recast.runtime.recorded import recording
from recast.runtime.tiers import settings as tier_settings

BYTES_OF_AN_ID = 25  # id, score, stamp, digest
_GUESTS = 1 << 16, 1 << 22  # at least, where there is room, and at most
_GUEST_IN = 3  # one row in three of a budget of bytes, half as many as there are others


def check(name: str, how: Dynamic, weight: Tensor) -> None:
    """Raise NotBuiltError for what a table of a GPU cannot do yet."""
    missing = [
        (bool(how.tiers) and not device_budget(name, how), "tiers but none of the GPU itself"),
        (weight.dtype not in CODES, f"rows of {str(weight.dtype).removeprefix('torch.')}"),
    ]
    for is_asked, what in missing:
        if is_asked:
            raise NotBuiltError(
                f"tables: {name} with {what} on {weight.device} is not built yet",
                why="a table in the memory of a GPU has none of it",
                tries=("model.cpu()", "leave it out", "recast.Device(...) before the other tiers"),
            )


def device_budget(name: str, how: Dynamic) -> int:
    """Bytes of the tier on a GPU; 0 without one."""
    tiers = tier_settings.check(name, how.tiers)
    return 0 if tiers is None else tiers.device


def rooms(name: str, how: Dynamic, row: int, parts: int = 1) -> tuple[int, int]:
    """Rows for ids, and rows for guests; ``row``: bytes of one with its optimizer state.

    Those of one of ``parts`` ranks where there is a budget of bytes, else those of all.

    Raises:
        UsageError: not two rows in a budget of bytes.
    """
    assert not isinstance(how.max_bytes, str)  # check() made a number of it
    budget = how.max_bytes or device_budget(name, how)
    if not budget:
        assert how.max_rows is not None
        rows = slots_for(how.max_rows) if how.evict is None else how.max_rows
        return rows, min(max(_GUESTS[0], rows // (_GUEST_IN - 1)), _GUESTS[1])
    waiting = 0 if how.admit is None else cuda_candidates.EACH * BYTES_OF_AN_ID
    total = budget // parts // (row + BYTES_OF_AN_ID + waiting) - 1
    if total < 2:
        raise UsageError(
            f"tables: {'recast.Device' if how.tiers else 'max_bytes'}: {budget} bytes"
            f"{tier_settings.share(parts)} are less than three rows",
            why=f"{name}: a row takes {row + BYTES_OF_AN_ID + waiting} bytes with its state"
            " and its id, and there are rows for padding and for ids that are not stored",
        )
    guests = min(max(total // _GUEST_IN, min(_GUESTS[0], total // 2)), _GUESTS[1])
    return total - guests, guests


class CudaTable(DynamicTable):
    """One table, whose slab is on the GPU ``on``.

    ``parts``: the ranks that it will be spread over, by :meth:`take_part`.
    """

    index: IdTable
    stamps = False  # to look at one is to wait for the device

    def __init__(
        self, name: str, dim: int, settings: Dynamic, row: int, initial: Initial,
        padding: int | None, on: Gpu, parts: int = 1,
    ) -> None:  # fmt: skip
        rows, self._guests = rooms(name, settings, row, parts)
        self._on: Gpu | None = on
        self._order: Tensor | None = None  # of ids, as they were loaded
        self._noted: list[recording.Recording | None] = []  # in which, for each of ``_fresh``
        self._known: Tensor | None = None  # ids that were stored when a log was last taken
        super().__init__(name, dim, settings, rows, initial, padding)
        self._on = None  # the id table knows it
        self._fit()
        if settings.max_rows is None:
            self.capacity *= parts  # what a plan divides

    def _fit(self) -> None:
        """Be as large as the id table, which is new, and let nobody wait."""
        index, admit = self.index, self.settings.admit
        self.capacity, self.slab_rows = index.capacity, index.slab_rows
        self.waiting: Candidates | None = None
        if admit is not None and admit.count > 1:
            self.waiting = Candidates(
                index.gpu, self.capacity, self._guests, admit.count, self.padding
            )

    def _new_index(self) -> IdTable:
        assert self._on is not None
        how = self.settings
        return IdTable(
            self._on, self.capacity, how.policy, self._guests, ttl=how.ttl or 0,
            padding=self.padding,
        )  # fmt: skip

    # ------------------------------------------------------------ lookups

    def find(
        self, weight: Tensor, ids: Sequence[Tensor], training: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """As of the host's table; nothing waits for the GPU.

        Raises:
            InputError: ids elsewhere than the table. UsageError: it was full in an earlier step.
        """
        if of(weight) is not self:
            _TABLES[weight] = self
        if any(x.device != weight.device for x in ids):
            raise InputError(f"{self.name}: ids are not on {weight.device}, where the table is")
        look_up = self._read if self._only_reads(weight, training) else self._insert
        matrix, rows = look_up(weight, _flat(ids))
        parts = torch.split_with_sizes(rows, [x.numel() for x in ids])
        return matrix, [part.view(x.shape) for part, x in zip(parts, ids, strict=True)]

    def _insert(self, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        now = recording.current()
        with self._lock:
            self.index.check()
            waiting, scores = self.waiting, self._scores(ids)
            only = None if waiting is None else waiting.admit(self.index, ids)
            batch = self.index.find_or_insert(ids, scores, only)
            if waiting is not None:
                waiting.drop(self.index, batch)
            self._rescue(weight, batch)
            self._fresh.append(batch.fresh(0))  # row 0 is no id's, whatever its state
            self._noted.append(now)
            self._begin_rows(weight.data, batch)
            self._order = None
        if now is not None:
            now.before_replay(self.index.check)
        return weight, batch.rows

    def _read(self, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        records = torch.is_grad_enabled() and weight.requires_grad
        rows = self.index.rows_of(ids)
        absent, known = rows < 0, rows.clamp(min=0)
        if records:
            self.index.pin(rows)
            there = torch.ops.recast.embedding_bags.default(
                [weight], [known], [None], [None], [0], ["none"], [0], [False], [False]
            )[0]
        else:
            there = weight.detach().index_select(0, known)
        own = torch.arange(len(ids), device=ids.device)
        first = torch.empty(len(ids), self.dim, dtype=weight.dtype, device=weight.device)
        self._begin_rows(first, Batch(ids, own, absent.int()))
        matrix = torch.where(absent[:, None], first, there)
        return torch.cat([weight.detach()[:1], matrix]), torch.where(rows == 0, 0, own + 1)

    def _rescue(self, weight: Tensor, batch: Batch) -> None:
        """Rows that ``batch`` took from others hold what is theirs still; nothing is below."""

    def _begin_rows(self, slab: Tensor, batch: Batch) -> None:
        self.index.begin(slab, batch, initial_rows._key(self.seed, self.name), self.initial)

    # ------------------------------------------------------------ steps

    def _next_step(self) -> None:
        self.index.advance()
        if self.waiting is not None:
            self.waiting.advance()

    def take_part(self, capacity: int, part: int, parts: int) -> None:
        """As of the host's table. There is room for as many guests as there was: those of every
        rank may meet at one, and a budget of bytes was a share before.
        """
        self._on, self._fresh, self._noted = self.index.gpu, [], []
        self._order = self._known = None
        super().take_part(capacity, part, parts)
        self._on = None
        self._fit()

    # ------------------------------------------------------------ all rows

    def stored(self, since: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As of the host's table, on the GPU: in the order of the rows, or as they were loaded;
        waits for it.
        """
        return as_loaded(self.index.stored(since), self._order)

    def load(
        self, slab: Tensor, ids: Tensor, scores: Tensor, stamps: Tensor, weight: Tensor
    ) -> Tensor:
        """As of the host's table. Raises CheckpointError: an id twice, or no room for them."""
        known = [x.detach().to(slab.device).long().contiguous() for x in (ids, scores, stamps)]
        ids, scores, stamps = known
        if len(torch.unique(ids)) != len(ids) or {len(scores), len(stamps)} != {len(ids)}:
            raise CheckpointError(f"{self.name}: an id is there twice, or has no score or stamp")
        if len(ids) > self.capacity:
            raise CheckpointError(
                f"{self.name}: {len(ids)} ids for a table of {self.capacity} rows",
                tries=("a larger max_rows",),
            )
        rows = self.index.load(ids, scores, stamps)
        self.take_fresh()
        slab[rows] = weight.detach().to(slab)
        self._order = ids
        return rows

    def put(self, name: str, slab: Tensor, values: Tensor) -> None:
        """As of the host's table."""
        rows = self.stored()[1] if self._order is None else self.index.rows_of(self._order)
        slab[rows] = values.detach().to(slab)

    def candidates(self) -> Tensor:
        """As of the host's table; waits for the GPU."""
        nobody = torch.empty(3, 0, dtype=torch.int64)
        return nobody if self.waiting is None else self.waiting.stored()

    def load_candidates(self, seen: Tensor) -> None:
        """As of the host's table; nothing without MinCount."""
        if self.waiting is not None:
            self.waiting.load(seen)

    # ------------------------------------------------------------ for its owner

    def mark(self) -> int:
        """As of the host's table; the ids that are stored are kept, to be compared with."""
        with self._lock:
            if self._known is None:
                self._known, self._since = self.ids(), self.index.step
            return self.index.step

    def take_log(self, since: int) -> Tensor:
        """As of the host's table: ids that were stored and are no more."""
        with self._lock:
            if self._known is None or since < self._since:
                raise UsageError(
                    f"{self.name}: nothing is known of step {since}",
                    why="what goes is noted from the first mark on",
                    tries=("since = recast.dynamic.mark(module)",),
                )
            before, self._known = self._known, self.ids()
            return before[~torch.isin(before, self._known)]

    def renew(self, rows: Tensor, gone: Tensor) -> None:
        """These rows were written by somebody else, and have no optimizer state."""
        with self._lock:
            self._fresh.append(rows)
            self._noted.append(None)

    def erase(self, ids: Tensor) -> int:
        """Forget these ids; how many were stored. Not between a lookup and its step."""
        flat = torch.unique(ids.long().reshape(-1).to(self.index.gpu.device))
        with self._lock:
            self._order = None
            return int(self.index.erase(flat))

    def counters(self) -> dict[str, int]:
        """inserted, evicted, expired and refused rows; hits and misses of lookups in training: as
        the GPU told when it last ended a step.
        """
        c = self.index.counters()
        kept = {name: c[name] for name in ("inserted", "evicted", "expired", "refused")}
        return {**kept, "hits": c["lookups"] - c["misses"], "misses": c["misses"]}

    def take_fresh(self) -> Tensor:
        """Rows that were given out since this was last asked, and row 0 in place of others.

        Not those of a recording that came to nothing: what they are was never computed.
        """
        now = recording.current()
        with self._lock:
            pairs = zip(self._fresh, self._noted, strict=True)
            fresh = [rows for rows, noted in pairs if noted is None or noted is now]
            self._fresh, self._noted = [], []
        return torch.cat(fresh) if fresh else torch.empty(0, dtype=torch.int64)

    # ------------------------------------------------------------ copies

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        del state["_lock"]
        return {**state, "_stepped": None, "_noted": [None] * len(self._fresh)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()
