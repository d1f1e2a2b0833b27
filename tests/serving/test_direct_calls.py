"""Compiled models call kernels without torch's dispatcher, unless that could be observed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from seen_ops import SeenOps
from torch.overrides import TorchFunctionMode

import recast
from recast.rewriter.compiled import trees
from recast.runtime import OPS, tolerances
from recast.runtime import op as op_file


@pytest.fixture
def fast() -> tuple[Any, tuple[Any, ...]]:
    model, batches, _ = models.build("dlrm")
    return recast.optimize(model.eval(), example=batches[0]), batches[0]


@pytest.fixture
def through(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """How each call of an op was made."""
    found: list[str] = []
    watched = op_file._watched

    def spy() -> bool:
        seen = watched()
        found.append("dispatcher" if seen else "direct")
        return seen

    monkeypatch.setattr(op_file, "_watched", spy)
    yield found


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_calls_are_direct(fast: Any, through: list[str]) -> None:
    model, batch = fast
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            model(*batch)
    assert len(through) >= 9 and set(through) == {"direct"}


def test_the_same_bits_both_ways(fast: Any) -> None:
    model, batch = fast
    upstream = torch.randn(model(*batch).shape)
    found = []
    for mode in (None, Functions()):
        model.zero_grad()
        if mode is None:
            out = model(*batch)
        else:
            with mode:
                out = model(*batch)
        out.backward(upstream)
        found.append([out.detach(), *(p.grad + 0 for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_dispatch_mode_sees_every_op(fast: Any, through: list[str]) -> None:
    model, batch = fast
    for grad in (True, False):
        with torch.set_grad_enabled(grad), SeenOps() as seen:
            model(*batch)
        assert "recast.embedding_bags.default" in seen.names
        assert "recast.dot_interaction.default" in seen.names
    assert set(through) == {"dispatcher"}


def test_the_profiler_sees_every_op(fast: Any) -> None:
    model, batch = fast
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as profile:
        model(*batch)
    names = {e.key for e in profile.key_averages()}
    assert {"recast::embedding_bags", "recast::dot_interaction", "recast::mlp"} <= names


def test_others_that_may_see_a_difference(fast: Any, through: list[str]) -> None:
    model, batch = fast
    plain = models.build("dlrm")[0].eval()
    with torch.no_grad():
        want = model(*batch)
        with torch.autocast("cpu", torch.bfloat16):
            assert tolerances.excess(model(*batch), plain(*batch), want.double()) <= 1
        assert "dispatcher" in through
        through.clear()
        with Functions():
            assert torch.equal(model(*batch), want)
        assert set(through) == {"dispatcher"}


def test_subclasses_go_through_the_dispatcher(fast: Any) -> None:
    class Own(torch.Tensor):
        pass

    model, batch = fast
    with torch.no_grad():
        got = model(batch[0].as_subclass(Own), *batch[1:])
        want = model(*batch)
        assert tolerances.excess(got.as_subclass(torch.Tensor), want, want.double()) <= 1


def test_lists_of_none_are_known_by_their_outline() -> None:
    x, key, leaves = torch.ones(2), [], []
    for value in (x, [None, None], None, (x, x)):
        trees.flatten(value, leaves, key)
    form = trees.outline(key)
    assert form is not False
    found = trees.outlined(form, (x, [None, None], None, (x, x)))
    assert found is not None and len(found) == len(leaves) == 3
    for other in ([None], [None, x], (None, None), [None, 0], None, x):
        assert trees.outlined(form, (x, other, None, (x, x))) is None
    for other in (x, 0, [], False):
        assert trees.outlined(form, (x, [None, None], other, (x, x))) is None


def test_every_op_with_a_backward_of_its_own_has_a_direct_call() -> None:
    for op in OPS.values():
        assert hasattr(op.target, "direct") == (op.differentiable is not None), op.name
    assert hasattr(OPS["mlp"].target, "direct")


def test_compilers_read_the_ops_themselves(fast: Any) -> None:
    model, _ = fast
    program = next(iter(model._runner.cases.values())).program
    names = {n: v for n, v in program.trace.__globals__.items() if n.startswith("mlp_default")}
    assert names and all(v is OPS["mlp"].target for v in names.values())
    direct = {n: v for n, v in program.run.__globals__.items() if n.startswith("mlp_default")}
    assert direct.keys() == names.keys()
    assert all(v is OPS["mlp"].target.direct for v in direct.values())
