"""Train and eval: one graph where the flags are only read, two where python forks on them."""

from __future__ import annotations

from typing import Any

from torch import nn

from .ir import Graph
from .signature import Signature
from .trace import Traced, trace
from .tracer import Refused


def trace_modes(
    root: nn.Module, signature: Signature, first: tuple[Any, ...], pairs: list[tuple[Any, Any]],
    *, sizes: tuple[int, int], opaque: frozenset[str], prefix: str,
) -> dict[str, Traced]:  # fmt: skip
    """``{"both": t}`` or ``{"train": t, "eval": u}``. Raises Refused."""

    def once(training: bool, plain: bool, kept: bool) -> Traced:
        return trace(
            root, signature, first, pairs, training=training, sizes=sizes, opaque=opaque,
            prefix=prefix, plain_flags=plain, sizes_kept=kept,
        )  # fmt: skip

    def run(training: bool, plain: bool) -> Traced:
        try:
            return once(training, plain, False)
        except Refused as error:
            if not error.size:
                raise
            try:
                return once(training, plain, True)
            except Refused:
                raise error from None

    plain = False
    try:
        evaluated = run(False, plain)
    except Refused as error:
        try:  # torch may insist on a real bool where a flag stands
            evaluated = run(False, plain := True)
        except Refused:
            raise error from None
    if not evaluated.forks:
        return {"both": evaluated}
    trained = run(True, plain)
    if text(trained.graph) == text(evaluated.graph) and trained.guards == evaluated.guards:
        return {"both": evaluated}
    return {"train": trained, "eval": evaluated}


def text(graph: Graph) -> str:
    """A graph as text, to compare two."""
    return "\n".join(f"{n.op} {n.name} {n.target} {n.args} {n.kwargs}" for n in graph.nodes)
