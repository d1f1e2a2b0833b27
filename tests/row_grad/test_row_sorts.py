"""Bags of one size, whose entries the sort makes from the ids: the bits of bags by offsets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from recast.errors import IdError
from recast.runtime.rows.grad import row_grad
from recast.runtime.rows.pieces import Piece, merge
from recast.runtime.rows.update import Update, apply

CPU = torch.device("cpu")
WIDTH = 5
FORMS = ["random", "padded", "sorted", "sorted and padded", "int32"]


def drawn(form: str, rows: int, bags: int, fixed: int) -> tuple[Piece, Piece]:
    """The gradient of one lookup of bags of ``fixed`` ids, and the same by offsets."""
    g = torch.Generator().manual_seed(rows + bags)
    ids = torch.randint(rows, (bags * fixed,), generator=g)
    if "sorted" in form:
        ids = ids.sort().values
    ids = ids.to(torch.int32 if form == "int32" else torch.int64)
    padding = int(ids[len(ids) // 2]) if "padded" in form else None
    upstream = torch.randn(bags, WIDTH, generator=g)
    even = Piece(ids, upstream, None, fixed, None, False, padding, None)
    offsets = torch.arange(0, len(ids), fixed)
    return even, Piece(ids, upstream, offsets, 1, None, False, padding, None)


# One, two and three digits; and one id a bag.
@pytest.mark.parametrize("fixed", [1, 7])
@pytest.mark.parametrize("rows", [30, 50_000, 9_000_000])
@pytest.mark.parametrize("form", FORMS)
def test_bags_of_one_size_are_those_of_their_offsets(
    form: str, rows: int, fixed: int, kernel: str
) -> None:
    even, ragged = drawn(form, rows, 90, fixed)
    ids, summed = merge([even], (rows, WIDTH), torch.float32, CPU)
    assert 2 <= len(ids) == len({int(i) for i in even.ids} - {even.padding_idx})
    for a, b in zip((ids, summed), merge([ragged], (rows, WIDTH), torch.float32, CPU), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("threads", [1, 2])
def test_tables_that_share_the_memory_of_their_sorts(threads: int, kernel: str) -> None:
    """Of unlike sizes, all in one step."""
    sizes = [(30, 60), (700, 16), *((9_000 + k, 5_000) for k in range(16)), (50_000, 70)]
    pairs = [drawn("random", rows, bags, 3) for rows, bags in sizes]

    def stepped(which: int) -> list[Tensor]:
        updates = []
        for (rows, _), pair in zip(sizes, pairs, strict=True):
            weight = torch.ones(rows, WIDTH)
            grad = row_grad(weight.shape, weight.dtype, weight.device, [pair[which]])
            updates.append(Update("sgd", weight, grad, (), lr=0.1))
        apply(updates)
        return [update.weight for update in updates]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found, right = stepped(0), stepped(1)
    finally:
        torch.set_num_threads(before)
    for a, b, (even, _) in zip(found, right, pairs, strict=True):
        assert torch.equal(a, b)
        assert (a != 1).any(1).sum() == len(even.ids.unique())


@pytest.mark.parametrize("bad", [-1, 50_000, 2**40])
def test_an_id_outside_the_table(bad: int, kernel: str) -> None:
    even, _ = drawn("random", 50_000, 90, 3)
    even.ids[200] = bad
    with pytest.raises(IdError, match=f"row {bad} of a table of 50000 rows"):
        merge([even], (50_000, WIDTH), torch.float32, CPU)


@pytest.mark.parametrize(("bag", "bad"), [(0, -1), (0, 1), (40, 2**40), (41, 30), (89, 271)])
def test_offsets_that_do_not_fit(bag: int, bad: int, kernel: str) -> None:
    """Below 0, not from the first id on, behind the ids, and smaller than the one before."""
    _, ragged = drawn("random", 50_000, 90, 3)
    assert ragged.offsets is not None
    ragged.offsets[bag] = bad
    with pytest.raises(IdError, match="offsets that do not fit its ids"):
        merge([ragged], (50_000, WIDTH), torch.float32, CPU)


def test_ids_in_no_bag(kernel: str) -> None:
    """What a sort before has left in memory is not taken for theirs."""
    even, _ = drawn("random", 1000, 90, 3)
    none = torch.tensor([100])  # an end without a start, from which no bag is left
    piece = Piece(torch.arange(270), torch.ones(0, WIDTH), none, 1, None, False, None, None)
    moved = []
    for one in (even, piece):
        weight = torch.ones(1000, WIDTH)
        grad = row_grad(weight.shape, weight.dtype, weight.device, [one])
        apply([Update("sgd", weight, grad, (), lr=0.1)])
        moved.append(int((weight != 1).any(1).sum()))
    assert moved == [len(even.ids.unique()), 0]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


BIG = 200_000  # ids of a sort that threads share


@pytest.mark.parametrize("wrong", ["id", "offsets"])
def test_a_shared_sort_of_what_is_wrong(wrong: str, kernel: str, two_threads: None) -> None:
    """What a thread has not written is left from the sort before, of a table of more rows."""
    many = torch.arange(30_000_000 - BIG, 30_000_000)
    upstream = torch.randn(BIG // 4, WIDTH)
    bags = Piece(many, upstream, torch.arange(0, BIG, 4), 1, None, False, None, None)
    merge([bags], (30_000_000, WIDTH), torch.float32, CPU)
    bags = dataclasses.replace(bags, ids=many % 1000, offsets=torch.arange(0, BIG, 4))
    if wrong == "id":
        bags.ids[3] = 1000
    else:
        bags.offsets[1] = 2**40  # type: ignore[index]
    said = "row 1000 of a table" if wrong == "id" else "offsets that do not fit"
    with pytest.raises(IdError, match=said):
        merge([bags], (1000, WIDTH), torch.float32, CPU)


@pytest.mark.parametrize("kernel", ["kernel"], indirect=True)
def test_the_first_of_several_wrong_ids_is_named(kernel: str, two_threads: None) -> None:
    """Not the one that a thread met first: here the second thread meets its own at once, the other
    one after milliseconds.
    """
    bags, fixed = 4000, 1000
    ids = torch.zeros(bags * fixed, dtype=torch.int64)
    half = len(ids) // 2
    ids[half - 1], ids[half] = 1001, 1002
    one = Piece(ids, torch.randn(bags, WIDTH), None, fixed, None, False, None, None)
    for _ in range(5):
        with pytest.raises(IdError, match="row 1001"):
            merge([one], (1000, WIDTH), torch.float32, CPU)
