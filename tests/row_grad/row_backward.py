"""A backward through tables with row gradients, its twin in plain torch, and what was counted."""

from __future__ import annotations

import torch
from row_lookup import ours, plain, twins, weigh
from torch.nn import Parameter

from recast.runtime.rows.grad import counters

clip_norm = torch.nn.utils.clip_grad_norm_
clip_value = torch.nn.utils.clip_grad_value_


def backward_both() -> tuple[Parameter, Parameter]:
    a, b = twins()
    weigh(ours(a)).backward()
    weigh(plain(b)).backward()
    return a, b


def expect_counts(**expected: int) -> None:
    """Check the dense events since the test began, by their first word."""
    got = {"write": 0, "read": 0, "step": 0}
    for key, times in counters().items():
        if key.startswith("dense-"):
            got[key.removeprefix("dense-").split(":")[0]] += times
    assert got == {"write": 0, "read": 0, "step": 0, **expected}, counters()
