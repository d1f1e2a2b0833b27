"""Every op under ``torch.func``: its forward derivatives, and batches of calls."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from op_checks import TRAINED, UNLIKE_DIFFERENCES, as_list, cast, floats
from torch import Tensor

from recast.runtime import OPS
from recast.runtime.op import Op, Sample


def takes(sample: Sample) -> bool:
    """Not what torch has no formula for: its maximum of a bag."""
    return not any(isinstance(arg, list) and "max" in arg for arg in sample.args)


CASES = [
    pytest.param(op, sample, id=f"{op.name}-{sample.label}")
    for op in TRAINED
    for sample in islice(filter(takes, op.samples()), 12 if op.name.startswith("emb") else 3)
]


def call(op: Op, args: tuple[Any, ...], values: tuple[Tensor, ...]) -> list[Tensor]:
    """The floats that ``op`` returns for ``args``, with ``values`` in place of their floats."""
    given = {id(t): v for t, v in zip(floats(op, args), values, strict=True)}
    new = [
        [given.get(id(a), a) for a in arg] if isinstance(arg, list) else given.get(id(arg), arg)
        for arg in args
    ]
    torch.manual_seed(5)
    return [o for o in as_list(op.target(*new)) if o.is_floating_point()]


def dot(a: list[Tensor], b: list[Tensor]) -> float:
    return sum((x * y).sum().item() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("op", "sample"), CASES)
def test_forward_derivatives_are_the_transpose_of_backward_ones(op: Op, sample: Sample) -> None:
    if sample.label in UNLIKE_DIFFERENCES:
        pytest.skip(UNLIKE_DIFFERENCES[sample.label])
    args = cast(sample.args, torch.float64)
    leaves = floats(op, args)
    g = torch.Generator().manual_seed(3)
    tangents = [torch.randn(t.shape, generator=g, dtype=t.dtype) for t in leaves]
    want, pull = torch.func.vjp(lambda *v: call(op, args, v), *leaves)
    up = [torch.randn(o.shape, generator=g, dtype=o.dtype) for o in want]
    outs, found = torch.func.jvp(lambda *v: call(op, args, v), tuple(leaves), tuple(tangents))
    torch.testing.assert_close(outs, want)
    assert dot(found, up) == pytest.approx(dot(list(pull(up)), tangents), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("op", "sample"), [c for c in CASES if not c.values[0].random])
def test_a_batch_of_calls_is_each_of_them(op: Op, sample: Sample) -> None:
    args = cast(sample.args, torch.float64)
    g = torch.Generator().manual_seed(3)
    stacked = [torch.randn(3, *t.shape, generator=g, dtype=t.dtype) for t in floats(op, args)]
    each = [call(op, args, values) for values in zip(*stacked, strict=True)]
    got = torch.vmap(lambda *v: call(op, args, v))(*stacked)
    for ours, *theirs in zip(got, *each, strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_rows_of_nan_and_long_bags(dtype: torch.dtype) -> None:
    """As without a transform: padding is left out, not times zero; halves are summed in float32."""
    weight = torch.rand(9, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight[2] = torch.nan
    ids, offsets = torch.arange(1800) % 9, torch.tensor([0, 3, 3, 700])

    def mean(weight: Tensor) -> Tensor:
        rest = [None], [0], ["mean"], [2], [False], [False]
        (out,) = OPS["embedding_bags"].target([weight], [ids], [offsets], *rest)
        return out

    outs, tangent = torch.func.jvp(mean, (weight,), (weight,))
    torch.testing.assert_close(outs, mean(weight))
    torch.testing.assert_close(tangent, mean(weight))
