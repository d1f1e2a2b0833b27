"""The kernels' gradients of max pooling and per-sample weights are those of the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recast.runtime import device
from recast.runtime.embedding import backward

pytestmark = pytest.mark.skipif(device.extension() is None, reason="there are no kernels")


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("torch's way was taken")


@pytest.fixture(params=[1, 3], autouse=True)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "threads", lambda: request.param)


def _summed(ids: Tensor, rows: Tensor, count: int) -> Tensor:
    return rows.new_zeros(count, rows.shape[1], dtype=torch.float64).index_add(
        0, ids, rows.double()
    )


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bags", [0, 1, 5, 3000])
def test_rows_that_won(bags: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(bags)
    winner = torch.randint(-1, 4, (bags, 13), generator=draw)
    winner[: bags // 3] = -1
    grad = torch.randn(bags, 26, generator=draw).to(dtype)[:, :13]  # its rows lie apart
    with monkeypatch.context() as only:
        only.setattr(torch, "unique", _never)
        ids, rows = backward.won_rows(winner, grad, 4)
    assert rows.dtype == dtype
    with device.use("torch"):
        want = backward.won_rows(winner, grad, 4)
    assert len(ids) == len(want[0])  # one row a bag and winner
    assert torch.equal(_summed(ids, rows, 4), _summed(*want, 4))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("form", ["fixed", "offsets", "offsets and end"])
def test_weights_of_samples(form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(3)
    table = torch.randn(9, 21, generator=draw, requires_grad=True)
    weights = torch.rand(900, 5, generator=draw)
    ids = torch.randint(9, (900, 5), generator=draw, dtype=dtype)
    how: dict[str, Any] = {}
    if form != "fixed":
        ids, weights = ids.view(-1), weights.view(-1)
        cuts = torch.randint(len(ids), (600,), generator=draw, dtype=dtype).sort().values
        end = cuts.new_full((1,), len(ids))
        how = {"offsets": torch.cat([cuts.new_zeros(2), cuts, end])}
        how["include_last_offset"] = form != "offsets"
    weights.requires_grad_()
    call = {"mode": "sum", "padding_idx": 2, "per_sample_weights": weights, **how}
    out = F.embedding_bag(ids, table, **call)
    upstream = torch.randn(out.shape, generator=draw)
    (want,) = torch.autograd.grad(out, weights, upstream)

    op = torch.ops.recast.embedding_bags
    offsets, ended = [how.get("offsets")], [how.get("include_last_offset", False)]
    (ours,) = op([table], [ids], offsets, [weights], [0], ["sum"], [2], ended, [False])
    monkeypatch.setattr(backward, "bag_of", _never)
    (got,) = torch.autograd.grad(ours, weights, upstream)
    torch.testing.assert_close(got, want)
    assert not got[ids == 2].any() and got.any()
