"""Derives a second batch of another size from one example, so that the batch size stays symbolic.

A batch is the tuple of the arguments of ``forward``. Tensors are cut along the dimension that holds
the batch; flat id lists are cut where their offsets or lengths say. The result is then tried on the
model: the model itself is the judge of what a batch is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from recast.errors import UsageError
from recast.rewriter.compiled.signature import Signature
from recast.rewriter.compiled.trees import flatten, rebuild

Args = tuple[Any, ...]
_FEW = 65  # rows in which most of what is rare in a batch still occurs


@dataclass(frozen=True)
class Batches:
    """Two tuples of ordered arguments and their batch sizes; ``second`` is None if it cannot be
    derived, and ``tries`` say what helps. ``note``: what the report says of them.
    """

    first: Args
    second: Args | None
    sizes: tuple[int, int]
    how: str
    note: str = ""
    fewer: Batches | None = None  # two of fewer rows, of which the model has not seen the second
    tries: tuple[str, ...] = ("example=[batch, batch_of_another_size]",)


def of_example(
    example: Any, signature: Signature, accepts: Callable[[Args], Any] | None = None,
    trains: Callable[[Args], bool] | None = None,
) -> Batches:  # fmt: skip
    """The two batches made from ``example``. ``accepts(args)`` runs the model, and raises if it
    does not take them; ``trains(args)`` says whether train mode takes them. Raises UsageError when
    the example does not fit the parameters of forward.
    """
    found = _of_example(example, signature, accepts)
    if 1 not in found.sizes or found.second is None or trains is None:
        return found
    one, several = found.first, found.second
    if found.sizes[1] == 1:
        one, several = several, one
    if trains(one) or not trains(several):
        return found
    others = _derived(several, accepts)  # batch norm does not train on a single row
    if others.second is None or 1 in others.sizes or not trains(others.second):
        return found
    rows = " and ".join(map(str, others.sizes))
    note = f"train mode takes no single row: captured on batches of {rows} rows, for any size"
    return replace(others, note=note)


def _of_example(
    example: Any, signature: Signature, accepts: Callable[[Args], Any] | None
) -> Batches:
    first, *more = given(example, signature)
    if not more and not _leaves(first):
        return Batches(first, None, (0, 0), "there is no tensor in the example")
    if not more and any(t.is_nested for t in _leaves(first)):
        return Batches(first, None, (0, 0), "no second batch can be cut from a nested tensor")
    if more:
        return Batches(first, more[0], _given_sizes(first, more[0]), "two batches were given")
    return _derived(first, accepts)


def _derived(first: Args, accepts: Callable[[Args], Any] | None) -> Batches:
    derived = [(plan, *_cut(first, plan)) for plan in _plans(first)]
    for likely, cut, _ in sorted(derived, key=lambda d: (d[2], d[0].multiples)):  # fewest uncut
        if cut is None or accepts is None:
            continue
        for plan in (likely, *_in_groups(likely, first)):
            second = cut if plan is likely else _cut(first, plan)[0]
            if second is None:
                continue
            try:
                accepts(second)
            except Exception:  # not a batch of this model: the next plan
                continue
            how = f"cut to {plan.keep} of {plan.size} rows"
            fewer = _fewer(first, second, plan)
            return Batches(first, second, (plan.size, plan.keep), how, fewer=fewer)
    return Batches(first, None, (0, 0), "the batch dimension cannot be told from one batch")


def _fewer(first: Args, second: Args, plan: _Plan) -> Batches | None:
    """``second``, and ``first`` cut to fewer rows than that."""
    keep = _another(plan.keep, {n for t in (*_leaves(first), *_leaves(second)) for n in t.shape})
    third, _ = _cut(first, replace(plan, keep=keep)) if keep < plan.keep else (None, 0)
    if third is None:
        return None
    return Batches(second, third, (plan.keep, keep), f"cut to {keep} of {plan.size} rows")


def given(example: Any, signature: Signature) -> list[Args]:
    """The one or two batches of ``example``, as ordered arguments. Raises UsageError."""
    return [ordered(e, signature) for e in _two(example, signature) or (example,)]


def calls(example: Any, signature: Signature) -> list[str]:
    """How each batch of :func:`given` is passed to the model by hand: ``"*example"``."""
    two = _two(example, signature)
    if two:
        return [f"{_stars(e, signature)}example[{k}]" for k, e in enumerate(two)]
    return [f"{_stars(example, signature)}example"]


def _stars(example: Any, signature: Signature) -> str:
    args = ordered(example, signature)
    if args and args[0] is example:
        return ""
    return "**" if isinstance(example, Mapping) else "*"


def ordered(example: Any, signature: Signature) -> Args:
    """``example`` as the ordered arguments of forward."""
    required = _required(signature)
    if isinstance(example, Mapping):
        return _of_mapping(example, signature)
    if isinstance(example, tuple) and not hasattr(example, "_fields"):
        return _bind(signature, example, {})
    if isinstance(example, list) and (len(required) != 1 or _takes(example)):
        return _bind(signature, tuple(example), {})
    return _bind(signature, (example,), {})


def _of_mapping(example: Mapping[Any, Any], signature: Signature) -> Args:
    """Keyword arguments, where the keys are parameters of forward; else its sole argument."""
    required, names, keys = _required(signature), list(signature.names), list(example)
    lacks = [n for n in required if n not in example]
    unknown = [k for k in keys if k not in names]
    further = signature.variadic[1] is not None and (required or not names)  # **kwargs takes them
    if not lacks and (further or (names and not unknown)):
        return _bind(signature, (), dict(example))
    if len(required) <= 1:
        return _bind(signature, (example,), {})
    said = [f"lacks {', '.join(map(repr, lacks))}"] if lacks else []
    said += [f"has {', '.join(map(repr, unknown))} besides"] if unknown and not further else []
    raise UsageError(
        f"example: the dict {' and '.join(said)}",
        why=f"where forward({', '.join(names)}) has several arguments, its keys are their names",
        tries=(
            f"example={{{', '.join(f'{n!r}: ...' for n in required)}}}",
            "example=(first_argument, second_argument), one of which may be a dict",
        ),
    )


def as_dict(ordered: Args, signature: Signature) -> str | None:
    """The argument as which a dict was understood to be the whole batch; None: it was not."""
    required = _required(signature)
    alone = len(required) <= 1 and ordered and isinstance(ordered[0], Mapping)
    return signature.names[0] if alone and signature.names else None


def _required(signature: Signature) -> list[str]:
    return [n for n in signature.names if n not in signature.defaults]


def _takes(example: Sequence[Any]) -> bool:
    return len(example) == 1 and not isinstance(example[0], torch.Tensor)


def _bind(signature: Signature, args: Args, kwargs: dict[str, Any]) -> Args:
    try:
        return signature.bind(args, kwargs)
    except TypeError as error:
        raise UsageError(
            f"example: {error}",
            why=f"a batch is the tuple of the arguments of forward({', '.join(signature.names)})",
            tries=("example=(first_argument, second_argument)", "example=[batch_a, batch_b]"),
        ) from None


def _two(example: Any, signature: Signature) -> tuple[Any, Any] | None:
    """The two batches of a list of two; None when the list is itself one batch."""
    if type(example) is not list or len(example) != 2:
        return None
    a, b = example
    required = _required(signature)
    if type(a) is not type(b) or (isinstance(a, torch.Tensor) and len(required) != 1):
        return None
    if isinstance(a, (tuple, dict, torch.Tensor)) or (len(required) == 1 and not _atom(a)):
        return a, b
    if isinstance(a, list) and len(a) == len(b) and len(a) >= len(required) > 0:
        return a, b
    return None


def _atom(value: Any) -> bool:
    return isinstance(value, (int, float, str, type(None)))


def _leaves(batch: Args) -> list[torch.Tensor]:
    leaves: list[torch.Tensor] = []
    for value in batch:
        flatten(value, leaves, [])
    return leaves


def _given_sizes(a: Args, b: Args) -> tuple[int, int]:
    """The most common pair of different first dimensions."""
    votes: dict[tuple[int, int], int] = {}
    for x, y in zip(_leaves(a), _leaves(b), strict=False):
        if x.dim() and y.dim() and x.shape[0] != y.shape[0]:
            pair = (x.shape[0], y.shape[0])
            votes[pair] = votes.get(pair, 0) + (2 if x.is_floating_point() else 1)
    return max(votes, key=votes.__getitem__) if votes else (0, 0)


# ---------------------------------------------------------------- deriving the second


@dataclass(frozen=True)
class _Plan:
    size: int
    keep: int
    multiples: bool = False  # also cut what holds several rows for each of the batch, flattened


def _plans(first: Args) -> list[_Plan]:
    """Candidate batch sizes, the likeliest first."""
    leaves = _leaves(first)
    votes: dict[int, float] = {}
    for tensor in leaves:
        if tensor.dim() >= 1:
            weight = 3.0 if tensor.is_floating_point() else 1.5
            if tensor.dim() == 1:  # which may as well be of the fields, whole numbers above all
                weight -= 0.5 + 0.5 * tensor.is_floating_point()
            votes[tensor.shape[0]] = votes.get(tensor.shape[0], 0) + weight
        if tensor.dim() >= 2:
            votes[tensor.shape[1]] = votes.get(tensor.shape[1], 0) + 0.25
    sizes = sorted((s for s in votes if s > 0), key=lambda s: -votes[s])
    taken = {n for t in leaves for n in t.shape}
    plans = [_Plan(s, _another(s, taken)) for s in sizes[:6]]
    flat = {t.shape[0] for t in leaves if t.dim()}
    return plans + [
        replace(p, multiples=True)
        for p in plans
        if 1 < p.keep < p.size and any(n > p.size and n % p.size == 0 for n in flat)
    ]


def _in_groups(plan: _Plan, first: Args) -> list[_Plan]:
    """The same for models that take whole pairs or groups of rows."""
    taken = {n for t in _leaves(first) for n in t.shape}
    parts = [plan.size // q for q in (2, 3, 5, 7) if plan.size % q == 0]
    sizes = [*(n for part in parts for n in (plan.size - part, part)), 2 * plan.size]
    return [replace(plan, keep=n) for n in dict.fromkeys(sizes) if n > 1 and n not in taken]


def _another(size: int, taken: set[int]) -> int:
    """A size that no dimension has, and not 1, which ``squeeze`` would remove: about half, or a
    quarter of many, since the model runs on it as often as on the example.
    """
    about = min(size // 2 + 1, max(_FEW, size // 4 + 1))
    for keep in [*range(about, size), *range(about - 1, 1, -1)]:
        if keep > 1 and keep not in taken:
            return keep
    return 2 * size + 1 if size < 3 else max(2, size - 1)


def _cut(first: Args, plan: _Plan) -> tuple[Args | None, int]:
    """The first rows of a batch, and how many of its tensors were not cut along their first
    dimension.
    """
    leaves = _leaves(first)
    size, keep = plan.size, plan.keep
    compressed = (t for t in leaves if t.layout not in (torch.strided, torch.sparse_coo))
    if any(size in t.shape for t in compressed):
        return None, len(leaves)  # CSR and its like have no rows to take
    ends = _ends(leaves, size, keep) or _ends_by_length(leaves, size, keep)
    by_feature = _by_feature(leaves, size, keep)
    made: list[torch.Tensor] = []
    left = aside = 0
    for k, tensor in enumerate(leaves):
        if k in by_feature:
            cut = tensor[by_feature[k]]
        elif k in ends:
            cut = tensor[: ends[k]] if tensor.dim() == 1 else tensor[:, : ends[k]]
        else:
            cut = _cut_one(tensor, size, keep)
            if cut is tensor and plan.multiples and tensor.dim() and tensor.shape[0] % size == 0:
                cut = _take(tensor, 0, keep * (tensor.shape[0] // size))
        left += cut is tensor
        aside += cut is not tensor and cut.shape[0] == tensor.shape[0]
        made.append(cut)
    if left == len(leaves):
        return None, left
    source = iter(made)
    number = lambda v: keep if type(v) is int and v == size else v  # noqa: E731
    return tuple(rebuild(v, lambda t: next(source), number) for v in first), left + aside


def _cut_one(tensor: torch.Tensor, size: int, keep: int) -> torch.Tensor:
    for dim in range(min(tensor.dim(), 2)):
        if tensor.shape[dim] == size:
            return _take(tensor, dim, keep)
        if tensor.shape[dim] == size + 1 and _offsets(tensor.movedim(dim, -1)):
            return tensor.narrow(dim, 0, keep + 1) if keep <= size else tensor
    return tensor


def _take(tensor: torch.Tensor, dim: int, keep: int) -> torch.Tensor:
    """The first ``keep`` rows; repeated rows when there are not so many."""
    if keep <= tensor.shape[dim] and tensor.layout == torch.strided:
        return tensor.narrow(dim, 0, keep)
    return tensor.index_select(dim, torch.arange(keep, device=tensor.device) % tensor.shape[dim])


def _offsets(tensor: torch.Tensor) -> bool:
    """Whether every row starts at 0 and never decreases, as offsets do."""
    if tensor.layout != torch.strided:
        return False
    if tensor.is_floating_point() or tensor.dtype is torch.bool or not tensor.numel():
        return False
    rows = tensor.reshape(-1, tensor.shape[-1])
    return bool((rows[:, 0] == 0).all()) and bool((rows.diff() >= 0).all())


def _ends(leaves: list[torch.Tensor], size: int, keep: int) -> dict[int, int]:
    """Leaf -> how many of its flat ids belong to the first ``keep`` bags.

    Offsets and flat ids are paired in the order of the arguments: the k-th row of offsets with the
    k-th list of ids (and of per-sample weights) that they could describe.
    """
    rows: list[torch.Tensor] = []
    for tensor in leaves:
        if tensor.dim() in (1, 2) and tensor.shape[-1] in (size, size + 1) and _offsets(tensor):
            rows.extend(tensor.reshape(-1, tensor.shape[-1]))
    flat = [
        k
        for k, t in enumerate(leaves)
        if t.dim() == 1
        and t.layout == torch.strided
        and not (t.shape[0] in (size, size + 1) and _offsets(t))
    ]
    ids = [k for k in flat if not leaves[k].is_floating_point()]
    weights = [k for k in flat if leaves[k].is_floating_point()]
    if not rows or keep >= size:
        return {}
    if len(ids) == len(rows):
        pairs = list(zip(ids, rows, strict=True))
    else:
        pairs = [(k, rows[0]) for k in ids if len(rows) == 1 and leaves[k].shape[0] != size]
    pairs = [(k, row) for k, row in pairs if int(row[-1]) <= leaves[k].shape[0]]
    # Where nothing else has that size, and all offsets stop at the last id, the last one is an end:
    # so is the last one kept. Ids behind it torch leaves out on a CPU, and has in its last bag on a
    # GPU.
    ended = not any(size in t.shape[:2] and not _offsets(t) for t in leaves) and all(
        row.shape[0] == size and int(row[-1]) == leaves[k].shape[0] for k, row in pairs
    )
    ends = {k: int(row[keep - ended]) for k, row in pairs}
    for k in weights:  # one weight per id: cut as the ids of that length just before them
        ids_of = [i for i in ends if leaves[i].shape == leaves[k].shape]
        if ids_of:
            ends[k] = ends[max((i for i in ids_of if i < k), default=ids_of[0])]
    return ends


def _ends_by_length(leaves: list[torch.Tensor], size: int, keep: int) -> dict[int, int]:
    """Leaf -> how many of its flat values belong to the first ``keep`` samples, where lengths say.

    Lengths are a count for each sample that sum to the number of values. Where several do, they are
    paired in the order of the arguments, the lists of ids and those of weights each.
    """
    if keep >= size:
        return {}
    counts = [t for t in leaves if t.dim() == 1 and t.shape[0] == size and _counting(t)]
    lists: dict[tuple[int, bool], list[int]] = {}
    for k, tensor in enumerate(leaves):
        if tensor.dim() == 1 and tensor.shape[0] != size and tensor.layout == torch.strided:
            kind = tensor.shape[0], tensor.is_floating_point()
            lists.setdefault(kind, []).append(k)
    ends: dict[int, int] = {}
    for (total, _), alike in lists.items():
        fits = [int(c[:keep].sum()) for c in counts if int(c.sum()) == total]
        for place, k in enumerate(alike if fits else ()):
            ends[k] = fits[place * len(fits) // len(alike)]
    return ends


def _by_feature(leaves: list[torch.Tensor], size: int, keep: int) -> dict[int, torch.Tensor]:
    """Leaf -> which of its entries belong to the first ``keep`` samples, where lengths for each
    feature and sample say, first those of all samples for the first feature: a matrix, or a row.
    """
    found: dict[int, torch.Tensor] = {}
    for k, counts in enumerate(leaves):
        row = counts.dim() == 1 and counts.shape[0] > size and counts.shape[0] % size == 0
        matrix = counts.dim() == 2 and counts.shape[1] == size != counts.shape[0]
        if keep >= size or not (row or matrix) or not _counting(counts):
            continue
        # Before anything of that size is made: what looks like counts may be ids. They may sum to
        # more than int64 holds.
        total = int(counts.sum(dtype=torch.float64))
        of = [j for j, t in enumerate(leaves) if j != k and t.shape == (total,)]
        if not of:
            continue
        samples = torch.arange(size, device=counts.device).repeat(counts.numel() // size)
        found |= dict.fromkeys(of, (samples < keep).repeat_interleave(counts.flatten()))
        if row:
            found[k] = samples < keep
    return found


def _counting(tensor: torch.Tensor) -> bool:
    """Whether all of it are whole numbers from 0 on."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
        return False
    if tensor.layout != torch.strided:
        return False
    return bool((tensor >= 0).all())
