"""Lookups that go whole into an interaction stay one tensor on the way, and no code can tell."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn

import recast
from recast.rewriter.compiled import codegen
from recast.rewriter.compiled.stacks import Plan
from recast.runtime import OPS

_BAGS = OPS["embedding_bags"].target


def lookups(*widths: int, mode: str = "sum", bags: int = 3) -> tuple[Any, ...]:
    """Arguments of a call with a table of each width, whose last lookup has ``bags`` bags."""
    n, g = len(widths), torch.Generator().manual_seed(sum(widths))
    weights = [nn.Parameter(torch.randn(9, w, generator=g)) for w in widths]
    ids = [torch.randint(9, (3, 2), generator=g) for _ in widths]
    ids[-1] = ids[-1][:bags]
    none, no = [None] * n, [False] * n
    return weights, ids, none, none, [*range(n)], [mode] * n, none, no, no


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("mode", ["sum", "max", "mean"])
def test_one_tensor_of_the_same_numbers(grad: bool, mode: str) -> None:
    args = lookups(5, 5, 5, mode=mode)
    with torch.set_grad_enabled(grad):
        apart = _BAGS.direct(*args)
        found = _BAGS.direct.stacked(((0, 1, 2),))(*args)
    whole = torch.stack(apart, 1)
    if mode == "max" and grad:  # its winners are kept lookup by lookup
        assert len(found) == 3
        found = [torch.stack(found, 1)]
    (stack,) = found
    assert torch.equal(stack, whole)
    if grad:
        upstream = torch.randn(stack.shape)
        want = torch.autograd.grad(whole, args[0], upstream)
        got = torch.autograd.grad(stack, args[0], upstream)
        assert all(torch.equal(a + 0, b + 0) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("stacks", [((2, 0),), ((0, 3), (2, 1)), ((1, 3, 0, 2),)])
def test_some_of_the_lookups_in_any_order(stacks: tuple[tuple[int, ...], ...]) -> None:
    args = lookups(5, 5, 5, 5)
    apart, found = _BAGS.direct(*args), _BAGS.direct.stacked(stacks)(*args)
    others = sorted({0, 1, 2, 3} - {k for places in stacks for k in places})
    whole = [torch.stack([apart[k] for k in places], 1) for places in stacks]
    whole += [apart[k] for k in others]
    assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))
    upstream = [torch.randn(part.shape) for part in whole]
    want = torch.autograd.grad(whole, args[0], upstream)
    got = torch.autograd.grad(found, args[0], upstream)
    assert all(torch.equal(a + 0, b + 0) for a, b in zip(want, got, strict=True))


def test_no_lookup_in_two_places() -> None:
    with pytest.raises(ValueError, match="twice"):
        _BAGS.direct.stacked(((0, 1, 0),))(*lookups(5, 5))


@pytest.mark.parametrize("args", [lookups(5, 4), lookups(5, 5, bags=2)], ids=["widths", "bags"])
def test_other_shapes_stay_apart(args: tuple[Any, ...]) -> None:
    found, want = _BAGS.direct.stacked(((0, 1),))(*args), _BAGS.direct(*args)
    assert len(found) == len(want) == 2
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def everything(stacks: bool, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """All numbers that a small model computes in training and evaluation."""
    if not stacks:
        monkeypatch.setattr(codegen.stacks, "plan", lambda *_: Plan({}, {}, {}, {}))
    torch.manual_seed(0)
    model, batches, _ = models.build("dlrm")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    fast, optimizer = recast.optimize(model, optimizer, example=batches[0])
    assert ("*embedding_bags_stack]" in fast.code) == stacks
    found = []
    parameters = list(fast.parameters())
    for batch in batches:
        optimizer.zero_grad()
        out = fast(*batch)
        out.backward(torch.randn(out.shape), retain_graph=True)
        out.square().sum().backward()
        found += [out.detach(), *(p.grad + 0 for p in parameters)]
        optimizer.step()
        found += [p.detach().clone() for p in parameters]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found.append(fast(*batches[0]).clone())
    loss = fast(*batches[0]).square().sum()
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    return [*found, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), parameters)]


def test_the_same_bits_as_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, plain = everything(True, monkeypatch), everything(False, monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
