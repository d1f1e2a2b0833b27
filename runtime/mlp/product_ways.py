"""The ways to compute a matrix product on the GPU: by an algorithm that cublasLt proposes, of whose
names and ranks this is the list, or "plain", by torch and a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from recast.runtime import fastest
from recast.runtime.gpu import cublaslt
from recast.runtime.gpu.cublaslt import Epilogue, Ready

# The ways by cublasLt and the rank of the proposal that each takes: first those that may use
# workspace, then those that may not, some of which save the launch that clears it.
_NUMBERS = ("second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_WITH_ROOM = len(_NUMBERS) + 1
RANKS = {
    f"cublaslt{room}{number}": first + k
    for room, first, most in (("", 0, _WITH_ROOM), (" without room", _WITH_ROOM, 4))
    for k, number in enumerate(("", *(f" {word}" for word in _NUMBERS))[:most])
}
# The same with the bias gradient in a separate kernel, as few algorithms can compute it.
APART = {f"{way}, sums apart": rank for way, rank in RANKS.items() if rank < 4}
COPY = "turned"  # the same with a transposed copy of an operand; all may use workspace
_TURNED = {f"{way}, {COPY}": rank for way, rank in RANKS.items() if rank < _WITH_ROOM}
# By name: the rank, whether the bias gradient is separate, whether an operand is transposed.
HOW = {
    **{way: (rank, False, False) for way, rank in RANKS.items()},
    **{way: (rank, True, False) for way, rank in APART.items()},
    **{way: (rank, False, True) for way, rank in _TURNED.items()},
    **{f"{way}, {COPY}": (rank, True, True) for way, rank in APART.items()},
}


def proposed_product(
    a: Tensor, b: Tensor, out: Tensor, epilogue: Epilogue, bias: Tensor | None,
    mask: Tensor | None, rank: int,
) -> Ready | None:  # fmt: skip
    """:func:`.cublaslt.product` by one of :data:`RANKS`."""
    room = rank < _WITH_ROOM
    return cublaslt.product(a, b, out, epilogue, bias, mask, rank % _WITH_ROOM, room)


def kernel_of(ready: Ready) -> tuple[object, ...]:
    """What tells two kernels of cublasLt apart; the bytes of an algorithm are but its numbers."""
    return ready.product.algorithm, ready.product.of


def ways_of(
    by_cublaslt: Callable[..., Any],
    proposed: Callable[[int], Ready | None],
    plain: Callable[[], Any],
    key: tuple[object, ...],
    of_turned: Callable[[int], Ready | None] | None = None,
) -> dict[str, Callable[[], Any]]:
    """The available ways by name: each distinct cublasLt kernel once, those with a transposed
    operand if ``of_turned`` is given, and last the plain way, which is always there.
    """
    ways, seen = {}, set()
    for name, rank in RANKS.items():
        ready = proposed(rank)
        if ready is not None and (rank < _WITH_ROOM or kernel_of(ready) not in seen):
            ways[name] = partial(by_cublaslt, rank)
            seen.add(kernel_of(ready))
    if of_turned is not None:
        for name, rank in _TURNED.items():
            if of_turned(rank) is not None:
                ways[name] = partial(by_cublaslt, rank, turned=True)
    if not ways:
        fastest.leave_out(key, "cublaslt", "it has no algorithm for this")
    return {**ways, "plain": plain}
