"""Two batches of different sizes from one: cut if it is clear how, refused if it is not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from forms import FORMS, Interaction
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import recast
from recast.errors import UsageError
from recast.rewriter.capture.batches import of_example
from recast.rewriter.capture.capture_model import capture
from recast.rewriter.compiled.signature import of_forward
from recast.rewriter.compiled.trees import flatten


class Any1(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


class Any2(nn.Module):
    def forward(self, ids: Any, offsets: Any) -> Any:
        return ids


class Any3(nn.Module):
    def forward(self, dense: Any, offsets: Any = None, ids: Any = None) -> Any:
        return dense


def shapes(batch: Any) -> list[tuple[int, ...]]:
    leaves: list[Tensor] = []
    for value in batch:
        flatten(value, leaves, [])
    return [tuple(t.shape) for t in leaves]


def second(model: nn.Module, example: Any) -> tuple[list[tuple[int, ...]], tuple[int, int]]:
    found = of_example(example, of_forward(model), lambda args: None)
    assert found.second is not None, found.how
    return shapes(found.second), found.sizes


def offsets(counts: list[int], last: bool = False) -> Tensor:
    total = torch.tensor([0, *counts]).cumsum(0)
    return total if last else total[:-1]


def test_rows_are_cut() -> None:
    got, sizes = second(Any1(), torch.zeros(8, 3))
    assert sizes == (8, 5)
    assert got == [(5, 3)]
    got, _ = second(Any1(), {"a": torch.zeros(8), "b": torch.zeros(8, 2, 4)})
    assert got == [(5,), (5, 2, 4)]
    got, _ = second(Any1(), (Interaction({"a": torch.zeros(8)}),))
    assert got == [(5,)]


def test_one_row_grows_and_other_sizes_are_avoided() -> None:
    assert second(Any1(), torch.zeros(1, 7))[0] == [(3, 7)]
    assert second(Any1(), torch.zeros(2, 7))[0] == [(5, 7)]
    assert second(Any1(), torch.zeros(8, 5))[0] == [(6, 5)]


def test_of_many_rows_a_quarter_is_enough() -> None:
    assert second(Any1(), torch.zeros(4096, 7))[0] == [(1025, 7)]
    assert second(Any1(), torch.zeros(128, 7))[0] == [(65, 7)]


def test_two_batches_of_fewer_rows() -> None:
    x = torch.arange(512.0)[:, None]
    found = of_example(x, of_forward(Any1()), lambda args: None)
    fewer = found.fewer
    assert fewer is not None and fewer.second is not None
    assert found.sizes == (512, 129) and fewer.sizes == (129, 65)
    assert fewer.first is found.second and torch.equal(fewer.second[0], x[:65])


def test_a_large_example_runs_whole_in_few_places() -> None:
    """Which sizes a graph relies on is tried with fewer rows."""
    rows = []

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.top = nn.Embedding(9, 4), nn.Linear(8, 1)

        def forward(self, ids: Tensor, other: Tensor) -> Tensor:
            return self.top(torch.cat([self.table(ids).mean(1), self.table(other).mean(1)], 1))

    class Counting(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is nn.functional.embedding:
                rows.append(len(args[0]))
            return func(*args, **kwargs or {})

    batch = torch.randint(9, (512, 6)), torch.randint(9, (512, 6))
    with Counting():
        fast = recast.optimize(Pooled(), example=batch)
    assert fast.report.to_dict()["captured"] == "whole"
    assert 0 < rows.count(512) <= 2 * 8 < len(rows)  # of two tables


def test_flat_ids_are_cut_where_their_offsets_say() -> None:
    a, b = [2, 0, 1, 3, 1, 0], [1, 1, 1, 1, 1, 5]
    dense, ids = torch.zeros(6, 3), [torch.ones(n, dtype=torch.long) for n in (sum(a), sum(b))]
    stacked = torch.stack([offsets(a), offsets(b)])
    assert second(Any3(), (dense, stacked, ids))[0] == [(4, 3), (2, 4), (6,), (4,)]
    listed = [offsets(a), offsets(b)]
    assert second(Any3(), (dense, listed, ids))[0] == [(4, 3), (4,), (4,), (6,), (4,)]
    ended = [offsets(a, last=True), offsets(b, last=True)]
    assert second(Any3(), (dense, ended, ids))[0] == [(4, 3), (5,), (5,), (6,), (4,)]


def test_nothing_is_left_behind_an_end() -> None:
    """With no other input as a hint: offsets with an end keep one, offsets without get none."""
    for counts, last, kept in (
        ([2, 3, 0, 4], True, 5),
        ([2, 3, 4, 0], False, 5),
        ([2, 3, 1, 3], False, 6),
    ):
        example = torch.arange(9), offsets(counts, last)
        found = of_example(example, of_forward(Any2()), lambda args: None)
        assert found.second is not None
        ids, cuts = found.second
        assert cuts.tolist() == [0, 2, 5] and ids.tolist() == [*range(kept)]


def test_weights_are_cut_as_their_ids() -> None:
    ids, weights = torch.ones(7, dtype=torch.long), torch.zeros(7)
    bag = {"ids": ids, "offsets": offsets([2, 0, 1, 3, 1, 0]), "weights": weights}
    assert second(Any3(), (torch.zeros(6, 3), bag))[0] == [(4, 3), (6,), (4,), (6,)]


def test_flat_values_are_cut_where_their_lengths_say() -> None:
    """Of two lengths with one sum, the ones next to the values count; values are not cut as rows
    even if their number is a multiple of the batch.
    """
    counts = [[2, 0, 1, 3, 1, 0], [1, 1, 1, 1, 1, 2], [2, 2, 2, 2, 2, 2]]
    jagged = {
        k: (torch.zeros(sum(c), dtype=torch.long), torch.zeros(sum(c)), torch.tensor(c))
        for k, c in enumerate(counts)
    }
    got = second(Any3(), (torch.zeros(6, 3), jagged))[0]
    assert got == [(4, 3), (6,), (6,), (4,), (4,), (4,), (4,), (8,), (8,), (4,)]
    assert got[4:6] != got[1:3]  # the same sum


class Jagged(nn.Module):
    """Offsets made from lengths, with an end."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleDict(
            {k: nn.EmbeddingBag(9, 4, mode="mean", include_last_offset=True) for k in "ab"}
        )

    def forward(self, features: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        pooled = []
        for name, bag in self.bags.items():
            values, lengths = features[name]
            pooled.append(bag(values, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])))
        return torch.cat(pooled, 1)


def test_bags_of_values_and_lengths_are_fused() -> None:
    """With values after the last end, torch and ours may differ: the cut must leave none."""
    batch = {
        k: (5 * torch.arange(1, n + 1) % 9, torch.tensor(c))
        for k, c, n in (("a", [2, 0, 1, 3, 1, 0], 7), ("b", [0, 4, 1, 0, 1, 3], 9))
    }
    fast = recast.optimize(Jagged(), example=(batch,), strict=True)
    assert fast.report.to_dict()["lookups"] == {"found": 2, "fused": 2}


class Keyed(nn.Module):
    """The values of all features in one tensor, feature by feature, with their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(n, 4, mode="sum") for n in (3, 90))

    def forward(self, dense: Tensor, values: Tensor, lengths: Tensor, weights: Tensor) -> Tensor:
        ends = lengths.view(2, -1).sum(1).cumsum(0)
        pooled = [dense]
        for k, counts in enumerate(lengths.view(2, -1)):
            mine = slice(ends[k] - counts.sum(), ends[k])
            starts = counts.cumsum(0) - counts
            pooled.append(self.bags[k](values[mine], starts, per_sample_weights=weights[mine]))
        return torch.cat(pooled, 1)


@pytest.mark.parametrize("flat", [True, False])
def test_lengths_by_feature_say_which_values_to_take(flat: bool) -> None:
    lengths = torch.tensor([[2, 0, 1, 3, 1, 0], [1, 5, 1, 2, 0, 2]])
    values = torch.cat([torch.randint(3, (7,)), torch.randint(3, 90, (11,))])
    batch = torch.rand(6, 2), values, lengths.flatten() if flat else lengths, torch.rand(18)
    model = Keyed()
    it = capture(model, batch)
    assert it.kind == "whole"
    assert it.batches is not None
    cut = it.batches[1]
    assert torch.equal(cut[2].view(2, -1), lengths[:, :4])
    assert torch.equal(cut[1], torch.cat([values[:6], values[7:16]]))
    assert torch.equal(cut[3], torch.cat([batch[3][:6], batch[3][7:16]]))


@pytest.mark.parametrize("largest", [2**61, 2**42])
def test_ids_are_not_taken_for_lengths(largest: int) -> None:
    """Which sum to more than int64 or the memory holds."""
    got, _ = second(Any1(), torch.full((8, 4), largest))
    assert got == [(5, 4)]


def test_numbers_of_rows_are_cut_too() -> None:
    model, batch = FORMS["RowsAsNumber"]
    it = capture(model(), batch(8))
    assert it.kind == "whole"
    assert it.batches is not None
    assert it.batches[1][1] == 5


def test_a_vector_of_fields_is_not_taken_for_the_batch() -> None:
    ids, fields = torch.zeros(64, 10, dtype=torch.int64), torch.arange(10)
    (cut, kept), sizes = second(Any2(), (ids, fields))
    assert cut[1:] == (10,) and cut[0] < 64 and kept == (10,) and sizes[0] == 64
    (cut, kept), sizes = second(Any2(), (ids.T, torch.zeros(64)))  # fields first
    assert cut[0] == 10 and kept == (cut[1],) and sizes[0] == 64


def test_two_batches_are_taken_as_they_are() -> None:
    a, b = (torch.zeros(4, 3),), (torch.zeros(9, 3),)
    for given in ([a, b], [list(a), list(b)], [a[0], b[0]], [{"x": a[0]}, {"x": b[0]}]):
        found = of_example(given, of_forward(Any1()))
        assert found.second is not None
        assert found.sizes == (4, 9)
        assert shapes(found.first) == [(4, 3)]


def test_names_may_be_given() -> None:
    found = of_example({"dense": torch.zeros(8), "ids": torch.zeros(8)}, of_forward(Any3()), len)
    assert found.first[1] is None
    assert shapes(found.first) == [(8,), (8,)]


@pytest.mark.parametrize("example", [(), (torch.zeros(2),) * 4])
def test_an_example_that_does_not_fit(example: Any) -> None:
    with pytest.raises(UsageError, match="example"):
        of_example(example, of_forward(Any3()))


class Fixed(nn.Module):
    """Takes no other size than the one it was made for."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


def test_nothing_tells_then_a_second_batch_is_asked_for() -> None:
    it = capture(Fixed(), torch.zeros(8, 2))
    assert it.kind == "none"
    assert it.why == "the batch dimension cannot be told from one batch"
    assert it.where is not None and it.where.startswith("test_batches.py:")
    assert it.tries == ("example=[batch, batch_of_another_size]",)


def test_an_example_that_the_model_refuses() -> None:
    with pytest.raises(UsageError, match="the plain model raises on it") as caught:
        capture(Fixed(), torch.zeros(8, 3))
    assert "The size of tensor a (3) must match" in str(caught.value)


def test_rows_that_hold_several_of_another_kind_each_are_cut_together() -> None:
    flat = torch.arange(8 * 3)
    got, sizes = second(Any3(), (torch.zeros(8, 4), flat, torch.zeros(8 * 3, 2)))
    assert sizes == (8, 5)
    assert got == [(5, 4), (15,), (15, 2)]


class Histories(nn.Module):
    """The items of all rows come in one flat list, as libraries collate them."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(20, 4)

    def forward(self, mask: Tensor, items: dict[str, Tensor]) -> Tensor:
        e = self.items(items["id"]).view(mask.shape[0], -1, 4)
        return (e[:, :-1] * mask.unsqueeze(-1)).sum(1) * e[:, -1]


def test_flattened_histories_need_no_second_batch() -> None:
    def batch(rows: int) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(rows)
        mask = torch.rand(rows, 3, generator=generator).round()
        return mask, {"id": torch.randint(0, 20, (rows * 4,), generator=generator)}

    model = Histories()
    found = capture(model, batch(8))
    assert found.kind == "whole"
    assert found.sizes == (8, 5)


class Sized(nn.Module):
    """Relies on the number of its rows."""

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        return x.cumsum(1)[:, -1] + torch.arange(float(n)) if n == 8 else x.sum(1)


def test_two_examples_with_as_many_rows_are_told() -> None:
    same, other = [torch.rand(8, 5), torch.rand(8, 3)], [torch.rand(8, 5), torch.rand(4, 3)]
    said = "both examples have 8 in dimension 0 of x"
    assert said in str(recast.optimize(Sized(), example=same).report)
    assert said not in str(recast.optimize(Sized(), example=other).report)


class Grouped(nn.Module):
    """Compares the rows of each group: pairs, halves of the batch, lists of candidates."""

    def __init__(self, rows: int, first: bool = False) -> None:
        super().__init__()
        self.table, self.top = nn.Embedding(20, 4), nn.Linear(4, 1)
        self.sizes = (rows, -1) if first else (-1, rows)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.table(x).mean(1)).view(*self.sizes).log_softmax(1)


@pytest.mark.parametrize(
    ("model", "rows", "sizes"),
    [
        (Grouped(2), 8, (8, 4)), (Grouped(2, first=True), 2, (2, 4)),
        (Grouped(4), 20, (20, 16)), (Grouped(3), 9, (9, 6)),
    ],
)  # fmt: skip
def test_a_batch_of_groups_is_cut_between_them(
    model: nn.Module, rows: int, sizes: tuple[int, int]
) -> None:
    x = torch.arange(rows * 3).reshape(rows, 3) % 20
    found = capture(model, x)
    assert found.kind == "whole", found.why
    assert found.sizes == sizes
    fast = recast.optimize(model, example=x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no plain forward
        for times in (2, 3):
            torch.testing.assert_close(fast(x.repeat(times, 1)), model(x.repeat(times, 1)))
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        fast(x.repeat(2, 1)[:-1])
