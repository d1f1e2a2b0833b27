"""Pieces: the gradient of embedding lookups, before anything is summed or written out.

The gradient of ``out[b] = Σ_{i in bag b} f_i · table[id_i]`` with respect to row r of the table is
``Σ_{i: id_i = r} f_i · rows[bag(i)]``, where ``rows`` is the gradient of ``out``. A ``Piece`` keeps
the right-hand side as the backward pass left it; ``merge`` turns pieces into unique ids and their
summed rows, which norms, finiteness checks and updates need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recast.errors import UsageError
from recast.runtime.rows import cuda as row_cuda
from recast.runtime.rows import kernel as row_kernel


@dataclass(slots=True)
class Piece:
    """The gradient of one lookup. ``rows`` may be shared with other tables and is never written.

    ids: (N,) int32 or int64, contiguous, bag after bag.
    rows: (n_bags, D) gradient of the lookup's output; any row stride; n_bags == N without pooling.
    offsets: (n_bags,) starts, or (n_bags + 1,) starts and the end; None if all bags have one size.
    fixed: ids per bag if ``offsets`` is None (1 without pooling).
    weights: (N,) factor of each id, or None.
    mean: whether to divide by the number of ids in the bag, padding not counted.
    padding_idx: ids equal to it (non-negative) get no gradient.
    scale: a factor of the whole piece, or None.
    version: the version counter of ``rows`` when the piece was made; -1: not watched.
    """

    ids: Tensor
    rows: Tensor
    offsets: Tensor | None
    fixed: int
    weights: Tensor | None
    mean: bool
    padding_idx: int | None
    scale: Tensor | float | None
    version: int = -1

    def held(self) -> int:
        """Bytes kept alive by this piece."""
        rows = self.rows
        return rows.shape[0] * rows.shape[1] * rows.itemsize + self.ids.numel() * self.ids.itemsize

    def own(self) -> Piece:
        """The same piece with its own copies of ids, offsets and weights.

        After the backward pass the user may load the next batch into the same buffers (or step the
        parameters that the weights came from) before the update.
        """
        return own_all([self])[0]

    def scaled(self, scale: Tensor | float | None) -> Piece:
        """The same piece times a factor."""
        if scale is None:
            return self
        return dataclasses.replace(self, scale=scale if self.scale is None else self.scale * scale)

    def check(self) -> None:
        """Raise UsageError if ``rows`` were overwritten since the backward pass."""
        rows = self.rows
        if self.version < 0 or rows._version == self.version:
            return
        # A slice of a bigger gradient shares its version counter with its neighbours: a new version
        # proves nothing.
        if rows.numel() * rows.itemsize < rows.untyped_storage().nbytes():
            return
        raise UsageError(
            "the gradient of a lookup was overwritten between backward() and its use",
            why="a table's gradient keeps it as it was, and another tensor shares its memory",
            tries=(
                "clone() the gradient before changing it in place",
                "change it out of place",
            ),
        )


def copies(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """A flat copy of each tensor, by its ``id()``; one copy operation per dtype and width."""
    alike: dict[tuple[torch.dtype, int], dict[int, Tensor]] = {}
    for tensor in tensors:
        dims = tensor.dim()
        width = tensor.shape[1] if dims == 2 else 0
        flat = tensor if dims == 1 or width else tensor.reshape(-1)
        alike.setdefault((tensor.dtype, width), {})[id(tensor)] = flat
    found: dict[int, Tensor] = {}
    for (_, width), group in alike.items():
        whole = torch.cat(list(group.values())).detach()
        sizes = [t.shape[0] * (width or 1) for t in group.values()]
        found.update(zip(group, torch.split_with_sizes(whole.view(-1), sizes), strict=True))
    return found


def own_all(pieces: Sequence[Piece]) -> list[Piece]:
    """``own()`` of each piece, with a few copies in total rather than one per tensor."""
    own = copies(
        t for piece in pieces for t in (piece.ids, piece.offsets, piece.weights) if t is not None
    )
    return [
        Piece(
            own[id(piece.ids)],
            piece.rows,
            None if piece.offsets is None else own[id(piece.offsets)],
            piece.fixed,
            None if piece.weights is None else own[id(piece.weights)],
            piece.mean,
            piece.padding_idx,
            piece.scale,
            version_of(piece.rows),
        )
        for piece in pieces
    ]


def version_of(rows: Tensor) -> int:
    """The present ``Piece.version`` of these rows."""
    return -1 if rows.is_inference() else rows._version


def unique_piece(ids: Tensor, rows: Tensor) -> Piece:
    """A piece with one row per id, without pooling."""
    return Piece(ids, rows, None, 1, None, False, None, None)


def merge(
    pieces: Sequence[Piece], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Sum pieces by row: (U,) int64 ids, sorted and unique, and (U, D) rows of ``dtype``.

    Duplicates are added in the order of the ids, in fp32 at least, as in torch's dense gradient.
    On a GPU the host waits for U.

    Raises:
        IdError: an id is outside the table of ``shape`` (rows, D), or offsets outside their ids.
        UsageError: the gradient was overwritten since the backward pass.
    """
    pieces = [piece for piece in pieces if piece.ids.numel() and piece.rows.shape[0]]
    if not pieces:
        return (
            torch.empty(0, dtype=torch.int64, device=device),
            torch.empty(0, shape[1], dtype=dtype, device=device),
        )
    for piece in pieces:
        piece.check()
    merged = row_cuda.merge(pieces, shape, dtype) or row_kernel.merge(pieces, shape, dtype)
    return merged or _merge_in_torch(pieces, shape, dtype)


def _merge_in_torch(
    pieces: Sequence[Piece], shape: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    compute = torch.promote_types(dtype, torch.float32)
    all_ids, all_sources, all_factors, all_rows = [], [], [], []
    first = 0
    for piece in pieces:
        ids, bags, factors = _entries(piece, compute)
        all_ids.append(ids)
        all_sources.append(bags + first)
        all_factors.append(factors)
        rows = piece.rows.to(compute)
        # Forward mode makes zero tensors without memory, which the lookup below would read.
        all_rows.append(rows.clone() if rows._is_zerotensor() else rows)
        first += piece.rows.shape[0]
    ids, order = torch.cat(all_ids).sort(stable=True)
    sources, factors = torch.cat(all_sources)[order], torch.cat(all_factors)[order]
    if ids.numel() == 0:
        return ids, all_rows[0].new_empty(0, shape[1]).to(dtype)
    if int(ids[0]) < 0 or int(ids[-1]) >= shape[0]:
        raise row_kernel.id_error(int(ids[0]) if int(ids[0]) < 0 else int(ids[-1]), shape[0])
    unique, counts = torch.unique_consecutive(ids, return_counts=True)
    # The segment sum is itself a pooled lookup, in the gradient's rows, ordered by id.
    rows = torch.nn.functional.embedding_bag(
        sources,
        torch.cat(all_rows) if len(all_rows) > 1 else all_rows[0],
        counts.cumsum(0) - counts,
        mode="sum",
        per_sample_weights=factors,
    )
    return unique, rows.to(dtype)


def _entries(piece: Piece, compute: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(n,) ids, (n,) bags and (n,) factors of all ids that get a gradient."""
    n_bags, device = piece.rows.shape[0], piece.rows.device
    bags = torch.arange(n_bags, device=device)
    ids = piece.ids.long()
    weights = piece.weights
    if piece.offsets is None:
        bags = bags if piece.fixed == 1 else bags.repeat_interleave(piece.fixed)
    else:
        bounds = piece.offsets.long()
        if bounds.numel() == n_bags:
            bounds = torch.cat([bounds, bounds.new_full((1,), ids.numel())])
        sizes = bounds.diff()
        if (sizes < 0).any() or (n_bags and bounds[0] != 0) or bounds[-1] > ids.numel():
            raise row_kernel.offsets_error()
        bags = bags.repeat_interleave(sizes)
        ids = ids[: bags.numel()]
        weights = None if weights is None else weights[: bags.numel()]
    factors = torch.ones_like(bags, dtype=compute) if weights is None else weights.to(compute)
    if piece.padding_idx is not None:
        kept = ids != piece.padding_idx
        ids, bags, factors = ids[kept], bags[kept], factors[kept]
    if piece.mean:
        factors = factors / torch.bincount(bags, minlength=n_bags)[bags]
    if piece.scale is not None:
        factors = factors * piece.scale
    return ids, bags, factors


def sparse_coo(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, pieces: Sequence[Piece]
) -> Tensor:
    """Pieces as torch's own sparse gradient: a coalesced COO tensor of ``shape`` (rows, D)."""
    ids, rows = merge(pieces, shape, dtype, device)
    return torch.sparse_coo_tensor(
        ids.unsqueeze(0), rows, tuple(shape), check_invariants=False, is_coalesced=True
    )
