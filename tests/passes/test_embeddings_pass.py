"""group-embeddings: every form of lookup, each named Miss, levels and shared tables."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from passkit import calls, fired, journal, misses, same
from torch import nn
from torch.nn import functional as F

import recast

ROWS, DIM = 12, 4


class Forward(nn.Module):
    """A model whose forward is a function of the model and its inputs."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._forward = forward

    def forward(self, *args: Any) -> Any:
        return self._forward(self, *args)


def ids(*shape: int, seed: int = 0, rows: int = ROWS, dtype: torch.dtype = torch.int64) -> Any:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, rows, shape, generator=g).to(dtype)


def bags(size: int, seed: int = 0, last: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """``(ids, offsets)`` of bags of 0 to 3 ids."""
    g = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 4, (size,), generator=g)
    ends = torch.cumsum(counts, 0)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends if last else ends[:-1]])
    return ids(int(ends[-1]), seed=seed + 1), offsets


def table(**options: Any) -> nn.Embedding:
    return nn.Embedding(ROWS, DIM, **options)


def bag(mode: str, **options: Any) -> nn.EmbeddingBag:
    return nn.EmbeddingBag(ROWS, DIM, mode=mode, **options)


def both(make: Callable[[int, int], Any]) -> list[Any]:
    """Two batches of different size."""
    return [make(6, 0), make(9, 5)]


def weighted(size: int, seed: int) -> tuple[torch.Tensor, ...]:
    flat, offsets = bags(size, seed)
    g = torch.Generator().manual_seed(seed)
    return flat, offsets, torch.rand(flat.shape, generator=g, dtype=torch.float64)


ONE = both(lambda n, s: (ids(n, seed=s),))
MATRIX = both(lambda n, s: (ids(n, 3, seed=s),))
RAGGED = both(lambda n, s: bags(n, s))
LAST = both(lambda n, s: bags(n, s, last=True))
PACKED = both(lambda n, s: (ids(n, 5, seed=s).double(),))

FORMS: dict[str, tuple[Callable[[], nn.Module], list[Any], int]] = {}


class Doubled(nn.Embedding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.long()) * 2


class Averaged(nn.EmbeddingBag):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) / x.shape[1]


def form(
    name: str, batches: list[Any], forward: Callable[..., Any], lookups: int = 1, **parts: Any
) -> None:
    """A form of lookup; ``parts`` are made anew for every model."""

    def make() -> nn.Module:
        return Forward(forward, **{part: build() for part, build in parts.items()})

    FORMS[name] = (make, batches, lookups)


def tables(count: int) -> Callable[[], nn.Module]:
    return lambda: nn.ModuleList(nn.Embedding(ROWS, DIM + k) for k in range(count))


def wide() -> nn.Module:
    """One table of several fields, with the first row of each field in a buffer."""
    e = nn.Embedding(20, DIM)
    e.register_buffer("starts", torch.tensor([0, 4, 8]))
    return e


def fixed() -> nn.Module:
    e = table()
    e.register_buffer("fixed", torch.randn(ROWS, DIM))
    return e


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def split_bag(m: Any, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    quotient = F.embedding_bag(torch.div(x, 4, rounding_mode="floor"), m.q.weight, o, mode="sum")
    return quotient * F.embedding_bag(x % 4, m.r.weight, o, mode="sum")


def masked_mean(m: Any, x: torch.Tensor) -> torch.Tensor:
    mask = (x != 0).unsqueeze(2)
    return (m.e(x) * mask).sum(1) / (mask.sum(1) + 1e-8)


def joined(m: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return m.e(torch.cat([a.unsqueeze(1), b.unsqueeze(1)], 1) + torch.tensor([0, 6]))


INT32 = both(lambda n, s: (ids(n, seed=s, dtype=torch.int32),))
FIELDS = both(lambda n, s: (ids(n, 3, seed=s, rows=4),))
TWO = both(lambda n, s: (ids(n, seed=s, rows=6), ids(n, seed=s + 1, rows=6)))
NAMED = both(lambda n, s: ({"a": ids(n, seed=s), "b": ids(n, seed=s + 1)},))
WEIGHTED = both(weighted)

form("embedding", ONE, lambda m, x: m.e(x), e=table)
form("embedding of a matrix", MATRIX, lambda m, x: m.e(x), e=table)
form("embedding by keyword", ONE, lambda m, x: m.e(input=x), e=table)
form("embedding with padding", ONE, lambda m, x: m.e(x), e=partial(table, padding_idx=3))
form("embedding, sparse", ONE, lambda m, x: m.e(x), e=partial(table, sparse=True))
form("int32 ids", INT32, lambda m, x: m.e(x), e=table)
form("F.embedding", ONE, lambda m, x: F.embedding(x, m.e.weight), e=table)
form("F.embedding, padding", MATRIX, lambda m, x: F.embedding(x, m.e.weight, -2), e=table)
form("torch.embedding", ONE, lambda m, x: torch.embedding(m.e.weight, x), e=table)
form("torch.embedding, padding", ONE, lambda m, x: torch.embedding(m.e.weight, x, 3), e=table)
form("a parameter", ONE, lambda m, x: F.embedding(x, m.w), w=partial(parameter, ROWS, DIM))
form("a buffer beside", ONE, lambda m, x: m.e(x) + F.embedding(x, m.e.fixed), 2, e=fixed)
form("bag of a matrix", MATRIX, lambda m, x: m.e(x), e=partial(bag, "sum"))
form("bag, mean", RAGGED, lambda m, x, o: m.e(x, o), e=partial(bag, "mean"))
form("bag, max", RAGGED, lambda m, x, o: m.e(x, o), e=partial(bag, "max"))
form("bag by keyword", RAGGED, lambda m, x, o: m.e(input=x, offsets=o), e=partial(bag, "sum"))
form("bag, padding", RAGGED, lambda m, x, o: m.e(x, o), e=partial(bag, "mean", padding_idx=0))
form("bag, sparse", RAGGED, lambda m, x, o: m.e(x, o), e=partial(bag, "sum", sparse=True))
form(
    "bag, last offset", LAST, lambda m, x, o: m.e(x, o),
    e=partial(bag, "sum", include_last_offset=True),
)  # fmt: skip
form("bag with weights", WEIGHTED, lambda m, x, o, w: m.e(x, o, w), e=partial(bag, "sum"))
form("F.embedding_bag", RAGGED, lambda m, x, o: F.embedding_bag(x, m.e.weight, o), e=table)
form(
    "F.embedding_bag, sum", RAGGED,
    lambda m, x, o: F.embedding_bag(x, m.e.weight, o, mode="sum"), e=table,
)  # fmt: skip
form(
    "F.embedding_bag with weights", WEIGHTED,
    lambda m, x, o, w: F.embedding_bag(x, m.e.weight, o, mode="sum", per_sample_weights=w), e=table,
)  # fmt: skip
form("quotient and remainder", RAGGED, split_bag, 2, q=table, r=table)
form(
    "packed columns", PACKED,
    lambda m, x: torch.cat([e(x[:, k : k + 1].long()) for k, e in enumerate(m.e)], -1), 5,
    e=tables(5),
)  # fmt: skip
form(
    "column ints", PACKED,
    lambda m, x: torch.cat([e(x[:, k].int()) for k, e in enumerate(m.e)], 1), 5, e=tables(5),
)  # fmt: skip
form("column list", PACKED, lambda m, x: m.e(x[:, [0, 2, 3]].long()), e=table)
form(
    "one table, offsets made in forward", FIELDS,
    lambda m, x: m.e(x + x.new_tensor([0, 4, 8]).unsqueeze(0)), e=wide,
)  # fmt: skip
form("one table, offsets in a buffer", FIELDS, lambda m, x: m.e(x + m.e.starts), e=wide)
form("field-aware ids", ONE, lambda m, x: m.e(x.unsqueeze(1) + m.e.starts), e=wide)
form("fields joined first", TWO, joined, e=table)
form(
    "a shared table", MATRIX, lambda m, x: torch.stack([m.e(x[:, 0]), m.e(x[:, 1])], 1), 2, e=table
)
form(
    "dict of features", NAMED,
    lambda m, f: torch.stack([m.a(f["a"].long()), m.b(f["b"].long())], dim=1), 2, a=table, b=table,
)  # fmt: skip
form("masked mean by hand", MATRIX, masked_mean, e=partial(table, padding_idx=0))
form(
    "dim-1 table beside", MATRIX, lambda m, x: m.e(x).sum(1) + m.w(x).sum(1), 2,
    e=table, w=partial(nn.Embedding, ROWS, 1),
)  # fmt: skip
form(
    "a subclass with a forward of its own", ONE, lambda m, x: m.e(x),
    e=lambda: Doubled(ROWS, DIM, padding_idx=2),
)  # fmt: skip
form(
    "a subclass of a bag", both(lambda n, s: (ids(n, 5, seed=s),)), lambda m, x: m.e(x),
    e=lambda: Averaged(ROWS, DIM, mode="sum"),
)  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_one_call_with_the_same_numbers(name: str) -> None:
    make, batches, lookups = FORMS[name]
    torch.manual_seed(3)
    fast = same(make(), batches)
    assert len(calls(fast, "embedding_bags")) == 1
    assert fired(fast)["group-embeddings"] == 1
    assert journal(fast).lookups_found == journal(fast).lookups_fused == lookups


def test_a_shared_table_is_handed_over_once() -> None:
    make, batches, _ = FORMS["a shared table"]
    (call,) = calls(same(make(), batches), "embedding_bags")
    assert len(call.args[0]) == 1 and call.args[4] == [0, 0]


def test_two_modules_with_one_parameter_are_one_table() -> None:
    one, two = table(), table()
    two.weight = one.weight
    model = Forward(lambda m, x: m.a(x) + m.b(x * 0), a=one, b=two)
    (call,) = calls(same(model, ONE), "embedding_bags")
    assert len(call.args[0]) == 1


def test_ids_that_depend_on_a_lookup_make_a_second_level() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        first = m.a(x)
        return m.b(first.argmax(1)) + first + m.c(x)

    fast = same(Forward(forward, a=table(), b=table(), c=table()), ONE)
    assert [len(c.args[1]) for c in calls(fast, "embedding_bags")] == [2, 1]
    assert fired(fast)["group-embeddings"] == 2


def test_a_write_between_lookups_parts_them() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        first = m.a(x)
        y[:, 0] = 0
        return first + m.b(y)

    fast = same(Forward(forward, a=table(), b=table()), MATRIX)
    assert len(calls(fast, "embedding_bags")) == 2
    assert journal(fast).lookups_fused == 2


def test_a_write_to_something_else_does_not() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        logit = m.a(x).sum(1)
        logit += m.b(x).sum(1)
        logit[:, 0] = 0
        return logit + m.c(x).sum(1)

    fast = same(Forward(forward, a=table(), b=table(), c=table()), MATRIX)
    assert len(calls(fast, "embedding_bags")) == 1


def test_a_lookup_that_nobody_uses_is_dropped_and_its_gradient_stays_none() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.b(x)
        return m.a(x)

    fast = same(Forward(forward, a=table(), b=table()), ONE)
    assert len(calls(fast, "embedding_bags")[0].args[0]) == 1


def test_a_lookup_without_gradient_among_others() -> None:
    fast = same(Forward(lambda m, x: m.a(x) * m.b(x).detach(), a=table(), b=table()), ONE)
    assert len(calls(fast, "embedding_bags")) == 1


def test_a_row_written_in_place_after_the_lookup() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        a, b = m.a(x), m.b(x)
        a.mul_(2.0)
        return a + b

    same(Forward(forward, a=table(), b=table()), ONE)


def test_a_frozen_table_gets_no_gradient() -> None:
    model = Forward(lambda m, x: m.a(x) + m.b(x), a=table(), b=table())
    model.b.weight.requires_grad_(False)
    same(model, ONE)


def test_padding_idx_is_read_at_each_call() -> None:
    model = Forward(lambda m, x: m.e(x), e=bag("sum"))
    fast = same(model, MATRIX, steps=False)
    (x,) = MATRIX[0]
    fast.get_submodule("e").padding_idx = 3
    want = F.embedding_bag(x, model.e.weight, mode="sum", padding_idx=3)
    torch.testing.assert_close(fast(x), want)
    assert model.e.padding_idx is None


def _replaced() -> nn.Module:
    e = table()
    e.forward = MethodType(  # type: ignore[method-assign]
        lambda self, x: F.embedding(x, self.weight) * 2, e
    )
    return Forward(lambda m, x: m.e(x), e=e)


def _tied() -> nn.Module:
    """Two modules of one table, the second of which rewrites its rows."""
    e = table()
    e.weight.data.uniform_(-0.1, 0.1)
    clipped = table(max_norm=1.0)
    clipped.weight = e.weight
    return Forward(lambda m, x: (m.e(x), m.clipped(x.flip(0)), m.e(x)), e=e, clipped=clipped)


def _reads(before: Callable[..., Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Forward(
            lambda m, x: (before(m.e.weight, x), m.e(x.flip(0)), before(m.e.weight, x)),
            e=table(max_norm=1.0),
        )
        model.e.weight.data.uniform_(-0.1, 0.1)  # type: ignore[union-attr,operator]
        return model

    return make


REWRITTEN = {
    "tied": _tied,
    "function": _reads(lambda w, x: F.embedding(x, w)),
    "bags": _reads(lambda w, x: F.embedding_bag(x.unsqueeze(1), w, mode="sum")),
    "index": _reads(lambda w, x: w[x]),
    "index_select": _reads(lambda w, x: w.index_select(0, x)),
    "functions": lambda: Forward(
        lambda m, x: (
            F.embedding(x, m.e.weight), F.embedding(x, m.e.weight, None, 1.0),
            F.embedding(x, m.e.weight),
        ),
        e=table(_weight=torch.full((ROWS, DIM), 0.1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", REWRITTEN)
def test_no_read_crosses_a_lookup_that_rewrites_its_rows(form: str) -> None:
    """On the example no row is longer than max_norm; later all are."""
    torch.manual_seed(5)
    plain = REWRITTEN[form]()
    fast = recast.optimize(copy.deepcopy(plain), example=ONE)
    for m in (plain, fast):
        with torch.no_grad():
            m.e.weight.mul_(20)  # type: ignore[union-attr,operator]
    x = ids(8, seed=2)
    for ours, theirs in zip(fast(x), plain(x), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(fast.state_dict(), plain.state_dict())


def _hooked() -> nn.Module:
    e = table()
    e.register_forward_hook(lambda m, i, o: o * 2)
    return Forward(lambda m, x: m.e(x), e=e)


def _normed() -> nn.Module:
    return Forward(lambda m, x: m.e(x), e=nn.utils.parametrizations.weight_norm(table()))


REFUSED: dict[str, tuple[Callable[[], nn.Module], list[Any], str]] = {
    "max_norm": (lambda: Forward(lambda m, x: m.e(x), e=table(max_norm=1.0)), ONE, "max_norm"),
    "scale_grad_by_freq": (
        lambda: Forward(lambda m, x: m.e(x), e=table(scale_grad_by_freq=True)), ONE,
        "scale_grad_by_freq",
    ),
    "bag with max_norm": (
        lambda: Forward(lambda m, x, o: m.e(x, o), e=bag("sum", max_norm=0.5)), RAGGED, "max_norm",
    ),
    "F.embedding with max_norm": (
        lambda: Forward(lambda m, x: F.embedding(x, m.e.weight, max_norm=1.0), e=table()),
        ONE,
        "max_norm",
    ),
    "F.embedding_bag with scale_grad_by_freq": (
        lambda: Forward(
            lambda m, x, o: F.embedding_bag(x, m.e.weight, o, scale_grad_by_freq=True), e=table()
        ),
        RAGGED,
        "scale_grad_by_freq",
    ),
    "hook": (_hooked, ONE, "hooks"),
    "parametrization": (_normed, ONE, "parametrization"),
    "forward of its own": (_replaced, ONE, "Embedding overrides the forward of nn.Embedding"),
    "torch.embedding_bag": (
        lambda: Forward(
            lambda m, x, o: torch.embedding_bag(m.e.weight, x, o, False, 0)[0], e=table()
        ),
        RAGGED,
        "inner spelling",
    ),
    "computed table": (
        lambda: Forward(lambda m, x: F.embedding(x, m.e.weight * 2), e=table()), ONE,
        "computed at each call",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", REFUSED)
def test_every_miss_says_why_and_keeps_the_numbers(form: str) -> None:
    make, batches, why = REFUSED[form]
    torch.manual_seed(3)
    fast = same(make(), batches, steps=False)
    assert not calls(fast, "embedding_bags")
    assert any(why in text for text in misses(fast, "group-embeddings")), misses(
        fast, "group-embeddings"
    )
    assert all(entry.tries for entry in journal(fast).missed if entry.rule == "group-embeddings"), (
        "every miss has a remedy"
    )
    assert journal(fast).lookups_fused == 0 < journal(fast).lookups_found
