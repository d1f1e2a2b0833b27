"""What forward squeezes: the rank of all that follows depends on which sizes are 1.

``x.squeeze()`` of (B, 1, D) has two dimensions, and one if B is 1. A graph is rewritten for the
ranks of the example. So where these matter, a size that is squeezed has to be 1, or not to be 1, as
it was there; else the plain forward runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recast.rewriter.ir import Node, Spec, note

from .counted_sizes import masks_of
from .dynamic_sizes import Sizes

if TYPE_CHECKING:
    from recast.rewriter.compiled.signature import Signature

    from .tracer import Tracer

_SQUEEZES = {torch.squeeze, "squeeze", "squeeze_"}
# These do the same with any rank; those that follow keep it, or do away with it.
_KEEP = {
    "sigmoid", "tanh", "relu", "exp", "log", "neg", "abs", "sqrt", "square", "log1p", "add", "sub",
    "mul", "div", "truediv", "pow", "clamp", "float", "double", "half", "to", "detach", "clone",
    "contiguous", "logsigmoid", "softplus", "dropout",
}  # fmt: skip
_KEEPING = (nn.Sigmoid, nn.Tanh, nn.ReLU, nn.Identity, nn.Dropout, nn.LogSigmoid, nn.Softplus)
_END = {
    "view", "reshape", "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss",
    "l1_loss",
}  # fmt: skip
_ENDING = (nn.BCELoss, nn.BCEWithLogitsLoss, nn.MSELoss, nn.L1Loss)
_END_OF_ALL = {"sum", "mean", "flatten"}  # without a dimension


@dataclass(frozen=True)
class Squeezed:
    """What the ranks in a graph rely on.

    rows: on more rows than one.
    sizes: on that dimensions of inputs that have these sizes in both examples do not have 1.
    ones: on that those which have 1 have it.
    """

    rows: bool = False
    sizes: frozenset[int] = frozenset()
    ones: bool = False


def relying(
    signature: Signature, squeezes: Iterable[Squeezed], batches: Any, sizes: tuple[int, int]
) -> Signature:
    """``signature`` for calls in which the same sizes are 1 as in both ``batches``, as far as
    ``squeezes`` rely on that. ``sizes``: the rows of each batch.
    """
    known = list(squeezes)
    alike = [(k, d, size) for k, told in signature.alike for d, size in told]
    lasting = {size for one in known for size in one.sizes}
    ones = [(k, d) for k, d, size in alike if size == 1] if any(s.ones for s in known) else []
    found = signature.relying(ones, [(k, d) for k, d, size in alike if size in lasting])
    if any(s.rows for s in known):
        first, second = (signature.leaves(batch)[0] for batch in batches)
        found.rows = tuple(
            (k, d)
            for k, (a, b) in enumerate(zip(first, second, strict=True))
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
            for d, pair in enumerate(zip(a.shape, b.shape, strict=False))
            if pair == sizes
        )
    return found


class Single(Sizes):
    """Asks a tensor which of some dimensions have size 1."""

    def __call__(self, value: Any) -> tuple[int, ...]:
        return tuple(d for d in self.dims if value.shape[d] == 1)


def chooses_one(mask: torch.Tensor) -> bool:
    """Whether ``x[mask]`` has one row."""
    return int(mask.count_nonzero()) == 1


def squeezed(tracer: Tracer) -> Squeezed:
    """What is squeezed where ranks matter. Of sizes that no input tells, a question is asked."""
    rows, ones, sizes = False, False, set[int]()
    for node in list(tracer.graph.nodes):
        dims = _dims(node)
        if not dims or not _matters(tracer, node):
            continue
        given: Any = node.args[0]
        shape: Any = note(given).spec.shape
        unknown = []
        for d in dims:
            if shape[d] == 1:
                ones = True
            elif isinstance(shape[d], int):
                sizes.add(shape[d])
            elif shape[d] == "B":
                rows = True
            elif not shape[d].endswith("*B"):
                unknown.append(d)
        masks = masks_of(given, tracer.pairs, tracer.counted) if unknown == [0] else None
        for mask in masks or ():  # which is asked without what is computed of the rows
            tracer.ask(mask, chooses_one, chooses_one(tracer.pairs[mask][0]))
        if unknown and masks is None:
            single = Single(tuple(unknown))
            tracer.ask(given, single, single(tracer.pairs[given][0]))
    return Squeezed(rows, frozenset(sizes), ones)


def _dims(node: Node) -> tuple[int, ...]:
    """The dimensions that ``node`` may remove."""
    if node.op not in ("call_function", "call_method") or node.target not in _SQUEEZES:
        return ()
    spec = note(node.args[0]).spec if node.args and isinstance(node.args[0], Node) else None
    if not isinstance(spec, Spec):
        return ()
    rank = len(spec.shape)
    dims: Any = node.args[1:] if len(node.args) > 1 else node.kwargs.get("dim", range(rank))
    dims = dims[0] if type(dims) is tuple and len(dims) == 1 else dims
    dims = (dims,) if isinstance(dims, int) else dims
    return tuple(d % rank for d in dims if isinstance(d, int) and rank)


def _matters(tracer: Tracer, node: Node) -> bool:
    """Whether anything depends on the rank of ``node``, but for the shape of the result."""
    stack, seen = [node], {node}
    while stack:
        value = stack.pop()
        if value in tracer.ranks:
            return True
        for user in value.users:
            if user.op == "output" or _ends(tracer, user):
                continue
            if not _keeps(tracer, user):
                return True
            if user not in seen:
                seen.add(user)
                stack.append(user)
    return False


def _name(node: Node) -> str:
    named = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return named.strip("_")


def _keeps(tracer: Tracer, node: Node) -> bool:
    if node.op == "call_module":
        return isinstance(tracer.root.get_submodule(str(node.target)), _KEEPING)
    return _name(node) in _KEEP


def _ends(tracer: Tracer, node: Node) -> bool:
    if node.op == "call_module":
        return isinstance(tracer.root.get_submodule(str(node.target)), _ENDING)
    alone = len(node.args) == 1 and not node.kwargs
    return _name(node) in _END or (alone and _name(node) in _END_OF_ALL)
