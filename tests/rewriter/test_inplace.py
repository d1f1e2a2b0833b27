"""``optimize(model, inplace=True)``: the user's own object runs the graph."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from seen_ops import SeenOps
from torch import nn

import recast


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(9, 4)
        self.out = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Dropout(0.5), nn.Linear(3, 1))

    def forward(self, ids, scale=None):
        y = self.out(self.emb(ids))
        return y if scale is None else y * scale


def fused(model, *args):
    with torch.no_grad(), SeenOps() as seen:
        model(*args)
    return any(name.startswith("recast.") for name in seen.names)


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy, saved])
def test_the_model_itself_runs_the_graph(copied):
    torch.manual_seed(0)
    model = Net()
    plain, ids = copy.deepcopy(model), torch.randint(9, (6,))
    recast.optimize(model, example=ids, inplace=True)
    model = copied(model)
    for mode in (True, False):
        model.train(mode), plain.train(mode)
        torch.manual_seed(1)
        ours = model(ids)
        torch.manual_seed(1)
        torch.testing.assert_close(ours, plain(ids))
        assert fused(model, ids) and not fused(plain, ids)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert type(model) is Net and not isinstance(recast.optimize(plain, example=ids), Net)
    with pytest.warns(recast.RecastWarning, match="plain forward"):
        torch.testing.assert_close(model(ids, 2.0), plain(ids, 2.0))


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, saved])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_copy_is_optimised_as_the_plain_model_is(copied, inplace, called):
    """Its graphs are of the model that it is a copy of; its statistics must not move."""
    model, x = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU()), torch.rand(8, 4)
    recast.optimize(model, example=x, inplace=True)
    model(x)
    twin = copied(model)
    if called:
        twin(x)
    before = {name: value.clone() for name, value in twin.state_dict().items()}
    fast = recast.optimize(twin, example=x, inplace=inplace)
    assert fast.report.captured == "whole"
    for name, value in twin.state_dict().items():
        assert torch.equal(value, before[name]), name
    torch.testing.assert_close(fast(x), nn.Sequential(*copy.deepcopy(twin))(x))


def test_without_inplace_the_model_stays_plain():
    model, ids = Net(), torch.randint(9, (6,))
    fast = recast.optimize(model, example=ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fused(fast, ids) and not fused(model, ids)
    assert "forward" not in vars(model)
