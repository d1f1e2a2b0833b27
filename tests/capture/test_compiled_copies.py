"""A Compiled is copied, saved, loaded, moved and nested as the user's model is."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from compiledkit import Plain, batch, pair, same, twins
from forms import FORMS
from torch import Tensor, nn

from recast.rewriter.capture.capture_model import capture
from recast.rewriter.compiled.module import Compiled


def test_deepcopy_is_whole_and_its_own() -> None:
    plain, fast = pair()
    fast.report = {"captured": "whole"}
    twin = copy.deepcopy(fast)
    same(plain.eval(), twin.eval())
    assert fast.training
    assert twin.report == fast.report
    assert str(twin) == str(fast)
    with torch.no_grad():
        twin.top[0].weight.zero_()
    assert plain.top[0].weight.abs().sum() > 0
    assert twin.top[0].weight is dict(twin.named_parameters())["top.0.weight"]
    same(plain, fast.eval())


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_saved_whole(how: str, tmp_path: Path) -> None:
    plain, fast = pair()
    fast.report, fast.plan = {"fired": 3}, "plan"
    if how == "pickle":
        again = pickle.loads(pickle.dumps(fast))
    else:
        torch.save(fast, tmp_path / "fast.pt")
        again = torch.load(tmp_path / "fast.pt", weights_only=False)
    for mode in (True, False):
        same(plain.train(mode), again.train(mode))
    assert (again.report, again.plan) == (fast.report, fast.plan)
    assert str(again) == str(fast)
    assert again.code.splitlines()[3:] == fast.code.splitlines()[3:]
    assert list(again.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("name", FORMS)
def test_every_form_survives_saving(name: str) -> None:
    make, args = FORMS[name]
    fast = Compiled(capture(make(), args(9)))
    buffer = io.BytesIO()
    torch.save(fast, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False).eval()
    fast.eval()
    leaves = torch.utils._pytree.tree_leaves
    torch.manual_seed(0)
    wanted = fast(*copy.deepcopy(args(5)))
    torch.manual_seed(0)
    got = again(*copy.deepcopy(args(5)))
    for a, b in zip(leaves(wanted), leaves(got), strict=True):
        if isinstance(a, Tensor):
            torch.testing.assert_close(a, b)


def test_state_dict_both_ways() -> None:
    plain, fast = twins()
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(0.1)
    fast.load_state_dict(plain.state_dict())
    same(plain.eval(), fast.eval())
    fresh = Plain()
    fresh.load_state_dict(fast.state_dict())
    same(fresh.eval(), fast)
    with pytest.raises(RuntimeError, match="Missing key"):
        fast.load_state_dict({"top.0.weight": plain.top[0].weight})


def test_to_and_dtypes() -> None:
    plain, fast = twins()
    plain.double().eval(), fast.double().eval()
    dense, ids = batch(5)
    same(plain, fast, (dense.double(), ids))
    assert fast.top[0].weight.dtype is torch.float64


def test_nested_in_another_module() -> None:
    plain, fast = twins()

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
            return self.inner(dense, ids) * 2

    a, b = Outer(plain), Outer(fast)
    for mode in (True, False):
        same(a.train(mode), b.train(mode))
    assert list(a.state_dict()) == list(b.state_dict())
    assert "Compiled" in repr(b)
    again = Compiled(capture(b, batch(9)))
    same(a.eval(), again.eval())


def test_optimizing_a_compiled_again() -> None:
    plain, fast = pair()
    again = Compiled(capture(fast, batch(9)))
    same(plain.eval(), again.eval())
    assert list(again.state_dict()) == list(plain.state_dict())


def test_inplace_rewrites_the_model_itself() -> None:
    model = Plain().eval()
    it = capture(model, batch(9), inplace=True)
    assert it.root is model
    fast = Compiled(it)
    fast.train()
    assert model.training
