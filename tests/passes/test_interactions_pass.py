"""fuse-dot-interaction: every way to stack, multiply, gather and join; each named Miss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from passkit import calls, fired, journal, misses, same
from torch import Tensor, nn
from torch.nn import functional as F

FIELDS, DIM = 4, 3
LI, LJ = [1, 2, 2, 3, 3, 3], [0, 0, 1, 0, 1, 2]


def batch(rows: int, seed: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, DIM, generator=g, dtype=torch.float64) for _ in range(FIELDS))


BATCHES = [batch(5, 0), batch(8, 1)]


class Model(nn.Module):
    """``forward(xs) = pairs(products(stack(xs)))``, all three given."""

    def __init__(
        self,
        stack: Callable[[Any, tuple[Tensor, ...]], Tensor],
        product: Callable[[Tensor], Tensor],
        pairs: Callable[[Any, Tensor, tuple[Tensor, ...]], Tensor],
    ) -> None:
        super().__init__()
        self.stack, self.product, self.pairs = stack, product, pairs
        self.scale = nn.Parameter(torch.ones(DIM))
        self.register_buffer("li", torch.tensor(LI))
        self.register_buffer("lj", torch.tensor(LJ))
        self.register_buffer("places", torch.tril_indices(FIELDS, FIELDS, -1))
        self.register_buffer("mask", torch.triu(torch.ones(FIELDS, FIELDS), 1).bool())
        self.frozen = nn.Parameter(
            torch.tril(torch.ones(FIELDS, FIELDS)).bool(), requires_grad=False
        )

    def forward(self, *xs: Tensor) -> Tensor:
        xs = (xs[0] * self.scale, *xs[1:])
        return self.pairs(self, self.product(self.stack(self, xs)), xs)


def _stack(m: Any, xs: Any) -> Tensor:
    return torch.stack(xs, dim=1)


def _bmm(t: Tensor) -> Tensor:
    return torch.bmm(t, t.transpose(1, 2))


def _gather(m: Any, z: Tensor, xs: Any) -> Tensor:
    return z[:, torch.tensor(LI), torch.tensor(LJ)]


STACKS: dict[str, Callable[[Any, Any], Tensor]] = {
    "stack": _stack,
    "stack from behind": lambda m, xs: torch.stack(list(xs), dim=-2),
    "cat and view": lambda m, xs: torch.cat(xs, dim=1).view(xs[0].shape[0], -1, DIM),
    "cat and reshape": lambda m, xs: torch.cat(xs, -1).reshape(-1, FIELDS, DIM),
    "one wide part": lambda m, xs: torch.cat([torch.cat(xs[:2], 1), *xs[2:]], 1).view(
        -1, FIELDS, DIM
    ),
    "unsqueeze and cat": lambda m, xs: torch.cat([x.unsqueeze(1) for x in xs], dim=1),
    "none index and cat": lambda m, xs: torch.cat([x[:, None] for x in xs], dim=1),
    "view and cat": lambda m, xs: torch.cat([x.view(-1, 1, DIM) for x in xs], dim=-2),
    "stack beside unsqueeze": lambda m, xs: torch.cat(
        [torch.stack(xs[1:], 1), xs[0].unsqueeze(1)], 1
    ),
    "given": lambda m, xs: (torch.stack(xs, 1) * 2.0).relu(),
}
PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "bmm": _bmm,
    "Tensor.bmm": lambda t: t.bmm(t.permute(0, 2, 1)),
    "matmul": lambda t: torch.matmul(t, t.transpose(-1, -2)),
    "@": lambda t: t @ t.transpose(2, 1),
    "mT": lambda t: t @ t.mT,
    "einsum": lambda t: torch.einsum("bfd,bgd->bfg", t, t),
}
PAIRS: dict[str, tuple[Callable[[Any, Tensor, Any], Tensor], int]] = {
    "tensors made in forward": (_gather, 6),
    "lists": (lambda m, z, xs: z[:, LI, LJ], 6),
    "buffers": (lambda m, z, xs: z[:, m.li, m.lj], 6),
    "rows of a buffer": (lambda m, z, xs: z[:, m.places[0], m.places[1]], 6),
    "tril_indices": (lambda m, z, xs: _unpacked(z, torch.tril_indices(FIELDS, FIELDS, -1)), 6),
    "triu_indices with self": (
        lambda m, z, xs: _unpacked(z, torch.triu_indices(FIELDS, FIELDS)), 10,
    ),
    "tril_indices on the device": (
        lambda m, z, xs: _unpacked(z, torch.tril_indices(FIELDS, FIELDS, -1, device=z.device)), 6,
    ),
    "any pairs": (lambda m, z, xs: z[:, [0, 3, 1], [0, 0, 3]], 3),
    "masked_select": (lambda m, z, xs: torch.masked_select(z, m.mask).view(-1, 6), 6),
    "Tensor.masked_select of a parameter": (
        lambda m, z, xs: z.masked_select(m.frozen).view(z.shape[0], -1), 10,
    ),
    "a mask as index": (lambda m, z, xs: z[:, m.mask], 6),
    "a mask made in forward": (
        lambda m, z, xs: z[:, torch.triu(torch.ones(FIELDS, FIELDS, dtype=torch.bool), 1)], 6,
    ),
    "flat index": (lambda m, z, xs: z.view(-1, FIELDS * FIELDS)[:, [1, 2, 3, 6, 7, 11]], 6),
    "index_select": (
        lambda m, z, xs: torch.index_select(z.flatten(1), 1, torch.tensor([4, 8, 9])), 3,
    ),
    "dense in front": (lambda m, z, xs: torch.cat([xs[0], _gather(m, z, xs)], dim=1), 6 + DIM),
    "dense and a zero column": (
        lambda m, z, xs: torch.cat(
            [xs[0], _gather(m, z, xs), torch.zeros(xs[0].shape[0], 1, dtype=z.dtype)], 1
        ),
        7 + DIM,
    ),
    "new_zeros": (
        lambda m, z, xs: torch.cat([_gather(m, z, xs), z.new_zeros(z.size(0), 2)], 1), 8,
    ),
    "F.pad": (
        lambda m, z, xs: F.pad(torch.cat([xs[0], _gather(m, z, xs)], 1), (0, 1)), 7 + DIM,
    ),
}  # fmt: skip


def _unpacked(z: Tensor, places: Tensor) -> Tensor:
    li, lj = places
    return z[:, li, lj]


def _one(fast: Any, columns: int) -> Any:
    assert fired(fast) == {"fuse-dot-interaction": 1}, misses(fast, "fuse-dot-interaction")
    (call,) = calls(fast, "dot_interaction")
    assert fast(*BATCHES[0]).shape[1] == columns
    left = [n.name for n in fast.graph.nodes if n.target in (torch.bmm, torch.matmul, torch.cat)]
    return call, left


@pytest.mark.parametrize("stack", STACKS)
def test_every_way_to_stack(stack: str) -> None:
    call, left = _one(same(Model(STACKS[stack], _bmm, _gather), BATCHES), 6)
    parts = {"given": 1, "one wide part": 3}.get(stack, FIELDS)
    assert len(call.args[0]) == parts
    assert len(left) == (stack == "one wide part")


@pytest.mark.parametrize("product", PRODUCTS)
def test_every_way_to_multiply(product: str) -> None:
    _one(same(Model(_stack, PRODUCTS[product], _gather), BATCHES), 6)


@pytest.mark.parametrize("pairs", PAIRS)
def test_every_way_to_keep_pairs(pairs: str) -> None:
    gather, columns = PAIRS[pairs]
    _, left = _one(same(Model(_stack, _bmm, gather), BATCHES), columns)
    assert not left


@pytest.mark.parametrize(
    "pairs", ["buffers", "rows of a buffer", "masked_select", "a mask as index"]
)
def test_pairs_held_by_the_model_are_read_at_each_call(pairs: str) -> None:
    model = Model(_stack, _bmm, PAIRS[pairs][0]).double()
    fast = same(model, BATCHES, steps=False)
    for m in (model, fast):
        with torch.no_grad():
            m.get_buffer("li").copy_(torch.tensor(LJ))
            m.get_buffer("lj").copy_(torch.tensor(LI))
            m.get_buffer("places").copy_(m.get_buffer("places").flip(0))
            m.get_buffer("mask").copy_(m.get_buffer("mask").t().clone())
    torch.testing.assert_close(fast(*BATCHES[0]), model(*BATCHES[0]))


def test_a_stack_used_elsewhere_is_taken_as_it_is() -> None:
    def pairs(m: Any, z: Tensor, xs: Any) -> Tensor:
        return _gather(m, z, xs)

    class Also(Model):
        def forward(self, *xs: Tensor) -> Tensor:
            t = torch.stack((xs[0] * self.scale, *xs[1:]), 1)
            return torch.cat([t.flatten(1), self.pairs(self, _bmm(t), xs)], 1)

    fast = same(Also(_stack, _bmm, pairs), BATCHES)
    (call,) = calls(fast, "dot_interaction")
    assert len(call.args[0]) == 1


def test_dense_behind_stays_outside() -> None:
    fast = same(
        Model(_stack, _bmm, lambda m, z, xs: torch.cat([_gather(m, z, xs), xs[0]], 1)), BATCHES
    )
    (call,) = calls(fast, "dot_interaction")
    assert call.args[1] is None and call.args[4] == 0


def test_attention_is_left_alone() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Parameter(torch.randn(DIM, DIM))

        def forward(self, *xs: Tensor) -> Tensor:
            t = torch.stack(xs, 1)
            return torch.softmax(torch.bmm(t @ self.q, t.transpose(1, 2)), -1) @ t

    fast = same(Attention(), BATCHES)
    assert not calls(fast, "dot_interaction") and not misses(fast, "fuse-dot-interaction")


REFUSED: dict[str, tuple[Callable[[Any, Tensor, Any], Tensor], str]] = {
    "used twice": (
        lambda m, z, xs: _gather(m, z, xs) + z[:, LJ, LI], "used more than once",
    ),
    "every pair": (lambda m, z, xs: z.flatten(1) + 1, "every pair is kept"),
    "int32 index": (lambda m, z, xs: z[:, m.li.int(), m.lj.int()], "dtype torch.int32"),
    "masked_select kept flat": (
        lambda m, z, xs: torch.masked_select(z, m.mask) * 2, "not shaped back",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", REFUSED)
def test_every_miss_says_why_and_keeps_the_numbers(form: str) -> None:
    pairs, why = REFUSED[form]
    fast = same(Model(_stack, _bmm, pairs), BATCHES, steps=False)
    assert not calls(fast, "dot_interaction")
    assert any(why in text for text in misses(fast, "fuse-dot-interaction")), journal(fast).missed
