"""RowGrad: the gradient of an embedding table that never becomes a dense matrix by itself.

From outside it is a tensor; inside it is pieces (see ``pieces``), in one cell that all its aliases
share. What operations do to it:

    detach, clone, ``*`` and ``/`` by a scalar, sums of row gradients, zero_   stays rows
    norms, the finiteness check of loss scaling                               sums rows, reads;
                                                                              of all ranks
    a write or a view                                                         dense from now on
    any other read                                                            a dense copy

The last two are counted (``count``): they are correct but cost a matrix. The rules are in
``dispatch``. On a GPU only what needs the unique ids waits for the device: norms of an order other
than 1, 2 and infinity, sparse tensors, and sums that would take more memory than half the table.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from recast.runtime.recorded import recording
from recast.runtime.rows import cuda as row_cuda
from recast.runtime.rows import cuda_shared_sorts as row_sorts
from recast.runtime.rows import kernel as row_kernel
from recast.runtime.rows.count import count, counters, reset_counters
from recast.runtime.rows.pieces import Piece, merge, sparse_coo, unique_piece

if TYPE_CHECKING:
    from recast.runtime.ranks.shards import ShardedTable
    from recast.runtime.rows.lots import Lot

__all__ = [
    "Piece",
    "RowGrad",
    "claim",
    "claimed",
    "counters",
    "reset_counters",
    "row_grad",
    "sparse_coo",
]


class Cell:
    """What the aliases of one gradient share: pieces times a scale, or the dense gradient.

    Attributes:
        pieces: the gradient as the backward pass made it.
        lot, number: where the pieces are until somebody asks for them; see ``lots``.
        scale: a factor of all pieces.
        full: the dense gradient, in place of pieces.
        loose: bytes held by pieces that are not merged; None: not counted yet.
        merged: whether there is one piece, of unique, sorted ids.
        sparse: whether the table has sparse=True: torch's own gradient would be a sparse tensor.
        place: the place of the pieces in a sort on a GPU.
        recorded: whether a recording made it: its numbers change with every replay.
        lent: the pieces that a recording lends it with after every replay; None: it does not.
        table: the sharded table whose gradient this is one rank's part of; None: it is whole.
        each: the piece, with one row per id, that ``_values()`` has returned.
    """

    # Class attributes until they are set, so that a cell of a lot is made with two attributes only.
    scale: Tensor | float | None = None
    full: Tensor | None = None
    loose: int | None = None
    merged: bool = False
    sparse: bool = False
    place: row_sorts.Place | None = None
    recorded: bool = False
    lent: tuple[Piece, ...] | None = None
    table: ShardedTable | None = None
    each: Piece | None = None
    lot: Lot | None = None
    number: int = 0
    _pieces: list[Piece]

    def __init__(
        self, pieces: list[Piece], scale: Tensor | float | None = None, full: Tensor | None = None,
        loose: int | None = None, merged: bool = False, sparse: bool = False,
        place: row_sorts.Place | None = None, recorded: bool = False,
        table: ShardedTable | None = None,
    ) -> None:  # fmt: skip
        self._pieces, self.scale, self.full, self.loose = pieces, scale, full, loose
        self.merged, self.sparse, self.place = merged, sparse, place
        self.recorded, self.table = recorded, table

    @property
    def pieces(self) -> list[Piece]:
        if self.lot is not None:
            self._pieces, self.lot = [self.lot.piece(self.number)], None
        return self._pieces

    @pieces.setter
    def pieces(self, pieces: list[Piece]) -> None:
        self._pieces, self.lot = pieces, None

    @property
    def spoils_all(self) -> bool:
        """Whether the scale is NaN or infinite, which makes NaN of the zeros in all other rows too.

        False on a device, which is not waited for; and for torch's sparse gradients, which have no
        other rows. The rows stay rows: whoever finds NaN and drops the gradients, or the step, must
        not pay a matrix for it.
        """
        scale = self.scale
        if scale is None or isinstance(scale, Tensor) or math.isfinite(scale):
            return False
        return self.full is None and not self.sparse

    def hold(self, pieces: list[Piece]) -> None:
        """Replace the pieces."""
        self.pieces, self.loose, self.merged, self.place = pieces, 0, False, None


_DETACH = torch.ops.aten.detach.default


class RowGrad(Tensor):
    """A (rows, D) gradient held as rows. Made by ``row_grad``."""

    cell: Cell

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, cell: Cell
    ) -> Self:
        grad: Self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        grad.cell = cell
        return grad

    def __init__(self, *_: object) -> None:
        pass  # object.__init__ would refuse the arguments of __new__

    @property
    def data(self) -> Tensor:
        """An alias, as for any tensor."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        # ``p.grad.data = p.grad.data / n``, and what ``module.double()`` does to gradients: torch
        # would swap the tensor without our seeing it, and leave the rows as they were.
        if isinstance(value, RowGrad):
            cell = value.cell
        else:
            count("dense-write", "data")
            cell = Cell([], full=value.detach(), table=self.cell.table)
        like = RowGrad(value.shape, value.dtype, value.device, cell)
        Tensor.data.__set__(self, like)  # type: ignore[attr-defined]
        self.cell = cell

    @property
    def lazy(self) -> bool:
        """Whether it is still held as rows."""
        return self.cell.full is None

    def sharing(self, cell: Cell) -> RowGrad:
        """A gradient like this one over ``cell``."""
        made: RowGrad = _wrapper(RowGrad, self.shape, dtype=self.dtype, device=self.device)
        made.cell = cell
        return made

    def merged(self) -> tuple[Tensor, Tensor]:
        """(U,) sorted unique int64 ids and their (U, D) rows, before ``cell.scale``."""
        cell = self.cell
        if not cell.merged:
            count("merge")
            ids, rows = merge(cell.pieces, self.shape, self.dtype, self.device)
            if cell.recorded:
                return ids, rows
            cell.hold([unique_piece(ids, rows)])
            cell.merged = True
        return cell.pieces[0].ids, cell.pieces[0].rows

    def scaled(self) -> tuple[Tensor, Tensor]:
        """(U,) sorted unique int64 ids and their (U, D) rows, with ``cell.scale``."""
        ids, rows = self.merged()
        scale = self.cell.scale
        return ids, rows if scale is None else rows * scale

    def dense(self) -> Tensor:
        """The dense gradient: that in the cell, or else a new copy that the cell does not keep."""
        if self.cell.full is not None:
            return self.cell.full
        cell, spoiled = self.cell, self.cell.spoils_all
        if isinstance(cell.scale, Tensor) and not cell.sparse:
            # Multiplied last, as in torch: infinity, known on the device only, leaves infinities in
            # rows that were looked up, and NaN in all others.
            plain = Cell(
                cell.pieces, merged=cell.merged, place=cell.place, recorded=cell.recorded,
                table=cell.table,
            )  # fmt: skip
            return self.sharing(plain).dense().mul_(cell.scale.reshape(()))
        rest = math.nan if spoiled else 0.0
        full = torch.full(self.shape, rest, dtype=self.dtype, device=self.device)
        if not spoiled and (row_cuda.add(self, full) or row_kernel.add(self, full)):
            return full
        ids, rows = self.scaled()
        return full.index_copy_(0, ids, rows)

    def promote(self, like: Tensor | None = None) -> Tensor:
        """Become dense, together with all aliases and for good; returns the dense gradient.

        ``like``: its parameter, as whose it lies in memory, as autograd's own does: torch's fused
        steps ask for no strides.
        """
        full = self.dense()
        if like is not None and full.stride() != like.stride() and like.t().is_contiguous():
            full = full.t().contiguous().t()
        self.cell.hold([])
        self.cell.scale, self.cell.full = None, full
        return full

    def rescale(self, factor: Tensor | float) -> None:
        """Multiply in place by a scalar; see ``Cell.spoils_all`` for NaN and infinity."""
        if isinstance(factor, Tensor):
            on_host = factor.is_cpu and row_sorts.serving(factor) is None
            factor = float(factor) if on_host else _kept(factor)
        global _any_spoiled
        scale = self.cell.scale
        self.cell.scale = factor if scale is None else scale * factor
        _any_spoiled = _any_spoiled or self.cell.spoils_all

    def extend(self, other: RowGrad, alpha: float = 1.0) -> None:
        """Add ``alpha * other`` in place; merge if pieces take more memory than half the table."""
        cell = self.cell
        if cell.spoils_all or other.cell.spoils_all:  # which merging rows would forget
            total = self.dense().add(other.dense(), alpha=alpha)
            cell.hold([])
            cell.scale, cell.full = None, total
            return
        if cell.scale is not None:
            cell.pieces = [piece.scaled(cell.scale) for piece in cell.pieces]
            cell.scale = None
        loose = cell.loose
        if loose is None:
            loose = sum(piece.held() for piece in cell.pieces)
        for piece in list(other.cell.pieces):  # they may be our own
            scaled = piece.scaled(other.cell.scale)
            cell.pieces.append(scaled if alpha == 1 else scaled.scaled(alpha))
            loose += piece.held()
        cell.loose = loose
        cell.merged, cell.sparse = False, cell.sparse and other.cell.sparse
        # Merging waits for a GPU, which a recording must not do; it holds only one step anyway.
        if loose > self.numel() * self.dtype.itemsize // 2 and recording.current() is None:
            self.merged()

    def add_to(self, dense: Tensor, alpha: float = 1.0) -> None:
        """``dense += alpha * self``, on the looked-up rows only."""
        if self.cell.spoils_all:
            dense.add_(self.dense(), alpha=alpha)
            return
        if row_cuda.add(self, dense, alpha) or row_kernel.add(self, dense, alpha):
            return
        ids, rows = self.scaled()
        dense.index_add_(0, ids, rows.to(dense.dtype), alpha=alpha)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        what = "dense" if not self.lazy else f"{sum(len(p.rows) for p in self.cell.pieces)} rows"
        return f"RowGrad({tuple(self.shape)}, {what}, dtype={self.dtype})"

    def numpy(self, *, force: bool = False) -> Any:
        # The array shares the tensor's memory, and may be written to.
        if force and self.device.type != "cpu":
            return self._read("numpy").numpy(force=True)
        if self.lazy:
            count("dense-write", "numpy")
        return self.promote().numpy()

    def __array__(self, dtype: Any = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:  # shares the memory too
        if self.lazy:
            count("dense-write", "__dlpack__")
        return self.promote().__dlpack__(**options)

    def tolist(self) -> Any:
        return self._read("tolist").tolist()

    def data_ptr(self) -> int:
        # The caller may write there without torch's knowledge. (untyped_storage() is torch's own,
        # and raises when asked for its memory.)
        if self.lazy:
            count("dense-write", "data_ptr")
        return self.promote().data_ptr()

    def share_memory_(self) -> Self:
        # ``module.share_memory()`` shares gradients too; torch's own method needs a storage.
        if self.lazy:
            count("dense-write", "share_memory_")
        self.promote().share_memory_()
        return self

    def is_shared(self) -> bool:
        return not self.lazy and self.promote().is_shared()

    # For a table with sparse=True, torch's own gradient is a sparse tensor: some users read its
    # indices and values by hand, others leave it out where torch refuses it. Below Python it is
    # strided, and norms and the like take it.

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        return self._looks_sparse()

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        return torch.sparse_coo if self._looks_sparse() else torch.strided

    def to_dense(self, *args: Any, **kwargs: Any) -> Tensor:
        if not self._looks_sparse():
            return super().to_dense(*args, **kwargs)
        return self._read("to_dense").to_dense(*args, **kwargs)

    def sparse_dim(self) -> int:
        return 1 if self._looks_sparse() else super().sparse_dim()

    def dense_dim(self) -> int:
        return 1 if self._looks_sparse() else super().dense_dim()

    def coalesce(self) -> Tensor:
        if not self._looks_sparse():
            return super().coalesce()
        pieces = [piece.scaled(self.cell.scale) for piece in self.cell.pieces]
        return sparse_coo(self.shape, self.dtype, self.device, pieces)

    def is_coalesced(self) -> bool:
        return False if self._looks_sparse() else super().is_coalesced()

    def _nnz(self) -> int:
        return len(self._each().ids) if self._looks_sparse() else super()._nnz()

    def _indices(self) -> Tensor:
        return self._each().ids.unsqueeze(0) if self._looks_sparse() else super()._indices()

    def _values(self) -> Tensor:
        return self._each().rows if self._looks_sparse() else super()._values()

    def _looks_sparse(self) -> bool:
        # The table of many ranks has one gradient, and each rank looks up other rows of it.
        return self.lazy and self.cell.sparse and self.cell.table is None

    def _each(self) -> Piece:
        """The gradient with one row per id, duplicates apart; writes to the rows change it."""
        from recast.runtime.embedding.backward import expanded  # here: it imports this module

        cell = self.cell
        pieces = cell.pieces
        each = cell.each
        if each is None or cell.scale is not None or len(pieces) != 1 or pieces[0] is not each:
            parts = [expanded(piece.scaled(cell.scale), self.shape[0]) for piece in pieces]
            none = torch.empty(0, self.shape[1], dtype=self.dtype, device=self.device)
            ids = torch.cat([none.new_empty(0, dtype=torch.int64), *(ids for ids, _ in parts)])
            rows = torch.cat([none, *(rows.to(self.dtype) for _, rows in parts)])
            each = unique_piece(ids, rows)  # despite its name: ids may repeat here
            cell.hold([each])
            cell.each, cell.scale = each, None
        return each

    def __deepcopy__(self, memo: dict[int, Any]) -> RowGrad:
        copy: RowGrad = memo.setdefault(id(self), self.clone())
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickled as a plain tensor, so that it loads without this package.
        return self._read("pickle").__reduce_ex__(protocol)

    def _read(self, what: str) -> Tensor:
        if self.lazy:
            count("dense-read", what)
        return self.dense()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _DETACH:  # the shortest way: autograd detaches every gradient in each backward
            grad: RowGrad = args[0]
            return grad.sharing(grad.cell)
        from recast.runtime.rows.dispatch import dispatch  # here: it imports this module

        return dispatch(func, args, kwargs or {})


def row_grad(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    pieces: list[Piece],
    sparse: bool = False,
    owned: bool = False,
    table: ShardedTable | None = None,
) -> RowGrad:
    """The gradient of a table of ``shape`` (rows, D) made of ``pieces``.

    Ids, offsets and weights are copied, as they are the user's batch; but not in a recording, whose
    inputs nobody writes to before its replay is over, and not if they are ``owned`` already (see
    ``own_all``). The rows are not copied.
    ``sparse``: the table asked for a sparse gradient, which some optimizers insist on. ``table``:
    the sharded table that the parameter is this rank's part of. Norm and finiteness are then those
    of all ranks, so every rank must have such a gradient, with no rows if need be.
    """
    recorded = recording.current() is not None
    own = pieces if recorded or owned else [piece.own() for piece in pieces]
    cell = Cell(own, sparse=sparse, recorded=recorded, table=table)
    # The same as RowGrad(...) with less Python: with 26 tables this runs 26 times a step.
    grad: RowGrad = _wrapper(RowGrad, shape, dtype=dtype, device=device)
    grad.cell = cell
    if row_sorts.serving(own[0].rows if own else grad) is not None:
        row_sorts.watch(grad)
    return grad


_wrapper: Any = Tensor._make_wrapper_subclass
_any_spoiled = False  # whether any gradient ever was; until then, steps ask no more


def may_be_spoiled() -> bool:
    """False: no gradient was ever multiplied by NaN or infinity, so none need be asked."""
    return _any_spoiled


def spoiled(parameters: Iterable[Tensor]) -> bool:
    """Whether the row gradient of any of ``parameters`` is NaN in rows that were not looked up."""
    if not may_be_spoiled():
        return False
    grads = [p.grad for p in parameters]
    return any(type(grad) is RowGrad and grad.cell.spoils_all for grad in grads)


_last_kept: tuple[weakref.ref[Tensor], int, recording.Recording | None, Tensor] | None = None


def _kept(scalar: Tensor) -> Tensor:
    """A copy of a device scalar, as its owner may write to it; many gradients share one copy."""
    global _last_kept
    if scalar.is_inference():
        return scalar.detach().clone()
    key = scalar._version, recording.current()
    if _last_kept is None or _last_kept[0]() is not scalar or _last_kept[1:3] != key:
        _last_kept = weakref.ref(scalar), *key, scalar.detach().clone()
    return _last_kept[3]


# --- which tables a fused optimizer owns ---------------------------------------------------------

_CLAIMS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def claim(weight: Tensor, owner: object) -> None:
    """Make ``claimed(weight)`` true for as long as ``owner`` lives."""
    _CLAIMS[weight] = weakref.ref(owner)


def claimed(weight: Tensor) -> bool:
    """Whether a fused optimizer owns this table and wants a RowGrad, ``sparse=True`` or not."""
    if not _CLAIMS:
        return False
    owner = _CLAIMS.get(weight)
    return owner is not None and owner() is not None
