"""RowGrad: the gradient of an embedding table that never becomes a dense matrix by itself.

It is a tensor to everyone who looks at it, and pieces (see ``row_pieces``) inside, held in one
cell that all its aliases share. What it does with an operation:

    detach, clone, ``*`` and ``/`` by a scalar, sums of row gradients, zero_   stays rows
    norms, the finiteness check of loss scaling                               merges rows, reads
    a write or a view                                                         dense from now on
    any other read                                                            a dense copy

The last two are counted (``row_count``): they are right but cost a matrix.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from recast.runtime.row_count import count, counters, reset_counters
from recast.runtime.row_pieces import Piece, merge, sparse_coo, unique_piece

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

aten = torch.ops.aten


@dataclass(slots=True)
class Cell:
    """What the aliases of one gradient share: pieces times a scale, or the dense gradient."""

    pieces: list[Piece]
    scale: Tensor | float | None = None
    full: Tensor | None = None
    loose: int = 0  # bytes held by pieces that are not merged
    merged: bool = False  # one piece of unique, sorted ids


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
        """An alias, as of any tensor."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        # ``p.grad.data = p.grad.data / n``, and what ``module.double()`` does to gradients: torch
        # would exchange the tensor behind our back and leave the rows as they were.
        if isinstance(value, RowGrad):
            cell = value.cell
        else:
            count("dense-write", "data")
            cell = Cell([], full=value.detach())
        like = RowGrad(value.shape, value.dtype, value.device, cell)
        Tensor.data.__set__(self, like)  # type: ignore[attr-defined]
        self.cell = cell

    @property
    def lazy(self) -> bool:
        """Whether it is rows still."""
        return self.cell.full is None

    def sharing(self, cell: Cell) -> RowGrad:
        """A gradient like this one over ``cell``."""
        return RowGrad(self.shape, self.dtype, self.device, cell)

    def merged(self) -> tuple[Tensor, Tensor]:
        """(U,) sorted unique ids and their (U, D) rows, not multiplied by ``cell.scale``."""
        cell = self.cell
        if not cell.merged:
            count("merge")
            ids, rows = merge(cell.pieces, self.shape, self.dtype, self.device)
            cell.pieces, cell.loose, cell.merged = [unique_piece(ids, rows)], 0, True
        return cell.pieces[0].ids, cell.pieces[0].rows

    def scaled(self) -> tuple[Tensor, Tensor]:
        """(U,) sorted unique ids and their (U, D) rows of the gradient itself."""
        ids, rows = self.merged()
        scale = self.cell.scale
        return ids, rows if scale is None else rows * scale

    def dense(self) -> Tensor:
        """The dense gradient: the one in the cell, or a copy made now."""
        if self.cell.full is not None:
            return self.cell.full
        ids, rows = self.scaled()
        full = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return full.index_copy_(0, ids, rows)

    def promote(self) -> Tensor:
        """Become the dense gradient, for all aliases and for good."""
        full = self.dense()
        self.cell.pieces, self.cell.scale, self.cell.full = [], None, full
        self.cell.loose = 0
        return full

    def rescale(self, factor: Tensor | float) -> None:
        """Multiply in place by a scalar."""
        if isinstance(factor, Tensor) and factor.device.type == "cpu":
            factor = float(factor)  # on an accelerator this would wait for the device
        scale = self.cell.scale
        self.cell.scale = factor if scale is None else scale * factor

    def extend(self, other: RowGrad, alpha: float = 1.0) -> None:
        """Add rows in place; merges when they hold more memory than half the table."""
        cell = self.cell
        if cell.scale is not None:
            cell.pieces = [piece.scaled(cell.scale) for piece in cell.pieces]
            cell.scale = None
        for piece in other.cell.pieces:
            scaled = piece.scaled(other.cell.scale)
            cell.pieces.append(scaled if alpha == 1 else scaled.scaled(alpha))
            cell.loose += piece.held()
        cell.merged = False
        if cell.loose > self.numel() * self.dtype.itemsize // 2:
            self.merged()

    def add_to(self, dense: Tensor, alpha: float = 1.0) -> None:
        """``dense += alpha * self`` on the touched rows."""
        ids, rows = self.scaled()
        dense.index_add_(0, ids, rows.to(dense.dtype), alpha=alpha)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        what = "dense" if not self.lazy else f"{sum(len(p.rows) for p in self.cell.pieces)} rows"
        return f"RowGrad({tuple(self.shape)}, {what}, dtype={self.dtype})"

    def numpy(self, *, force: bool = False) -> Any:
        return self._read("numpy").numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self._read("numpy").__array__(dtype)

    def tolist(self) -> Any:
        return self._read("tolist").tolist()

    def data_ptr(self) -> int:
        # For somebody who may write to it behind torch's back. (untyped_storage() is torch's: it
        # raises when its memory is asked for.)
        if self.lazy:
            count("dense-write", "data_ptr")
        return self.promote().data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> RowGrad:
        copy: RowGrad = memo.setdefault(id(self), self.clone())
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A saved gradient loads anywhere, with or without this package.
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
        kwargs = kwargs or {}
        rule = _RULES.get(func.overloadpacket)
        if rule is not None:
            result = rule(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return _densely(func, args, kwargs)


def row_grad(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, pieces: list[Piece]
) -> RowGrad:
    """The gradient of a table of ``shape`` (rows, D) made of ``pieces``.

    Ids, offsets and weights are copied (they are the user's batch); the rows are kept as they are.
    """
    own = [piece.own() for piece in pieces]
    return RowGrad(shape, dtype, device, Cell(own, loose=sum(piece.held() for piece in own)))


# --- which tables a fused optimizer owns ---------------------------------------------------------

_CLAIMS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def claim(weight: Tensor, owner: object) -> None:
    """From now on, and as long as ``owner`` lives, ``claimed(weight)``."""
    _CLAIMS[weight] = weakref.ref(owner)


def claimed(weight: Tensor) -> bool:
    """Whether a fused optimizer owns this table and wants a RowGrad, ``sparse=True`` or not."""
    if not _CLAIMS:
        return False
    owner = _CLAIMS.get(weight)
    return owner is not None and owner() is not None


# --- what stays rows -----------------------------------------------------------------------------


def _is_rows(value: object) -> bool:
    return isinstance(value, RowGrad) and value.cell.full is None


def _is_scalar(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex()
    return isinstance(value, int | float)


def _alias(func: Any, grad: Any, *args: Any, **kwargs: Any) -> Any:
    return grad.sharing(grad.cell) if isinstance(grad, RowGrad) else NotImplemented


def _view(func: Any, grad: Any, size: Any, *args: Any, **kwargs: Any) -> Any:
    same = _is_rows(grad) and tuple(size) == tuple(grad.shape)
    return grad.sharing(grad.cell) if same else NotImplemented


def _clone(func: Any, grad: Any, **kwargs: Any) -> Any:
    cell = grad.cell
    if cell.full is not None:
        return grad.sharing(Cell([], full=cell.full.clone()))
    # Pieces are never written to, so two gradients may hold the same ones.
    return grad.sharing(Cell(list(cell.pieces), cell.scale, None, cell.loose, cell.merged))


def _times(func: Any, x: Any, y: Any, **kwargs: Any) -> Any:
    """mul, div: out of place, either side may be the scalar (of mul)."""
    divide = func.overloadpacket is aten.div
    grad, factor = (y, x) if _is_rows(y) and not divide else (x, y)
    if kwargs or not _is_rows(grad) or not _is_scalar(factor):
        return NotImplemented
    result: RowGrad = _clone(func, grad)
    result.rescale(1 / factor if divide else factor)
    return result


def _times_(func: Any, grad: Any, factor: Any, **kwargs: Any) -> Any:
    if kwargs or not _is_rows(grad) or not _is_scalar(factor):
        return NotImplemented
    grad.rescale(1 / factor if func.overloadpacket is aten.div_ else factor)
    return grad


def _neg(func: Any, grad: Any) -> Any:
    return _times(aten.mul.Tensor, grad, -1.0)


def _zero_(func: Any, grad: Any) -> Any:
    if not _is_rows(grad):
        return NotImplemented
    grad.cell.pieces, grad.cell.scale, grad.cell.loose, grad.cell.merged = [], None, 0, False
    return grad


def _as_rows(value: Any, like: Tensor) -> RowGrad | None:
    """A row gradient, or torch's own sparse one as such, that can be added to ``like``."""
    if not isinstance(value, Tensor) or value.shape != like.shape or value.dtype != like.dtype:
        return None
    if isinstance(value, RowGrad):
        return value if value.lazy else None
    if value.layout is not torch.sparse_coo or value.sparse_dim() != 1:
        return None
    piece = unique_piece(value._indices()[0], value._values())  # not unique, if not coalesced
    cell = Cell([piece], loose=piece.held())
    return RowGrad(value.shape, value.dtype, value.device, cell)


def _add(func: Any, x: Any, y: Any, *, alpha: Any = 1) -> Any:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or isinstance(alpha, complex):
        return NotImplemented
    rows_x, rows_y = _as_rows(x, y), _as_rows(y, x)
    if rows_x is not None and rows_y is not None:
        result: RowGrad = _clone(func, rows_x)
        result.extend(rows_y, alpha)
        return result
    # A dense gradient and rows: the dense one is copied, and no other matrix is made.
    rows, dense = (rows_x, y) if rows_x is not None else (rows_y, x)
    if rows is None or dense.shape != rows.shape or dense.dtype != rows.dtype:
        return NotImplemented
    full = dense.dense() if isinstance(dense, RowGrad) else dense
    total = full.clone(memory_format=torch.contiguous_format)
    if rows is rows_y:
        rows.add_to(total, alpha)
    else:
        rows.add_to(total.mul_(alpha) if alpha != 1 else total)
    return total


def _add_(func: Any, x: Any, y: Any, *, alpha: Any = 1) -> Any:
    rows = None if isinstance(alpha, complex) else _as_rows(y, x)
    if rows is None or x.layout is not torch.strided:
        return NotImplemented
    if _is_rows(x):
        x.extend(rows, alpha)
    else:
        rows.add_to(x.dense() if isinstance(x, RowGrad) else x, alpha)
    return x


def _copy_(func: Any, x: Any, y: Any, non_blocking: bool = False) -> Any:
    if not _is_rows(y) or x.shape != y.shape or x.device != y.device:
        return NotImplemented
    if isinstance(x, RowGrad):
        if not x.lazy or x.dtype != y.dtype:
            return NotImplemented
        other = y.cell
        x.cell.pieces, x.cell.scale = list(other.pieces), other.scale
        x.cell.loose, x.cell.merged = other.loose, other.merged
        return x
    y.add_to(x.zero_())
    return x


def _vector_norm(
    func: Any, grad: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    # Rows of zeros count for nothing in norms of positive order only.
    if not _is_rows(grad) or ord <= 0 or dim is not None or keepdim:
        return NotImplemented
    rows = grad.merged()[1]
    if rows.numel() == 0:
        return torch.zeros((), dtype=dtype or grad.dtype, device=grad.device)
    norm = torch.linalg.vector_norm(rows, ord, dtype=dtype)
    scale = grad.cell.scale
    return norm if scale is None else norm * abs(scale)


def _is_bad(func: Any, grad: Any) -> Any:
    """isnan, isinf (asked of every gradient by anomaly detection): nothing bad needs no memory."""
    if not _is_rows(grad) or bool(func(grad.scaled()[1]).any()):
        return NotImplemented
    return torch.zeros((), dtype=torch.bool, device=grad.device).expand(grad.shape)


def _like(func: Any, grad: Any, *args: Any, **kwargs: Any) -> Any:
    """zeros_like, new_empty ...: only the shape is looked at."""
    if not _is_rows(grad):
        return NotImplemented
    outline = torch.empty((), dtype=grad.dtype, device=grad.device).expand(grad.shape)
    return func(outline, *args, **kwargs)


# --- lists of gradients --------------------------------------------------------------------------


def _foreach_zero_(func: Any, grads: Any) -> Any:
    for grad in grads:
        grad.zero_()


def _foreach_times_(func: Any, grads: Any, factors: Any) -> Any:
    divide = func.overloadpacket is aten._foreach_div_
    if not isinstance(factors, list | tuple):
        if not _is_scalar(factors):
            return NotImplemented
        factors = [factors] * len(grads)
    for grad, factor in zip(grads, factors, strict=True):
        grad.div_(factor) if divide else grad.mul_(factor)
    return None


def _foreach_norm(func: Any, grads: Any, ord: Any = 2, dtype: Any = None) -> Any:
    return [torch.linalg.vector_norm(grad, ord, dtype=dtype) for grad in grads]


def _unscale_(func: Any, grads: Any, found_inf: Tensor, inverse: Tensor) -> Any:
    """The finiteness check of loss scaling; rows are looked at, and scaled by their factor."""
    plain = [g.dense() if isinstance(g, RowGrad) else g for g in grads if not _is_rows(g)]
    if plain:
        func(plain, found_inf, inverse)
    rows = [g for g in grads if _is_rows(g)]
    looked_at = [g.scaled()[1] for g in rows]
    looked_at = [r for r in looked_at if r.numel()]
    if looked_at:
        func(looked_at, found_inf, torch.ones_like(inverse))  # times one: nothing is written
    for grad in rows:
        grad.rescale(inverse)


_RULES: dict[Any, Callable[..., Any]] = {
    aten.detach: _alias,
    aten.alias: _alias,
    aten.view: _view,
    aten.clone: _clone,
    aten.mul: _times,
    aten.div: _times,
    aten.mul_: _times_,
    aten.div_: _times_,
    aten.neg: _neg,
    aten.zero_: _zero_,
    aten.add: _add,
    aten.add_: _add_,
    aten.copy_: _copy_,
    aten.linalg_vector_norm: _vector_norm,
    aten.isnan: _is_bad,
    aten.isinf: _is_bad,
    aten.zeros_like: _like,
    aten.ones_like: _like,
    aten.empty_like: _like,
    aten.full_like: _like,
    aten.rand_like: _like,
    aten.randn_like: _like,
    aten.new_zeros: _like,
    aten.new_ones: _like,
    aten.new_empty: _like,
    aten.new_full: _like,
    aten.new_empty_strided: _like,
    aten._foreach_zero_: _foreach_zero_,
    aten._foreach_mul_: _foreach_times_,
    aten._foreach_div_: _foreach_times_,
    aten._foreach_norm: _foreach_norm,
    aten._amp_foreach_non_finite_check_and_unscale_: _unscale_,
}


# --- everything else -----------------------------------------------------------------------------


def _densely(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on dense gradients: written to or viewed, it stays dense; read, it is a copy."""
    schema = func._schema
    aliased = [a.alias_info is not None for a in schema.arguments]
    views = any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)
    wrappers: dict[int, RowGrad] = {}

    def plain(value: Any, keep: bool) -> Any:
        if not isinstance(value, RowGrad):
            return value
        if value.lazy:
            count("dense-write" if keep else "dense-read", schema.name.removeprefix("aten::"))
        if not keep:
            return value.dense()
        full = value.promote()
        wrappers[id(full)] = value
        return full

    # A view may be written to later, so what is viewed is kept as well.
    by_name = {a.name: keep or views for a, keep in zip(schema.arguments, aliased, strict=True)}
    plain_args = [
        tree_map(lambda x, keep=by_name[a.name]: plain(x, keep), value)
        for value, a in zip(args, schema.arguments, strict=False)
    ]
    plain_kwargs = {
        name: tree_map(lambda x, keep=by_name[name]: plain(x, keep), value)
        for name, value in kwargs.items()
    }
    result = func(*plain_args, **plain_kwargs)
    # An operation in place returns its argument: that is the gradient, not the matrix inside.
    return tree_map(lambda x: wrappers.get(id(x), x), result)
