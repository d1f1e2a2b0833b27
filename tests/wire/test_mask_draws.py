"""A part of a mask is that part of torch's own; the generator ends where torch leaves it."""

from __future__ import annotations

import pytest
import torch

from recast.runtime import device
from recast.runtime.mlp import torch_draws
from recast.runtime.mlp.mask_draws import drawn
from recast.runtime.ranks import dropout_global

KERNELS = [*(isa for isa in device.ISAS if device.why_not(isa)() is None), "torch"]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_part_of_what_torch_draws(kernel: str, dtype: torch.dtype) -> None:
    like = torch.empty(0, dtype=dtype)
    with device.use(kernel):
        for used in (0, 1, 311, 623, 624, 625):
            for parts in (
                (0, 4000, 0),
                (7, 3000, 5),
                (311, 1, 4000),
                (1, 312, 6240),
                (500, 0, 3000),
            ):
                before, count, after = parts
                ours, theirs = (torch.Generator().manual_seed(used) for _ in range(2))
                for g in (ours, theirs):
                    torch.empty(used, dtype=torch.int32).random_(generator=g)
                part = drawn(count, before, after, 0.3, like, ours)
                whole = torch.empty(sum(parts), dtype=dtype).bernoulli_(0.3, generator=theirs)
                assert torch.equal(part, whole.div_(0.3)[before : before + count])
                assert torch.equal(ours.get_state(), theirs.get_state())


@pytest.mark.parametrize("shape", [(40, 70), (40, 7, 10), (40, 1)])
@pytest.mark.parametrize("turned", [False, True])
def test_rows_of_a_mask_in_any_layout(shape: tuple[int, ...], turned: bool) -> None:
    whole = torch.randn(*shape).transpose(0, -1) if turned else torch.randn(*shape)
    dim = whole.dim() - 1 if turned else 0
    torch.manual_seed(3)
    noise = torch.empty_like(whole).bernoulli_(0.6).div_(0.6)
    part = whole.narrow(dim, 9, 20)
    place = dropout_global.Part.at(part, list(whole.shape), dim, 9)
    found = dropout_global._noise(part, place, 1 - 0.6, torch.Generator().manual_seed(3))
    assert torch.equal(found, noise.narrow(dim, 9, 20))


def test_the_kernel_is_taken_where_it_draws_as_torch_does() -> None:
    why = torch_draws.why_not()
    assert why is None or "MKL" in why or device.extension() is None
