"""``torch.tensor([3] * n)`` and ``torch.tensor(range(n))`` of a size ``n`` of the batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from guarded import Net, both, check, ids
from torch import Tensor

tensor = torch.tensor  # a name under which torch.tensor is not followed


class Lists(Net):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.ways(x)[self.way]()
        return self.a(self.table(x).sum(1)) * made.unsqueeze(-1), made

    def ways(self, x: Tensor) -> dict[str, Callable[[], Tensor]]:
        raise NotImplementedError


class Made(Lists):
    def ways(self, x: Tensor) -> dict[str, Callable[[], Tensor]]:
        return {
            "tensor": lambda: torch.tensor([3] * x.shape[0]),
            "turned": lambda: torch.tensor(x.size(0) * [3]),
            "dtype": lambda: torch.tensor([3] * x.shape[0], dtype=torch.int32),
            "float": lambda: torch.tensor([0.5] * x.shape[0]),
            "bool": lambda: torch.tensor([True] * x.shape[0]),
            "LongTensor": lambda: torch.LongTensor([3] * len(x)),
            "FloatTensor": lambda: torch.FloatTensor([3] * len(x)),
            "as_tensor": lambda: torch.as_tensor([3] * len(x)),
            "array": lambda: torch.from_numpy(np.array([0.1] * len(x))),
            "array of ints": lambda: torch.from_numpy(np.array([3] * len(x))),
            "less than once": lambda: torch.LongTensor([3] * (len(x) - 6)).sum() + x[:, 0],
            "range": lambda: torch.tensor(range(x.shape[0])),
            "range with two ends": lambda: torch.LongTensor(range(2, len(x) + 2)),
        }


class Other(Lists):
    def ways(self, x: Tensor) -> dict[str, Callable[[], Tensor]]:
        return {
            "longer": lambda: torch.tensor([3] * x.shape[0] + [4])[1:],
            "asked": lambda: x[:, 0] if [3] * x.shape[0] else x[:, 1],
            "counted": lambda: x[:, 0] * ([3] * x.shape[0]).count(3),
            "entries": lambda: x[:, 0] * sum([3] * x.shape[0]),
            "as text": lambda: x[:, 0] * len(str([3] * x.shape[0])),
            "not followed": lambda: tensor([3] * x.shape[0]),
        }


@pytest.mark.parametrize("way", Made("").ways(ids(1)))
def test_a_tensor_is_made_of_it(way: str) -> None:
    plain, fast, it = both(Made(way), ids(8))
    assert it.kind == "whole", it.why
    for rows in (8, 5, 1, 0):  # torch.tensor([]) is of floats
        if rows == 0 and it.traced["both"].guards:
            check(plain, fast, ids(rows), warns="goes another way")
        check(plain, fast, ids(rows))
        assert [t.dtype for t in fast(ids(rows))] == [t.dtype for t in plain(ids(rows))]


@pytest.mark.parametrize("way", Other("").ways(ids(1)))
def test_other_uses_are_refused(way: str) -> None:
    plain, fast, it = both(Other(way), ids(8))
    assert it.kind == "partial"
    assert it.why == "repeats a list 8 times for one example batch and 5 times for the other"
    assert it.tries == ("torch.full((n,), value) in place of torch.tensor([value] * n)",)
    assert it.where is not None and it.where.startswith("test_repeated_lists.py:")
    check(plain, fast, ids(5))
