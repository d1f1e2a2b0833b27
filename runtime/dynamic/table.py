"""A dynamic table in host memory, whose rows are made as ids arrive (``cuda_table``: on a GPU).

Rows are in a slab, which is the weight of the user's module: row 0 is for padding, rows 1 to
capacity for stored ids, and the rows after them for guests: ids that are looked up in training but
not stored, which have a row until the next optimizer step. The slab is reserved as a whole, but
takes memory only as rows are written, so its shape never changes and an optimizer updates it like
any table. The id table (``csrc/id_table.h``) maps ids to rows.

Between two optimizer steps no row changes its id, as gradients refer to rows of the slab. Lookups
without gradients change nothing: ids that are not stored are answered from a separate matrix.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from recast.errors import NotBuiltError, UsageError
from recast.runtime import device
from recast.runtime.dynamic import generation, prefetch_ids
from recast.runtime.dynamic.all_rows import empty
from recast.runtime.dynamic.bookkeeping import Bookkeeping
from recast.runtime.dynamic.settings import Dynamic, Initial
from recast.runtime.ranks import initial_rows
from recast.runtime.rows.grad import RowGrad
from recast.runtime.tiers.tier import Tier

_MOST_ROWS = 2**32 - 2
_GUESTS = 1 << 20, 1 << 24  # guest rows: at least, at most; unwritten ones take no memory

_TABLES: WeakIdKeyDictionary = WeakIdKeyDictionary()
_state = threading.local()


def of(weight: Tensor) -> DynamicTable | None:
    """The dynamic table whose slab is ``weight``; None for any other tensor."""
    return _TABLES.get(weight) if _TABLES else None


def any_tables() -> bool:
    """Whether there are dynamic tables at all."""
    return bool(_TABLES)


@contextmanager
def only_read() -> Iterator[None]:
    """Lookups inside it store nothing, even in training: for examples and proofs."""
    before = getattr(_state, "only_read", False)
    _state.only_read = True
    try:
        yield
    finally:
        _state.only_read = before


def _guests(capacity: int) -> int:
    return min(max(_GUESTS[0], capacity), _GUESTS[1])


def _flat(ids: Sequence[Tensor]) -> Tensor:
    flat = [x.detach().reshape(-1).long() for x in ids]
    return flat[0].contiguous() if len(flat) == 1 else torch.cat(flat)


class DynamicTable(Bookkeeping):
    """One table: which row an id has, and the initial values of rows.

    Attributes:
        name: the module's name in the user's model.
        marks_generation: whether writes to the slab as a whole are detected; see ``generation``.
    """

    marks_generation: ClassVar[bool] = True

    def __init__(
        self, name: str, dim: int, settings: Dynamic, capacity: int, initial: Initial,
        padding: int | None = None,
    ) -> None:  # fmt: skip
        guests = _guests(capacity)
        if capacity + guests > _MOST_ROWS:
            raise UsageError(
                f"tables: {name}: {capacity} rows",
                why=f"rows are numbered by 32 bits, guests too: at most {_MOST_ROWS - guests} rows",
            )
        self.name, self.dim, self.settings = name, dim, settings
        self.capacity, self.initial, self.padding = capacity, initial, padding
        self.seed = settings.seed
        self.part, self.parts = 0, 1  # this rank's part of the ids, by hash
        # About the last load: how many rows there were, and which of them belong to this part.
        self.chosen: tuple[int, Tensor] | None = None
        self.index = self._new_index()
        self.slab_rows = 1 + capacity + guests + generation.ROWS
        self._generation: float | None = None  # None: the mark is not checked
        self.tier: Tier | None = None  # the tier below, if there is one
        self._fresh: list[Tensor] = []  # rows without optimizer state yet
        self._stepped: Any = None  # the gradient of the last step, if it was a row gradient
        self._log: list[Tensor] | None = None  # ids dropped since the first mark
        self._since = 0
        self._lock = threading.Lock()

    def _new_index(self) -> Any:
        extension = device.extension()
        if extension is None:
            raise NotBuiltError(
                f"tables: {self.name}: dynamic tables need the C++ kernels",
                why=device.why_missing() or "",
                tries=("recast env says what is missing",),
            )
        settings = self.settings
        admit = 1 if settings.admit is None else settings.admit.count
        guests = _guests(self.capacity)
        return extension.IdTable(self.capacity, guests, settings.policy, admit, settings.ttl or 0)

    # ------------------------------------------------------------ lookups

    def _check_wrapper(self, weight: Tensor) -> None:
        """Raise UsageError inside a DistributedDataParallel of the user's: it would average the
        gradients of rows that belong to other ids on other ranks.
        """
        around = DistributedDataParallel._active_ddp_module
        if around is None or self.parts > 1 or around.process_group.size() == 1:
            return
        if all(held is not weight for held in around.module.parameters()):
            return
        raise UsageError(
            f"{self.name}: a dynamic table inside DistributedDataParallel",
            why="it averages row by row, and each rank has other ids in its rows",
            tries=("optimize(...) without world_size=1, whose result averages gradients itself",),
        )

    def find(
        self, weight: Tensor, ids: Sequence[Tensor], training: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """A matrix (rows, D), and for each tensor of ids their rows in it, of the same shape.

        The matrix is ``weight`` itself, unless some ids are not stored and must not be.

        Raises:
            UsageError: the table is full, and ``evict`` is None.
        """
        if of(weight) is not self:
            _TABLES[weight] = self
        self._check_wrapper(weight)
        joined = _flat(ids)
        reads = self._only_reads(weight, training)
        look_up = self._read if reads else partial(self._store, ids)
        if self.padding is None:
            matrix, rows = look_up(weight, joined)
        else:
            real = joined != self.padding
            matrix, found = look_up(weight, joined[real])
            if matrix is not weight:  # row 0 is for padding there too
                matrix, found = torch.cat([weight.detach()[:1], matrix]), found + 1
            rows = torch.zeros_like(joined)
            rows[real] = found
        sizes = [x.numel() for x in ids]
        parts = torch.split_with_sizes(rows, sizes) if len(sizes) > 1 else (rows,)
        return matrix, [part.view(x.shape) for part, x in zip(parts, ids, strict=True)]

    def fetch(self, weight: Tensor, ids: Sequence[Tensor], training: bool) -> None:
        """Bring the rows of ``ids`` to memory, for the next lookup of the same tensors."""
        if self.tier is None or self._only_reads(weight, training):
            return
        joined = _flat(ids)
        with self._lock:
            self.tier.bring(weight, self._real(joined))
            self.tier.ready = tuple(ids)

    def _real(self, ids: Tensor) -> Tensor:
        return ids if self.padding is None else ids[ids != self.padding]

    def _only_reads(self, weight: Tensor, training: bool) -> bool:
        records = torch.is_grad_enabled() and weight.requires_grad
        return not training or not records or getattr(_state, "only_read", False)

    def mark_generation(self, slab: Tensor) -> None:
        """Mark ``slab``: its rows belong to the ids that they have now."""
        if self.marks_generation:
            self._generation = None  # another thread may be checking
            self._generation = generation.write_mark(slab)

    def check_generation(self, weight: Tensor) -> None:
        """Raise UsageError if rows from another time have been written to ``weight``."""
        ratio = self._generation
        if ratio is None or len(weight) != self.slab_rows:
            return
        slab = weight.detach()
        if generation.is_untouched(slab, ratio):
            return
        below = 0 if self.tier is None else self.tier.below
        rows_alone = generation.is_unchanged(slab, ratio)
        if self._generation is not ratio or (rows_alone and not below):
            return  # in the first case new ids arrived during the check
        if rows_alone:
            raise generation.below_error(self.name, below)
        raise generation.changed_error(self.name)

    def _read(self, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        self.check_generation(weight)
        rows = empty(len(ids))
        self.index.find(ids, rows, device.threads())
        absent = rows < 0
        records = torch.is_grad_enabled() and weight.requires_grad
        if records:
            if self.tier is not None:  # rows with a gradient must be in memory
                with self._lock:
                    self.tier.lift(weight, ids)
                self.index.find(ids, rows, device.threads())
                absent = rows < 0
            self.index.pin(rows[~absent].contiguous())
        if not bool(absent.any()):
            return weight, rows
        unique, place = torch.unique(ids, return_inverse=True)
        of_unique = empty(len(unique))
        of_unique[place] = rows
        absent = of_unique < 0
        first = self._answers(unique[absent], weight.dtype)
        known = of_unique.clamp(min=0)
        if records:
            matrix = torch.ops.recast.embedding_bags.default(
                [weight], [known], [None], [None], [0], ["none"], [0], [False], [False]
            )[0]
            return matrix.index_copy(0, absent.nonzero().squeeze(1), first), place
        matrix = weight.detach().index_select(0, known)
        matrix[absent] = first
        return matrix, place

    def _answers(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """(n, D): the rows of ids that are not in memory: those on disk, else initial values."""
        first = self.initial_rows(ids, dtype)
        if self.tier is not None:
            with self._lock:
                there, rows = self.tier.peek(ids, "weight")
            first[there] = rows
        return first

    def _store(self, given: Sequence[Tensor], weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = empty(len(ids))
        with self._lock:
            if self.tier is not None and not self.tier.is_ready(given):
                self.tier.bring(weight, ids)
            try:
                full = self.index.find_or_insert(ids, self._scores(ids), rows, device.threads())
            except MemoryError as error:
                raise MemoryError(
                    f"{self.name}: no memory for more ids; it has {len(self)} of {self.capacity}"
                    " rows"
                ) from error
            if full is not None:
                raise self._full(*full)
            fresh_ids, fresh = self.index.take_fresh(empty)
            if len(fresh):
                self._fresh.append(fresh)
                self._begin(weight.data, fresh_ids, fresh)
            if len(fresh) or self.tier is not None:
                self.check_generation(weight)
                self.mark_generation(weight.data)
            self._keep_gone()
        return weight, rows

    def _begin(self, slab: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Write the initial values of ``ids`` to ``rows``; in float32 by the bit-exact kernel."""
        if slab.dtype is not torch.float32:
            slab[rows] = self.initial_rows(ids, slab.dtype)
            return
        how, key = self.initial, initial_rows._key(self.seed, self.name)
        device.extension().initial_rows(
            ids, rows, slab, *key, how.kind == "uniform", how.a, how.b, device.threads()
        )

    def initial_rows(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """(n, D): the initial values of these ids, stored or not."""
        how = self.initial
        return initial_rows.rows(
            ids, self.dim, seed=self.seed, name=self.name, kind=how.kind,
            a=how.a, b=how.b, dtype=dtype,
        )  # fmt: skip

    def _scores(self, ids: Tensor) -> Tensor | None:
        if self.settings.policy != "given":
            return None
        scores = self.settings.evict(ids)  # type: ignore[misc, operator]
        if (
            not isinstance(scores, Tensor)
            or scores.shape != ids.shape
            or scores.is_floating_point()
        ):
            raise UsageError(
                f"tables: {self.name}: evict gave {_told(scores)} for {len(ids)} ids",
                why="a score of eviction is an int64 for each id; the lowest is evicted first",
            )
        return scores.long().contiguous()

    def _full(self, id_: int, guests: bool) -> UsageError:
        if guests:
            return UsageError(
                f"{self.name}: more than {self.slab_rows - 1 - self.capacity} ids that are not"
                " stored were looked up since the last optimizer step",
                tries=("step the optimizer more often", "a larger max_rows"),
            )
        return UsageError(
            f"{self.name}: id {id_} is new, and all {self.capacity} rows are taken",
            why="evict is None, so no row is given up"
            + ("" if self.parts == 1 else f"; {self._part()}, and a hash is not quite even"),
            tries=('recast.Dynamic(evict="lru")', "a larger budget", "table.erase(ids)"),
        )

    @property
    def counts_lookups(self) -> bool:
        """Whether it matters how often an id is looked up in one step."""
        return self.settings.admit is not None or self.settings.policy in ("lfu", "epoch_lfu")

    def _part(self) -> str:
        return f"this rank has the rows of part {self.part + 1} of {self.parts} of the ids"

    def take_part(self, capacity: int, part: int, parts: int) -> None:
        """Become the empty table of one part of the ids, with room for ``capacity`` rows.

        The caller gives the weight a slab of the new ``slab_rows``.
        """
        self.capacity, self.part, self.parts = capacity, part, parts
        self.slab_rows = 1 + capacity + _guests(capacity) + generation.ROWS
        self.index = self._new_index()
        self._fresh, self._stepped, self._log = [], None, None

    def load(
        self, slab: Tensor, ids: Tensor, scores: Tensor, stamps: Tensor, weight: Tensor
    ) -> Tensor:
        """See ``AllRows.load``."""
        rows = super().load(slab, ids, scores, stamps, weight)
        self.mark_generation(slab)
        return rows

    # ------------------------------------------------------------ steps

    def take_fresh(self) -> Tensor:
        """Rows that are new since the last call, and have no optimizer state yet."""
        with self._lock:
            fresh, self._fresh = self._fresh, []
        return torch.cat(fresh) if fresh else empty(0)

    def check_gradient(self, weight: Tensor) -> None:
        """Raise UsageError if the gradient contains that of an earlier step, whose rows may belong
        to other ids by now.
        """
        grad, kept = weight.grad, self._stepped
        if kept is None or not isinstance(grad, RowGrad) or grad.cell is not kept[0]:
            return
        if grad.cell.pieces and grad.cell.pieces[0] is kept[1]:
            raise UsageError(
                f"{self.name}: its gradient holds that of a step that was done",
                why="rows of a dynamic table may have gone to other ids since",
                tries=("optimizer.zero_grad() after each step",),
            )

    def advance(self, weight: Tensor) -> None:
        """The optimizer has stepped: rows may change their ids."""
        grad = weight.grad
        pieces = grad.cell.pieces if isinstance(grad, RowGrad) else []
        self._stepped = (grad.cell, pieces[0]) if isinstance(grad, RowGrad) and pieces else None
        self.chosen = None
        self.check_generation(weight)
        with self._lock:
            self._next_step()

    def _next_step(self) -> None:
        looked_up = self.index.looked_up
        self.index.advance()
        try:
            self._keep_gone()
        finally:
            if self.tier is not None:
                self.tier.advance(looked_up)

    # ------------------------------------------------------------ for its owner

    def __len__(self) -> int:
        return len(self.index) + (0 if self.tier is None else self.tier.below)

    def ids(self) -> Tensor:
        """(n,) int64: the stored ids, in the row order of ``state_dict()``."""
        return self.stored()[0]

    def prefetch(self, ids: Tensor) -> None:
        """Start to fetch the rows of ``ids``, of any shape, from disk for a later lookup.

        A thread reads them. They are moved to memory when they are looked up, so prefetching
        changes no numbers. Does nothing for a table without tiers. On many ranks ids go to their
        owners: every rank calls it with its own ids, at the same point of its loop.
        """
        if self.tier is None:
            return
        flat = self._real(ids.detach().reshape(-1).long().cpu())
        flat = prefetch_ids.ids_of_owner(flat, self.parts, flat.device)
        with self._lock:
            self.tier.ahead(flat)

    def __repr__(self) -> str:
        return f"DynamicTable({self.name}, {len(self)} of {self.capacity} rows)"

    # ------------------------------------------------------------ copies

    def check_copies(self) -> None:
        """Raise NotBuiltError if it cannot be copied."""
        if self.tier is not None:
            raise NotBuiltError(
                f"{self.name} has rows on disk: it cannot be copied or pickled",
                why="two tables cannot share the files of one",
                tries=("recast.checkpoint.save, and load into a model with tiers in another path",),
            )

    def __getstate__(self) -> dict[str, Any]:
        self.check_copies()
        state = dict(vars(self))
        index = state.pop("index")
        del state["_lock"]
        state["_stepped"] = None
        state["stored"], state["candidates"] = index.stored(0, empty), index.candidates(empty)
        state["clock"] = index.step, index.epoch, index.looked_up
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        stored, candidates = state.pop("stored"), state.pop("candidates")
        clock = state.pop("clock")
        vars(self).update(state)
        self._lock = threading.Lock()
        self.index = self._new_index()
        self.index.load(*stored)
        self.index.load_candidates(*candidates)
        self.index.step, self.index.epoch, self.index.looked_up = clock


def _told(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return repr(value)
