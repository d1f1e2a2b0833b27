"""Whether tensors have the same metadata as earlier ones, asked for many of them in one call.

Torch's compiler has such a call for its guards: it takes 3 us for 55 tensors, where Python takes 70
to check them one by one. It is private; without it, Python checks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def guards_of_torch() -> Any:
    """Torch's call, if it exists and detects what is needed here."""
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:  # another version of torch
        return None
    made: Any = TensorGuards
    return made if _detects_all(made) else None


def _detects_all(guards: Any) -> bool:
    """Whether ``guards`` detects every difference that matters here."""
    with torch.inference_mode(False), torch.device("cpu"):
        a, b = torch.zeros(4, 3), torch.zeros(5)
        others = [
            (torch.zeros(4, 2), b), (torch.zeros(3, 3), b), (torch.zeros(3, 4).t(), b),
            (torch.zeros(4, 3).double(), b), (torch.zeros(4, 3).requires_grad_(), b),
            (torch._neg_view(torch.zeros(4, 3)), b), (torch.zeros(4, 3).to_sparse(), b),
            (torch.nn.Parameter(a, requires_grad=False), b), (torch.zeros(4, 3, device="meta"), b),
            (a, torch.zeros(6, 1)), (a, None),
        ]  # fmt: skip
        try:
            check = guards(
                a, b, dynamic_dims_sizes=[[4, 3], [None]], dynamic_dims_strides=[[3, 1], [1]]
            ).check
            same = check(a, b) and check(torch.ones(4, 3), torch.ones(7))
            if not same or any(check(*pair) for pair in others):
                return False
            check = guards(a, a.clone(), dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            return check(a, a.clone()) and not check(a, a)
        except (TypeError, RuntimeError):  # its arguments are different ones
            return False


class TensorMetadata:
    """The metadata of ``tensors``, which are all different objects: class, dtype, device, sizes,
    strides, ``requires_grad``, and how torch dispatches on them. ``free``: indices of tensors whose
    first dimension may have any size.
    """

    def __init__(self, tensors: Sequence[Tensor], free: Collection[int]) -> None:
        self._count, self._free = len(tensors), frozenset(free)
        self._check: Callable[..., bool] | None = None
        guards = guards_of_torch() if tensors else None
        if guards is not None:
            sizes: list[list[int | None]] = [[*t.shape] for t in tensors]
            for k in self._free:
                sizes[k][0] = None
            strides = [[*t.stride()] for t in tensors]
            made = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
            self._check = made.check
        else:
            self._known = self._look(tensors)

    def matches(self, tensors: Sequence[object]) -> bool:
        """Whether these tensors have the same metadata, and are all different objects.

        False may have other reasons: with other settings of autocast, or inside inference mode, no
        tensor matches what was recorded outside.
        """
        if len(tensors) != self._count:
            return False
        if self._check is not None:
            return self._check(*tensors)
        if len(set(map(id, tensors))) != len(tensors):
            return False
        plain = all([isinstance(t, Tensor) for t in tensors])
        return plain and self._look(tensors) == self._known  # type: ignore[arg-type]

    def _look(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        sizes = [t.shape[1:] if k in self._free else t.shape for k, t in enumerate(tensors)]
        return (
            [*map(type, tensors)], sizes,
            [
                (t.dtype, t.device, t.layout, t.dim(), t.requires_grad, t.is_inference(),
                 t.layout is torch.strided and (t.stride(), t.is_neg(), t.is_conj()))
                for t in tensors
            ],
        )  # fmt: skip
