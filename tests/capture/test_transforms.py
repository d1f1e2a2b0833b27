"""``torch.vmap`` and other ``torch.func`` transforms in forward: one call, or refused by name."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast


def product(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum()


mapped = torch.vmap(product)


@torch.vmap
def decorated(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(9, 4), nn.Embedding(9, 4)
        self.top = nn.Linear(1, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.inner(self.user(ids[:, 0]), self.item(ids[:, 1])).unsqueeze(1))

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.vmap(product)(a, b)


class ByName(Model):
    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        return mapped(a, b)


class ByDecorator(Model):
    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        return decorated(a, b)


class ByAttribute(Model):
    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.vmap(product)

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        return self.kept(a, b)


class ByLambda(Model):
    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.vmap(lambda a, b: (a * b).sum())

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        return self.kept(a, b)


class Tangent(Model):
    """The gradient of ``a`` is one of zeros without memory."""

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.func.jvp(lambda x: (x * b).sum(1), (a,), (b,))[1]


class OfAParameter(Model):
    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.vmap(lambda x: (x * self.top.weight).sum())(a) + b.sum(1)


class InForward(Model):
    def forward(self, ids: Tensor) -> Tensor:
        return self.top(torch.vmap(product)(self.user(ids[:, 0]), self.item(ids[:, 1]))[:, None])


class Gradient(Model):
    def forward(self, ids: Tensor) -> Tensor:
        rows = self.user(ids[:, 0])
        slope = torch.func.grad(lambda x: x.square().sum())(rows)
        return self.top((slope * self.item(ids[:, 1])).sum(1, keepdim=True))


def compare(plain: nn.Module, fast: nn.Module, rows: int) -> None:
    results: list[Any] = []
    for model in (plain, fast):
        model.zero_grad()
        out = model(torch.arange(2 * rows).view(rows, 2) % 9)
        out.backward(torch.linspace(1, 2, rows)[:, None])
        results.append((out, [p.grad + 0 for p in model.parameters()]))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("make", [Model, ByName, ByDecorator, ByAttribute, ByLambda, Tangent])
def test_a_function_with_a_name_is_one_call(make: type[Model]) -> None:
    plain = make()
    fast = recast.optimize(copy.deepcopy(plain), example=torch.randint(9, (6, 2)))
    report = fast.report.to_dict()
    assert report["captured"] == "whole" and report["lookups"] == {"found": 2, "fused": 2}
    if make not in (ByAttribute, ByLambda):  # pickle takes the plain ones as little
        file = io.BytesIO()
        torch.save(fast, file)
        file.seek(0)
        compare(plain, torch.load(file, weights_only=False), 5)
    for rows in (6, 1, 4):
        compare(plain, fast, rows)


@pytest.mark.parametrize(
    "make, name",
    [(InForward, "torch.vmap"), (OfAParameter, "torch.vmap"), (Gradient, "torch.func.grad")],
)
def test_what_cannot_be_one_is_told_by_its_name_and_line(make: type[Model], name: str) -> None:
    plain = make()
    fast = recast.optimize(copy.deepcopy(plain), example=torch.randint(9, (6, 2)))
    report = fast.report.to_dict()
    assert report["captured"] == "partial"
    assert report["why"] == f"{name} in forward, inside which no trace can look"
    line = (make.inner if make is OfAParameter else make.forward).__code__.co_firstlineno
    assert report["where"] == f"test_transforms.py:{line + 1 + (make is Gradient)}"
    compare(plain, fast, 5)
