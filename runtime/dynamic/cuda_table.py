"""A dynamic table in GPU memory: ``table.py`` with the id table of ``cuda.py``.

Nothing in a step waits for the GPU, and shapes depend on the batch size only, so a recorded step
can be replayed (``recast.TrainingStep``). How it differs from a table on the host:

- an id has one bucket of at most 128 rows, which may be full, and evict, before the table is full;
  with ``evict=None`` there are 1.7 times ``max_rows`` slots, so that ``max_rows`` ids find one;
- a table that is full under ``evict=None`` raises at a later lookup, once the GPU has reported it;
- lookups that store nothing are answered from a matrix with all rows of the call;
- at most twice as many ids wait for MinCount as there are rows (``cuda_candidates.py``);
- on many ranks, a budget of bytes is divided from the start, so that no GPU ever holds the whole;
- for tiers below it, see ``cuda_tiered.py``.
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
_GUESTS = 1 << 16, 1 << 22  # guest rows: at least (if there is room), and at most
_GUEST_IN = 3  # with a budget of bytes, one row in three is for guests


def check(name: str, how: Dynamic, weight: Tensor) -> None:
    """Raise NotBuiltError for what a table on a GPU cannot do yet."""
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
    """Rows for ids, and rows for guests; ``row``: bytes of one row with its optimizer state.

    With a budget of bytes, those of one of ``parts`` ranks, else those of all.

    Raises:
        UsageError: a budget of bytes has no room for two rows.
    """
    assert not isinstance(how.max_bytes, str)  # check() has made it a number
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

    ``parts``: over how many ranks it will be sharded, by :meth:`take_part`.
    """

    index: IdTable
    marks_generation = False  # checking one would wait for the device

    def __init__(
        self, name: str, dim: int, settings: Dynamic, row: int, initial: Initial,
        padding: int | None, on: Gpu, parts: int = 1,
    ) -> None:  # fmt: skip
        rows, self._guests = rooms(name, settings, row, parts)
        self._on: Gpu | None = on
        self._order: Tensor | None = None  # the ids, in the order in which they were loaded
        self._noted: list[recording.Recording | None] = []  # the recording of each of ``_fresh``
        self._known: Tensor | None = None  # the ids that were stored when a log was last taken
        super().__init__(name, dim, settings, rows, initial, padding)
        self._on = None  # from now on the id table has it
        self._fit()
        if settings.max_rows is None:
            self.capacity *= parts  # a plan divides it again

    def _fit(self) -> None:
        """Take the sizes of the new id table, and start without waiting ids."""
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
        """As for a table on the host; nothing waits for the GPU.

        Raises:
            InputError: ids are on another device than the table.
            UsageError: the table was full in an earlier step.
        """
        if of(weight) is not self:
            _TABLES[weight] = self
        self._check_wrapper(weight)
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
            self._fresh.append(batch.fresh(0))  # row 0 belongs to no id, so its state is irrelevant
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
        """A hook to save rows that ``batch`` took from other ids, before they are overwritten. Does
        nothing here, as there is no tier below.
        """

    def _begin_rows(self, slab: Tensor, batch: Batch) -> None:
        self.index.begin(slab, batch, initial_rows._key(self.seed, self.name), self.initial)

    # ------------------------------------------------------------ steps

    def _next_step(self) -> None:
        self.index.advance()
        if self.waiting is not None:
            self.waiting.advance()

    def take_part(self, capacity: int, part: int, parts: int) -> None:
        """As for a table on the host. There are as many guest rows as before: the guests of all
        ranks may land on one, and a budget of bytes has been divided already.
        """
        self._on, self._fresh, self._noted = self.index.gpu, [], []
        self._order = self._known = None
        super().take_part(capacity, part, parts)
        self._on = None
        self._fit()

    # ------------------------------------------------------------ all rows

    def stored(self, since: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As for a table on the host, but on the GPU: in row order, or in the order in which rows
        were loaded. Waits for the GPU.
        """
        return as_loaded(self.index.stored(since), self._order)

    def load(
        self, slab: Tensor, ids: Tensor, scores: Tensor, stamps: Tensor, weight: Tensor
    ) -> Tensor:
        """As for a table on the host. Raises CheckpointError if an id occurs twice or not all
        fit.
        """
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
        """As for a table on the host."""
        rows = self.stored()[1] if self._order is None else self.index.rows_of(self._order)
        slab[rows] = values.detach().to(slab)

    def candidates(self) -> Tensor:
        """As for a table on the host. Waits for the GPU."""
        nobody = torch.empty(3, 0, dtype=torch.int64)
        return nobody if self.waiting is None else self.waiting.stored()

    def load_candidates(self, seen: Tensor) -> None:
        """As for a table on the host; does nothing without MinCount."""
        if self.waiting is not None:
            self.waiting.load(seen)

    # ------------------------------------------------------------ for its owner

    def mark(self) -> int:
        """As for a table on the host; keeps a copy of the stored ids to compare with later."""
        with self._lock:
            if self._known is None:
                self._known, self._since = self.ids(), self.index.step
            return self.index.step

    def take_log(self, since: int) -> Tensor:
        """As for a table on the host: ids that were stored then and are not stored now."""
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
        """Note that ``rows`` have been written from outside and need new optimizer state."""
        with self._lock:
            self._fresh.append(rows)
            self._noted.append(None)

    def erase(self, ids: Tensor) -> int:
        """Forget these ids; returns how many were stored. Not between a lookup and its step."""
        flat = torch.unique(ids.long().reshape(-1).to(self.index.gpu.device))
        with self._lock:
            self._order = None
            return int(self.index.erase(flat))

    def counters(self) -> dict[str, int]:
        """inserted, evicted, expired and refused rows; hits and misses of lookups in training; as
        of the last step that the GPU has finished.
        """
        c = self.index.counters()
        kept = {name: c[name] for name in ("inserted", "evicted", "expired", "refused")}
        return {**kept, "hits": c["lookups"] - c["misses"], "misses": c["misses"]}

    def take_fresh(self) -> Tensor:
        """Rows that are new since the last call, with row 0 in place of others.

        Without those of an abandoned recording, which were never computed.
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
