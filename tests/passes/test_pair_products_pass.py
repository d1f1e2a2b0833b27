"""fuse-pair-products: loops, index lists, masks of pairs, sums before and behind, each Miss."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from passkit import calls, fired, journal, misses, optimized, same
from torch import Tensor, nn

FIELDS, DIM = 5, 4
PAIRS = list(combinations(range(FIELDS), 2))
LI, LJ = [i for i, _ in PAIRS], [j for _, j in PAIRS]


def batch(rows: int, seed: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, FIELDS, DIM, generator=g, dtype=torch.float64),)


BATCHES = [batch(6, 0), batch(9, 1)]


class Model(nn.Module):
    """``forward(x) = products(self, x * scale)``, with parameters for the products to use."""

    def __init__(self, products: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.products = products
        self.scale = nn.Parameter(torch.ones(DIM))
        self.mix = nn.Parameter(torch.randn(DIM, DIM))
        self.register_buffer("li", torch.tensor(LI))
        self.register_buffer("lj", torch.tensor(LJ))

    def forward(self, x: Tensor) -> Tensor:
        return self.products(self, x * self.scale)


def _field_aware(x: Tensor) -> Tensor:
    return (x.unsqueeze(1) * torch.arange(1.0, FIELDS + 1).view(1, -1, 1, 1).to(x)).contiguous()


def _listed(x: Tensor) -> list[Tensor]:
    return [x[:, k] * (k + 1) for k in range(FIELDS)]


FORMS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "index lists": (lambda m, x: x[:, LI] * x[:, LJ], "none"),
    "buffers": (
        lambda m, x: torch.index_select(x, 1, m.li) * torch.index_select(x, 1, m.lj), "none",
    ),
    "pooled": (lambda m, x: (x[:, LI] * x[:, LJ]).sum(1), "pairs"),
    "pooled, kept": (lambda m, x: (x[:, m.li] * x[:, m.lj]).sum(dim=1, keepdim=True), "pairs"),
    "inner, kept": (lambda m, x: (x[:, LI] * x[:, LJ]).sum(2, keepdim=True), "dim"),
    "all at once": (lambda m, x: (x[:, LI] * x[:, LJ]).sum(dim=(1, 2)), "all"),
    "one by one": (lambda m, x: (x[:, LI] * x[:, LJ]).sum(2, keepdim=True).sum(1), "all"),
    "two tensors": (lambda m, x: (x @ m.mix)[:, LI] * x[:, LJ], "none"),
    "one gathered": (lambda m, x: (x[:, LI] @ m.mix) * x[:, LJ], "none"),
    "lists of vectors": (
        lambda m, x: (lambda v: torch.cat([v[i].unsqueeze(1) for i in LI], 1)
                      * torch.cat([v[j].unsqueeze(1) for j in LJ], 1))(_listed(x)), "none",
    ),
    "stack of a loop": (
        lambda m, x: torch.stack([x[:, i] * x[:, j] for i, j in PAIRS], dim=1), "none",
    ),
    "split": (
        lambda m, x: (lambda v: torch.cat([a * b for a, b in combinations(v, 2)], 1))(
            torch.split(x, 1, dim=1)), "none",
    ),
    "unbind, side by side": (
        lambda m, x: (lambda v: torch.cat([a * b for a, b in combinations(v, 2)], -1))(
            x.unbind(1)), "none",
    ),
    "chunk, side by side": (
        lambda m, x: (lambda v: torch.cat([a * b for a, b in combinations(v, 2)], -1))(
            torch.chunk(x, FIELDS, 1)), "none",
    ),
    "slices": (
        lambda m, x: torch.cat([x[:, i : i + 1] * x[:, j : j + 1, :] for i, j in PAIRS], 1), "none",
    ),
    "select, negative": (
        lambda m, x: torch.stack([x.select(1, -1 - i) * x[:, j] for i, j in PAIRS], 1), "none",
    ),
    "field-aware": (
        lambda m, x: (lambda v: torch.stack([v[:, i, j] * v[:, j, i, :] for i, j in PAIRS], 1))(
            _field_aware(x)), "none",
    ),
    "inner in the loop": (
        lambda m, x: torch.cat([(x[:, i] * x[:, j]).sum(1, keepdim=True) for i, j in PAIRS], 1),
        "dim",
    ),
    "inner in the loop, stacked, summed": (
        lambda m, x: torch.stack([(x[:, i] * x[:, j]).sum(-1) for i, j in PAIRS], 1).sum(
            1, keepdim=True), "all",
    ),
    "vectors of a list": (
        lambda m, x: (lambda v: torch.stack([v[i] * v[j] for i, j in PAIRS], 1).sum(1))(_listed(x)),
        "pairs",
    ),
    "python's sum": (lambda m, x: sum(x[:, i] * x[:, j] for i, j in PAIRS), "pairs"),
    "sum of inner": (
        lambda m, x: x[:, 0, :1] + sum((x[:, i] * x[:, j]).sum(1, keepdim=True) for i, j in PAIRS),
        "all",
    ),
    "beside other parts": (
        lambda m, x: torch.cat([x[:, 0, :3], *(x[:, i] * x[:, j] for i, j in PAIRS), x[:, 1]], 1),
        "none",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_write_it(form: str) -> None:
    products, summed = FORMS[form]
    fast = same(Model(products), BATCHES, steps=form in ("split", "python's sum"))
    assert fired(fast)["fuse-pair-products"] == 1, journal(fast).missed
    (call,) = calls(fast, "pair_products")
    assert call.args[5] == summed


def test_a_stack_of_their_own_is_never_made() -> None:
    def products(m: Any, x: Tensor) -> Tensor:
        stack = torch.stack(_listed(x), 1)
        return torch.stack([stack[:, i] * stack[:, j] for i, j in PAIRS], 1)

    fast = same(Model(products), BATCHES, steps=False)
    (call,) = calls(fast, "pair_products")
    assert len(call.args[0]) == FIELDS
    assert not [n for n in fast.graph.nodes if n.target is torch.stack]


def test_an_index_that_is_read_at_each_call_may_change() -> None:
    model = Model(FORMS["buffers"][0])
    fast = same(model, BATCHES, steps=False)
    for held in (model, fast):
        held.load_state_dict({**held.state_dict(), "li": torch.tensor(LJ)})
    torch.testing.assert_close(fast(*BATCHES[0]), model(*BATCHES[0]))


def test_second_derivatives_of_an_index_that_counts_from_the_end() -> None:
    g = torch.Generator().manual_seed(3)
    x, up, other = (torch.randn(n, generator=g) for n in ((6, FIELDS, DIM), (6, 10, DIM), (DIM,)))
    model = Model(lambda m, x: x[:, m.li] * x[:, m.lj])
    model.lj -= FIELDS
    fast = optimized(model, [(x,), (x[:4],)])
    assert calls(fast, "pair_products")
    found = []
    for one in (model, fast):
        (first,) = torch.autograd.grad(one(x), model.scale, up, create_graph=True)
        found.append([first, *torch.autograd.grad(first, model.scale, other)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


KEPT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "two products": lambda m, x: torch.stack([x[:, 0] * x[:, 1], x[:, 1] * x[:, 2]], 1),
    "no vectors": lambda m, x: torch.stack([x * k for k in (x + 1, x + 2, x + 3)], 1),
    "another dimension": lambda m, x: torch.stack([x[:, i] * x[:, j] for i, j in PAIRS], 2),
    "read twice": lambda m, x: (lambda p, q: p * q + p - q)(x[:, LI], x[:, LJ]),
    "broadcast": lambda m, x: x[:, LI] * x[:, :1],
    "a sum of several lengths": lambda m, x: sum(
        (x[:, k, :d] * x[:, 0, :d]).sum(1) for k, d in ((1, 1), (2, 2), (3, 4))
    ),
}


@pytest.mark.parametrize("form", KEPT)
def test_what_gains_nothing_or_is_none_stays(form: str) -> None:
    fast = same(Model(KEPT[form]), BATCHES, steps=False)
    assert not calls(fast, "pair_products")


MISSES: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "not side by side": (
        lambda m, x: torch.stack(
            [x[:, 0] * x[:, 1], x[:, 1] * x[:, 2], x[:, 0] + x[:, 3], x[:, 2] * x[:, 3]], 1
        ), "do not stand side by side",
    ),
    "several lengths": (
        lambda m, x: torch.cat([x[:, k, :d] * x[:, k + 1, :d] for k, d in ((0, 1), (1, 2), (2, 4))],
                               1), "do not stand side by side",
    ),
    "several lengths, summed": (
        lambda m, x: torch.stack([(x[:, k, :d] * x[:, 0, :d]).sum(1)
                                  for k, d in ((0, 1), (1, 2), (2, 4))], 1),
        "do not stand side by side",
    ),
    "int32 index": (lambda m, x: x[:, m.li.int()] * x[:, m.lj.int()], "torch.int32"),
}  # fmt: skip


@pytest.mark.parametrize("form", MISSES)
def test_every_miss_says_why_and_keeps_the_numbers(form: str) -> None:
    products, why = MISSES[form]
    fast = same(Model(products), BATCHES, steps=False)
    assert not calls(fast, "pair_products")
    assert any(why in text for text in misses(fast, "fuse-pair-products")), journal(fast).missed


class Bilinear(nn.Module):
    """The bilinear interactions of FiBiNET, with ``kind`` layers."""

    def __init__(self, kind: str, bias: bool) -> None:
        super().__init__()
        self.kind = kind
        count = {"all": 1, "each": FIELDS, "interaction": len(PAIRS)}[kind]
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=bias) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        v = torch.split(x, 1, dim=1)
        at = {"all": [0] * len(PAIRS), "each": LI, "interaction": range(len(PAIRS))}[self.kind]
        mixed = [self.layers[k](v[i]) * v[j] for k, (i, j) in zip(at, PAIRS, strict=True)]
        parts = torch.split(torch.cat(mixed, 1), 1, dim=1)
        return torch.flatten(torch.cat(parts, dim=-1), start_dim=1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["all", "each", "interaction"])
def test_bilinear_interactions_are_a_few_products(kind: str, bias: bool) -> None:
    fast = same(Bilinear(kind, bias), BATCHES)
    wanted = {"fuse-pair-products": 1, "group-vector-linears": 1, "join-split": 1}
    assert fired(fast) == wanted, journal(fast).missed
    assert not [n for n in fast.graph.nodes if n.op == "call_module"]


def test_layers_of_vectors_in_a_list() -> None:
    def products(m: Any, x: Tensor) -> Tensor:
        v = _listed(x)
        return torch.stack([m.layer(v[i]) * v[j] for i, j in PAIRS], 1)

    model = Model(products)
    model.layer = nn.Linear(DIM, DIM)
    fast = same(model, BATCHES)
    assert fired(fast)["group-vector-linears"] == 1, journal(fast).missed


MATRICES: dict[str, tuple[int, Callable[[Any, Tensor], Tensor]]] = {
    "one a pair, split": (len(PAIRS), lambda m, x: torch.cat(
        [torch.matmul(v[0], w) * v[1] for v, w in zip(
            combinations(torch.split(x, 1, dim=1), 2), torch.split(m.held, 1, dim=0), strict=True)],
        1)),
    "one a vector, split": (FIELDS, lambda m, x: torch.cat(
        [(x[:, j : j + 1] @ torch.split(m.held, 1)[j]) * x[:, i : i + 1] for i, j in PAIRS], 1)),
    "one a pair, by place": (len(PAIRS), lambda m, x: torch.stack(
        [torch.matmul(x[:, i], m.held[k]) * x[:, j] for k, (i, j) in enumerate(PAIRS)], 1)),
    "out of order": (len(PAIRS), lambda m, x: torch.stack(
        [torch.matmul(x[:, i], m.held[-1 - k]) * x[:, j] for k, (i, j) in enumerate(PAIRS)], 1)),
    "one for all": (2, lambda m, x: torch.stack(
        [torch.matmul(x[:, i], m.held[1]) * x[:, j] for i, j in PAIRS], 1)),
}  # fmt: skip


@pytest.mark.parametrize("form", MATRICES)
def test_matrices_of_one_parameter_are_layers_too(form: str) -> None:
    count, products = MATRICES[form]
    model = Model(products)
    model.held = nn.Parameter(torch.randn(count, DIM, DIM))
    fast = same(model, BATCHES)
    assert fired(fast)["group-vector-linears"] == 1, journal(fast).missed
    left = [n for n in fast.graph.nodes if n.target in (torch.matmul, operator.matmul)]
    assert not [n for n in left if n.users]


def test_a_vector_without_its_middle_is_no_row_of_a_split_matrix() -> None:
    """(B, D) @ (1, D, D) is (1, B, D): its first dimension is not the batch."""

    def products(m: Any, x: Tensor) -> Tensor:
        w = torch.split(m.held, 1, dim=0)
        return torch.cat([(x[:, i] @ w[i]).transpose(0, 1) * x[:, j : j + 1] for i, j in PAIRS], 1)

    model = Model(products)
    model.held = nn.Parameter(torch.randn(FIELDS, DIM, DIM))
    assert "group-vector-linears" not in fired(same(model, BATCHES, steps=False))


def test_layers_of_several_kinds_are_left() -> None:
    def products(m: Any, x: Tensor) -> Tensor:
        mixed = [layer(x[:, k]) for k, layer in enumerate(m.layers)]
        return torch.stack([a * b for a, b in combinations(mixed, 2)], 1)

    model = Model(products)
    model.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=k != 1) for k in range(3))
    fast = same(model, BATCHES, steps=False)
    assert any("cannot be grouped" in text for text in misses(fast, "group-vector-linears"))


class Attentional(nn.Module):
    """An attentional factorisation machine."""

    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.keep = keep
        self.attention = nn.Linear(DIM, 3)
        self.projection = nn.Linear(3, 1, bias=False)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        products = x[:, LI] * x[:, LJ]
        a = torch.softmax(self.projection(torch.relu(self.attention(products))), dim=1)
        return torch.sum(self.drop(a) * products, dim=1, keepdim=self.keep), a


@pytest.mark.parametrize("keep", [False, True])
def test_attentional_pairs_read_the_vectors_again(keep: bool) -> None:
    fast = same(Attentional(keep), BATCHES)
    assert fired(fast)["fuse-pair-products"] == fired(fast)["pool-pair-products"] == 1
    assert [call.args[5] for call in calls(fast, "pair_products")] == ["none", "pairs"]
