"""The forms that forwards of real models take, each as small as it can be.

``FORMS[name]`` is ``(make, batch)``: a model, and its arguments for a number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

FORMS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {}


def form(batch: Callable[[int], tuple[Any, ...]]) -> Callable[[type], type]:
    def add(kind: type) -> type:
        def make() -> nn.Module:
            torch.manual_seed(0)
            return kind()

        FORMS[kind.__name__] = make, batch
        return kind

    return add


def ids(rows: int, fields: int = 3) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return (torch.randint(0, 10, (rows, fields), generator=generator),)


def floats(rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows)),)


def named(rows: int) -> tuple[dict[str, Tensor]]:
    x = ids(rows)[0]
    return ({"user": x[:, 0], "item": x[:, 1], "tag": x[:, 2]},)


def bags(rows: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(rows)
    counts = torch.randint(0, 4, (2, rows), generator=generator)
    offsets = torch.cat([torch.zeros(2, 1, dtype=torch.long), counts.cumsum(1)[:, :-1]], 1)
    flat = [torch.randint(0, 10, (int(c.sum()) + 1,), generator=generator) for c in counts]
    return floats(rows)[0], offsets, flat


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 4)
        self.out = nn.Linear(4, 1)


@form(named)
class IteratesKeys(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({k: nn.Embedding(10, 4) for k in ("user", "item", "tag")})

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return torch.stack([self.tables[k](inputs[k]) for k in inputs.keys()], dim=1).sum((1, 2))  # noqa: SIM118


@form(lambda rows: (list(ids(rows)[0].unbind(1)),))
class EnumeratesList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(10, 4) for _ in range(3))

    def forward(self, fields: list[Tensor]) -> Tensor:
        return torch.cat([self.tables[k](x) for k, x in enumerate(fields)], 1).sum(1)


class Pool(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.eps = torch.FloatTensor([1e-8])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        total = (x * mask.unsqueeze(-1)).sum(1)
        return total if self.mode == "sum" else total / (mask.sum(1, keepdim=True) + self.eps)


@form(ids)
class ModuleBuiltInForward(Base):
    def forward(self, x: Tensor) -> Tensor:
        pooled = Pool("mean")(self.table(x), (x != 0).float())
        return nn.Softmax(dim=1)(self.out(pooled).view(-1, 1)) + nn.Sigmoid()(pooled).sum(1, True)


@form(ids)
class ArgumentFlags(Base):
    def forward(self, x: Tensor, sigmoid: bool = True, scale: float = 2.0) -> Tensor:
        y = self.out(self.table(x).sum(1)) * scale
        return torch.sigmoid(y) if sigmoid else y


@form(ids)
class ShapeChecks(Base):
    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 2:
            raise ValueError("two dimensions")
        assert x.shape[1] == 3
        assert len(x.shape) == 2
        e = self.table(x)
        if x.shape[0] == e.shape[0] and isinstance(e, torch.Tensor) and torch.is_tensor(x):
            e = e * 2
        return self.out(e.sum(1)).squeeze(1)


@form(ids)
class NumpyOffsets(Base):
    def __init__(self) -> None:
        super().__init__()
        self.offsets = np.array((0, *np.cumsum([10, 10])), dtype=np.int64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.new_tensor(self.offsets).unsqueeze(0)
        return self.out(self.table(x)[:, : np.int64(2)].sum(1) * np.float32(0.5))


@form(ids)
class Factories(Base):
    def forward(self, x: Tensor) -> Tensor:
        rows, width = x.size(0), x.shape[1]
        e = self.table(x)
        e = torch.cat([torch.zeros(rows, 1, 4), torch.ones((rows, 1, 4)), e], 1)
        e = e + torch.arange(rows).view(rows, 1, 1) * 0.01 + torch.full((rows, 1, 1), 0.5)
        mask = torch.triu(torch.ones(width, width), 1).bool()
        e = e + self.out.weight.expand(rows, -1).unsqueeze(1) + e.new_zeros(rows, 1, 4)
        picked = torch.arange(rows).unsqueeze(1).repeat(1, width)[:, mask[0]].float().sum(1)
        return self.out(e.reshape(rows, -1, 4).sum(1)).view(rows) + picked


@form(ids)
class PlainTensorAttribute(Base):
    def __init__(self) -> None:
        super().__init__()
        self.offsets = torch.tensor([0, 10, 20])
        self.spread = [torch.tensor([1.0, 2.0, 3.0, 4.0]), {"k": torch.tensor(0.5)}]

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x + self.offsets).sum(1) * self.spread[0] + self.spread[1]["k"])


@form(ids)
class ParametersInList(Base):
    def __init__(self) -> None:
        super().__init__()
        self.gates = [nn.Parameter(torch.randn(4, 2)) for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        e = self.table(x).sum(1)
        return self.out(e) + sum((e @ torch.softmax(g, 0)).sum(1, keepdim=True) for g in self.gates)


@form(ids)
class OnlyParameters(Base):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        w = F.softmax(self.w * 2, dim=0) + self.shift.exp()
        norm = sum(p.pow(2).sum() for p in self.parameters())
        return self.out(self.table(x).sum(1) * w) + 1e-3 * norm


@form(floats)
class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y += self.b(x)  # nobody else sees it
        z = torch.zeros_like(y)
        z[:, 0] = y[:, 1]
        z[:, 1:].add_(y[:, :3])
        alias = z.view(-1)
        z *= 2  # alias sees this
        y = F.relu(y * 1.5, inplace=True)
        w = y + z
        w += y
        w += 1
        w.unsqueeze_(1)
        return w.squeeze(1).sum(1) + alias.view(-1, 4).sum(1)


@form(floats)
class Dropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 4)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.a(x))
        y = F.dropout(self.drop(self.b(y)), 0.4, self.training)
        return (y + torch.rand(4)).sum(1) + F.dropout(y, p=0.1, training=self.training).sum(1)


@form(floats)
class ForksOnTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.a(x))
        return y.sum(1) if self.training else torch.sigmoid(y).sum(1)


@form(floats)
class OwnBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if self.training:
            self.steps += 1
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * y.mean(0))
        return (y - self.mean).sum(1)


@form(floats)
class NoGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        with torch.no_grad():
            target = self.b(x) * y
        return (y * target + self.b(x).detach()).sum(1)


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
    """Python wants a real int of both ``len`` and ``int``."""

    def rows(self, x: Tensor) -> int:
        return int(x.shape[0])

    def forward(self, x: Tensor) -> Tensor:
        e = self.table(x)
        assert isinstance(rows_of(e), int) or len(e) > 0
        position = torch.arange(len(x)).view(-1, 1) * 0.01
        return self.out(e.view(self.rows(x), rows_of(self.out.weight.t()), -1).sum(2) + position)


@form(ids)
class MeanOverTheBatch(Base):
    """Python wants a real float of ``float``; elsewhere it stays a type that torch knows."""

    def forward(self, x: Tensor) -> Tensor:
        squares = self.table(x).pow(2).sum() / float(len(x))
        assert isinstance(1.0, float)
        return self.out(self.table(x).sum(1)) + squares + float(x.shape[0]) / 1000


@form(lambda rows: ({"x": ids(rows)[0], "scale": 2.0},))
class KeywordOnly(Base):
    def forward(self, batch: dict[str, Any], *, flip: bool = False, bias: float = 1.0) -> Tensor:
        y = self.out(self.table(batch["x"]).sum(1)) * batch["scale"] + bias
        return -y if flip else y


@form(ids)
class LeavesConstants(Base):
    """Attributes that every call writes alike, whatever they held before."""

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
    """What was made from nothing depends on the inputs once they are written into it."""

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
    """``x @= w`` makes a tensor of another shape: no write in place, unlike ``+=`` and ``%=``."""

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
