"""contract-attention-inputs: the target beside each row of a history, in every way to write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from passkit import fired, journal, misses, same
from torch import Tensor, nn
from torch.nn import functional as F

LENGTH, DIM = 13, 11


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, DIM, generator=g, dtype=torch.float64)
    return q, torch.randn(rows, LENGTH, DIM, generator=g, dtype=torch.float64)


BATCHES = [batch(4, 0), batch(7, 1)]


class Model(nn.Module):
    """``scores(self, q, k)``, with layers that it may want, named by their inputs."""

    def __init__(self, scores: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.scores = scores
        self.scale = nn.Parameter(torch.ones(DIM))
        for parts in (2, 3, 4, 5):
            setattr(self, f"of{parts}", nn.Linear(parts * DIM, 4))
        self.plain = nn.Linear(4 * DIM, 4, bias=False)
        self.last = nn.Linear(4, 1)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return self.last(torch.relu(self.scores(self, q * self.scale, k * self.scale)))


def _four(m: Any, q: Tensor, k: Tensor) -> Tensor:
    wide = q.unsqueeze(1).expand(-1, LENGTH, -1)
    return m.of4(torch.cat([wide, k, wide - k, wide * k], dim=-1))


def _flat(m: Any, q: Tensor, k: Tensor) -> Tensor:
    wide = q.unsqueeze(1).repeat(1, LENGTH, 1)
    joined = torch.cat([wide, k, wide - k, wide * k], 2)
    return m.of4(joined.view(-1, 4 * DIM)).view(-1, LENGTH, 4)


FORMS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "four": _four,
    "rows of all samples": _flat,
    "other order": lambda m, q, k: m.plain(torch.cat(
        [k * q[:, None], k - q[:, None], k, q[:, None].expand_as(k)], -1)),
    "three": lambda m, q, k: m.of3(torch.cat(
        [k, q.unsqueeze(1).expand(-1, LENGTH, -1), k * q.unsqueeze(1)], 2)),
    "side by side": lambda m, q, k: m.of2(torch.cat(
        [q.unsqueeze(1).repeat_interleave(LENGTH, dim=1), k], -1)),
    "differences": lambda m, q, k: m.of3(torch.cat(
        [q.unsqueeze(1) - k, k - q.unsqueeze(1), q.unsqueeze(1) * k], -1)),
    "one of them twice": lambda m, q, k: (lambda w: m.of5(torch.cat([w, k, w, k - w, w * k], -1)))(
        q.unsqueeze(1).expand(-1, LENGTH, -1)),
    "a function": lambda m, q, k: F.linear(torch.cat(
        [q.unsqueeze(1).expand(-1, LENGTH, -1), k, q.unsqueeze(1) * k], -1),
        m.of3.weight, m.of3.bias),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_write_it(form: str) -> None:
    fast = same(Model(FORMS[form]), BATCHES)
    assert fired(fast)["contract-attention-inputs"] == 1, journal(fast).missed
    wide = [
        n for n in fast.graph.nodes if n.target in ("expand", "repeat", "expand_as") and n.users
    ]
    assert not wide


def test_a_product_that_is_read_again_is_kept() -> None:
    def scores(m: Any, q: Tensor, k: Tensor) -> Tensor:
        wide = q.unsqueeze(1).expand(-1, LENGTH, -1)
        product = wide * k
        return m.of4(torch.cat([wide, k, wide - k, product], -1)) + product.sum(-1, keepdim=True)

    assert fired(same(Model(scores), BATCHES))["contract-attention-inputs"] == 1


OTHERS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "two histories": lambda m, q, k: m.of3(torch.cat(
        [q.unsqueeze(1).expand(-1, LENGTH, -1), k, k.flip(1)], -1)),
    "two targets": lambda m, q, k: m.of3(torch.cat(
        [q.unsqueeze(1).expand(-1, LENGTH, -1), k, (q * 2).unsqueeze(1).expand_as(k)], -1)),
    "rows only": lambda m, q, k: m.of2(torch.cat([k, k * q.unsqueeze(1)], -1)),
    "few rows": lambda m, q, k: m.of2(torch.cat(
        [q.unsqueeze(1).expand(-1, 2, -1), k[:, :2]], -1)),
    "an input that is read twice": lambda m, q, k: (lambda x: m.of2(x) + x[..., :4])(torch.cat(
        [q.unsqueeze(1).expand(-1, LENGTH, -1), k], -1)),
    "a square": lambda m, q, k: m.of3(torch.cat(
        [q.unsqueeze(1).expand(-1, LENGTH, -1), k, k * k], -1)),
}  # fmt: skip


@pytest.mark.parametrize("form", OTHERS)
def test_what_is_something_else_stays(form: str) -> None:
    fast = same(Model(OTHERS[form]), BATCHES, steps=False)
    assert not fired(fast)["contract-attention-inputs"], journal(fast).fired


def test_hooks_are_named() -> None:
    model = Model(_four)
    model.of4.register_forward_hook(lambda m, args, out: None)
    fast = same(model, BATCHES, steps=False)
    assert any("hooks" in why for why in misses(fast, "contract-attention-inputs"))
