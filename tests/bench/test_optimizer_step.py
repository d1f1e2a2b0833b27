"""The benchmark of optimizers: its variants train alike, and a row says what was measured."""

from __future__ import annotations

import optimizer_step
import pytest
import torch


@pytest.mark.parametrize("name", optimizer_step.KINDS)
def test_variants_train_alike(name: str) -> None:
    case = optimizer_step.Case(tables=2, rows=300, dim=4, alpha=1.05, batch=16)
    found = optimizer_step.measure(optimizer_step.KINDS[name], case, lead=2, rounds=2)
    eager, fast, ours = (dict(v.model.named_parameters()) for v in found)
    for key, parameter in ours.items():
        torch.testing.assert_close(parameter, eager[key], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(parameter, fast[key], rtol=1e-4, atol=1e-4)
    row = optimizer_step.row(name, case, found)
    assert row["rows"] == 300 and {"eager", "eager, fastest", "recast"} <= row.keys()


def test_ids_of_a_power_law() -> None:
    case = optimizer_step.Case(tables=1, rows=1000, dim=4, alpha=1.05, batch=5000)
    drawn = optimizer_step.ids(case, torch.Generator().manual_seed(0))
    counts = drawn.bincount(minlength=1000).sort(descending=True).values
    assert int(drawn.min()) >= 0 and int(drawn.max()) < 1000
    assert counts[0] > 20 * counts[200]
