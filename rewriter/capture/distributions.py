"""torch.distributions in forward: shapes there hold sizes that depend on the batch.

``torch.Size(shape)`` takes real numbers alone. So while forward is traced those modules of torch
see a ``torch`` of which ``Size`` and ``broadcast_shapes`` take traced sizes too. In other threads
it is as ever.

What the modules check of their arguments is a node of the graph, where a question would have to be
answered ahead of each call.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import fx
from torch.distributions import Distribution, dirichlet

from recast.rewriter.ir import note
from recast.rewriter.order import declare_assertion

from . import frames
from .opaque_calls import OpaqueCall
from .shapes import Shape, Size, broadcast_shapes
from .values import Value

_MODULES = [
    module
    for name, module in list(sys.modules.items())
    if name.startswith("torch.distributions.") and vars(module).get("torch") is torch
]
_lock = threading.Lock()
_tracing: list[int] = []  # the threads that trace, once for each trace


@contextmanager
def traced_shapes() -> Iterator[None]:
    """Have torch.distributions take traced sizes meanwhile."""
    own = threading.get_ident()
    with _lock:
        _tracing.append(own)
        _show(_TORCH, _Dirichlet)
    try:
        yield
    finally:
        with _lock:
            _tracing.remove(own)
            if not _tracing:
                _show(torch, _DIRICHLET)


def _show(seen: ModuleType, dirichlet_seen: Any) -> None:
    """Have the modules see these."""
    for module in _MODULES:
        vars(module)["torch"] = seen
    vars(dirichlet)["_Dirichlet"] = dirichlet_seen


def _traces() -> bool:
    return threading.get_ident() in _tracing


class _OfSize(type(Size)):  # type: ignore[misc]
    """The type of :class:`_Size`: torch's own is none, so it is made one of ours."""

    def __instancecheck__(cls, value: Any) -> bool:
        return type(value) is Shape if _traces() else isinstance(value, torch.Size)


class _Size(Size, metaclass=_OfSize):
    """What ``torch.Size`` is meanwhile."""

    def __new__(cls, sizes: Iterable[Any] = ()) -> Any:
        return super().__new__(cls, sizes) if _traces() else torch.Size(sizes)


def _is_all_true(valid: torch.Tensor) -> Any:
    """Of what is traced a node that raises; the modules go on as if it were true. It is a question
    where forward would catch the error.
    """
    if not isinstance(valid, Value) or valid.constant or frames.catch_errors():
        return torch._is_all_true(valid)
    asking = sys._getframe(1).f_locals
    made, name = asking.get("self"), asking.get("param")
    rule = asking.get("constraint", asking.get("support"))
    of = type(made).__name__
    given = f"parameter {name} of {of}()" if name else f"the value given to {of}"
    always = made is not None and "_validate_args" in vars(made)
    args = valid, asking.get("value", valid), given, str(rule), always
    valid.tracer.record("call_function", require_valid, args, {})
    return True


def require_valid(
    valid: torch.Tensor, value: torch.Tensor, given: str, constraint: str, always: bool
) -> None:
    """Raise the ValueError of ``torch.distributions`` unless all of ``valid`` is true; ``always``:
    also where ``set_default_validate_args(False)`` was called since, as ``torch.compile`` does.
    """
    if (always or Distribution._validate_args) and not torch._is_all_true(valid):
        raise ValueError(
            f"Expected {given} ({type(value).__name__} of shape {tuple(value.shape)})"
            f" to satisfy the constraint {constraint}, but found invalid values:\n{value}"
        )


declare_assertion(require_valid)


def why_not_recorded(graphs: Iterable[fx.Graph]) -> str | None:
    """Why replays may not stand for ``graphs``: they would not check values. Or None."""
    for graph in graphs:
        for node in graph.nodes:
            if node.target is require_valid:
                where = note(node).where
                at = f" ({where})" if where else ""
                return (
                    f"torch.distributions checks {node.args[2]}{at}, and a replay would not;"
                    " validate_args=False leaves that out"
                )
    return None


class _Dirichlet:
    """What ``_Dirichlet`` is meanwhile, a ``torch.autograd.Function``: one call."""

    @staticmethod
    def apply(concentration: torch.Tensor) -> Any:
        if not isinstance(concentration, Value):
            return _DIRICHLET.apply(concentration)
        target = OpaqueCall(_DIRICHLET.apply, None)
        return concentration.tracer.record("call_function", target, (concentration,), {})


_DIRICHLET: Any = dirichlet._Dirichlet


class _Torch(ModuleType):
    """The module torch, with a few functions of its own."""

    Size = _Size
    broadcast_shapes = staticmethod(broadcast_shapes)
    _is_all_true = staticmethod(_is_all_true)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_TORCH = _Torch("torch")
