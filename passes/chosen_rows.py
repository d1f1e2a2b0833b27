"""Rows that a mask chooses, ``x[mask]``: as many as it says, each made of its own row of the batch;
and groups of rows that follow each other, ``x.view(-1, 2, 6)``.

Their means are by how many there are, on each rank, and on all. What else is computed along them is
not known, and then they are told of.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.nn import functional as F

from recast.rewriter.ir import Node, is_call, is_method, note

from .leaf import argument, spec_of
from .own_rows import ALONG, told_dim
from .place_writes import found_by_mask
from .row_counts import counts_places, name_of, starts_with_rows, takes_each
from .row_order import groups

# losses that may leave out rows, whose mean is by the others' number or weights
OF_CLASSES = (
    F.cross_entropy, F.nll_loss, torch.ops.recast.cross_entropy.default,
    torch.ops.recast.linear_cross_entropy.default,
)  # fmt: skip
# whose values are spread over each other's dimensions
_SPREAD = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss")
_INTO = ("index_add_", "index_add", "index_copy_", "index_put_", "setitem", "output")


def chooses(node: Node) -> bool:
    """Whether ``node`` chooses rows, and all that is computed of them is known."""
    return _chooses(node) and _is_known(node)


def finds_rows(node: Node) -> bool:
    """Whether ``node`` is ``x[index]`` of the rows of the batch, or of several for each, or groups
    of them.
    """
    if groups(node):
        return True
    if not is_call(node, operator.getitem) or not starts_with_rows(node.args[0]):
        return False
    key = _first(node.args[1])
    return isinstance(key, Node) and spec_of(key) is not None and not counts_places(key)


def chosen(x: Any) -> bool:
    """Whether ``x`` has a row for each that ``chooses`` takes, and no other size that varies."""
    if any(isinstance(n, str) for n in _shape(x)[1:]):
        return False
    seen, queue = set[Node](), [x] if _shape(x) else []
    while queue:
        node = queue.pop()
        if _chooses(node):
            return _is_known(node)
        new = [n for n in node.all_input_nodes if n not in seen and _shape(n)[:1] == _shape(x)[:1]]
        seen.update(new)
        queue += new
    return False


def _shape(x: Any) -> tuple[Any, ...]:
    """The sizes of ``x``; of ``unbind`` those of one of its tensors."""
    spec = spec_of(x)
    if spec is None and isinstance(x, Node) and name_of(x) == "unbind":
        spec = note(x).spec[0]
    return () if spec is None else tuple(spec.shape)


def _chooses(node: Node) -> bool:
    if is_call(node, torch.masked_select) or is_method(node, "masked_select"):
        return starts_with_rows(node.args[0])
    if groups(node):
        return isinstance(_shape(node)[0], str)
    return finds_rows(node) and found_by_mask(_first(node.args[1]))


def _first(key: Any) -> Any:
    return key[0] if isinstance(key, tuple) and key else key


def _is_known(node: Node) -> bool:
    """Whether nothing but sums and means is computed along the rows of ``node``."""
    seen, queue = {node}, [node]
    while queue:
        for user in queue.pop().users:
            name = name_of(user)
            if name in _SPREAD and len({_place(n) for n in user.all_input_nodes} - {None}) > 1:
                return False  # pairs of them
            first, *others = *_shape(user), None
            kept = first == _shape(node)[0]
            sums = (
                name in ("mean", "sum") or "reduction" in user.kwargs or is_call(user, *OF_CLASSES)
            )
            if (sums and not kept) or name in _INTO:
                continue
            if (
                not kept
                or any(isinstance(n, str) for n in others)
                or (name in ALONG and not _along_others(user, name))
                or (is_call(user, operator.getitem) and not takes_each(user))
            ):
                return False
            if user not in seen:
                seen.add(user)
                queue.append(user)
    return True


def _place(x: Any) -> int | None:
    """The dimension of ``x``, counted from the last, whose size varies."""
    return next((-k for k, n in enumerate(reversed(_shape(x)), 1) if isinstance(n, str)), None)


def _along_others(node: Node, name: str) -> bool:
    """Whether ``node`` is computed along another dimension than the first."""
    spec = spec_of(argument(node, 0, "input"))
    dim = told_dim(node, name)
    return spec is not None and isinstance(dim, int) and dim % len(spec.shape) != 0
