"""Both attentions under masks that leave keys out for a whole block of queries, which the CPU
kernels then do not compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from recast.runtime import device
from recast.runtime.layers import field_attention, silu_attention

PLACES = 150  # several blocks of each kernel's; the last register is part
DIM = 20


def _causal() -> Tensor:
    return torch.ones(PLACES, PLACES, dtype=torch.bool).triu(1)


def _padding(at_front: bool) -> Tensor:
    """Rows of 150, 3, 90 and 41 places."""
    lengths = torch.tensor([PLACES, 3, 90, 41])[:, None]
    left_out = torch.arange(PLACES) >= lengths
    return (left_out.flip(1) if at_front else left_out)[:, None, None, :]


LEFT_OUT: dict[str, Callable[[], Tensor]] = {
    "after": _causal,
    "behind": lambda: _padding(False),
    "in front": lambda: _padding(True),
    "after, and in front": lambda: _causal() | _padding(True),  # some queries have no keys
    "all but one": lambda: ~torch.eye(PLACES, dtype=torch.bool),
    "all": lambda: torch.ones(1, 1, dtype=torch.bool),
    "none": lambda: torch.zeros(PLACES, 1, dtype=torch.bool),
}


def _drawn(far: float = 1.0) -> tuple[Tensor, ...]:
    """q, k and v; the scores are the same in float32 and float64, also if 10,000 is added."""
    g = torch.Generator().manual_seed(17)
    shape = 4, PLACES, 2, DIM
    q, k = (torch.randint(-4, 5, shape, generator=g) / 2 for _ in range(2))
    v = torch.randn(shape, generator=g)
    return q.transpose(1, 2) * far, k.transpose(1, 2), v.transpose(1, 2)


def _same(op: Any, module: Any, args: tuple[Any, ...], double: bool = True) -> None:
    """Results and gradients as those of the definition, in float64 if ``double``; NaN where it has
    NaN.
    """

    def run(call: Any, dtype: torch.dtype) -> list[Tensor]:
        cast = [t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in args]
        leaves = [t.requires_grad_() for t in cast[:3]]
        torch.manual_seed(5)
        out = call(*cast)
        out = out[0] if isinstance(out, list) else out
        g = torch.Generator().manual_seed(7)
        up = torch.randn(out.shape, generator=g).to(dtype)
        return [out, *torch.autograd.grad(out, leaves, up)]

    judge = run(module.reference, torch.float64 if double else torch.float32)
    for a, b in zip(run(op.target, torch.float32), judge, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.fixture(params=device.ISAS, autouse=True)
def _isa(request: pytest.FixtureRequest) -> Iterator[None]:
    why = device.why_not(request.param)()
    if why is not None:
        pytest.skip(why)
    with device.use(request.param):
        yield


def _softmax(
    *masks: Any, far: float = 1.0, p: float = 0.0, values: Tensor | None = None, double: bool = True
) -> None:
    q, k, v = _drawn(far)
    v = v if values is None else values
    args = (q, k, v, 0.25, p, True, False, *masks)
    _same(field_attention.field_attention, field_attention, args, double)


@pytest.mark.parametrize("form", LEFT_OUT)
@pytest.mark.parametrize("number", [-math.inf, -1e9, -10_000.0, torch.finfo().min])
@pytest.mark.parametrize("added", [True, False])
def test_softmax(form: str, number: float, added: bool) -> None:
    """The weights of what is left out are zero, but where a query has no other keys."""
    mask = LEFT_OUT[form]()
    if added:
        exact = number in (-math.inf, -10_000.0)  # in float32, others swallow the scores
        bias = torch.zeros(mask.shape).masked_fill(mask, number)
        _softmax(bias, None, 0.0, True, double=exact)
    else:
        _softmax(None, mask, number, True)


def test_softmax_without_keys() -> None:
    """A query without keys gets NaN, as by torch's softmax."""
    _softmax(None, LEFT_OUT["after, and in front"](), -math.inf, False)


@pytest.mark.parametrize("number", [-math.inf, math.nan, math.inf])
def test_a_query_of_nan_among_others(number: float) -> None:
    """A query that gets NaN gives it to the gradients of all keys, also those left out for it."""
    bias = torch.zeros(4, 1, PLACES, PLACES).masked_fill(LEFT_OUT["behind"](), -math.inf)
    bias[:, :, 20, slice(None) if number == -math.inf else 1] = number
    _softmax(bias, None, 0.0, False)


def test_softmax_with_dropout() -> None:
    """In float32 as the definition, which draws the same mask."""
    _softmax(None, LEFT_OUT["after, and in front"](), -1e9, False, p=0.3, double=False)


@pytest.mark.parametrize("number", [-9_500.0, -16_000.0])
def test_scores_beyond_the_mask(number: float) -> None:
    """Scores so far apart that what a finite number should leave out has weight."""
    mask = LEFT_OUT["after"]()
    _softmax(torch.zeros(mask.shape).masked_fill(mask, number), None, 0.0, False, far=3_000.0)


def test_bias_and_filled() -> None:
    g = torch.Generator().manual_seed(23)
    bias = torch.randn(2, 1, PLACES, generator=g).masked_fill(torch.arange(PLACES) > 99, -math.inf)
    _softmax(bias, LEFT_OUT["after, and in front"](), -1e9, True)


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_not_finite(number: float) -> None:
    """What is left out is multiplied by zero, which makes NaN of inf: as torch has it."""
    values = _drawn()[2].clone()
    values[2, :, 120] = number  # behind the last key of this sample
    mask = LEFT_OUT["behind"]()
    _softmax(None, mask, -math.inf, False, values=values)
    q, k, _ = _drawn()
    _same(
        silu_attention.silu_attention,
        silu_attention,
        (q, k, values, 0.3, 0.1, None, (~mask).float()),
    )


@pytest.mark.parametrize("form", LEFT_OUT)
@pytest.mark.parametrize("bias", ["none", "some", "-inf where it is left out"])
def test_silu(form: str, bias: str) -> None:
    q, k, v = _drawn()
    mask = LEFT_OUT[form]()
    added = None
    if bias != "none":
        added = torch.randn(2, PLACES, PLACES, generator=torch.Generator().manual_seed(29))
    if bias == "-inf where it is left out":
        assert added is not None
        added = added.expand(4, -1, -1, -1).masked_fill(mask, -math.inf)
    args = (q, k, v, 0.3, 1 / PLACES, added, (~mask).float())
    _same(silu_attention.silu_attention, silu_attention, args)
