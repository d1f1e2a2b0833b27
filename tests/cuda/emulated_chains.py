"""Chains on an emulated GPU with a stand-in for cublasLt, and their judge.

Dropout masks are the kernels' own, so each comparison replays in plain torch the masks that a call
says it drew.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cublaslt_stand_in import Library
from emulated_gpu import Emulated
from torch import Tensor
from torch.nn import functional as F

from recast.runtime import OPS
from recast.runtime.mlp import mask as mlp_mask
from recast.runtime.tolerances import excess

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
MLP, DROP = OPS["mlp"], OPS["relu_dropout"]


@dataclass
class Machine:
    """What a test runs on, and what it saw."""

    library: Library
    gpu: Emulated

    def products(self) -> list[str]:
        return self.library.epilogues()


@contextlib.contextmanager
def replayed(masks: Sequence[Tensor]) -> Iterator[None]:
    """Let plain torch's dropouts take these masks, in order."""
    left = list(masks)

    def dropout(x: Tensor, p: float, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0 or not x.numel():
            return x
        return x * left.pop(0).to(x.dtype) * mlp_mask.scale_of(p)

    before = F.dropout
    F.dropout = dropout  # type: ignore[assignment]
    try:
        yield
    finally:
        F.dropout = before
    assert not left, "every mask is of some dropout"


def cast(args: Any, dtype: torch.dtype, where: str = "cpu") -> Any:
    """A copy of ``args`` in ``dtype`` on the device ``where``."""
    copied = copy.deepcopy(args)

    def one(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return t.to(where, dtype) if t.is_floating_point() else t.to(where)

    return tuple([one(t) for t in a] if isinstance(a, list) else one(a) for a in copied)


def leaves(args: Any) -> list[Tensor]:
    """Input and params; not the running statistics."""
    params = args[1] if len(args) > 3 else []
    return [args[0], *(t for t in params if t is not None)]


Run = tuple[Tensor, list[Tensor | None]]


def run(call: Callable[..., Tensor], args: Any, upstream: Tensor, grads: bool = True) -> Run:
    wanted = [t.requires_grad_() for t in leaves(args)]
    out = call(*args)
    if not grads:
        return out, []
    found = torch.autograd.grad(out, wanted, upstream.to(out.dtype), allow_unused=True)
    return out, list(found)


def compare(op: Any, args: Any, dtype: torch.dtype, seed: int = 1, where: str = "cpu") -> Tensor:
    """A call with its gradients against plain torch under its masks, in float64 too."""
    with torch.no_grad():
        shape = op.reference(*cast(args, F32)).shape
    g = torch.Generator().manual_seed(seed)
    upstream = torch.randn(shape, generator=g).to(where, dtype)
    ours_args, plain_args = cast(args, dtype, where), cast(args, dtype, where)
    wide_args = cast(plain_args, torch.float64, where)
    wanted = [t.requires_grad_() for t in leaves(ours_args)]
    torch.manual_seed(seed)
    out = op.target(*ours_args)
    masks = mlp_mask.masks(out)
    grads = torch.autograd.grad(out, wanted, upstream, allow_unused=True)
    with replayed(masks):
        plain = run(op.reference, plain_args, upstream)
    with replayed(masks):
        truth = run(op.reference, wide_args, upstream)
    every = [t for t in (truth[0], *truth[1]) if t is not None and t.numel()]
    scale = max((t.abs().max().item() for t in every), default=1.0)
    parts = zip((out, *grads), (plain[0], *plain[1]), (truth[0], *truth[1]), strict=True)
    for i, (a, b, c) in enumerate(parts):
        if c is None:
            assert a is None and b is None
            continue
        assert a is not None and b is not None and a.dtype == b.dtype
        share = excess(a, b, c, scale=scale)
        assert share <= 1, f"part {i}: {share:.2f} of the limit"
    if len(args) > 3:
        for a, b in zip(ours_args[2], plain_args[2], strict=True):  # statistics
            assert a is None or excess(a, b, b.double()) <= 1
    return out


def chain(
    rows: int, widths: Sequence[int], p: float, bias: bool = True, seed: int = 0, last: bool = False
) -> tuple[Any, ...]:
    """Linear, relu, dropout, ...; behind the last linear only if ``last``."""
    g = torch.Generator().manual_seed(seed)
    params: list[Tensor | None] = []
    steps: list[str] = []
    for i, (k, n) in enumerate(itertools.pairwise(widths)):
        params += [torch.randn(n, k, generator=g) / k**0.5]
        params += [torch.randn(n, generator=g) if bias else None]
        steps.append("linear")
        if i < len(widths) - 2 or last:
            steps += ["relu", *(["dropout"] if p else [])]
    drops = steps.count("dropout")
    x = torch.randn(rows, widths[0], generator=g)
    return x, params, [], steps, [p] * drops, [True] * drops


CHAINS = {
    "one layer": (7, [13, 9]),
    "one row": (1, [13, 9, 1]),
    "two": (5, [3, 130, 7]),
    "many rows": (70, [13, 24, 1]),
    "three": (33, [13, 24, 17, 1]),
    "four": (6, [8, 64, 32, 16, 3]),
    "five": (9, [5, 7, 11, 9, 3, 2]),
    "ones": (4, [1, 1, 1]),
}
