"""Train and eval mode: one graph if training flags are only passed on, two if Python branches on
them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from types import CodeType
from typing import Any

from torch import nn

from recast.rewriter.compiled.signature import Signature
from recast.rewriter.compiled.trees import flatten, rebuild
from recast.rewriter.ir import Graph

from .kept_numbers import after_calls, not_asked, set_between
from .opaque_calls import ATTEMPTS
from .plain_model import live_copy, rehearse
from .refused import Refused, asked_again
from .trace import Traced, trace

_SIZES = {"int", "float", "range"}


def trace_modes(
    root: nn.Module, signature: Signature, first: tuple[Any, ...], second: tuple[Any, ...],
    pairs: list[tuple[Any, Any]], *, sizes: tuple[int, int], opaque: frozenset[str], prefix: str,
    falls_back: bool, varying: Collection[str],
) -> dict[str, Traced]:  # fmt: skip
    """``{"both": t}`` or ``{"train": t, "eval": u}``. ``falls_back``: the plain forward can take
    over where a question is answered otherwise. ``varying``: numbers that are set between calls.
    Raises Refused.
    """
    given: Any = dict(sizes=sizes, opaque=opaque, prefix=prefix, falls_back=falls_back)
    near, small = (set_between(root, varying, small) for small in (False, True))
    if small != near:
        with suppress(Refused):  # as where forward compares it with a length
            return _modes(root, signature, first, second, pairs, between=small, **given)
    return _modes(root, signature, first, second, pairs, between=near, **given)


def _modes(
    root: nn.Module, signature: Signature, first: tuple[Any, ...], second: tuple[Any, ...],
    pairs: list[tuple[Any, Any]], *, sizes: tuple[int, int], opaque: frozenset[str], prefix: str,
    falls_back: bool, between: dict[str, tuple[Any, Any]],
) -> dict[str, Traced]:  # fmt: skip
    """:func:`trace_modes` with the numbers ``between`` calls."""
    numbers: set[str] = set()  # that forward keeps, in any mode

    def once(training: bool, plain: bool, kept: set[str], outside: Iterable[CodeType]) -> Traced:
        kept_ones = after_calls(root, signature, (first, second), training, numbers) or {}
        found = {**between, **kept_ones}
        traced = trace(
            root, signature, first, pairs, training=training, sizes=sizes, opaque=opaque,
            prefix=prefix, plain_flags=plain,
            sizes_kept=frozenset(kept), outside=frozenset(outside), numbers=found,
        )  # fmt: skip
        if not falls_back:
            not_asked(traced)
        return traced

    def run(training: bool, plain: bool) -> Traced:
        first: Refused | None = None
        kept, outside = {"numpy"} if signature.arrays else set[str](), dict[CodeType, Refused]()
        while True:
            try:
                return once(training, plain, kept, outside)
            except Refused as error:
                if error.number and error.number not in numbers:
                    numbers.add(error.number)
                    continue
                first = first or error
                if not _another_way(error, kept, outside):
                    raise _reason(first, error, outside) from None

    plain = False
    try:
        evaluated = run(False, plain)
    except Refused as error:
        try:  # torch may insist on a real bool in place of a flag
            evaluated = run(False, plain := True)
        except Refused:
            raise error from None
    if not evaluated.forks:
        return {"both": evaluated}
    _warm_caches(root, signature, first)
    known = set(numbers)
    trained = run(True, plain)
    if numbers > known:
        evaluated = run(False, plain)
    if _all(trained) == _all(evaluated):
        return {"both": evaluated}
    return {"train": trained, "eval": evaluated}


def _another_way(error: Refused, kept: set[str], outside: dict[CodeType, Refused]) -> bool:
    """Whether a trace that was refused with ``error`` may succeed in another way, which is added to
    ``kept``, the sizes that stay real, or to ``outside``, the functions that run as one call.
    """
    left = [code for code in error.inside if code not in outside]
    if not asked_again(error) <= kept:
        kept |= asked_again(error)
    elif error.size in _SIZES and "numpy" not in kept:  # which may have asked for it
        kept.add("numpy")
    elif left and len(outside) < ATTEMPTS:
        outside[left[0]] = error
    else:
        return False
    return True


def _reason(first: Refused, last: Refused, outside: dict[CodeType, Refused]) -> Refused:
    """Which of the refusals to tell, when there is no other way."""
    if first.transform:
        return first
    if last.outside in outside:
        inner = outside[last.outside]  # what is in the way inside it
        inner.why = f"{inner.why}; {last.why}"
        return inner
    return last if outside and not last.error else first  # the one that got further


def _all(traced: Traced) -> tuple[Any, ...]:
    """What each call does, to compare two traces: constants of the output may differ by mode too,
    and those that forward leaves in the model or in its arguments.
    """
    key: list[Any] = []
    beside = traced.template, traced.argument_writes, traced.leaves
    flatten(rebuild(beside, lambda hole: None), [], key)
    return text(traced.graph), traced.guards, traced.stores, traced.entries, key


def _warm_caches(root: nn.Module, signature: Signature, batch: tuple[Any, ...]) -> None:
    """Run the plain forward in train mode once, to fill caches such as ``lru_cache``, which must
    not keep values of the trace. In eval mode the example has been run before.
    """
    rehearse(live_copy(root, training=True), signature, batch)


def text(graph: Graph) -> str:
    """A graph as text, to compare two."""
    return "\n".join(f"{n.op} {n.name} {n.target} {n.args} {n.kwargs}" for n in graph.nodes)
