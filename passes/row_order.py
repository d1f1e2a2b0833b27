"""Whether a reshape, or a part of one, keeps the rows of the batch in their order.

Where several rows stand for one of the batch, they are all first ones, then all second ones, as in
``cat([u, v])``, or those of one sample after another, as in ``stack([u, v], 1).flatten(0, 1)``. A
value is ``outer * B * inner`` numbers, whatever its shape, and one that does not fit mixes rows::

    stack([u, v], 1).view(-1, 6)[:B]    other rows than one process has first
    cat([u, v]).view(B, 12)             two rows of u
"""

from __future__ import annotations

import math
import operator
from typing import Any

from recast.rewriter.ir import Node, is_call

from .leaf import argument, spec_of
from .row_counts import keys_of, name_of, rows_of

_RESHAPES = {"reshape", "view", "flatten", "unflatten", "ravel", "view_as", "reshape_as"}


def reorders(node: Node) -> bool:
    """Whether ``node`` is a reshape, or a part of rows, whose rows are made of others' numbers."""
    if name_of(node) in _RESHAPES:
        return _fit(node) is False
    return _takes_others(node)


def groups(node: Node) -> bool:
    """Whether ``node`` puts rows that follow each other into one: ``x.view(-1, 2, 6)``."""
    spec = spec_of(node)
    return (
        spec is not None and name_of(node) in _RESHAPES and _fit(node) is True and not rows_of(spec)
    )


def _fit(node: Node) -> bool | None:
    """Whether a reshape keeps together what is of each row, or group of rows; None: not known."""
    flat, made = _flat(node.args[0]), spec_of(node)
    if flat is None or made is None or sum(isinstance(size, str) for size in made.shape) != 1:
        return None
    outer, inner = _around(made.shape)
    if rows_of(made):
        return flat[0] % outer == 0 and flat[1] % inner == 0
    return flat[0] == outer and inner % flat[1] == 0


def _around(sizes: tuple[Any, ...]) -> tuple[int, int]:
    """How many numbers there are outside and inside of the only size that varies."""
    dim = next(d for d, size in enumerate(sizes) if isinstance(size, str))
    return math.prod(sizes[:dim]), math.prod(sizes[dim + 1 :])


def _flat(x: Any) -> tuple[int, int] | None:
    """``(outer, inner)`` of the numbers of ``x``; None: not known."""
    spec, within = spec_of(x), _within(x)
    if spec is None or within is None:
        return None
    outer, inner = _around(spec.shape)
    return within[0] * outer, within[1] * inner


def _within(x: Any) -> tuple[int, int] | None:
    """``(outer, inner)`` of the dimension of ``x`` that counts rows; None: not known."""
    spec = spec_of(x)
    if spec is None or sum(isinstance(size, str) for size in spec.shape) != 1 or not rows_of(spec):
        return None
    (dim,) = rows_of(spec)
    if spec.shape[dim] == "B":
        return 1, 1
    name, source = name_of(x), x.args[0] if x.args else None
    if name in _RESHAPES:
        flat = _flat(source)
        outer, inner = _around(spec.shape)
        return None if flat is None or not _fit(x) else (flat[0] // outer, flat[1] // inner)
    if name in ("cat", "concat") and isinstance(source, (list, tuple)):
        return _joined([_within(one) for one in source], _rows_in(spec.shape[dim]))
    if name in ("repeat", "tile", "repeat_interleave"):
        rows = _within(source)
        if rows is None:
            return None
        times = _rows_in(spec.shape[dim]) // math.prod(rows)
        within = name == "repeat_interleave"
        return (rows[0], rows[1] * times) if within else (rows[0] * times, rows[1])
    like = (n for n in x.all_input_nodes if (s := spec_of(n)) and spec.shape[dim] in s.shape)
    return _within(next(like, None))


def _joined(parts: list[tuple[int, int] | None], rows: int) -> tuple[int, int] | None:
    """Of ``parts`` one after the other, or side by side."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or len({inner for _, inner in known}) > 1:
        return None
    outer, inner = sum(outer for outer, _ in known), known[0][1]
    return (outer, inner) if outer * inner == rows else known[0] if len({*known}) == 1 else None


def _rows_in(size: Any) -> int:
    """``2`` of the size ``2*B``."""
    return 1 if size == "B" else int(str(size)[:-2])


def _takes_others(node: Node) -> bool:
    """Whether ``node`` takes a part of several rows for each of the batch that has not one, or as
    many, of each.
    """
    source = argument(node, 0, "input")
    made, spec, within = spec_of(node), spec_of(source), _within(source)
    if within is None or spec is None or within[0] * within[1] == 1:
        return False
    (rows,) = rows_of(spec)
    outer, inner = within
    name = name_of(node)
    if name in ("chunk", "tensor_split"):
        parts, dim = argument(node, 1, "chunks"), argument(node, 2, "dim", 0)
        return dim == rows and (not isinstance(parts, int) or outer % parts != 0)
    if name in ("split", "narrow"):
        return argument(node, 2 if name == "split" else 1, "dim", 0) == rows and inner != 1
    if not is_call(node, operator.getitem) or made is None:
        return False
    keys = keys_of(node.args[1])
    key = keys[rows] if len(keys) > rows and None not in keys and ... not in keys else None
    if not isinstance(key, slice) or (key.start, key.stop, key.step) == (None, None, None):
        return False
    if key.step in (None, 1):
        return inner != 1 or (isinstance(key.start, int) and key.start != 0)
    return not isinstance(key.step, int) or inner % key.step != 0
