"""The parameters that a recorded backward reads in place.

Autograd keeps the version of each tensor that a node saves, and refuses a backward if one has been
written to since. A replay does not go through that check, and would read what was written. So the
same versions are compared here, for the parameters that the nodes of the forward saved. These do
not include the weight of a layer whose input wants no gradient, nor any bias, nor anything under
autocast: there a copy was saved, which each replay of the forward makes anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class SavedParameters:
    """Which of the ``parameters`` the backward from ``outs`` reads; ``outs`` have just been
    computed and not yet been differentiated.
    """

    def __init__(self, outs: Sequence[Tensor], parameters: Iterable[Tensor]) -> None:
        starts: dict[int, list[int]] = {}
        with _Still():
            for t in _saved(outs):
                starts.setdefault(t.untyped_storage().data_ptr(), []).append(t.data_ptr())
        self.parameters = [p for p in parameters if _is_read(p, starts)]
        self._versions: list[int] = []

    def begin(self) -> None:
        """Called after a forward has been replayed."""
        self._versions = [p._version for p in self.parameters]

    def check(self) -> None:
        """Called before its backward is replayed: raises autograd's RuntimeError if one was written
        to.
        """
        for p, version in zip(self.parameters, self._versions, strict=True):
            if p._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an"
                    f" inplace operation: a parameter {[*p.shape]} is at version {p._version};"
                    f" expected version {version} instead"
                )


class _Still(TorchDispatchMode):
    """Inside, nothing is computed: the memory of the recording has not been filled yet."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} while saved tensors are looked at")


def _saved(outs: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors that the nodes behind ``outs`` have saved."""
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
            # Nodes that a backward has been through hold nothing any more; and what hooks
            # recompute, as in checkpointing, they compute from the parameters at that time.
            with contextlib.suppress(RuntimeError):
                found = getattr(node, name, None)
                every = found if isinstance(found, tuple | list) else (found,)
                for t in every:
                    if isinstance(t, Tensor) and t.layout is torch.strided and t.numel():
                        yield t


def _is_read(parameter: Tensor, starts: dict[int, list[int]]) -> bool:
    """Whether the saved tensor is the parameter, or a view of it: by their storages."""
    if parameter.layout is not torch.strided or not parameter.numel():
        return False
    steps = zip(parameter.shape, parameter.stride(), strict=True)
    first, elements = parameter.data_ptr(), 1 + sum((n - 1) * step for n, step in steps)
    past = first + elements * parameter.element_size()
    among = starts.get(parameter.untyped_storage().data_ptr(), ())
    return any(first <= start < past for start in among)
