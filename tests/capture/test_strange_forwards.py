"""Forwards that do what no graph can: left to torch, with the reason, or checked at each call."""

from __future__ import annotations

import contextlib
import copy
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from strange import IDS, Base, pair, why
from torch import Tensor, nn

import recast
from recast.errors import RecastWarning

# ---------------------------------------------------------------- gradients


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class NewFunction(Base):
    def forward(self, ids: Tensor) -> Tensor:
        return Reversed.apply(self.rows(ids))  # type: ignore[no-any-return, no-untyped-call]


class ExactType(Base):
    def forward(self, ids: Tensor) -> Tensor:
        e = self.emb(ids).sum(1)
        return self.out(e.detach() if type(e) is torch.Tensor else e)  # type: ignore[no-any-return]


class History(Base):
    def forward(self, ids: Tensor) -> Tensor:
        e = self.emb(ids).sum(1)
        return self.out(e.detach() if e.grad_fn is not None else e)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [NewFunction, ExactType, History])
def test_gradients_are_the_models(kind: type[Base]) -> None:
    plain, fast = pair(kind)
    for model in (plain, fast):
        (model(IDS) * torch.linspace(-1, 1, 12).view(6, 2)).sum().backward()
    for p, q in zip(plain.parameters(), fast.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(q.grad + 0, p.grad)
    if kind is ExactType:
        assert fast.report.to_dict()["captured"] == "whole"


# ---------------------------------------------------------------- arguments


class Adds(Base):
    def forward(self, batch: dict[str, Any]) -> Tensor:
        batch["rows"] = self.rows(batch["ids"])
        batch["inner"]["ids"] = batch["ids"] * 2
        batch["inner"]["kept"] = [batch["rows"].detach(), {"size": len(batch["ids"]), "two": 2}]
        return batch["rows"] * 2  # type: ignore[no-any-return]


def test_what_forward_puts_into_its_argument_is_there() -> None:
    plain, fast = pair(Adds, {"ids": IDS, "inner": {"ids": IDS}})
    assert fast.report.to_dict()["captured"] == "whole"
    for rows in (3, 6):
        batches: list[Any] = [{"ids": IDS[:rows], "inner": {"ids": IDS}} for _ in range(2)]
        for model, batch in zip((plain, fast), batches, strict=True):
            out = model(batch)
            torch.testing.assert_close(out, batch["rows"] * 2)
            (grad,) = torch.autograd.grad(batch["rows"].square().sum(), model.emb.weight)
            batch["grad"] = grad + 0
        torch.testing.assert_close(batches[1], batches[0])
        assert list(batches[1]) == list(batches[0])
    given: dict[str, Any] = {"ids": IDS[:3], "inner": {"ids": IDS}}
    assert recast.diff(plain, fast, (given,)).ok
    fast(given)
    with pytest.warns(RecastWarning, match="another structure"):  # it has more in it now
        fast(given)


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch.pop("spare"),
        lambda batch: batch["many"].append(batch["ids"]),
        lambda batch: batch["many"].__setitem__(0, batch["ids"] * 1),
        lambda batch: batch.setdefault("made", types.SimpleNamespace(ids=batch["ids"])),
        lambda batch: batch.setdefault("made", [batch]),
    ],
    ids=["removed", "appended", "replaced in a list", "object", "itself"],
)
def test_other_changes_of_an_argument_are_its_own(change: Callable[[Any], Any]) -> None:
    class Changes(Base):
        def forward(self, batch: dict[str, Any]) -> Tensor:
            change(batch)
            return self.rows(batch["ids"])  # type: ignore[no-any-return]

    plain, fast = pair(Changes, {"ids": IDS, "spare": IDS, "many": [IDS]})
    assert "forward changes what is in" in why(fast)
    batches: list[Any] = [{"ids": IDS, "spare": IDS, "many": [IDS]} for _ in range(2)]
    torch.testing.assert_close(fast(batches[0]), plain(batches[1]))
    assert list(batches[0]) == list(batches[1])
    assert len(batches[0]["many"]) == len(batches[1]["many"])


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch's compiler looks at
def test_what_forward_puts_there_under_torch_compile() -> None:
    plain, fast = pair(Adds, {"ids": IDS, "inner": {"ids": IDS}})
    batches: list[Any] = [{"ids": IDS[:4], "inner": {"ids": IDS}} for _ in range(2)]
    compiled: Any = torch.compile(fast, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(batches[0]), plain(batches[1]))
    torch.testing.assert_close(batches[0], batches[1])


class Moves(Base):
    """Takes dicts in a tuple and a list, and puts what it moved to its device back into one."""

    def forward(self, batch: tuple[dict[str, Tensor], list[dict[str, Tensor]], Tensor]) -> Tensor:
        ids, (items,), mask = batch
        for name, value in items.items():
            items[name] = value.to(mask.device)
        items["masked"] = mask * items["weight"]
        return (self.rows(ids["ids"]) * items["masked"].unsqueeze(-1)).sum(0)  # type: ignore[no-any-return]


def test_entries_written_to_dicts_in_a_tuple() -> None:
    def batch(rows: int) -> Any:
        return {"ids": IDS[:rows]}, [{"weight": torch.rand(rows)}], torch.rand(rows)

    plain, fast = pair(Moves, batch(6))
    assert fast.report.to_dict()["captured"] == "whole"
    for rows in (3, 6):
        given = batch(rows)
        twin = copy.deepcopy(given)
        held = given[1][0]["weight"]
        torch.testing.assert_close(fast(given), plain(twin))
        torch.testing.assert_close(given, twin)
        assert given[1][0]["weight"] is held  # it was there already


class Doubles(Base):
    """Takes two dicts, which may be the same, or lie in others that are the same."""

    def forward(self, batch: dict[str, Any], other: dict[str, Any]) -> Tensor:
        batch["inner"]["weight"] = batch["inner"]["weight"] * 2
        return self.rows(batch["ids"]) * batch["inner"]["weight"] + other["inner"]["weight"]  # type: ignore[no-any-return]


def test_a_dict_that_forward_writes_to_and_is_given_twice() -> None:
    def batch() -> dict[str, Any]:
        return {"ids": IDS, "inner": {"weight": torch.ones(6, 1)}}

    plain, fast = pair(Doubles, batch(), batch())
    assert fast.report.to_dict()["captured"] == "whole"
    torch.testing.assert_close(fast(batch(), batch()), plain(batch(), batch()))
    once = batch()
    want = plain(once, once)
    for ways in (lambda one: (one, one), lambda one: (one, {**one})):
        given = ways(batch())
        warned = pytest.warns(RecastWarning, match="in two places")
        with warned if given[0] is given[1] else contextlib.nullcontext():  # once
            torch.testing.assert_close(fast(*given), want)
        torch.testing.assert_close(given[0], once)


class Given(Base):
    def forward(self, ids: Tensor, given: Any) -> Tensor:
        factor = given.factor if hasattr(given, "factor") else float(sum(given))
        return self.rows(ids) * factor


@pytest.mark.parametrize("name", ["object", "array", "set"])
def test_an_argument_that_was_changed_in_place(name: str) -> None:
    given: Any = {
        "object": types.SimpleNamespace(factor=2.0), "array": np.array([1.0, 2.0]), "set": {1, 2},
    }[name]  # fmt: skip
    plain, fast = pair(Given, IDS, given)
    torch.testing.assert_close(fast(IDS, given), plain(IDS, given))
    if name == "object":
        given.factor = 5.0
    elif name == "array":
        given[0] = 7.0
    else:
        given.add(9)
    with pytest.warns(RecastWarning, match="given is another"):
        torch.testing.assert_close(fast(IDS, given), plain(IDS, given))


class Proxied(Base):
    def forward(self, batch: Any) -> Tensor:
        return self.rows(batch["ids"])


def test_a_mapping_that_cannot_be_written() -> None:
    plain, fast = pair(Proxied, types.MappingProxyType({"ids": IDS}))
    batch = types.MappingProxyType({"ids": IDS[:2]})
    torch.testing.assert_close(fast(batch), plain(batch))


# ---------------------------------------------------------------- other shapes, dtypes, errors


class MeanOfRows(Base):
    def forward(self, ids: Tensor) -> Tensor:
        return self.emb(ids).mean(-2)  # type: ignore[no-any-return]


def test_another_number_of_dimensions() -> None:
    plain, fast = pair(MeanOfRows)
    for ids in (IDS.view(2, 3, 4), IDS[0]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecastWarning)
            torch.testing.assert_close(fast(ids), plain(ids))
    torch.testing.assert_close(fast(IDS), plain(IDS))


class ByDtype(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.mean(1) if x.is_floating_point() else x.sum(1)
        return x if x.is_contiguous() else x * 2


class ByLayout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1) if x.is_contiguous() else x.mean(1)


@pytest.mark.parametrize("kind", [ByDtype, ByLayout])
def test_dtype_and_layout_that_forward_asks_for(kind: type[nn.Module]) -> None:
    x = torch.randn(6, 5)
    fast = recast.optimize(kind(), example=x)
    for given in (x, x[:4].long(), torch.randn(5, 7).t()[:, ::1]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecastWarning)
            torch.testing.assert_close(fast(given), kind()(given))


class Unknown(Base):
    def forward(self, ids: Tensor) -> Tensor:
        try:
            e = self.emb(ids)
        except IndexError:
            e = self.emb(ids.clamp(0, 8)) * 0.5
        return e.sum(1)  # type: ignore[no-any-return]


class UnknownAtAll(Base):
    def forward(self, ids: Tensor) -> Tensor:
        try:
            e = self.emb(ids)
        except:  # noqa: E722
            e = self.emb(ids.clamp(0, 8)) * 0.5
        return e.sum(1)  # type: ignore[no-any-return]


class Forgiving:
    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *about: object) -> bool:
        return kind is IndexError


class UnknownInBlock(Base):
    def forward(self, ids: Tensor) -> Tensor:
        e = self.emb(ids.clamp(0, 8)) * 0.5
        with Forgiving():
            e = self.emb(ids)
        return e.sum(1)  # type: ignore[no-any-return]


class Views(Base):
    def forward(self, ids: Tensor) -> Tensor:
        e = self.emb(ids)
        with contextlib.suppress(RuntimeError):
            e = e.view(ids.shape[0], -1, 3, 4).sum(1)
        return e.sum(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Unknown, UnknownAtAll, UnknownInBlock])
def test_errors_that_forward_catches(kind: type[Base]) -> None:
    plain, fast = pair(kind)
    with pytest.warns(RecastWarning, match="forward catches errors"):
        torch.testing.assert_close(fast(IDS + 3), plain(IDS + 3))


def test_errors_that_forward_catches_in_the_trace() -> None:
    plain, fast = pair(Views)
    assert "goes on after an error" in why(fast)
    ids = IDS.view(4, 6)
    torch.testing.assert_close(fast(ids), plain(ids))


@torch.compile(backend="eager", fullgraph=True)
def _wave(x: Tensor) -> Tensor:
    return torch.sin(x) * 2


class Compiles(Base):
    def forward(self, ids: Tensor) -> Tensor:
        return _wave(self.rows(ids))


class Branches(Base):
    def forward(self, ids: Tensor) -> Tensor:
        rows = self.rows(ids)
        found: Tensor = torch.cond(rows.sum() > 0, torch.sin, torch.cos, (rows,))
        return found


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch's compiler looks at
@pytest.mark.parametrize("kind", [Compiles, Branches])
def test_what_compiles_inside_forward(kind: type[Base]) -> None:
    plain, fast = pair(kind)
    torch.testing.assert_close(fast(IDS), plain(IDS))


class Lengths:
    """Values and lengths; the offsets are made on first use."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._offsets: Tensor | None = None

    def offsets(self) -> Tensor:
        if self._offsets is None:
            self._offsets = torch.arange(0, self.values.numel(), self.values.shape[1])
        return self._offsets


class OfLengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.out = nn.EmbeddingBag(9, 4), nn.Linear(4, 2)

    def forward(self, given: Lengths) -> Tensor:
        found: Tensor = self.out(self.emb(given.values.reshape(-1), given.offsets()))
        return found


def test_what_an_argument_keeps_for_itself() -> None:
    plain = OfLengths()
    fast = recast.optimize(copy.deepcopy(plain), example=(Lengths(IDS),))
    assert fast.report.captured == "whole"
    torch.testing.assert_close(fast(Lengths(IDS[:2])), plain(Lengths(IDS[:2])))


class Chosen(Base):
    """A loop over rows that a mask selects from products with a mask of floats."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = torch.bmm((ids > 0).float().unsqueeze(1), self.emb(ids)).squeeze(1)
        total = torch.zeros(4)
        for row in h[mask]:
            total = total + row
        return self.out(h + total)


def test_sizes_of_products_of_masks_are_asked() -> None:
    plain, fast = pair(Chosen, IDS, torch.arange(6) < 2)
    for ids in (IDS, IDS.flip(0)):  # a warning would be an error
        mask = torch.arange(6) < 2
        torch.testing.assert_close(fast(ids, mask), plain(ids, mask))


class MultipliedOnes(Base):
    """Writes to a tensor of its own: to write the same twice changes nothing."""

    def forward(self, ids: Tensor) -> Tensor:
        kept = torch.ones(4)
        kept *= (ids[0] > 4).float()
        return self.out(self.emb(ids).sum(1) * kept)  # type: ignore[no-any-return]


class AddedZeros(Base):
    def forward(self, ids: Tensor) -> Tensor:
        total = torch.zeros(4)
        total += ids[0]
        return self.out(self.emb(ids).sum(1) * total)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [MultipliedOnes, AddedZeros])
def test_constants_are_as_they_were_before_a_write(kind: type[Base]) -> None:
    plain, fast = pair(kind, IDS)
    assert fast.report.captured == "whole"
    for ids in (IDS, 8 - IDS):
        torch.testing.assert_close(fast(ids), plain(ids))
