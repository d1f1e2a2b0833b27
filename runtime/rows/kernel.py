"""The C++ kernel of row gradients (``csrc/row_update.cpp``), and when it can be used.

It takes tables on the CPU whose numbers (weights, optimizer state, gradients) are fp32, or fp32
mixed with either fp16 or bf16; all sums are fp32. Everything else uses the same formulas in torch
(``pieces``, ``update``). All tables of a step go through one call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recast.errors import IdError
from recast.runtime import device

if TYPE_CHECKING:
    from recast.runtime.rows.grad import RowGrad
    from recast.runtime.rows.pieces import Piece
    from recast.runtime.rows.update import Update

_ID_DTYPES = (torch.int64, torch.int32)


def merge(
    pieces: Sequence[Piece], shape: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """(U,) sorted unique int64 ids and (U, D) summed rows; None if the kernel cannot be used.

    Raises IdError for an id outside the table.
    """
    extension = device.extension()
    if extension is None or dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return None
    for plain in (False, True):
        given = [_plain(piece) if plain else piece for piece in pieces]
        try:
            total = extension.RowSum(given, shape[0], shape[1], device.threads())
        except IndexError as error:
            raise _error(str(error).split()[1], shape[0]) from None
        if (n := total.count()) >= 0:
            ids = torch.empty(n, dtype=torch.int64)
            rows = torch.empty(n, shape[1])
            total.store(ids, rows)
            return ids, rows.to(dtype)
    return None


def update(updates: Sequence[Update]) -> Sequence[Update]:
    """Update in place the tables that the kernel takes, in one call; return the other updates."""
    if not updates or device.extension() is None:
        return updates
    steps = [_step(updates, None)]
    left = [updates[i] for i in steps[0].left]
    if left:
        pieces = [[_plain(piece) for piece in one.grad.cell.pieces] for one in left]
        steps.append(_step(left, pieces))
        left = [left[i] for i in steps[1].left]
    done = {id(one) for one in left}
    for step in steps:
        step.run()
    # As after any in-place operation: backward through a graph that saved the table must raise.
    written = [t for one in updates if id(one) not in done for t in (one.weight, *one.states)]
    torch.autograd.graph.increment_version(written)
    return left


def add(grad: RowGrad, dense: Tensor, alpha: float = 1.0) -> bool:
    """``dense += alpha * grad`` on looked-up rows, each written once; False: nothing was done."""
    if type(dense) is not Tensor or not dense.is_cpu or dense.requires_grad:
        return False
    if dense.dtype is not torch.float32 or grad.dtype is not torch.float32:
        return False
    if device.extension() is None or isinstance(grad.cell.scale, Tensor):
        return False
    for piece in grad.cell.pieces:
        piece.check()
    # An SGD step with lr = -1, in the form of an Update.
    numbers = (-1.0, 0.0, (0.0, 0.0), 0.0, 0.0, 0.0, float(alpha))
    step = _step([("sgd", dense, grad, (), *numbers, None, None, None, None)], None)
    if step.left:
        return False
    step.run()
    torch.autograd.graph.increment_version([dense])
    return True


def count_steps(steps: list[Tensor]) -> None:
    """Add one to optimizers' step counts on the CPU: () float tensors."""
    if not steps:
        return
    extension = device.extension()
    if extension is not None and extension.count_steps(steps):
        torch.autograd.graph.increment_version(steps)
    else:  # a tensor, as a Python number would be wrapped anew for each count
        torch._foreach_add_(steps, torch.tensor(1.0), alpha=1.0)


def _step(updates: Sequence[tuple[Any, ...]], pieces: list[list[Piece]] | None) -> Any:
    try:
        return device.extension().RowStep(updates, pieces, device.threads())
    except IndexError as error:
        table, bad = str(error).split()
        raise _error(bad, updates[int(table)][1].shape[0]) from None


def _plain(piece: Piece) -> Piece:
    """The same piece in a layout that the kernel reads."""
    offsets, weights = piece.offsets, piece.weights
    return dataclasses.replace(
        piece,
        ids=_indices(piece.ids),
        rows=piece.rows.contiguous(),
        offsets=None if offsets is None else _indices(offsets),
        weights=None if weights is None else weights.float().contiguous(),
    )


def _indices(tensor: Tensor) -> Tensor:
    plain = tensor if tensor.dtype in _ID_DTYPES else tensor.long()
    return plain.contiguous()


def _error(bad: str, rows: int) -> IdError:
    """The error for what the kernel found: an id, or offsets."""
    if bad == "offsets":
        return offsets_error(f"a table of {rows} rows")
    return id_error(int(bad), rows)


def id_error(bad: int, rows: int) -> IdError:
    return IdError(
        f"a gradient for row {bad} of a table of {rows} rows",
        why="the ids of a lookup were changed between its forward and its backward pass",
        tries=("do not write into the ids of a batch before backward() returned",),
    )


def offsets_error(table: str = "a table") -> IdError:
    return IdError(
        f"a gradient for {table}, by offsets that do not fit its ids",
        why="the offsets of a lookup were changed between its forward and its backward pass",
        tries=("do not write into the offsets of a batch before backward() returned",),
    )
