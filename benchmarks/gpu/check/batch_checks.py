"""Batches fed by prefetch, and ids out of range."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import recast
from gpu.check.optimizer_checks import Tables
from gpu.harness.items import Item
from recast.errors import IdError
from recast.runtime import checked
from recast.runtime.recorded.prefetch import prefetch


def batches(device: torch.device, tiny: bool) -> Iterator[Item]:
    """Prefetching, and ids out of range."""
    yield Item("prefetch, values", partial(_prefetched, device))
    yield Item("ids out of range, counted", partial(_bad_ids, device))
    if device.type == "cuda":
        yield Item("ids out of range, checked", partial(_checked_ids, device))


def _prefetched(device: torch.device) -> dict[str, object]:
    g = torch.Generator().manual_seed(0)
    made: list[dict[str, Any]]
    made = [{"k": k, "x": [torch.randn(1 << 20, generator=g)]} for k in range(12)]
    burn = torch.randn(2048, 2048, device=device) if device.type == "cuda" else None
    sums = []
    for batch in prefetch(made, device, depth=2):
        if burn is not None:  # keeps the user's stream busy, so that copies overtake it
            for _ in range(20):
                burn = burn @ burn * 1e-3
        assert batch["x"][0].device.type == device.type
        sums.append(batch["x"][0].double().sum())
    expected = torch.stack([b["x"][0].double().sum() for b in made])
    torch.testing.assert_close(torch.stack(sums).cpu(), expected)
    return {}


def _lookup(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = Tables(16, sparse=False).to(device)
    good = [torch.zeros(8, 3, dtype=torch.long, device=device) for _ in range(3)]
    return recast.optimize(model, example=(good,))


def _bad(device: torch.device) -> list[Tensor]:
    ids = [torch.ones(8, 3, dtype=torch.long, device=device) for _ in range(3)]
    ids[1][4, 1] = 300
    return ids


def _bad_ids(device: torch.device) -> dict[str, object]:
    model = _lookup(device)
    before = checked.bad_ids()
    with torch.no_grad():
        out = model(_bad(device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    good = model([i.clamp(max=1) for i in _bad(device)])
    torch.testing.assert_close(out[:4], good[:4])
    assert checked.bad_ids() == before + 1
    return {}


def _checked_ids(device: torch.device) -> dict[str, object]:
    with checked.checked():
        try:
            _lookup(device)(_bad(device))
        except IdError as error:
            assert "300" in str(error)
            return {"detail": error.what}
    raise AssertionError("no IdError")
