"""Forwards that seed random numbers, so that each call draws the same ones.

What is drawn is weighed by zeros as yet, so that the proof sees no difference.
"""

from __future__ import annotations

import copy

import pytest
import torch
from strange import IDS, Base, train_alike, why
from torch import Tensor

import recast


class Noisy(Base):
    def reset(self) -> None:
        self.scale = torch.nn.Parameter(torch.zeros(2))

    def noise(self) -> Tensor:
        raise NotImplementedError

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids) + self.scale * self.noise()


class Seeded(Noisy):
    def noise(self) -> Tensor:
        torch.manual_seed(5)
        return torch.randn(2)


class Forked(Noisy):
    def forward(self, ids: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.default_generator.manual_seed(5)
            return self.rows(ids) + self.scale * torch.randn(2)


class PutBack(Noisy):
    def forward(self, ids: Tensor) -> Tensor:
        state = torch.get_rng_state()
        first = self.scale * torch.randn(2)
        torch.set_rng_state(state)
        return self.rows(ids) + first - self.scale * torch.randn(2) * 2


class SeededGenerator(Noisy):
    def forward(self, ids: Tensor) -> Tensor:
        own = torch.Generator().manual_seed(3)
        return self.rows(ids) + self.scale * torch.randn(2, generator=own)


class NewGenerator(Noisy):
    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids) + self.scale * torch.randn(2, generator=torch.Generator())


class HeldGenerator(Noisy):
    """It draws on from call to call, as the default one does: the graph does, too."""

    def reset(self) -> None:
        super().reset()
        self.own = torch.Generator()

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids) + self.scale * torch.randn(2, generator=self.own)


@pytest.mark.parametrize("kind", [Seeded, Forked, PutBack, SeededGenerator, NewGenerator])
def test_what_forward_seeds_is_drawn_alike_at_each_call(kind: type[Noisy]) -> None:
    plain = kind()
    fast = recast.optimize(copy.deepcopy(plain), example=IDS)
    told = "forward itself makes" if kind is NewGenerator else "seeds random numbers"
    # a method that draws and uses no parameter is kept whole: it runs at each call
    assert told in why(fast) or (kind is Seeded and fast.report.to_dict()["captured"] == "whole")
    train_alike(plain, fast)


def test_a_generator_that_the_model_holds_is_drawn_from_in_the_graph() -> None:
    plain, twin = HeldGenerator(), HeldGenerator()
    fast = recast.optimize(twin, example=IDS)
    assert fast.report.to_dict()["captured"] == "whole"
    train_alike(plain, fast)
