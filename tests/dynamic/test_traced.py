"""A trace of a dynamic table would keep the rows of one batch, so tracing is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import recast
from recast.errors import NotBuiltError

IDS = torch.randint(2**60, (8, 3), generator=torch.Generator().manual_seed(0))


def trained() -> Any:
    model: Any = nn.Sequential(nn.EmbeddingBag(1, 4), nn.Linear(4, 1))
    opt: Any = torch.optim.Adagrad(model.parameters(), lr=0.1)
    fast, opt = recast.optimize(
        model, opt, example=IDS[:5], tables={"0": recast.Dynamic(max_rows=100)}
    )
    fast(IDS).square().mean().backward()
    opt.step()
    return fast.eval()  # whose rows for IDS are all there


@pytest.mark.parametrize(
    "trace",
    [
        lambda f: torch.jit.trace(f, (IDS,), check_trace=False),
        lambda f: torch.export.export(f, (IDS,), strict=False),
        lambda f: make_fx(f)(IDS),
    ],
    ids=["jit", "export", "make_fx"],
)
@pytest.mark.filterwarnings("ignore")  # of torch, about its tracers
def test_traces_are_refused(trace: Callable[[Any], Any]) -> None:
    fast = trained()
    want = fast(IDS)
    with pytest.raises(NotBuiltError, match="is a dynamic table, and is traced"):
        trace(fast)
    torch.testing.assert_close(fast(IDS), want)
