"""Without gradients an interaction reads one-id lookups straight from the tables, unnoticed."""

from __future__ import annotations

from importlib import import_module
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import recast
from recast.errors import IdError
from recast.rewriter.compiled import stacks
from recast.runtime import OPS, device
from recast.runtime.embedding import unread_rows
from recast.runtime.embedding.unread_rows import UnreadRows

_BAGS, _DOT = OPS["embedding_bags"], OPS["dot_interaction"]


def stacked(*args: Any) -> Any:
    """All lookups as one tensor."""
    return _BAGS.target.direct.stacked((tuple(args[4]),))(*args)


def unread(*args: Any) -> Any:
    """The same, not read yet."""
    return _BAGS.target.direct.unread((tuple(args[4]),))(*args)


pytestmark = pytest.mark.skipif(device.extension() is None, reason="needs the C++ kernels")


def lookups(
    count: int,
    dim: int,
    bags: int,
    mode: str = "sum",
    dtype: torch.dtype = torch.int64,
    **more: Any,
) -> tuple[Any, ...]:
    """Arguments of a call with one id per bag; the first lookup's ids have a stride."""
    g = torch.Generator().manual_seed(count + dim + bags)
    weights = [torch.randn(7 + k, dim, generator=g) for k in range(count)]
    shape = (bags,) if mode == "none" else (bags, more.get("ids", 1))
    ids = [torch.randint(7, shape, generator=g).to(dtype) for _ in range(count)]
    ids[0] = torch.stack((ids[0], ids[0] + 1), 1).reshape(2 * bags, *shape[1:])[::2]
    offsets, factors, no = [None] * count, [None] * count, [False] * count
    padding = more.get("padding", [None] * count)
    return weights, ids, offsets, factors, [*range(count)], [mode] * count, padding, no, no


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("mode", ["sum", "mean", "max", "none"])
@pytest.mark.parametrize(
    ("count", "dim", "bags"), [(26, 64, 19), (5, 130, 8), (2, 7, 40), (1, 1, 1), (3, 16, 0)]
)
@torch.no_grad()
def test_the_same_bits(count: int, dim: int, bags: int, mode: str, dtype: torch.dtype) -> None:
    args = lookups(count, dim, bags, mode, dtype)
    x = torch.randn(bags, dim, generator=torch.Generator().manual_seed(1))
    li, lj = torch.tril_indices(count + 1, count + 1, -1)
    rows, later = stacked(*args), unread(*args)
    assert [type(u) for u in later] == [UnreadRows]
    for first, dense, pad in ((True, x, 1), (False, None, 0)):
        pairs = (li, lj) if first else (li.flip(0), lj.flip(0))  # a triangle, and a list of pairs
        call = (dense, *pairs, pad)
        features: list[list[Any]] = [[x, *r] if first else [*r, x] for r in (rows, later)]
        want, got = (_DOT.target.direct(f, *call) for f in features)
        assert torch.equal(got, want)
    wide = [w.double()[i.reshape(-1).long()] for w, i in zip(args[0], args[1], strict=True)]
    truth = _DOT.reference([x.double(), *wide], x.double(), li, lj, 1)
    got = _DOT.target.direct([x, *unread(*args)], x, li, lj, 1)
    torch.testing.assert_close(got.double(), truth, rtol=1e-5, atol=2e-5)


@torch.no_grad()
def test_what_is_no_row_as_it_is_is_read() -> None:
    several, padded = lookups(3, 8, 4, ids=2), lookups(3, 8, 4, padding=[None, 2, None])
    weighed = lookups(3, 8, 4)
    weighed[3][1] = torch.rand(4, 1)
    half = lookups(3, 8, 4)
    half[0][:] = [w.half() for w in half[0]]
    for args in (several, padded, weighed, half):
        (found,) = unread(*args)
        assert torch.equal(found, stacked(*args)[0])
    with torch.enable_grad():
        assert isinstance(unread(*lookups(3, 8, 4))[0], Tensor)


@torch.no_grad()
def test_an_interaction_that_cannot_reads_them_first() -> None:
    """Features of float64: the reference runs, on the same rows."""
    args, li_lj = lookups(3, 8, 4), torch.tril_indices(4, 4, -1)
    x = torch.randn(4, 8, dtype=torch.float64)
    found = _DOT.target.direct([x, *unread(*args)], None, *li_lj, 0)
    want = _DOT.reference([x, *stacked(*args)], None, *li_lj, 0)
    assert torch.equal(found, want)


@torch.no_grad()
def test_wrong_ids_are_named_where_they_are_looked_up() -> None:
    args = lookups(3, 8, 4)
    args[1][2][3] = 9
    with pytest.raises(IdError, match=r"id 9 of lookup 2 .*outside its 9 rows"):
        unread(*args)


class OneIdEach(nn.Module):
    """The least DLRM."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(9, 4, mode="sum") for _ in range(3))

    def forward(self, x: Tensor, ids: list[Tensor]) -> Tensor:
        rows = [table(i) for table, i in zip(self.tables, ids, strict=True)]
        z = torch.stack([x, *rows], 1)
        li, lj = torch.tril_indices(4, 4, -1)
        return torch.cat([x, torch.bmm(z, z.transpose(1, 2))[:, li, lj]], 1)


def test_a_model_uses_it_without_gradients_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = OneIdEach()
    batch = torch.randn(5, 4), [torch.randint(9, (5, 1)) for _ in model.tables]
    fast = recast.optimize(model, example=batch)
    made: list[UnreadRows] = []

    def counted(*args: Any) -> UnreadRows:
        made.append(UnreadRows(*args))
        return made[-1]

    def fail(rows: Any) -> None:
        raise AssertionError("the interaction did not take them as they are")

    monkeypatch.setattr(
        import_module("recast.runtime.embedding.embedding_bags"), "UnreadRows", counted
    )
    monkeypatch.setattr(unread_rows, "read", fail)
    fast(*batch).sum().backward()
    assert not made
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(fast(*batch), model(*batch), rtol=1e-4, atol=1e-5)
    assert len(made) == 2
    with torch.no_grad(), torch.profiler.profile(acc_events=True) as profile:  # wants both
        fast(*batch)
    names = {event.name for event in profile.events() or ()}
    assert {"recast::embedding_bags", "recast::dot_interaction"} <= names
    assert len(made) == 2


def test_not_across_a_write() -> None:
    """An in-place op between the two may write to a table or ids: then rows are read at once."""
    aten = torch.ops.aten
    for between, quiet in ((aten.relu.default, True), (aten.relu_.default, False)):
        graph = fx.Graph()
        ids = graph.placeholder("x")
        bags = graph.call_function(_BAGS.target, ([ids] * 2,) * 2)
        parts = [graph.call_function(getitem, (bags, k)) for k in range(2)]
        graph.call_function(between, (ids,))
        dot = graph.call_function(_DOT.target, (parts, None, ids, ids, 0))
        graph.output(dot)
        assert stacks._quiet(bags, dot) == quiet
