"""Forms of what forward does: loops over modules, attributes, tables, writes, training, no_grad."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from form_kit import Base, floats, form, ids, named
from torch import Tensor, nn


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
        y += self.b(x)  # no other tensor sees it
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
