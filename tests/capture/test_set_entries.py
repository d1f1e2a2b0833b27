"""Entries that forward sets in a dict of the model, and never reads: stored at each call."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.gate, self.out = nn.EmbeddingBag(40, 8), nn.Linear(8, 4), nn.Linear(8, 1)
        self.kept: dict[Any, Any] = {"before": 1}

    def forward(self, ids: Tensor) -> Tensor:
        h = self.rows(ids)
        self.keep(h, self.gate(h).softmax(-1))
        out: Tensor = self.out(h)
        return out

    def keep(self, h: Tensor, gates: Tensor) -> None:
        raise NotImplementedError


class Losses(Base):
    def keep(self, h: Tensor, gates: Tensor) -> None:
        self.kept["load"] = gates.mean(0).square().sum()
        self.kept["entropy"] = -(gates * gates.log()).sum(1).mean()


class Numbers(Base):
    def keep(self, h: Tensor, gates: Tensor) -> None:
        self.kept["load"] = gates.mean(0).square().sum().item()


class MadeKeys(Base):
    def keep(self, h: Tensor, gates: Tensor) -> None:
        for k in range(2):
            self.kept[f"gate {k}"] = gates[:, k].detach()
            self.kept[k] = h[:, k].sum()


class ByMethod(Base):
    def keep(self, h: Tensor, gates: Tensor) -> None:
        self.log("gates", gates)
        self.kept.update(rows=h, load=gates.mean(0))

    def log(self, name: str, value: Tensor) -> None:
        self.kept[name] = value.mean()


class ByMode(Base):
    def keep(self, h: Tensor, gates: Tensor) -> None:
        self.kept["before"] = gates.sum()
        if self.training:
            self.kept["training"] = h.sum()


class Reads(Base):
    def keep(self, h: Tensor, gates: Tensor) -> None:
        self.kept["load"] = gates.sum() + self.kept["before"]


class Counts(Base):
    def keep(self, h: Tensor, gates: Tensor) -> None:
        self.kept["load"] = gates.sum()
        self.kept["before"] = len(self.kept)


class Texts(Base):
    def keep(self, h: Tensor, gates: Tensor) -> None:
        self.kept["mode"] = "train" if self.training else "eval"


class Removes(Base):
    def keep(self, h: Tensor, gates: Tensor) -> None:
        self.kept.clear()
        self.kept["load"] = gates.sum()


class ByName(Base):
    def keep(self, h: Tensor, gates: Tensor) -> None:
        self.kept["load"] = gates.sum() + len(getattr(self, "kept"))  # noqa: B009


class ByNames(Base):
    def keep(self, h: Tensor, gates: Tensor) -> None:
        for name in ("kept", "kept"):
            self.kept["load"] = gates.sum() + len(getattr(self, name))


class Aside(Base):
    def keep(self, h: Tensor, gates: Tensor) -> None:
        kept = self.kept
        kept["load"] = gates.sum() * len(kept)


def ids(rows: int) -> Tensor:
    return torch.randint(40, (rows, 3), generator=torch.Generator().manual_seed(rows))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.requires_grad == b.requires_grad and torch.allclose(a, b, atol=1e-6)
    return type(a) is type(b) and (abs(a - b) < 1e-6 if isinstance(a, float) else bool(a == b))


def check(plain: Base, fast: Any) -> None:
    for training in (True, False, True):
        for rows in (16, 7, 7, 1):
            a, b = plain.train(training)(ids(rows)), fast.train(training)(ids(rows))
            torch.testing.assert_close(b, a)
            assert list(fast.kept) == list(plain.kept)
            assert all(same(one, fast.kept[key]) for key, one in plain.kept.items())


@pytest.mark.parametrize("kind", [Losses, Numbers, MadeKeys, ByMethod, ByMode])
def test_entries_are_set_at_each_call(kind: type[Base]) -> None:
    model = kind()
    plain = copy.deepcopy(model)
    fast = recast.optimize(model, example=ids(16))
    assert fast.report.captured == "whole", str(fast.report)
    check(plain, fast)
    if kind is Numbers:  # torch copies no tensors that have a history
        check(copy.deepcopy(plain), pickle.loads(pickle.dumps(fast)))
    assert fast.why_not_recordable() == (
        "forward writes into a dict that the model holds, and a replay would not"
    )


def test_a_stored_loss_has_gradients() -> None:
    model = Losses()
    plain = copy.deepcopy(model)
    fast = recast.optimize(model, example=ids(16))
    for one in (plain, fast):
        one(ids(7))
        (one.kept["load"] + one.kept["entropy"]).backward()
    for (name, a), b in zip(plain.named_parameters(), fast.parameters(), strict=True):
        if a.grad is not None:
            assert b.grad is not None, name
            torch.testing.assert_close(b.grad, a.grad)


@pytest.mark.parametrize("kind", [Reads, Counts, Texts, Removes, ByName, ByNames, Aside])
def test_what_is_read_or_is_no_tensor_is_left_to_the_plain_forward(kind: type[Base]) -> None:
    model = kind()
    plain = copy.deepcopy(model)
    fast = recast.optimize(model, example=ids(16))
    assert fast.report.captured == "partial"
    assert "forward changes what is in self.kept, a dict" in str(fast.report)
    check(plain, fast)
