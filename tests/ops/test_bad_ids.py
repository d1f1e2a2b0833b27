"""Bad input to embedding_bags: the exact words, from the C++ kernels, from plain torch, and from a
GPU's kernels in checked mode alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import emulated_gpu
import pytest
import torch
from torch import Tensor

from recast.errors import DtypeError, IdError, InputError
from recast.runtime import OPS, checked, device

TARGET = OPS["embedding_bags"].target


@pytest.fixture(params=["compiled", "torch", "emulated cuda"], autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "torch":
        with device.use("torch"):
            yield
    elif request.param == "emulated cuda":
        with emulated_gpu.serve(), checked.checked():
            yield
    elif device.extension() is None:
        pytest.skip(str(device.why_missing()))
    else:
        yield


def look_up(
    ids: Tensor,
    *,
    rows: int = 10,
    offsets: Tensor | None = None,
    weights: Tensor | None = None,
    mode: str = "sum",
    last: bool = False,
    padding: int | None = None,
    grad: bool = True,
) -> Any:
    """Three lookups of three tables; the middle one is given."""
    tables = [torch.randn(r, 4, requires_grad=grad) for r in (3, rows, 5)]
    good = torch.zeros(2, 1, dtype=torch.int64)
    return TARGET(
        tables,
        [good, ids, good],
        [None, offsets, None],
        [None, weights, None],
        [0, 1, 2],
        ["sum", mode, "sum"],
        [None, padding, None],
        [False, last, False],
        [False] * 3,
    )


def ints(*values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("ids", "options", "what", "place"),
    [
        (([1, 2], [3, 10]), {}, "id 10 of lookup 1 (table 1)", "ids[1, 1]"),
        (([1, -1], [3, 10]), {}, "id -1 of lookup 1 (table 1)", "ids[0, 1]"),
        ((9, 2, 30), {"mode": "none"}, "id 30 of lookup 1 (table 1)", "ids[2]"),
        (([9], [-7]), {"mode": "none"}, "id -7 of lookup 1 (table 1)", "ids[1, 0]"),
        ((1, 2, 3, 11), {"offsets": ints(0, 2)}, "id 11 of lookup 1 (table 1)", "ids[3]"),
        (([1, 2], [10, 3]), {"mode": "max"}, "id 10 of lookup 1 (table 1)", "ids[1, 0]"),
        (([1, 2], [10, 3]), {"padding": 2}, "id 10 of lookup 1 (table 1)", "ids[1, 0]"),
    ],
)
def test_ids_outside(
    ids: Any, options: dict[str, Any], what: str, place: str, dtype: torch.dtype, grad: bool
) -> None:
    with pytest.raises(IdError) as raised:
        look_up(ints(*ids, dtype=dtype), grad=grad, **options)
    assert raised.value.what == f"{what} is outside its 10 rows"
    assert raised.value.why == f"it stands at {place}; valid ids are 0..9"
    assert "0..9" in raised.value.tries[0]
    assert isinstance(raised.value, IndexError)


def test_remedy_names_rows() -> None:
    with pytest.raises(IdError) as raised:
        look_up(ints([12]))
    assert raised.value.tries[1] == "give the table at least 13 rows"
    with pytest.raises(IdError) as raised:
        look_up(ints([-1]))
    assert "padding_idx" in raised.value.tries[1]


def test_first_bad_id_wins_over_threads() -> None:
    """The same error whatever the number of threads: that of the lowest lookup and position."""
    ids = torch.randint(0, 10, (5000, 8))
    ids[4000, 3] = 99
    ids[77, 5] = 77
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            with pytest.raises(IdError, match=r"id 77 of lookup 1 .*\n.*ids\[77, 5\]"):
                look_up(ids)
    finally:
        torch.set_num_threads(before)


def test_huge_ids_do_not_wrap() -> None:
    for value in (2**62, -(2**62), 2**32):
        with pytest.raises(IdError, match=f"id {value} of lookup 1"):
            look_up(ints([value]))


@pytest.mark.parametrize(
    ("offsets", "last", "what"),
    [
        (ints(0, 3, 2), False, "offsets of lookup 1 (table 1) decrease: 3 then 2 at position 2"),
        (ints(0, 2, 9), False, "offsets[2] = 9 of lookup 1 (table 1) runs past its 4 ids"),
        (ints(1, 2), False, "offsets of lookup 1 (table 1) start at 1, not at 0"),
        (ints(-1, 2), False, "offsets of lookup 1 (table 1) start at -1, not at 0"),
        (ints(0, 2, 5), True, "offsets[2] = 5 of lookup 1 (table 1) runs past its 4 ids"),
        (ints(0, 4, 3), True, "offsets of lookup 1 (table 1) decrease: 4 then 3 at position 2"),
    ],
)
def test_offsets(offsets: Tensor, last: bool, what: str) -> None:
    for dtype in (torch.int64, torch.int32):
        with pytest.raises(IdError) as raised:
            look_up(ints(1, 2, 3, 4), offsets=offsets.to(dtype), last=last)
        assert raised.value.what == what
        assert "from 0, never decreasing" in raised.value.why


def test_float_ids() -> None:
    with pytest.raises(DtypeError) as raised:
        look_up(torch.tensor([[1.5]]))
    assert raised.value.what == "ids of lookup 1 (table 1) are float32"
    assert "ids.long()" in raised.value.tries
    assert isinstance(raised.value, TypeError)


def test_float_offsets() -> None:
    with pytest.raises(DtypeError, match=r"offsets of lookup 1 .* are float32"):
        look_up(ints(1, 2), offsets=torch.tensor([0.0]))


@pytest.mark.parametrize(
    ("ids", "options", "what"),
    [
        (ints([1, 2]), {"offsets": ints(0)}, "have 2 dimensions and offsets"),
        (ints(1, 2), {}, "have 1 dimensions and no offsets"),
        (ints([[1, 2]]), {}, "have 3 dimensions and no offsets"),
        (ints(1, 2), {"offsets": ints([0])}, "offsets of lookup 1 .table 1. have shape .1, 1."),
        (ints(1), {"offsets": ints(), "last": True}, "have shape .0,."),
        (ints([1, 2]), {"weights": torch.ones(2)}, r"have shape \(2,\), its ids \(1, 2\)"),
        (ints([1]), {"weights": torch.ones(1, 1), "mode": "mean"}, "given with mode 'mean'"),
        (ints([1]), {"padding": 10}, "padding_idx 10 of lookup 1 .table 1. is outside its 10"),
    ],
)
def test_shapes(ids: Tensor, options: dict[str, Any], what: str) -> None:
    with pytest.raises(InputError, match=what):
        look_up(ids, **options)


def test_weights_dtype() -> None:
    with pytest.raises(DtypeError, match=r"per_sample_weights of lookup 1 .* are float64"):
        look_up(ints([1]), weights=torch.ones(1, 1, dtype=torch.float64))


def test_unknown_mode() -> None:
    with pytest.raises(InputError, match="unknown pooling mode 'median'"):
        look_up(ints([1]), mode="median")


def test_empty_table() -> None:
    with pytest.raises(IdError, match=r"id 0 of lookup 1 .* outside its 0 rows"):
        look_up(ints([0]), rows=0)
    outs = look_up(torch.zeros(0, 3, dtype=torch.int64), rows=0)
    assert outs[1].shape == (0, 4)
