"""Same numbers after every prefix of the pipeline, for every small model, in both modes."""

from __future__ import annotations

import copy

import pytest
import torch
from models import CASES, build

import recast
from recast.passes import PIPELINE

# Every tenth of the prefixes, the whole pipeline among them; the others are long tests.
PREFIXES = [
    pytest.param(
        k,
        id=",".join(p.name for p in PIPELINE[:k]) or "nothing",
        marks=[pytest.mark.long] * bool((len(PIPELINE) - k) % 10),
    )
    for k in range(len(PIPELINE) + 1)
]


@pytest.mark.parametrize("length", PREFIXES)
@pytest.mark.parametrize("name", CASES)
def test_parity(name: str, length: int) -> None:
    model, batches, loss = build(name)
    plain = copy.deepcopy(model)
    fast = recast.optimize(model, example=batches, passes=PIPELINE[:length])
    assert fast.report.to_dict()["raised"] == []
    assert fast.report.to_dict()["captured"] == "whole"
    recast.diff(plain, fast, batches[::-1], steps=3).check()
    if length == len(PIPELINE):
        recast.diff(plain, fast, batches[0], steps=3, loss=loss).check()
    kind = [(k, v.shape, v.dtype) for k, v in plain.state_dict().items()]
    assert [(k, v.shape, v.dtype) for k, v in fast.state_dict().items()] == kind
    for k, v in fast.state_dict().items():
        assert torch.equal(v, plain.state_dict()[k])


@pytest.mark.parametrize("name", CASES)
def test_every_lookup_is_grouped(name: str) -> None:
    model, batches, _ = build(name)
    report = recast.optimize(model, example=batches).report.to_dict()
    assert report["lookups"] == {"found": CASES[name].lookups, "fused": CASES[name].lookups}


@pytest.mark.parametrize("name", ["dlrm", "deepfm", "dcn", "packed", "mmoe"])
def test_one_example_is_enough(name: str) -> None:
    model, batches, _ = build(name)
    fast = recast.optimize(model, example=batches[0])
    assert fast.report.to_dict()["captured"] == "whole"
    recast.diff(model, fast, batches, steps=1).check()


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Adam", "momentum"])
@pytest.mark.parametrize("name", ["dlrm", "deepfm", "attention", "bags"])
def test_the_users_optimizer(name: str, kind: str) -> None:
    """The same optimizer object, and its state under torch's own names."""
    make = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
        "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
        "Adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    }[kind]
    model, batches, loss = build(name)
    plain = copy.deepcopy(model)
    given = make(model.parameters())
    fast, optimizer = recast.optimize(model, given, example=batches)
    assert optimizer is given
    recast.diff(plain, fast, batches, steps=3, loss=loss, optimizer=make).check()
    twin = make(plain.parameters())
    for step in range(3):
        for m, o in ((plain, twin), (fast, optimizer)):
            o.zero_grad()
            torch.manual_seed(step)
            loss(m(*copy.deepcopy(batches[step % 2]))).backward()
            o.step()
    ours, theirs = optimizer.state_dict(), twin.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for k, state in theirs["state"].items():
        assert list(ours["state"][k]) == list(state)
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(ours["state"][k][key], value, rtol=1e-4, atol=1e-6)


def test_weights_go_both_ways() -> None:
    """state_dict of either loads into the other, and shows in the outputs."""
    model, batches, _ = build("deepfm")
    plain = copy.deepcopy(model)
    fast = recast.optimize(model, example=batches)
    changed = {k: v * 1.25 if v.is_floating_point() else v for k, v in plain.state_dict().items()}
    fast.load_state_dict(changed)
    plain.load_state_dict(fast.state_dict())
    recast.diff(plain, fast, batches).check()
