"""Tensors and settings of a layer that forward sets for one call of it, and sets back."""

from __future__ import annotations

import copy

import pytest
import torch
from strange import IDS, Base, train_alike, why
from torch import Tensor, nn
from torch.func import functional_call

import recast


class Added(Base):
    """Corrections of the weights, all zero as yet: the proof sees the same outputs without them."""

    def reset(self) -> None:
        self.more = nn.ParameterDict({k: torch.zeros_like(v) for k, v in named(self.out)})

    def forward(self, ids: Tensor) -> Tensor:
        weights = {k: v + self.more[k] for k, v in named(self.out)}
        return functional_call(self.out, weights, self.emb(ids).sum(1))  # type: ignore[no-any-return]


class Detached(Base):
    def forward(self, ids: Tensor) -> Tensor:
        weights = {k: v.detach() for k, v in named(self.out)}
        return self.rows(ids) + functional_call(self.out, weights, self.emb(ids).sum(1))  # type: ignore[no-any-return]


class DetachedTable(Base):
    def forward(self, ids: Tensor) -> Tensor:
        weights = {k: v.detach() for k, v in named(self.emb)}
        return self.rows(ids) + self.out(functional_call(self.emb, weights, ids).sum(1))  # type: ignore[no-any-return]


class Padded(Base):
    def forward(self, ids: Tensor) -> Tensor:
        self.emb.padding_idx = 3
        rows = self.rows(ids)
        self.emb.padding_idx = None
        return rows


class Momentum(Base):
    def reset(self) -> None:
        self.norm = nn.BatchNorm1d(2)

    def forward(self, ids: Tensor) -> Tensor:
        was = self.norm.momentum
        self.norm.momentum = 0.5
        rows: Tensor = self.norm(self.rows(ids))
        self.norm.momentum = was
        return rows


class InEncoder(Base):
    """The setting is of a part of what becomes one node."""

    def reset(self) -> None:
        self.mix = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        weights = {"linear1.weight": self.mix.linear1.weight.detach()}
        return functional_call(self.mix, weights, self.emb(ids))  # type: ignore[no-any-return]


def named(module: nn.Module) -> list[tuple[str, Tensor]]:
    return list(module.named_parameters())


@pytest.mark.parametrize(
    ("kind", "set_"),
    [
        (Added, "out.weight"),
        (Detached, "out.weight"),
        (DetachedTable, "emb.weight"),
        (Padded, "emb.padding_idx"),
        (Momentum, "norm.momentum"),
        (InEncoder, "mix.linear1.weight"),
    ],
)
def test_a_layer_that_forward_sets_for_one_call_is_told_and_trains_alike(
    kind: type[Base], set_: str
) -> None:
    plain = kind()
    fast = recast.optimize(copy.deepcopy(plain), example=IDS)
    assert f"forward sets {set_}, itself or by functional_call" in why(fast)
    train_alike(plain, fast)
