"""The benchmark of Adam: its variants train alike, and a row says what was measured."""

from __future__ import annotations

import adam_step
import torch


def test_variants_train_alike() -> None:
    case = adam_step.Case(tables=2, rows=300, dim=4, alpha=1.05, batch=16)
    found = adam_step.measure(case, lead=2, rounds=2)
    eager, fused, ours = (dict(v.model.named_parameters()) for v in found)
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, eager[name], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(parameter, fused[name], rtol=1e-4, atol=1e-4)
    row = adam_step.row(case, found)
    assert row["rows"] == 300 and {"eager", "eager fused=True", "recast"} <= row.keys()


def test_ids_of_a_power_law() -> None:
    case = adam_step.Case(tables=1, rows=1000, dim=4, alpha=1.05, batch=5000)
    drawn = adam_step.ids(case, torch.Generator().manual_seed(0))
    counts = drawn.bincount(minlength=1000).sort(descending=True).values
    assert int(drawn.min()) >= 0 and int(drawn.max()) < 1000
    assert counts[0] > 20 * counts[200]
