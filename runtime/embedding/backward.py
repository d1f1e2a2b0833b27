"""The gradients of ``embedding_bags``. On a GPU nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.runtime import device
from recast.runtime.embedding import cuda as embedding_cuda
from recast.runtime.embedding import cuda_weight_grad
from recast.runtime.embedding.call import Call, Layout
from recast.runtime.embedding.outputs import unstacked
from recast.runtime.gpu import gpu
from recast.runtime.ranks import shards
from recast.runtime.recorded import recording
from recast.runtime.rows import cuda_shared_sorts as row_sorts
from recast.runtime.rows import lots
from recast.runtime.rows.grad import claimed, row_grad
from recast.runtime.rows.pieces import Piece, copies, version_of

if TYPE_CHECKING:
    from recast.runtime.ranks.shards import ShardedTable


def sparse_owner(weight: Tensor) -> Callable[[], bool]:
    """A function that tells whether ``weight`` gets a row gradient: whether a fused optimizer owns
    it. It is called in backward: only then is training known to be set up.

    A hook of the table may return a sparse tensor, which autograd refuses in place of a row
    gradient: torch's own can be replaced by it. The part of a sharded table has no such.
    """
    return lambda: claimed(weight) and not (weight._backward_hooks and shards.of(weight) is None)


def lot_of(
    ctx: Any, layout: Layout, saved: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> Sequence[Tensor | None] | None:
    """The gradients of all tables of a call as parts of one ``Lot``, which costs a fifth of making
    a piece for each; None if they must be made one by one.

    ``saved``: the tensors that the call saved, only ids if bags are fixed; ``grads``: as autograd
    gives them. ``ctx``: that of the autograd function, whose inputs are the call and the tables.
    """
    fixed, count = _lot_layout(layout), len(layout.table)
    if fixed is None or len(saved) != count or ctx.tables != count:
        return None
    if ctx.columns is not None or ctx.claimed is not None or ctx.shards is not None or ctx.whole:
        return None
    if torch.is_grad_enabled() or recording.current() is not None:
        return None
    if torch._C._len_torch_dispatch_stack() or not all(ctx.needs_input_grad[1 : 1 + count]):
        return None
    rows: Tensor | Sequence[Tensor | None] | None = grads
    if ctx.stacks:
        whole = ctx.stacks[0] == layout.table  # one table per lookup, in order: see _lot_layout
        rows = grads[0] if whole else unstacked(ctx.stacks, grads, count)
    if rows is None or row_sorts.serving(saved[0]) is not None:
        return None
    padding = fixed.padding or tuple(
        -1 if at is None else at + like[0][0] if at < 0 else at
        for at, like in zip(layout.padding_idx, ctx.like, strict=True)
    )
    lot = lots.lot_of(saved, rows, fixed.mean, padding)
    return None if lot is None else lots.grads_of(lot, ctx.like)


class _LotLayout(NamedTuple):
    """The part of a layout that a lot needs."""

    mean: tuple[bool, ...]
    padding: tuple[int, ...] | None  # None: some lookup has padding, which depends on its table


@lru_cache(maxsize=256)
def _lot_layout(layout: Layout) -> _LotLayout | None:
    """None unless each table has exactly one lookup, neither "max" nor sparse."""
    count = len(layout.table)
    if layout.table != tuple(range(count)) or "max" in layout.mode or any(layout.sparse):
        return None
    unpadded = all(at is None for at in layout.padding_idx)
    mean = tuple(mode == "mean" for mode in layout.mode)
    return _LotLayout(mean, (-1,) * count if unpadded else None)


class Backward:
    """The gradients of one call from the upstream gradient of each lookup.

    ``like``: shape and dtype of each table; ``winners``, ``by_place``: from the forward pass (see
    ``Found``); ``shards``: for each matrix, the sharded table that it is this rank's part of, or
    None.
    """

    def __init__(
        self,
        call: Call,
        like: Sequence[tuple[torch.Size, torch.dtype]],
        grads: Sequence[Tensor | None],
        winners: Iterator[Tensor | None],
        by_place: bool,
        shards: Sequence[ShardedTable | None] | None = None,
    ) -> None:
        self.call, self.like, self.grads, self.by_place = call, like, grads, by_place
        self.shards = shards or [None] * len(like)
        modes = call.layout.mode
        self.winners = {k: next(winners) for k, mode in enumerate(modes) if mode == "max"}
        self.lookups: dict[int, list[int]] = {}
        for k, t in enumerate(call.layout.table):
            if grads[k] is not None:
                self.lookups.setdefault(t, []).append(k)

    def tables(
        self,
        wanted: Sequence[bool],
        claimed: Sequence[Callable[[], bool]] | None,
        whole: Sequence[bool] = (),
    ) -> list[Tensor | None]:
        """The gradient of each table: RowGrad, sparse COO, or dense with ``create_graph``.

        ``claimed``: whether a fused optimizer owns each table; None if no lookup is sparse.
        ``whole``: for each lookup, whether its table's gradient is to be dense.
        """
        found: list[Tensor | None] = [None] * len(self.like)
        held: dict[int, bool] = {}
        dense = torch.is_grad_enabled()
        for t, lookups in self.lookups.items():
            if not wanted[t]:
                continue
            sparse = claimed is not None and all(self.call.layout.sparse[k] for k in lookups)
            coo = claimed is not None and sparse and not claimed[t]()
            if coo or dense:
                found[t] = self.matrix(t, [self.piece(k, None) for k in lookups], coo)
            elif whole and not sparse and all(whole[k] for k in lookups):
                found[t] = self._added(t, [self.piece(k, None) for k in lookups])
            else:
                held[t] = sparse
        recorded = recording.current() is not None
        own = None if recorded else copies(self.held(held))
        for t, sparse in held.items():
            pieces = [self.piece(k, own) for k in self.lookups[t]]
            shape, dtype = self.like[t]
            where, table = pieces[0].rows.device, self.shards[t]
            found[t] = row_grad(shape, dtype, where, pieces, sparse, owned=True, table=table)
        return found

    def _added(self, t: int, pieces: list[Piece]) -> Tensor:
        """The dense gradient of table ``t``; it keeps nothing of the pieces."""
        shape, dtype = self.like[t]
        where = pieces[0].rows.device
        return row_grad(shape, dtype, where, pieces, owned=True).dense()

    def held(self, tables: Iterable[int]) -> Iterator[Tensor]:
        """What the gradients of ``tables`` keep of the batch: ids, offsets, weights."""
        call = self.call
        for t in tables:
            for k in self.lookups[t]:
                if call.layout.mode[k] == "max":
                    continue  # backward makes its ids from the winners
                yield call.ids[k]
                for kept in (call.offsets[k], call.per_sample_weights[k]):
                    if kept is not None:
                        yield kept

    def matrix(self, t: int, pieces: Sequence[Piece], coo: bool) -> Tensor:
        """The gradient of table ``t`` as a plain tensor, sparse COO (``coo``) or dense."""
        shape, dtype = self.like[t]
        ids, rows = _cat([expanded(p, shape[0]) for p in pieces])
        rows = rows.to(dtype)
        if not coo:
            return rows.new_zeros(tuple(shape)).index_add(0, ids, rows)
        return torch.sparse_coo_tensor(ids.unsqueeze(0), rows, tuple(shape), check_invariants=False)

    def piece(self, k: int, own: Mapping[int, Tensor] | None) -> Piece:
        """The gradient of lookup ``k`` as a Piece (ids and upstream rows), not yet expanded.

        ``own``: flat copies of the tensors it keeps of the batch, by ``id()``; None: keep the
        batch's own.
        """
        grad, call = self.grads[k], self.call
        assert grad is not None
        layout = call.layout
        mode, ids = layout.mode[k], call.ids[k]
        if grad.dim() != 2:
            grad = grad.reshape(-1, grad.shape[-1])
        if grad.stride(1) != 1:
            grad = grad.contiguous()
        if mode == "max":
            return self.piece_of_max(k, grad, own is not None)
        offsets, fixed, weights = call.offsets[k], 1, call.per_sample_weights[k]
        if mode == "none":
            offsets = None
        elif offsets is None:
            fixed = ids.shape[1]
        if own is None:
            flat, version = _flat(ids), -1
            weights = None if weights is None else _flat(weights)
        else:
            flat, version = own[id(ids)], version_of(grad)
            offsets = None if offsets is None else own[id(offsets)]
            weights = None if weights is None else own[id(weights)]
        padding = None if layout.padding_idx[k] is None else self.padding(k)
        return Piece(flat, grad, offsets, fixed, weights, mode == "mean", padding, None, version)

    def piece_of_max(self, k: int, grad: Tensor, watched: bool) -> Piece:
        """The same for a "max" lookup, whose ids come from its winners."""
        winner, rows = self.winners[k], self.like[self.call.layout.table[k]][0][0]
        assert winner is not None
        if self.by_place:
            won = placed_rows(winner, grad, _flat(self.call.ids[k]))
        else:
            won = won_rows(winner, grad, rows)
        version = version_of(won[1]) if watched else -1
        return Piece(*won, None, 1, None, False, None, None, version)

    def padding(self, k: int) -> int | None:
        """``padding_idx`` of lookup k, counted from the first row."""
        layout = self.call.layout
        index = layout.padding_idx[k]
        rows = self.like[layout.table[k]][0][0]
        return index + rows if index is not None and index < 0 else index

    def sample_weights(self, k: int) -> Tensor | None:
        """The gradient of the per-sample weights of lookup ``k``: (grad of the bag) · (row)."""
        grad = self.grads[k]
        if grad is None:
            return None
        call, ids = self.call, self.call.ids[k]
        where = None if torch.is_grad_enabled() else embedding_cuda.serving(grad)
        if where is not None:
            done = cuda_weight_grad.sample_weights(call, k, grad, where)
            if done is not None:
                return done
        done = self._weights_of_kernel(k, grad)
        if done is not None:
            return done
        flat = ids.reshape(-1)
        bag = bag_of(call.offsets[k], ids.shape[-1], len(flat), len(grad), flat.device)
        dead = bag >= len(grad)
        padding = call.left_out(k)
        if padding is not None:
            dead = dead | (flat == padding)
        if _unread(grad):
            dead = dead | (flat < 0) | (flat >= len(call.weight(k)))
            flat = flat.masked_fill(dead, 0)
        # The padding gets no gradient here either, where this is differentiated itself.
        rows = F.embedding(flat, call.weight(k), padding_idx=self.padding(k))
        products = grad.index_select(0, bag.clamp(max=len(grad) - 1)) * rows
        out = products.sum(1).to(call.weight(k).dtype)
        return out.masked_fill(dead, 0).reshape(ids.shape)

    def _weights_of_kernel(self, k: int, grad: Tensor) -> Tensor | None:
        """``sample_weights`` by the C++ kernel, which copies no row; None if it cannot be used."""
        extension, call = _extension(grad), self.call
        if extension is None:
            return None
        ids = call.ids[k].contiguous()
        out = torch.zeros(ids.shape, dtype=call.weight(k).dtype)
        padding = call.left_out(k)
        done = extension.sample_weights(
            grad, call.weight(k), ids, call.offsets[k], -1 if padding is None else padding, out,
            device.threads(),
        )  # fmt: skip
        return out if done else None


def _extension(grad: Tensor) -> Any:
    """The C++ kernels if they may be used on ``grad``; else None."""
    if torch.is_grad_enabled() or not grad.is_cpu or torch._C._len_torch_dispatch_stack():
        return None
    return device.extension()


def _flat(tensor: Tensor) -> Tensor:
    return (tensor if tensor.dim() == 1 else tensor.reshape(-1)).contiguous()


def bag_of(
    offsets: Tensor | None, fixed: int, count: int, bags: int, where: torch.device
) -> Tensor:
    """(count,) int64: the bag of each of ``count`` ids; ``bags`` for ids after the last end."""
    place = torch.arange(count, device=where)
    if offsets is None:
        return place // max(fixed, 1)
    bag = torch.searchsorted(offsets.long().contiguous(), place, right=True) - 1
    return bag.clamp(max=bags)


def expanded(piece: Piece, count: int) -> tuple[Tensor, Tensor]:
    """``(ids, rows)``, (n,) int64 and (n, dim), of a Piece of a table of ``count`` rows;
    differentiable in its rows.

    One row per id. Ids that get no gradient are dropped; on a GPU, where it would take a
    synchronisation to count them, they stay and have rows of zeros.
    """
    ids, rows = piece.ids.long(), piece.rows
    if not len(rows):
        return ids[:0], rows
    bag = bag_of(piece.offsets, piece.fixed, len(ids), len(rows), ids.device)
    keep = bag < len(rows)
    if piece.padding_idx is not None:
        keep = keep & (ids != piece.padding_idx)
    if piece.mean:
        counts = torch.zeros(len(rows) + 1, device=rows.device)  # in 16 bits they would stop at 256
        counts = counts.to(torch.promote_types(counts.dtype, rows.dtype))
        counts = counts.index_add(0, bag, keep.to(counts.dtype))[: len(rows)]
        rows = rows / counts.clamp(min=1).unsqueeze(1)
    weights = piece.weights
    if _unread(rows):
        keep = keep & (ids >= 0) & (ids < count)
        spare = piece.padding_idx
        ids = ids.masked_fill(~keep, 0 if spare is None or spare >= count else spare)
        out = rows.index_select(0, bag.clamp(max=len(rows) - 1))
        out = out.masked_fill(~keep.unsqueeze(1), 0)
    else:
        kept = keep.nonzero().squeeze(1)
        ids, bag = ids.index_select(0, kept), bag.index_select(0, kept)
        out = rows.index_select(0, bag)
        weights = None if weights is None else weights.index_select(0, kept)
    if weights is not None:
        out = out * weights.unsqueeze(1)
    if piece.scale is not None:
        out = out * piece.scale
    return ids, out


def _unread(tensor: Tensor) -> bool:
    """Whether ids on the device of ``tensor`` are unchecked, and reading them would synchronise."""
    return tensor.is_cuda or gpu.serving(tensor) is not None


def won_rows(winner: Tensor, grad: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """``(ids, rows)``: for each bag, one row per id that won a column, zero in all other columns.

    ``winner``: (bags, dim) row ids, -1 in empty bags; ``grad``: (bags, dim).
    """
    bags, dim = grad.shape
    extension = _extension(grad)
    if extension is not None:

        def empty(count: int) -> tuple[Tensor, Tensor]:
            return winner.new_empty(count), grad.new_empty(count, dim)

        found: tuple[Tensor, Tensor] | None = extension.won_rows(
            winner, grad, empty, device.threads()
        )
        if found is not None:
            return found
    bag = torch.arange(bags, device=grad.device).unsqueeze(1)
    live = winner >= 0
    keys = (bag * rows + winner)[live]
    unique, inverse = torch.unique(keys, return_inverse=True)
    column = torch.arange(dim, device=grad.device).expand(bags, dim)[live]
    out = grad.new_zeros(len(unique), dim).index_put((inverse, column), grad[live])
    return unique % rows, out


def placed_rows(winner: Tensor, grad: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """``(ids, rows)``: the same with a row for every id. An id that won nothing has a row of zeros
    and is replaced by a winner's, so that the update touches no row of the table that won nothing.

    ``winner``: (bags, dim) positions in ``ids``, len(ids) in empty bags; ``grad``: (bags, dim).
    """
    count = len(ids)
    if not count or not winner.numel():
        return ids[:0], grad.new_empty(0, grad.shape[1])
    # In one column each row is written at most once, except the last, which is dropped.
    rows = grad.new_zeros(count + 1, grad.shape[1]).scatter(0, winner, grad)[:count]
    won = torch.zeros(count + 1, dtype=torch.bool, device=ids.device)
    won.scatter_(0, winner.reshape(-1), True)
    some = ids.index_select(0, winner.min().clamp(max=count - 1).reshape(1))
    return torch.where(won[:count], ids, some), rows


def _cat(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(pairs) == 1:
        return pairs[0]
    return torch.cat([ids for ids, _ in pairs]), torch.cat([rows for _, rows in pairs])
