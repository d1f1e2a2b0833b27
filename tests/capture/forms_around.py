"""Forms of what goes in and out: sequences, results, containers, sizes, keywords, constants."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from form_kit import Base, bags, floats, form, ids, named
from torch import Tensor, nn


@form(lambda rows: (ids(rows)[0], ids(rows)[0][:, 0] % 3 + 1))
class Sequences(Base):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        e = self.table(x)
        packed = nn.utils.rnn.pack_padded_sequence(
            e, lengths.clamp(min=1, max=3).cpu(), batch_first=True, enforce_sorted=False
        )
        states, last = self.gru(packed)
        states, _ = nn.utils.rnn.pad_packed_sequence(states, batch_first=True, total_length=3)
        values, index = states.max(dim=1)
        mixed, _ = self.attention(states, states, states)
        h = torch.zeros(x.size(0), 4)
        for step in states.unbind(1):
            h = h * 0.5 + step
        return self.out(last[0] + values + index * 0.1 + mixed.sum(1) + h).squeeze(-1)


class Answer(NamedTuple):
    click: Tensor
    buy: Tensor


@dataclass
class Losses:
    loss: Tensor
    parts: dict[str, Tensor]
    name: str


@form(ids)
class NamedOutputs(Base):
    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.out(self.table(x).sum(1)).squeeze(1)
        return {"answer": Answer(y, y * 2), "list": [y, (y + 1, 3)], "none": None}


@form(ids)
class DataclassOutput(Base):
    def forward(self, x: Tensor) -> Losses:
        y = self.out(self.table(x).sum(1)).squeeze(1)
        return Losses(y.mean(), {"y": y}, "both")


class Interaction:
    """A batch class of some library: not a Mapping, it keeps a dict of tensors inside."""

    def __init__(self, columns: dict[str, Tensor]) -> None:
        self.columns = columns

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def keys(self) -> Any:
        return self.columns.keys()


@form(lambda rows: (Interaction(named(rows)[0]),))
class ForeignContainer(Base):
    def forward(self, batch: Interaction) -> Tensor:
        return self.out(sum(self.table(batch[k]) for k in batch.keys())).squeeze(1)  # noqa: SIM118


@form(lambda rows: (floats(rows)[0], rows))
class RowsAsNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 2)

    def forward(self, x: Tensor, rows: int) -> Tensor:
        return self.a(x.view(rows, 2, -1)).sum((1, 2)) / rows


@form(ids)
class SharedModules(Base):
    def __init__(self) -> None:
        super().__init__()
        self.again = self.table
        self.by_name = {"item": self.table}
        self.layers = [self.out, self.again]

    def forward(self, x: Tensor) -> Tensor:
        a = self.again(x).sum(1) + self.by_name["item"](x[:, :1]).sum(1)
        return self.layers[0](a + self.layers[1](x[:, 1])).squeeze(1)


@form(bags)
class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(10, 4, mode="sum") for _ in range(2))
        self.a = nn.Linear(6, 4)

    def forward(self, dense: Tensor, offsets: Tensor, indices: list[Tensor]) -> Tensor:
        x = self.a(dense)
        e = [t(i, o) for t, i, o in zip(self.tables, indices, offsets, strict=True)]
        all_ = torch.cat([x, *e], 1).view(x.size(0), -1, 4)
        z = torch.bmm(all_, all_.transpose(1, 2))
        n = all_.shape[1]
        li = torch.tensor([i for i in range(n) for j in range(i)])
        lj = torch.tensor([j for i in range(n) for j in range(i)])
        return torch.cat([x, z[:, li, lj]], 1).sum(1)


@form(floats)
class StoresResult(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        self.last = y.pow(2).mean()
        return y.sum(1)


@form(floats)
class ValueGuard(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        if (x > 100).any():
            x = x.clamp(max=100) * 0
        return self.a(x).sum(1)


def rows_of(x: Tensor) -> int:
    return len(x)


@form(ids)
class LengthIsTheBatch(Base):
    """Python demands a real int from both ``len`` and ``int``."""

    def rows(self, x: Tensor) -> int:
        return int(x.shape[0])

    def forward(self, x: Tensor) -> Tensor:
        e = self.table(x)
        assert isinstance(rows_of(e), int) or len(e) > 0
        position = torch.arange(len(x)).view(-1, 1) * 0.01
        return self.out(e.view(self.rows(x), rows_of(self.out.weight.t()), -1).sum(2) + position)


@form(ids)
class PartsOfTheBatch(Base):
    """Numbers of rows that are a fraction of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        e = self.table(x).sum(1)
        rows = e.size(0)
        most, half = int(rows * 0.8), math.floor(rows * 0.5)
        e[:most] = e[:most] * 2
        e[: math.ceil(rows / 3)] += round(rows * 0.3) + round(rows / 8, 1)
        e = e / math.sqrt(rows) + math.log(len(e))
        return self.out(torch.cat([e[half:], e[:half]]))


@form(ids)
class MeanOverTheBatch(Base):
    """Python demands a real float from ``float``; elsewhere it stays a type that torch knows."""

    def forward(self, x: Tensor) -> Tensor:
        squares = self.table(x).pow(2).sum() / float(len(x))
        assert isinstance(1.0, float)
        return self.out(self.table(x).sum(1)) + squares + float(x.shape[0]) / 1000


class OverRows(Base):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.table(x).sum(1))
        return out * self.share(x)

    def share(self, x: Tensor) -> float:
        return 1.0 / len(x)


class Scaled(OverRows):
    def forward(self, x: Tensor) -> Tensor:
        return super(Scaled, self).forward(x) + len(x)  # noqa: UP008


@form(ids)
class NewOfASize(Base):
    """The constructor of older code: a size, or the numbers to hold."""

    def forward(self, x: Tensor) -> Tensor:
        e = self.table(x).sum(1)
        noise = e.data.new(e.size()).zero_() + e.new(len(x), 4).fill_(0.1) + e.new([1.0, 2, 3, 4])
        return self.out(e + noise)


def handing_on(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@form(ids)
class Decorated(Base):
    """What a decorator wraps does with the number of rows."""

    @handing_on
    @handing_on
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.table(x).sum(1))
        return out / len(x)


@form(ids)
class MethodsOfBases(Scaled):
    """What its bases do with the number of rows is reached by ``super()``."""

    def forward(self, x: Tensor) -> Tensor:
        def above() -> Tensor:
            return super(MethodsOfBases, self).forward(x)

        return above() + super().forward(x)

    def share(self, x: Tensor) -> float:
        return super().share(x) * 2


class Halved(Base):
    @staticmethod
    def half(x: Tensor) -> Tensor:
        return x[: int(len(x) * 0.5) + 1]

    @classmethod
    def share(cls, x: Tensor) -> float:
        return 1.0 / len(x)


@form(ids)
class FunctionsOfBases(Halved):
    """``super()`` reaches methods of no object, too, and those that every object has."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        self.rows = len(x)
        return self.out(self.table(super().half(x)).sum(1)) * super().share(x) * self.rows


@form(lambda rows: ({"x": ids(rows)[0], "scale": 2.0},))
class KeywordOnly(Base):
    def forward(self, batch: dict[str, Any], *, flip: bool = False, bias: float = 1.0) -> Tensor:
        y = self.out(self.table(batch["x"]).sum(1)) * batch["scale"] + bias
        return -y if flip else y


@form(ids)
class LeavesConstants(Base):
    """Every call writes the same values to these attributes, whatever they held before."""

    def __init__(self) -> None:
        super().__init__()
        self.fields = 0

    @cached_property
    def order(self) -> list[str]:
        return ["a", "b"]

    def forward(self, x: Tensor) -> Tensor:
        self.fields = x.shape[1]
        self.kind = "sum"
        return self.out(self.table(x).sum(1) / self.fields) * len(self.order)


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            y = layer(x)
            x = x + y if x.shape == y.shape else y
        return x


@form(ids)
class ComparesShapes(Base):
    """Answered from the shapes alone: neither lookups nor layers run twice for it."""

    def __init__(self) -> None:
        super().__init__()
        self.top = Residual(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        e = torch.stack([self.table(x[:, k]) for k in range(3)], 1)
        assert e.shape[0] == x.shape[0]
        return self.top(e.sum(1))


@form(lambda rows: (*ids(rows), np.array([1.0, 2.0])))
class ArrayInput(Base):
    def forward(self, x: Tensor, weights: Any) -> Tensor:
        return self.out(self.table(x).sum(1)) * float(weights.sum())


@form(ids)
class WritesIntoConstants(Base):
    """A constant depends on the inputs once they are written into it."""

    def forward(self, x: Tensor) -> Tensor:
        e = self.table(x[:, 0])
        total = torch.zeros(30, 4).scatter_add_(0, x[:, :1].expand(-1, 4), e) * 2
        last = torch.zeros(3)
        view = last.view(-1)
        last[1] = e.mean()
        return self.out(total[x[:, 1]] + e) * (view * 3).sum()


@form(ids)
class CountsWithTraining(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x).sum(1)) * (3 - self.training) + (2 + self.training)


@form(floats)
class AssignsProducts(nn.Module):
    """``x @= w`` makes a tensor of another shape: no in-place write, unlike ``+=`` and ``%=``."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(6, k)) for k in (4, 3))
        self.back = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        q, k = x, x * 2
        q @= self.weights[0]
        q @= self.back
        k @= self.weights[1]
        r = x + 3
        r %= 2
        r //= 0.7
        return torch.cat([q + x, k, r], 1)
