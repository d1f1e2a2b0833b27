"""What torch's operations do to a row gradient: it stays rows, is merged, or becomes dense.

An operation in ``RULES`` keeps rows if its rule says so; any other runs on the dense gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_map

from recast.runtime.rows import cuda_shared_sorts as row_sorts
from recast.runtime.rows import ranks as row_ranks
from recast.runtime.rows.count import count
from recast.runtime.rows.grad import Cell, RowGrad, may_be_spoiled
from recast.runtime.rows.pieces import unique_piece

aten = torch.ops.aten


# --- what stays rows -----------------------------------------------------------------------------


@_disable_dynamo  # not to be traced when it runs under a compiled step
def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func`` on arguments that include row gradients."""
    rule = RULES.get(func.overloadpacket)
    if rule is not None and "out" not in kwargs:
        result = rule(func, *args, **kwargs)
        if result is not NotImplemented:
            return result
    return _densely(func, args, kwargs)


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
        return grad.sharing(Cell([], full=cell.full.clone(), table=cell.table))
    # Pieces are never written to, so two gradients may share them.
    own = Cell(list(cell.pieces), cell.scale, None, cell.loose, cell.merged, cell.sparse)
    own.table = cell.table
    return grad.sharing(own)


def _times(func: Any, x: Any, y: Any, **kwargs: Any) -> Any:
    """mul and div, out of place; in mul either side may be the scalar."""
    divide = func.overloadpacket is aten.div
    grad, factor = (y, x) if _is_rows(y) and not divide else (x, y)
    if kwargs or not _is_rows(grad) or not _is_scalar(factor):
        return NotImplemented
    result: RowGrad = _clone(func, grad)
    result.rescale(_inverse(factor) if divide else factor)
    return result


def _times_(func: Any, grad: Any, factor: Any, **kwargs: Any) -> Any:
    if kwargs or not _is_rows(grad) or not _is_scalar(factor):
        return NotImplemented
    grad.rescale(_inverse(factor) if func.overloadpacket is aten.div_ else factor)
    return grad


def _inverse(factor: Any) -> Any:
    """1 / factor; infinite for zero, as in torch, where Python would raise."""
    if isinstance(factor, Tensor):
        # In float64: that of an integer would be float32, also for a float64 gradient.
        return 1 / factor.double() if factor.is_cpu else 1 / factor
    return 1 / factor if factor else math.copysign(math.inf, factor)


def _neg(func: Any, grad: Any) -> Any:
    return _times(aten.mul.Tensor, grad, -1.0)


def _zero_(func: Any, grad: Any) -> Any:
    if not _is_rows(grad):
        return NotImplemented
    grad.cell.hold([])
    grad.cell.scale = None
    return grad


def _as_rows(value: Any, like: Tensor) -> RowGrad | None:
    """``value`` as a row gradient that can be added to ``like``; it may be one, or sparse COO."""
    if not isinstance(value, Tensor) or value.shape != like.shape or value.dtype != like.dtype:
        return None
    if isinstance(value, RowGrad):
        return value if value.lazy else None
    if value.layout is not torch.sparse_coo or value.sparse_dim() != 1:
        return None
    piece = unique_piece(value._indices()[0], value._values())  # unique only if coalesced
    cell = Cell([piece], loose=piece.held(), sparse=True)
    return RowGrad(value.shape, value.dtype, value.device, cell)


def _add(func: Any, x: Any, y: Any, *, alpha: Any = 1) -> Any:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or isinstance(alpha, complex):
        return NotImplemented
    rows_x, rows_y = _as_rows(x, y), _as_rows(y, x)
    if rows_x is not None and rows_y is not None:
        result: RowGrad = _clone(func, rows_x)
        result.extend(rows_y, alpha)
        return result
    # A dense gradient plus rows: a copy of the dense one is the only matrix made.
    rows, dense = (rows_x, y) if rows_x is not None else (rows_y, x)
    if rows is None or dense.shape != rows.shape or dense.dtype != rows.dtype:
        return NotImplemented
    full = dense.dense() if isinstance(dense, RowGrad) else dense
    total = full.clone(memory_format=torch.contiguous_format)
    if rows is rows_y:
        rows.add_to(total, alpha)
    else:
        rows.add_to(total.mul_(alpha) if alpha != 1 else total)
    table = rows.cell.table
    return total if table is None else rows.sharing(Cell([], full=total, table=table))


def _add_(func: Any, x: Any, y: Any, *, alpha: Any = 1) -> Any:
    rows = None if isinstance(alpha, complex) else _as_rows(y, x)
    if rows is None and type(y) is Tensor and _is_rows(x) and y.layout is torch.strided:
        # Adding a dense gradient, as for a table that is also read as a whole.
        count("dense-write", "add_")
        x.promote().add_(y, alpha=alpha)
        return x
    if rows is None or not (isinstance(x, RowGrad) or x.layout is torch.strided):
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
        x.cell.hold(list(other.pieces))
        x.cell.scale, x.cell.loose, x.cell.merged = other.scale, other.loose, other.merged
        return x
    y.add_to(x.zero_())
    return x


def _record_stream(func: Any, grad: Any, stream: Any) -> Any:
    """Called by autograd when a gradient is made on one stream and accumulated on another."""
    cell = grad.cell
    held = [cell.full, cell.scale]
    for piece in cell.pieces:
        held += (piece.ids, piece.rows, piece.offsets, piece.weights, piece.scale)
    for t in held:
        if isinstance(t, Tensor) and t.is_cuda:
            t.record_stream(stream)


def _vector_norm(
    func: Any, grad: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    if dim is not None or keepdim or not isinstance(grad, RowGrad):
        return NotImplemented
    return _norms([grad], ord, dtype)[0]


def _norms(grads: Sequence[Tensor], order: Any, dtype: torch.dtype | None) -> list[Tensor]:
    """The norm of each, in ``dtype`` if given; for a sharded table, that of the whole gradient."""
    # Rows of zeros may be left out only if the order is positive.
    rows = [grad for grad in grads if isinstance(grad, RowGrad) and grad.lazy and order > 0]
    norms = dict(zip(map(id, rows), _norms_of_rows(rows, order, dtype), strict=True))
    others = [grad for grad in grads if id(grad) not in norms]
    norms.update((id(grad), _norm_of_dense(grad, order, dtype)) for grad in others)
    return row_ranks.norms(grads, [norms[id(grad)] for grad in grads], order)


def _norm_of_dense(grad: Tensor, order: Any, dtype: torch.dtype | None) -> Tensor:
    if isinstance(grad, RowGrad):
        if grad.numel() == 0 and order < 0 and grad.cell.table is not None:
            # A rank without rows: infinity does not change the minimum over the other ranks.
            return torch.full((), float("inf"), dtype=dtype or grad.dtype, device=grad.device)
        grad = grad._read("linalg_vector_norm")
    return torch.linalg.vector_norm(grad, order, dtype=dtype)


def _norms_of_rows(grads: Sequence[RowGrad], order: Any, dtype: torch.dtype | None) -> list[Tensor]:
    """The norm of each local gradient. Norms that the GPU kernels compute do not synchronise."""
    wanted = [dtype or grad.dtype for grad in grads]
    spoiled = may_be_spoiled() and any(grad.cell.spoils_all for grad in grads)
    if torch.float64 not in wanted and not spoiled:
        found = row_sorts.norms(grads, order)
        if found is not None:
            return [norm.to(of) for norm, of in zip(found, wanted, strict=True)]
    return [_norm_of_rows(grad, order, dtype) for grad in grads]


def _norm_of_rows(grad: RowGrad, order: Any, dtype: torch.dtype | None) -> Tensor:
    ids, rows = grad.merged()
    if grad.cell.spoils_all and len(ids) < grad.shape[0]:
        return torch.full((), math.nan, dtype=dtype or grad.dtype, device=grad.device)
    if rows.numel() == 0:
        return torch.zeros((), dtype=dtype or grad.dtype, device=grad.device)
    norm = torch.linalg.vector_norm(rows, order, dtype=dtype)
    scale = grad.cell.scale
    return norm if scale is None else norm * abs(scale)


_WRITABLE = 1 << 24  # numbers of a gradient up to which isnan, isinf return memory for each


def _is_bad(func: Any, grad: Any) -> Any:
    """isnan, isinf. If all values are finite, this makes no matrix of numbers, and the result for a
    large table is an expanded False, which takes no memory.
    """
    if not _is_rows(grad) or grad.cell.spoils_all:
        return NotImplemented
    largest = row_sorts.norms([grad], float("inf"))
    looked_at = func(grad.scaled()[1]) if largest is None else ~largest[0].isfinite()
    if bool(looked_at.any()):
        return NotImplemented
    # ``torch.isclose`` writes to the result. In a backward pass anomaly detection asks, about every
    # gradient; and loops ask at each step, about tables that nobody compares number by number.
    writable = grad.numel() <= _WRITABLE and torch._C._current_graph_task_id() == -1
    none = torch.zeros(grad.shape if writable else (), dtype=torch.bool, device=grad.device)
    return none.expand(grad.shape)


def _like(func: Any, grad: Any, *args: Any, **kwargs: Any) -> Any:
    """zeros_like, new_empty and so on, which look only at shape, dtype and device."""
    if not _is_rows(grad):
        return NotImplemented
    outline = torch.empty((), dtype=grad.dtype, device=grad.device).expand(grad.shape)
    return func(outline, *args, **kwargs)


# --- lists of gradients --------------------------------------------------------------------------


def _foreach_zero_(func: Any, grads: Any) -> Any:
    for grad in grads:
        grad.zero_()


def _foreach_times_(func: Any, grads: Any, factors: Any) -> Any:
    if not isinstance(factors, list | tuple):
        if not _is_scalar(factors):
            return NotImplemented
        factors = [factors] * len(grads)
    divide = func.overloadpacket is aten._foreach_div_
    for grad, factor in zip(grads, factors, strict=True):
        grad.div_(factor) if divide else grad.mul_(factor)
    return None


def _foreach_norm(func: Any, grads: Any, ord: Any = 2, dtype: Any = None) -> Any:
    return _norms(grads, ord, dtype)


def _unscale_(func: Any, grads: Any, found_inf: Tensor, inverse: Tensor) -> Any:
    """Loss scaling's check that gradients are finite, and unscaling: for row gradients, by their
    scale.
    """
    plain = [g.dense() if isinstance(g, RowGrad) else g for g in grads if not _is_rows(g)]
    if plain:
        func(plain, found_inf, inverse)
    rows = [g for g in grads if _is_rows(g)]
    largest = row_sorts.norms(rows, float("inf"))
    looked_at = [g.scaled()[1] for g in rows] if largest is None else largest
    looked_at = [r for r in looked_at if r.numel()]
    if looked_at:
        func(looked_at, found_inf, torch.ones_like(inverse))  # times one: nothing is written
    row_ranks.agree(grads, found_inf)
    for grad in rows:
        grad.rescale(inverse)


RULES: dict[Any, Callable[..., Any]] = {
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
    aten.record_stream: _record_stream,
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
    """Run ``func`` on dense gradients. A gradient that is written or viewed stays dense; for a
    read, a dense copy is made.
    """
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

    # A view may be written to later, so a viewed gradient must stay dense too.
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
    # An in-place operation returns its argument: the RowGrad, not the matrix inside it.
    return tree_map(lambda x: wrappers.get(id(x), x), result)
