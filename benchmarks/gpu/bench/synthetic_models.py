"""The synthetic models of NVIDIA Merlin's distributed-embeddings (config_v3), in plain torch.

Tables in groups, inputs of one or many ids each, outputs concatenated with ten numbers into an MLP.
Ids follow a power law with exponent ``alpha`` (1.05 is their default; 0: uniform)::

    id = ⌊(r ((N + 1)^g - 1) + 1)^(1/g)⌋ - 1,   g = 1 - alpha,  r uniform in [0, 1)

so that id 0 is the hottest. ``shuffled`` spreads the hot rows over the table, which is harder.
Published steps on one A100-80GB at batch 65536 with Adagrad: Tiny 17.6 ms, Small 57.8 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Tables(NamedTuple):
    """``many`` tables of ``rows`` x ``dim``, each with one input of every given number of ids."""

    many: int
    rows: int
    dim: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Config:
    name: str
    tables: tuple[Tables, ...]
    hidden: tuple[int, ...]
    published_ms: float | None  # on one A100-80GB

    def numbers(self) -> int:
        """Weights of all tables."""
        return sum(t.many * t.rows * t.dim for t in self.tables)

    def dims(self) -> list[int]:
        """The width of every table, in the order of the model's."""
        return [t.dim for t in self.tables for _ in range(t.many)]

    def cut(self, rows: int) -> Config:
        """The same with at most ``rows`` rows a table."""
        tables = tuple(t._replace(rows=min(t.rows, rows)) for t in self.tables)
        return Config(self.name, tables, self.hidden, None)

    def scaled(self, rows: int) -> Config:
        """That with small layers as well, to try the code itself."""
        cut = self.cut(rows)
        return Config(self.name, cut.tables, tuple(min(h, 32) for h in self.hidden), None)


TINY = Config(
    "synthetic Tiny",
    (
        Tables(1, 10_000, 8, (1, 10)), Tables(1, 1_000_000, 16, (1, 10)),
        Tables(1, 25_000_000, 16, (1, 10)), Tables(1, 25_000_000, 16, (1,)),
        Tables(16, 10, 8, (1,)), Tables(10, 1000, 8, (1,)), Tables(4, 10_000, 8, (1,)),
        Tables(2, 100_000, 16, (1,)), Tables(19, 1_000_000, 16, (1,)),
    ),
    (256, 128),
    17.6,
)  # fmt: skip
SMALL = Config(
    "synthetic Small",
    (
        Tables(5, 10_000, 16, (1, 30)), Tables(3, 4_000_000, 32, (1, 30)),
        Tables(1, 50_000_000, 32, (1, 30)), Tables(1, 50_000_000, 32, (1,)),
        Tables(30, 10, 16, (1,)), Tables(30, 1000, 16, (1,)), Tables(5, 10_000, 16, (1,)),
        Tables(5, 100_000, 32, (1,)), Tables(27, 4_000_000, 32, (1,)),
    ),
    (512, 256, 128),
    57.8,
)  # fmt: skip
NUMBERS = 10


class Synthetic(nn.Module):
    """``ids[k]``: (batch, ids of input k); inputs by groups, then tables, then numbers of ids."""

    def __init__(self, config: Config, sparse: bool = False) -> None:
        super().__init__()
        self.tables = nn.ModuleList()
        self.of_input: list[int] = []
        width = NUMBERS
        for t in config.tables:
            for _ in range(t.many):
                self.of_input += [len(self.tables)] * len(t.ids)
                self.tables.append(nn.EmbeddingBag(t.rows, t.dim, mode="sum", sparse=sparse))
                width += t.dim * len(t.ids)
        layers: list[nn.Module] = []
        for h in config.hidden:
            layers += [nn.Linear(width, h), nn.ReLU()]
            width = h
        self.mlp = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, numbers: Tensor, ids: list[Tensor]) -> Tensor:
        pooled = [self.tables[t](ids[k]) for k, t in enumerate(self.of_input)]
        return self.mlp(torch.cat([*pooled, numbers], 1)).squeeze(1)


def power_law(
    rows: int, shape: tuple[int, ...], alpha: float, generator: torch.Generator
) -> Tensor:
    """Ids in [0, rows), id 0 the hottest; int64, on the device of ``generator``."""
    r = torch.rand(shape, dtype=torch.float64, generator=generator, device=generator.device)
    g = 1.0 - alpha
    ids = (r * ((rows + 1.0) ** g - 1) + 1) ** (1 / g) - 1
    return ids.floor().long().clamp_(0, rows - 1)


def shuffled(ids: Tensor, rows: int) -> Tensor:
    """Ids mapped one to one, by the same map at every call, so that neighbours part."""
    # A multiplication by a number without common factors with rows is a permutation.
    factor = 0x9E3779B1 % rows or 1
    while _common(factor, rows) != 1:
        factor += 1
    return (ids * factor + rows // 3) % rows


def _common(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


def batch(
    config: Config, size: int, seed: int, device: torch.device, *, alpha: float, shuffle: bool
) -> tuple[tuple[Tensor, list[Tensor]], Tensor]:
    """((numbers (size, 10), ids), labels (size,))."""
    g = torch.Generator(device).manual_seed(seed)
    ids = []
    for t in config.tables:
        for _ in range(t.many):
            for n in t.ids:
                made = power_law(t.rows, (size, n), alpha, g)
                ids.append(shuffled(made, t.rows) if shuffle else made)
    numbers = torch.rand(size, NUMBERS, generator=g, device=device)
    labels = torch.randint(2, (size,), generator=g, device=device).float()
    return (numbers, ids), labels
