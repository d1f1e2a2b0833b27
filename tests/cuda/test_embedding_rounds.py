"""How many rounds of bags a warp searches at once: more if there are enough blocks."""

from __future__ import annotations

from typing import Any

import emulated_gpu
import pytest
import torch
from emulated_bags import call, check

from recast.runtime.embedding.cuda_classes import LookupClass


def of(lanes: int, bags: int, pools_max: bool = False) -> LookupClass:
    return LookupClass(0, 0, 4, lanes, 1, pools_max, bags, 0)


@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("bags", [1, 4])
def test_a_warp_has_no_more_than_the_kernel_has_room_for(lanes: int, bags: int) -> None:
    rounds = of(lanes, bags).rounds(10**9, 132)
    assert rounds == 1 or rounds * bags * 32 // lanes <= 32
    assert rounds in (1, 2, 4, 8)


def test_blocks_stay_enough_for_the_device() -> None:
    by_warps, full = of(32, 4), 132 * 12
    assert [by_warps.rounds(n * full, 132) for n in (0, 1, 2, 4, 8, 99)] == [1, 1, 2, 4, 8, 8]
    assert by_warps.rounds(2 * full - 1, 132) == 1
    assert of(32, 1, pools_max=True).rounds(10**9, 132) == 1


@pytest.mark.parametrize("ragged", [False, True])
def test_a_call_of_many_bags(emulated: emulated_gpu.Emulated, ragged: bool) -> None:
    """Of one id each, or of none, one and two; over the end of the last block."""
    g = torch.Generator().manual_seed(1)
    table, ids = torch.randn(50, 128, generator=g), torch.randint(0, 50, (1700, 1), generator=g)
    lookup: dict[str, Any] = {"table": table, "ids": ids}
    if ragged:
        sizes = torch.randint(0, 3, (1700,), generator=g)
        starts = sizes.cumsum(0) - sizes
        lookup = {"table": table, "ids": ids.reshape(-1), "offsets": starts.clamp(max=1700)}
    launched: list[int] = []
    launch = emulated.launch

    def noted(kernel: Any, grid: Any, block: Any, shared: int, arguments: Any) -> None:
        launched.append(arguments[-1].value)
        launch(kernel, grid, block, shared, arguments)

    emulated.launch = noted  # type: ignore[method-assign]
    outs = call([lookup])
    assert launched == [2]
    check([lookup], outs)
