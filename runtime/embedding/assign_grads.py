"""Row gradients that are assigned to ``.grad`` here, in place of autograd.

Autograd would detach each gradient first, which costs 13 us for one of ours.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from recast.runtime import device
from recast.runtime.recorded import recording
from recast.runtime.rows import lots
from recast.runtime.rows.grad import RowGrad


def left_after_assignment(
    ctx: Any, weights: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """``grads`` without those that are assigned to ``.grad`` here, where nobody can tell.

    Autograd keeps the job if the pass does not end at the table, the table has a gradient or hooks,
    was frozen since forward, somebody holds its accumulation node, or a process group exists (DDP
    hooks those nodes, and it does not show).
    ``ctx``: that of the autograd function, whose first inputs are ``weights``.
    """
    if not weights or not (weights[0].is_cpu or weights[0].is_cuda):
        return grads
    if torch.compiler.is_compiling() or recording.current() is not None:
        return grads
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return grads
    left = _assigned(weights, grads, ctx.next_functions)
    if weights[0].is_cuda and any(a is not b for a, b in zip(grads, left, strict=True)):
        let_caller_wait(weights[0].device)
    return left


def _assigned(
    weights: Sequence[Tensor], grads: Sequence[Tensor | None], edges: tuple[Any, ...]
) -> Sequence[Tensor | None]:
    """``grads`` without those assigned to ``.grad``; ``edges``: the next function of each."""
    if device.extension() is not None:
        runs = torch._C._will_engine_execute_node
        placed: list[Tensor | None] = lots.grads().place(weights, grads, edges, runs, _references())
        return placed
    left, alone = list(grads), _references() + 1  # and that of the call to getrefcount
    for t, (weight, grad, edge) in enumerate(zip(weights, grads, edges, strict=False)):
        if type(grad) is not RowGrad or not weight.is_leaf or weight.grad is not None:
            continue
        if not weight.requires_grad:
            continue
        if weight._backward_hooks or weight._post_accumulate_grad_hooks:
            continue
        # Inline: a Python call adds one reference or two, depending on what torch.compile has done.
        if sys.getrefcount(edge[0]) > alone or not _adds_to_leaf(edge[0]):
            continue
        weight.grad = grad
        left[t] = None
    return left


def let_caller_wait(where: torch.device) -> None:
    """Make the stream that backward was called on wait for the current one, as the autograd engine
    does for gradients that it accumulates itself.
    """
    here = torch.cuda.current_stream(where)

    def wait() -> None:
        caller = torch.cuda.current_stream(where)
        if caller != here:
            caller.wait_stream(here)

    torch.autograd.Variable._execution_engine.queue_callback(wait)


def _adds_to_leaf(node: Any) -> bool:
    """Whether the running backward pass accumulates into a leaf at ``node``."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # it returns the gradient instead, as torch.autograd.grad does
        return False


@cache
def _references() -> int:
    """How many references a node in ``next_functions`` has if nobody else holds it: one, or two
    with a torch that keeps one itself (2.13).
    """
    with torch.inference_mode(False), torch.enable_grad():
        product = torch.ones(1, device="cpu", requires_grad=True) * 1
    assert product.grad_fn is not None
    edges = product.grad_fn.next_functions
    return sys.getrefcount(edges[0][0]) - 1
