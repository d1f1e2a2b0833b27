"""The cases of the GPU benchmark run, so that no time on a GPU is lost to faults in them.

On the CPU, at toy sizes, so that arguments and variants are known to fit; ``--dry-run`` does the
same on the emulator, and ``--long`` tests run that.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from gpu.bench import judged_models, op_cases, step_parts, timing, whole_steps
from gpu.bench.judged_models import Subject
from gpu.bench.roofline import Rates
from gpu.bench.synthetic_models import Config, Tables
from gpu.bench.timing import Bar, Variant
from gpu.harness import items
from torch import Tensor

from recast.runtime import OPS, tolerances

CPU = torch.device("cpu")
KNOWN = Rates(1e12, {"float32": 1e14, "bfloat16": 1e15})
TOY = Config("toy", (Tables(2, 20, 8, (1, 3)), Tables(1, 10, 4, (1,))), (8,), None)


@pytest.fixture
def compiling() -> Iterator[None]:
    """Resets the compiler, so that other tests find nothing of these."""
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
    "name", [f"{n}, {str(d).removeprefix('torch.')}" for n, _, _, d in op_cases.ALONE]
)
def test_arguments_are_those_of_the_op(name: str) -> None:
    """The op and its definition agree on them, and every float has a gradient."""
    index = [label for label, _ in step_parts.labels()].index(name)
    _, op, make, _ = op_cases.ALONE[index]
    made, args, moved, flops, forward = make(torch.float32, CPU, 5)
    assert made == op and 0 < forward[0] <= moved and 0 <= forward[1] <= flops
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


@pytest.mark.parametrize("name", step_parts.BEFORE)
def test_new_kernels_are_measured_beside_those_before(name: str) -> None:
    (item,) = [i for i in step_parts.ops(KNOWN, CPU, True) if i.name.startswith(name)]
    lines = [line for line in lines_of(item) if line["variant"] == "recast graph, kernel before"]
    assert [line["case"].rpartition(", ")[2] for line in lines] == [
        "forward", "forward and backward",
    ]  # fmt: skip
    assert all(line["ms"] > 0 for line in lines)


def toy(device: torch.device, tiny: bool) -> Iterator[Subject]:
    return judged_models.synthetic(TOY, Bar(ms=1.0), KNOWN, device, tiny)


def lines_of(item: items.Item) -> list[Any]:
    lines: Any = (item.run() or {})["rows"]
    assert not [line for line in lines if "why not" in line] or timing.preparing
    return list(lines)


def synthetic(k: int) -> list[Any]:
    """The lines of the k-th of the four cases."""
    items = list(whole_steps.judged(toy, CPU, True))
    assert [i.name for i in items][::3] == ["toy, fp32, ranked", "toy, bf16, shuffled"]
    lines = lines_of(items[k])
    names = [line["variant"] for line in lines]
    assert names[:3] == [*whole_steps.OURS] and names[-1] == "floor"
    assert ("torch.compile" in names) == (k % 2 == 0) and "eager sparse" in names
    return lines


def test_a_synthetic_model_is_measured() -> None:
    """In all ways, one after the other, on one set of tables; and what of it is replayed."""
    lines = synthetic(3)
    assert all(line["ms"] > 0 for line in lines[:-1])
    assert [line.get("recorded") for line in lines[:3]] == [
        None, "forward, backward, step", "the whole step",
    ]  # fmt: skip
    assert [line["variant"] for line in lines if "must" in line] == ['recast mode="graph"']


def test_what_is_not_judged_comes_last() -> None:
    """Each peer is measured for each kind of ids it is asked for, once; kernels at the end."""
    for subjects in (toy, partial(judged_models.dlrm, Bar(ms=1.0), KNOWN)):
        for s in subjects(CPU, True):
            assert "eager sparse" in s.peers and "torch.compile" in (*s.peers, *s.later)
            assert not set(s.peers) & set(s.later) and len(s.ways) <= 2
    names = [item.name for item in whole_steps.more(toy, CPU, True)]
    assert names[0] == "toy, fp32, shuffled, torch.compile"
    assert names[-2:] == ["toy, fp32, ranked, kernels", "toy, bf16, ranked, kernels"]


def test_rows_padded_less_are_measured_beside_ours() -> None:
    item = next(i for i in whole_steps.more(toy, CPU, True) if i.name.endswith("ways"))
    names = ["recast graph", *next(s for s in toy(CPU, True) if s.ways).ways, "floor"]
    lines = lines_of(item)
    assert [line["variant"] for line in lines] == names
    assert "recast graph, rows at 16 bytes" in names
    assert all(line["ms"] > 0 and line.get("recorded", "") != "" for line in lines[:-1])


def test_kernels_of_a_step_are_told() -> None:
    *_, item = whole_steps.more(toy, CPU, True)
    lines = lines_of(item)
    assert [line["variant"] for line in lines] == [*whole_steps.OURS[1:]]
    assert all(line["launches"] > 0 and line["kernels"] for line in lines)


def test_kernels_of_a_step_that_is_not_replayed_are_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = timing.Graphed(lambda k: None, lambda: "")
    monkeypatch.setattr(whole_steps, "steps", lambda *_, **how: [Variant("r", lambda: step)])
    *_, item = whole_steps.more(toy, CPU, True)
    with pytest.raises(RuntimeError, match="nothing was recorded"):
        item.run()


def test_nothing_is_timed_while_it_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "preparing", True)
    assert all("ms" not in line for line in synthetic(1)[:-1])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which dynamo looks at
def test_all_ways_are_measured(compiling: None) -> None:
    """Compiled ones too: of a model, of the dropout MLP, of tables and their optimizer."""
    assert len(synthetic(0)) == 7
    ways = [item for item in whole_steps.more(toy, CPU, True) if "kernels" not in item.name]
    assert all(lines_of(item) for item in ways)
    dropout = list(step_parts.dropout(KNOWN, CPU, True))
    lines = lines_of(dropout[0])
    assert [line["variant"] for line in lines if "ms" in line][:2] == ["recast", "recast graph"]
    assert [line["must"] for line in lines if "must" in line] == ["1.3 x torch.compile"]
    assert lines_of(dropout[1])[0]["launches"] > 0
    for item in step_parts.updates(KNOWN, CPU, True):
        assert len(lines_of(item)) == 6
