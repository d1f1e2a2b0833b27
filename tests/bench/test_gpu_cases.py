"""The cases of the GPU's bench run: a machine with a GPU is lent for minutes, too few to mend one.

On the CPU, at toy sizes, so that arguments and variants are known to fit; ``--dry-run`` is the same
on the emulator, and ``--long`` tests run that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gpu_cases
import gpu_measure
import gpu_parts
import gpu_steps
import pytest
import torch
from gpu_floor import Rates
from gpu_synthetic import Config, Tables
from torch import Tensor

from recast.runtime import OPS, tolerances

CPU = torch.device("cpu")
KNOWN = Rates(1e12, {"float32": 1e14, "bfloat16": 1e15})
TOY = Config("toy", (Tables(2, 20, 8, (1, 3)), Tables(1, 10, 4, (1,))), (8,), None)


@pytest.fixture
def compiling() -> Iterator[None]:
    """What compiled functions leave is not left to other tests."""
    yield
    torch._dynamo.reset()


def floats(args: list[Any]) -> list[Tensor]:
    found = {
        id(t): t
        for a in args
        for t in (a if isinstance(a, list) else [a])
        if isinstance(t, Tensor) and t.is_floating_point()
    }
    return list(found.values())


@pytest.mark.parametrize(
    "name", [f"{n}, {str(d).removeprefix('torch.')}" for n, _, _, d in gpu_cases.ALONE]
)
def test_arguments_are_those_of_the_op(name: str) -> None:
    """Ours and its definition agree on them, and every float has a gradient."""
    index = [label for label, _ in gpu_parts.labels()].index(name)
    _, op, make, _ = gpu_cases.ALONE[index]
    made, args, moved, flops = make(torch.float32, CPU, 5)
    assert made == op and moved > 0 and flops >= 0
    assert 0 < gpu_cases.forward_share(op) <= 1
    leaves = [t.requires_grad_() for t in floats(args)]
    found = []
    for call in (OPS[op].target, OPS[op].reference):
        torch.manual_seed(0)
        outs = call(*args)
        outs = list(outs) if isinstance(outs, (list, tuple)) else [outs]
        g = torch.Generator().manual_seed(1)
        given = [torch.randn(o.shape, generator=g) for o in outs]
        grads = torch.autograd.grad(outs, leaves, given)
        found.append(
            [*outs, *(x.to_dense() if x.layout != torch.strided else x + 0 for x in grads)]
        )
    for a, b in zip(*found, strict=True):
        assert tolerances.excess(a.detach(), b.detach(), b.detach().double()) <= tolerances.CHAIN


def synthetic(k: int) -> list[Any]:
    """The lines of the k-th of the four cases."""
    items = list(gpu_steps.synthetic(TOY, 1.0, KNOWN, CPU, True))
    assert [i.name for i in items][::3] == ["toy, fp32, ranked", "toy, bf16, shuffled"]
    lines: Any = (items[k].run() or {})["rows"]
    assert not [line for line in lines if "why not" in line] or gpu_measure.preparing
    names = [line["variant"] for line in lines]
    assert names[:2] == ["recast", "recast graph"] and names[-1] == "floor"
    assert ("torch.compile" in names) == (k % 2 == 0) and "eager sparse" in names
    return lines


def test_a_synthetic_model_is_measured() -> None:
    """The ways to run it, one after the other, on one set of tables."""
    assert all(line["ms"] > 0 for line in synthetic(3)[:-1])


def test_nothing_is_timed_while_it_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_measure, "preparing", True)
    assert all("ms" not in line for line in synthetic(1)[:-1])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which dynamo looks at
def test_all_ways_are_measured(compiling: None) -> None:
    """Also the compiled ones, of a model, of the dropout MLP, of tables and their optimizer."""
    assert len(synthetic(0)) == 7
    (item,) = gpu_parts.dropout(KNOWN, CPU, True)
    lines: Any = (item.run() or {})["rows"]
    assert [line["variant"] for line in lines if "ms" in line][:2] == ["recast", "recast graph"]
    assert [line["must"] for line in lines if "must" in line] == ["1.3 x torch.compile"]
    for item in gpu_parts.updates(KNOWN, CPU, True):
        lines = (item.run() or {})["rows"]
        assert len(lines) == 5 and not [line for line in lines if "why not" in line]
