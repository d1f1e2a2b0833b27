"""The id table of a GPU, which maps 64-bit ids to rows of a slab: ``csrc/cuda/id_table.cu``.

    batch = table.find_or_insert(ids)            # (n,) rows; which are new, and which ids lost them
    table.begin(slab, batch, key, initial)       # the initial values of new rows
    ...                                          # lookups, gradients, the optimizer's step
    table.advance()                              # rows may be evicted again

An id has one bucket of at most 128 slots, and a slot is a row. Rows 1 to ``capacity`` are stored,
row 0 is for padding, and the rows after them are for guests: ids that found no slot, which keep
their row until :meth:`advance`. A bucket can be full before the table is. In a table that may
evict, each bucket gives up its own lowest rows, so it keeps nearly, but not exactly, the best rows
of the whole table. A table that may not evict should have 1.7 times as many slots as ids (see
``cuda_batch.slots_for``).

Within each bucket, rows are assigned in the order of the batch, whatever the GPU's schedule: the
same batches get the same rows. Nothing waits for the GPU, no launch depends on what is in its
memory, and steps are counted there, so a recorded step of one batch size can be replayed.

Tested: on the emulator, under the address and thread sanitizers; on an H200, small tables trained
to the same numbers as plain ones, on one rank and on ranks that shared the GPU. Capacity and speed
there have not been measured.
"""

from __future__ import annotations

from ctypes import c_double, c_int32, c_int64, c_void_p
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from recast.errors import CheckpointError, NotBuiltError, UsageError
from recast.runtime.dynamic.cuda_batch import FRESH, SLOTS, Batch
from recast.runtime.dynamic.settings import Initial
from recast.runtime.gpu import nvrtc
from recast.runtime.gpu.cuda_launch import Argument, Kernel
from recast.runtime.gpu.gpu import Gpu, serving

COUNTS = "inserted", "evicted", "refused", "misses", "lookups", "expired"
POLICIES = ("never", "lru", "lfu", "epoch_lru", "epoch_lfu", "given")  # as in id_table.cu
CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_MISSES = COUNTS.index("misses")
_THREADS, _WARPS, _SCAN, _TILE = 256, 8, 4096, 4096  # as in id_table.cu and row_sort.cu
_SAMPLES_TO_AGE = 10  # lookups per stored row after which counts are halved
_MOST_BUCKETS = (2**32 - 2) // SLOTS
_MOST_BATCH = 2**30 - 1
_SIGN = -(2**63)


class IdTable:
    """One table.

    Args:
        gpu: runs the kernels.
        rows: how many ids can be stored.
        policy: which slot of a full bucket is evicted, one of :data:`POLICIES`; "never": none, and
            :meth:`check` raises.
        guests: rows for ids that are not stored; enough for all batches between two steps.
        ttl: steps without a lookup after which an id is forgotten; 0: never.
        padding: the id that is never stored and has row 0.
        ages: whether the counts of "lfu" are halved from time to time.
        demotes: whether evicted rows go to a tier below: then batches report the score and last
            step of evicted ids, and no id is refused for its score.

    Raises:
        UsageError: impossible numbers, or an unknown policy.
    """

    def __init__(
        self, gpu: Gpu, rows: int, policy: str = "lru", guests: int = 1 << 20, *, ttl: int = 0,
        padding: int | None = None, ages: bool = True, demotes: bool = False,
    ) -> None:  # fmt: skip
        if policy not in POLICIES or rows < 1 or guests < 1:
            raise UsageError(
                f"a table of {rows} rows and {guests} guests that evicts by {policy!r}",
                why=f"policies are {', '.join(POLICIES)}",
            )
        self.buckets = -(-rows // SLOTS)
        if self.buckets > _MOST_BUCKETS:
            raise UsageError(f"a table of {rows} rows on a GPU", why="rows are numbered by 32 bits")
        self.gpu, self.policy, self.guests = gpu, policy, guests
        self.ttl, self.padding, self._ages = ttl, padding, ages and policy == "lfu"
        self.demotes = demotes
        self.slots = rows // self.buckets
        self.capacity = self.buckets * self.slots
        self.slab_rows = 1 + self.capacity + guests
        device = gpu.device
        self.digests = torch.zeros(self.buckets, SLOTS, dtype=torch.uint8, device=device)
        self.ids, self.scores, self.stamps = torch.zeros(
            3, self.buckets, SLOTS, dtype=torch.int64, device=device
        ).unbind()
        self.clock = torch.tensor([1, 0, 0], device=device)
        self._counts = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)
        self._first_keys = torch.tensor([0, self.buckets], device=device)
        self._told = gpu.counters(len(COUNTS))  # as of some past step; read without waiting
        self._used = 0  # guest rows in use
        self._table = self._words_of_table()

    def _words_of_table(self) -> Tensor:
        """``struct Table`` of id_table.cu."""
        tensors = self.digests, self.ids, self.scores, self.stamps, self.clock, self._counts
        words = [t.data_ptr() for t in tensors]
        words += [self.buckets, self.slots, POLICIES.index(self.policy), self.ttl]
        words += [self.padding is not None, self.padding or 0]
        return torch.tensor(words, device=self.gpu.device)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        for name in ("gpu", "_table", "_told"):  # these hold addresses
            del state[name]
        return {**state, "_told": self._told.clone()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        gpu = serving(self.digests)
        if gpu is None:
            raise NotBuiltError(f"a table of the GPU, on {self.digests.device}")
        self.gpu = gpu
        self._told = gpu.counters(len(COUNTS))
        self._told.copy_(state["_told"])
        self._table = self._words_of_table()

    # ------------------------------------------------------------ batches

    def find(self, ids: Tensor) -> Batch:
        """The rows of ``ids``; those that are not stored get guest rows, which are new.

        Nothing is stored and no lookup is counted. Raises UsageError if there are not enough guest
        rows.
        """
        return self._probe(ids, self._guests_for(ids))

    def rows_of(self, ids: Tensor) -> Tensor:
        """(n,) int64: the rows of ``ids``, -1 if not stored."""
        return self._probe(ids, -1).rows

    def pin(self, rows: Tensor) -> None:
        """Protect those of ``rows`` that are stored from eviction in this step; -1 is ignored."""
        step = torch.where((rows > 0) & (rows <= self.capacity), self.clock[0], 0)
        self.stamps.view(-1).scatter_reduce_(0, self.place_of(rows), step, "amax")

    def place_of(self, rows: Tensor) -> Tensor:
        """(n,) flat indices of stored ``rows`` in ``stamps`` and ``scores``; 0 for other rows."""
        at = torch.where(rows <= self.capacity, rows - 1, 0).clamp(min=0)
        return torch.div(at, self.slots, rounding_mode="floor") * SLOTS + at % self.slots

    def find_or_insert(
        self, ids: Tensor, scores: Tensor | None = None, only: Tensor | None = None
    ) -> Batch:
        """The rows of ``ids``, in training: new ids are stored, if need be in place of others.

        Args:
            ids: (n,) int64, any values.
            scores: (n,) int64 with policy "given", where an id with a lower score than all in its
                bucket is not stored; else None.
            only: (n,) bool, which ids may be stored, the same for equal ids; None: all.

        Raises:
            UsageError: scores that do not fit the policy, or not enough guest rows.
        """
        if (scores is not None) != (self.policy == "given"):
            raise UsageError(f"scores for a table that evicts by {self.policy!r}")
        n, first_guest = len(ids), self._guests_for(ids)
        ids, given = ids.contiguous(), None if scores is None else scores.contiguous()
        keys, values, *others = self._words(4, n).unbind()
        batch = self._probe(ids, first_guest, given, (keys, values))
        if n == 0:
            return batch
        if only is not None:
            waits = (keys < self.buckets) & ~only  # as if their rows were known
            guests = torch.arange(first_guest, first_guest + n, device=ids.device)
            batch.rows.copy_(torch.where(waits, guests, batch.rows))
            batch.what.masked_fill_(waits, FRESH)
            keys.masked_fill_(waits, self.buckets)
            self._counts[_MISSES] += waits.sum()
        keys, values = self._sort((keys, values), (others[0], others[1]))
        starts, runs = self._runs(keys)
        gone = torch.empty_like(ids)
        facts = ids.new_empty(n, 2) if self.demotes else None
        blocks = -(-min(n, self.buckets) // _WARPS)
        self._launch(
            "id_insert", blocks, self._at(ids), self._at(given), self._at(keys), self._at(values),
            self._at(starts), self._at(runs), c_int64(first_guest), self._at(batch.rows),
            self._at(batch.what), self._at(gone), self._at(facts),
        )  # fmt: skip
        return Batch(ids, batch.rows, batch.what, gone, facts)

    def begin(self, slab: Tensor, batch: Batch, key: tuple[int, int], how: Initial) -> None:
        """Write the initial values of new rows, which depend on key, id and ``how`` only.

        slab: (slab_rows, D), with contiguous rows, in float32, float16 or bfloat16.
        """
        n, dim = len(batch.ids), slab.shape[1]
        kernel = _initial_rows(CODES[slab.dtype])
        arguments = (
            self._at(batch.ids), self._at(batch.rows), self._at(batch.what), c_int32(n),
            c_int32(dim), c_int64(key[0] | key[1] << 32), c_int32(how.kind == "uniform"),
            c_double(how.a), c_double(how.b), self._at(slab), c_int64(slab.stride(0)),
        )  # fmt: skip
        blocks = -(-n * -(-dim // 4) // _THREADS)
        self._now().launch(kernel, (blocks, 1, 1), (_THREADS, 1, 1), 0, arguments)

    def erase(self, ids: Tensor) -> Tensor:
        """Forget ``ids``; returns how many were stored, (1,). Not between a lookup and its step."""
        return self.erase_rows(self.rows_of(ids))

    def erase_rows(self, rows: Tensor) -> Tensor:
        """Forget the ids of stored ``rows``, ignoring -1; returns how many there were, (1,)."""
        erased = torch.zeros(1, dtype=torch.int64, device=self.gpu.device)
        blocks = -(-len(rows) // _THREADS)
        self._launch("id_erase", blocks, self._at(rows), c_int32(len(rows)), self._at(erased))
        return erased

    def advance(self) -> None:
        """Begin the next step: guests are forgotten, and rows of the last step may be evicted."""
        most = c_int64(_SAMPLES_TO_AGE * self.capacity)
        if self._ages:
            blocks = min(8 * self.gpu.multiprocessors, -(-self.buckets * SLOTS // _THREADS))
            self._launch("id_age", blocks, most)
        self._launch("id_advance", 1, most, self._at(self._told))
        self._used = 0

    # ------------------------------------------------------------ for its owner

    def check(self) -> None:
        """Raise UsageError if an id found no row and none may be evicted, as far as is known.

        The host does not wait: steps that the GPU has not finished are reported by a later call.
        """
        refused = self.counters()["refused"]
        if self.policy == "never" and refused:
            raise UsageError(
                f"{refused} new ids found no row: their buckets of {self.slots} rows are full",
                why="evict is None, so no row is given up; steps that the GPU had not done were not"
                " waited for: what these ids learned since is dropped",
                tries=('recast.Dynamic(evict="lru")', "a larger budget"),
            )

    def counters(self) -> dict[str, int]:
        """inserted, evicted, refused and expired rows, misses and lookups in training; as of some
        past step.
        """
        return dict(zip(COUNTS, self._told.tolist(), strict=True))

    def stored(self, since: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(ids, rows, scores, stamps), in row order, of what was looked up at step ``since`` or
        later. Waits for the GPU.
        """
        kept = self._is_stored() & (self.stamps >= since)
        bucket, slot = kept.nonzero(as_tuple=True)
        scores = self.scores[bucket, slot]
        scores = scores ^ _SIGN if self.policy == "given" else scores
        rows = 1 + bucket * self.slots + slot
        return self.ids[bucket, slot], rows, scores, self.stamps[bucket, slot]

    def load(self, ids: Tensor, scores: Tensor, stamps: Tensor, *, strict: bool = True) -> Tensor:
        """Replace all that is stored by these distinct ids; returns their rows, (n,). Waits for the
        GPU.

        Without ``strict``, ids that do not fit are left out, and their rows are meaningless.

        Raises:
            CheckpointError: they do not fit; the table is empty then.
        """
        self.digests.zero_()
        counts = self._counts.clone()
        rows = torch.empty_like(ids)
        for at in range(0, len(ids), self.guests):
            self._used, part = 0, slice(at, at + self.guests)
            given = scores[part] if self.policy == "given" else None
            rows[part] = self.find_or_insert(ids[part], given).rows
        kept = rows <= self.capacity
        overflow = strict and not bool(kept.all())
        self._used = 0
        self._counts.copy_(counts)
        if overflow:
            self.digests.zero_()
            raise CheckpointError(
                f"{len(ids)} ids for a table of {self.buckets} buckets of {self.slots} rows",
                why="a bucket has more ids than rows",
                tries=("a larger budget",),
            )
        place = self.place_of(rows[kept])
        scores = scores ^ _SIGN if self.policy == "given" else scores
        self.scores.view(-1)[place] = scores[kept]
        self.stamps.view(-1)[place] = stamps[kept]
        return rows

    @property
    def step(self) -> int:
        """The number of the step that the next :meth:`advance` ends. Reading and setting it wait
        for the GPU.
        """
        return int(self.clock[0])

    @step.setter
    def step(self, number: int) -> None:
        self.clock[0] = number

    @property
    def epoch(self) -> int:
        """The epoch for "epoch_lru" and "epoch_lfu"."""
        return int(self.clock[1])

    @epoch.setter
    def epoch(self, number: int) -> None:
        self.clock[1] = number

    @property
    def looked_up(self) -> int:
        """Lookups since counts were last halved."""
        return int(self.clock[2])

    @looked_up.setter
    def looked_up(self, count: int) -> None:
        self.clock[2] = count

    def __len__(self) -> int:
        return int(self._is_stored().sum())

    def _is_stored(self) -> Tensor:
        stored = self.digests != 0
        return stored & (self.stamps + self.ttl >= self.clock[0]) if self.ttl else stored

    # ------------------------------------------------------------ launches

    def _guests_for(self, ids: Tensor) -> int:
        """The first guest row for a batch; its guest rows stay reserved until the step ends."""
        first = 1 + self.capacity + self._used
        self._used += len(ids)
        if self._used > self.guests or len(ids) > _MOST_BATCH:
            raise UsageError(
                f"{self._used} ids were looked up since the last step of a table that has rows for"
                f" {self.guests} guests",
                tries=("step the optimizer more often", "a larger budget: guests are part of it"),
            )
        return first

    def _probe(
        self, ids: Tensor, first_guest: int, given: Tensor | None = None,
        sort: tuple[Tensor, Tensor] | None = None,
    ) -> Batch:  # fmt: skip
        n, ids = len(ids), ids.contiguous()
        rows, what = torch.empty_like(ids), self._words(n)
        keys, values = (None, None) if sort is None else sort
        self._launch(
            "id_probe", -(-n // _WARPS), self._at(ids), c_int32(n), self._at(given),
            c_int64(first_guest), self._at(rows), self._at(what), self._at(keys), self._at(values),
        )  # fmt: skip
        return Batch(ids, rows, what)

    def _sort(
        self, entries: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """(keys, values) sorted by key, in one of the two pairs; equal keys keep their order."""
        n, bits = len(entries[0]), self.buckets.bit_length()
        passes, tiles = -(-bits // 8), -(-n // _TILE)
        shifts = [p * bits // passes for p in range(passes + 1)]
        for shift, past in pairwise(shifts):
            (keys, values), (to_keys, to_values) = entries, others
            digit, n_counts = (c_int32(shift), c_int32(past - shift)), tiles << (past - shift)
            counts, size = self._words(n_counts), c_int32(n_counts)
            blocks = -(-n_counts // _SCAN)
            totals = self._words(blocks)
            of = self._at(keys), c_int32(n), *digit, self._at(counts)
            all_in_one = self._at(None), c_int32(0)
            self._row_sort("digit_counts", tiles, *of, *all_in_one)
            for name in ("scan_totals", "scan_counts")[blocks == 1 :]:
                self._row_sort(name, blocks, self._at(counts), size, self._at(totals))
            self._row_sort(
                "scatter", tiles, of[0], self._at(values), *of[1:], self._at(to_keys),
                self._at(to_values), *all_in_one,
            )  # fmt: skip
            entries, others = others, entries
        return entries

    def _runs(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """(starts, runs): where each bucket's entries start; runs[1] is the number of buckets."""
        n = len(keys)
        blocks = -(-n // _SCAN)
        starts, runs = self._words(n + 1), self._words(2)
        totals = self._words(blocks)
        of = self._at(keys), c_int32(n), self._at(totals)
        if blocks > 1:
            self._row_sort("run_totals", blocks, *of)
        last = self._at(self._first_keys), c_int32(2), self._at(starts), self._at(runs)
        self._row_sort("run_starts", blocks, *of, *last)
        return starts, runs

    def _launch(self, name: str, blocks: int, *arguments: Argument) -> None:
        whole = (self._at(self._table), *arguments)
        self._now().launch(_kernel(name), (blocks, 1, 1), (_THREADS, 1, 1), 0, whole)

    def _row_sort(self, name: str, blocks: int, *arguments: Argument) -> None:
        self._now().launch(_sort_kernel(name), (blocks, 1, 1), (_THREADS, 1, 1), 0, arguments)

    def _now(self) -> Gpu:
        """The Gpu that serves the table's memory now: while recording, the one that records."""
        return serving(self.digests) or self.gpu

    def _words(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self.gpu.device)

    @staticmethod
    def _at(tensor: Tensor | None) -> c_void_p:
        return c_void_p(None if tensor is None else tensor.data_ptr())


@cache
def _kernel(name: str) -> Kernel:
    return Kernel(nvrtc.program("id_table.cu"), name)


@cache
def _sort_kernel(name: str) -> Kernel:
    return Kernel(nvrtc.program("row_sort.cu", defines={"RECAST_WIDE_KEY": False}), name)


@cache
def _initial_rows(dtype: int) -> Kernel:
    program = nvrtc.program("initial_rows.cu", defines={"RECAST_TABLE": dtype})
    return Kernel(program, "initial_rows")
