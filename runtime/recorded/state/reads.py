"""Parameters that a recorded backward reads where they lie.

Autograd keeps the version of each tensor that a node saves, and refuses a backward for which one
was written to since. A replay unpacks nothing, and would read what has been written: so the same
versions are compared here, of the same parameters, those which the nodes of the forward saved.
That is, of a layer whose input wants no gradient not the weight, never a bias, and under autocast
none at all: there a copy was saved, of which each replay of the forward makes its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Reads:
    """Of the backward from ``outs``, just computed and not yet differentiated, which of the
    ``parameters`` it reads.
    """

    def __init__(self, outs: Sequence[Tensor], parameters: Iterable[Tensor]) -> None:
        starts: dict[int, list[int]] = {}
        with _Still():
            for t in _saved(outs):
                starts.setdefault(t.untyped_storage().data_ptr(), []).append(t.data_ptr())
        self.parameters = [p for p in parameters if _is_read(p, starts)]
        self._versions: list[int] = []

    def begin(self) -> None:
        """A forward has been replayed."""
        self._versions = [p._version for p in self.parameters]

    def check(self) -> None:
        """Before its backward is: raises RuntimeError, as autograd, for what was written to."""
        for p, version in zip(self.parameters, self._versions, strict=True):
            if p._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an"
                    f" inplace operation: a parameter {[*p.shape]} is at version {p._version};"
                    f" expected version {version} instead"
                )


class _Still(TorchDispatchMode):
    """Nothing is computed inside, of memory that a recording has not yet filled."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} while saved tensors are looked at")


def _saved(outs: Sequence[Tensor]) -> Iterator[Tensor]:
    """What the nodes behind ``outs`` have saved."""
    ahead: list[Any] = [t.grad_fn for t in outs]
    seen = {None}
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        ahead += [above for above, _ in node.next_functions]
        names = [name for name in dir(node) if name.startswith("_saved_")]
        for name in ("saved_tensors", *names):
            # Nothing is left of what a backward has been through already; and what hooks compute
            # again, as those of checkpoints, they compute of parameters as these are then.
            with contextlib.suppress(RuntimeError):
                found = getattr(node, name, None)
                every = found if isinstance(found, tuple | list) else (found,)
                for t in every:
                    if isinstance(t, Tensor) and t.layout is torch.strided and t.numel():
                        yield t


def _is_read(parameter: Tensor, starts: dict[int, list[int]]) -> bool:
    """Whether what was saved is the parameter, or a view of it; where that starts, by storages."""
    if parameter.layout is not torch.strided or not parameter.numel():
        return False
    steps = zip(parameter.shape, parameter.stride(), strict=True)
    first, elements = parameter.data_ptr(), 1 + sum((n - 1) * step for n, step in steps)
    past = first + elements * parameter.element_size()
    among = starts.get(parameter.untyped_storage().data_ptr(), ())
    return any(first <= start < past for start in among)
