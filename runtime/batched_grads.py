"""``torch.autograd.grad(..., is_grads_batched=True)``: runs our backward once for each gradient.

Torch calls a backward once, under vmap, with tensors that stand for a batch of gradients. Kernels
need addresses, which such tensors do not have, so each gradient of the batch is handled by itself
and the results are put together again. Gradients of tables are dense then, as torch's are. Kernels
cannot see either that torch marks a tensor as negated: such gradients are copied first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

from recast.errors import NotBuiltError

_Backward = Callable[..., Any]
_Together = Callable[[Tensor], Tensor]

# Torch has two kinds of vmap, and autograd.grad uses the older one.
try:
    _OLDER, _OLDER_BATCH = map(torch._C._dispatch_key_parse, ("VmapMode", "Batched"))
    _is_included: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_included
except (AttributeError, RuntimeError):  # a torch that has the newer one only
    _is_included = bool  # of None: no
    _OLDER = _OLDER_BATCH = None  # type: ignore[assignment]


def each_of_batch(backward: _Backward) -> _Backward:
    """Wrap the ``backward`` of an ``autograd.Function`` so that it accepts batches of gradients."""

    @wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> Any:
        if _functorch.maybe_current_level() is None and not _is_included(_OLDER):
            return backward(ctx, *_as_they_lie(grads))
        return _each(backward, ctx, grads)

    return run


def one_at_a_time(backward: _Backward) -> _Backward:
    """Wrap the ``backward`` of a message between ranks so that it refuses batches of gradients."""

    @wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> Any:
        if _functorch.maybe_current_level() is not None or _is_included(_OLDER):
            raise NotBuiltError(
                "a batch of gradients through a model that is spread over ranks",
                why="the gradients of rows travel to their owners once for each backward pass",
                tries=("a loop over the gradients, without is_grads_batched or vmap",
                       "world_size=1"),
            )  # fmt: skip
        return backward(ctx, *grads)

    return run


def _each(backward: _Backward, ctx: Any, grads: tuple[Tensor | None, ...]) -> Any:
    batch = _batch_of([grad for grad in grads if grad is not None])
    if batch is None:
        return backward(ctx, *_as_they_lie(grads))
    apart, together = batch
    parts = [None if grad is None else apart(grad) for grad in grads]
    found = []
    for k in range(next(len(part) for part in parts if isinstance(part, tuple))):
        one = tuple(part[k] if isinstance(part, tuple) else part for part in parts)
        result = _each(backward, ctx, one)  # a batch may be one of batches
        found.append(result if isinstance(result, tuple) else (result,))
    results = tuple(_joined(some, together) for some in zip(*found, strict=True))
    return results if len(results) > 1 else results[0]


def _as_they_lie(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """``grads`` whose memory holds their numbers: the imaginary part of a conjugate is a view that
    torch negates as it reads, and kernels read addresses.
    """
    if any([grad is not None and grad.is_neg() for grad in grads]):
        return tuple(None if grad is None else grad.resolve_neg() for grad in grads)
    return grads


def _batch_of(
    grads: Sequence[Tensor],
) -> tuple[Callable[[Tensor], tuple[Tensor, ...] | Tensor], _Together] | None:
    """How to take the innermost batch apart, if there is one, and how to put it together again."""
    of_newer = [_functorch.maybe_get_level(g) for g in grads if _functorch.is_batchedtensor(g)]
    if of_newer:
        level = max(of_newer)

        def apart(grad: Tensor) -> tuple[Tensor, ...] | Tensor:
            there = _functorch.is_batchedtensor(grad) and _functorch.maybe_get_level(grad) == level
            if not there:
                return grad
            return _functorch.get_unwrapped(grad).unbind(_functorch.maybe_get_bdim(grad))

        return apart, lambda whole: _functorch._add_batch_dim(whole, 0, level)
    if not any(_is_older(grad) for grad in grads):
        return None
    depth = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return (
        lambda grad: (
            torch._remove_batch_dim(grad, depth, 0, 0).unbind() if _is_older(grad) else grad
        ),
        lambda whole: torch._add_batch_dim(whole, 0, depth),
    )


def _is_older(grad: Tensor) -> bool:
    return _OLDER_BATCH is not None and torch._C._dispatch_keys(grad).has(_OLDER_BATCH)


def _joined(parts: tuple[Tensor | None, ...], together: _Together) -> Tensor | None:
    there = [_dense(part) for part in parts if part is not None]
    if not there:
        return None
    zero, every = torch.zeros_like(there[0]), iter(there)
    return together(torch.stack([zero if part is None else next(every) for part in parts]))


def _dense(part: Tensor) -> Tensor:
    if part.layout != torch.strided:
        return part.to_dense()
    return part if type(part) is Tensor else part + 0  # of row gradients a dense copy
