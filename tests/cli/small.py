"""Models that the tests of the command line name."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Small(nn.Module):
    """Three tables, an interaction of none, one chain with a branch in it."""

    def __init__(self, chatty: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(11, 4) for _ in range(3))
        self.top = nn.Sequential(nn.Linear(15, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())
        self.chatty = chatty

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        if self.chatty:
            print("the model says something")
        rows = [table(ids[:, k]) for k, table in enumerate(self.tables)]
        return self.top(torch.cat([dense, *rows], dim=1)).squeeze(1)


def model(chatty: bool = False, rows: int = 8) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    if chatty:
        print("the function says something")
    g = torch.Generator().manual_seed(0)
    batch = torch.randn(rows, 3, generator=g), torch.randint(11, (rows, 3), generator=g)
    return Small(chatty), batch


def with_loss() -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    return (*model(), lambda out: nn.functional.mse_loss(out, torch.full_like(out, 0.25)))


def bad_loss() -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    return (*model(), lambda out: out.mean(7))


def no_scalar() -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    return (*model(), lambda out: out)


def number_loss() -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    return (*model(), lambda out: out.sum().item())


class Rows(nn.Module):
    """One step of a loop for each row of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = [self.linear(x[k] * x[k].sum().item()) for k in range(len(x))]
        return torch.stack(out)


def rows() -> tuple[nn.Module, tuple[Tensor]]:
    return Rows(), (torch.randn(6, 4),)


def wrong_example() -> tuple[nn.Module, tuple[Tensor]]:
    return Small(), (torch.randn(6, 4),)


no_example = Small()


class Bare(nn.Module):
    """Nothing to train."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def bare() -> tuple[nn.Module, Tensor]:
    return Bare(), torch.ones(4, 3)


HERE = 3  # no model
