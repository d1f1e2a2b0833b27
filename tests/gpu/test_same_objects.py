"""The check of all objects before a replay: each change of one of them is noticed, with the
extension and without it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from recast.runtime import device
from recast.runtime.recorded.state.same import (
    ReferenceCounts,
    TensorLayouts,
    Versions,
    attributes_of,
    have_only,
    held_in_torch,
    same_attributes,
    same_items,
    same_objects,
    same_reference_counts,
    same_values,
    set_attributes,
    values_of,
)


@pytest.fixture(autouse=True, params=["extension", "torch"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "extension":
        if not hasattr(device.extension(), "same_items"):
            pytest.skip(device.why_missing() or "an extension of before")
        yield request.param
    else:
        with device.use("torch"):
            yield request.param


class Thing:
    calls = 0

    def __init__(self) -> None:
        self.a, self.b = object(), None

    @property
    def asked(self) -> int:
        Thing.calls += 1
        return Thing.calls // 10**9


def test_attributes() -> None:
    things = [Thing() for _ in range(4)]
    names = ("a", "b", "asked")
    known = attributes_of(things, names)
    assert len(known) == 12 and same_attributes(things, names, known)
    assert same_attributes(things, ("a",), known[::3])
    assert not same_attributes(things, names, known[:-1]) and not same_attributes(
        things, names, [*known, 0]
    )
    assert not same_attributes(things[:-1], names, known)
    things[3].a = object()
    assert not same_attributes(things, names, known)
    del things[0].a
    with pytest.raises(AttributeError):
        same_attributes(things, names, known)


def test_values() -> None:
    dicts: list[dict[object, object]] = [{}, {1: "a", 2: None}, OrderedDict(x=things()), {}]
    known = values_of(dicts)
    assert len(known) == 3 and same_values(dicts, known)
    for k, key, value in ((0, 1, None), (1, 2, 0), (2, "x", things()), (3, 0, "a"), (1, 3, None)):
        before = dict(dicts[k])
        dicts[k][key] = value
        assert not same_values(dicts, known), (k, key)
        dicts[k].clear()
        assert same_values(dicts, known) == (not before)
        dicts[k].update(before)
        assert same_values(dicts, known)
    with pytest.raises(TypeError):
        same_values([[]], [])  # type: ignore[list-item]


def things() -> list[object]:
    return [object()]


def test_items() -> None:
    dicts: list[dict[str, object]] = [{"a": 1.5, "b": None}, OrderedDict(a=things())]
    held, keys, absent = [*[dicts[0]] * 3, dicts[1]], ["a", "b", "c", "a"], object()
    known = [d.get(k, absent) for d, k in zip(held, keys, strict=True)]
    dicts[1]["other"] = 3
    assert same_items(held, keys, known, absent)
    changes: list[Callable[[], object]] = [
        lambda: dicts[0].update(a=2.5), lambda: dicts[0].pop("b"),
        lambda: dicts[0].update(c=None), lambda: dicts[1].update(a=things()),
    ]  # fmt: skip
    for change in changes:
        before = [dict(d) for d in dicts]
        change()
        assert not same_items(held, keys, known, absent)
        for d, old in zip(dicts, before, strict=True):
            d.clear()
            d.update(old)
        assert same_items(held, keys, known, absent)
    with pytest.raises(ValueError):
        same_items(held, keys[1:], known, absent)


def made() -> list[Tensor]:
    return [
        nn.Parameter(torch.zeros(4, 4)), torch.zeros(3, 2, 2).transpose(1, 2), torch.zeros(()),
        torch.zeros(0, 3), nn.Parameter(torch.zeros(2), requires_grad=False),
    ]  # fmt: skip


class Other(Tensor):
    """A class of its own, which the extension does not read."""


@pytest.mark.parametrize("other", [False, True])
def test_where_tensors_lie(other: bool) -> None:
    tensors = made() + ([torch.zeros(2).as_subclass(Other)] if other else [])
    where = TensorLayouts(tensors)
    with torch.no_grad():
        for t in tensors:
            t.add_(1)
        assert where.unchanged(), "they may be written to"
    base = tensors[0].data
    changes: list[Tensor] = [
        base.clone(), base.t(), base.view(2, 8), base[:2], base.view(-1), base.view(torch.int32),
        base[1:],
    ]  # fmt: skip
    for data in changes:
        if data.dtype != base.dtype:
            tensors[2].data, kept = torch.zeros((), dtype=data.dtype), tensors[2].data
            assert not where.unchanged()
            tensors[2].data = kept
        else:
            tensors[0].data = data
            assert not where.unchanged(), data.shape
            tensors[0].data = base
        assert where.unchanged()
    tensors[1].transpose_(0, 1)
    assert not where.unchanged()
    assert TensorLayouts([]).unchanged()


class Property(nn.Parameter):
    """Its ``grad`` is not torch's."""

    @property  # type: ignore[override]
    def grad(self) -> str:
        return "ours"

    @grad.setter
    def grad(self, value: object) -> None:
        self.given = value


def test_attributes_of_tensors() -> None:
    """Torch's are read and set without a look-up for each; those of subclasses are their own."""
    tensors = [nn.Parameter(torch.zeros(2)), torch.zeros(2), Property(torch.zeros(2))]
    grads = [torch.ones(2), None, torch.ones(2)]
    set_attributes(tensors, "grad", grads)
    assert tensors[0].grad is grads[0] and tensors[1].grad is None
    assert tensors[2].grad == "ours" and vars(tensors[2])["given"] is grads[2]
    names = ("grad", "requires_grad", "_backward_hooks")
    known = [grads[0], True, None, None, False, None, "ours", True, None]
    assert same_attributes(tensors, names, known)
    tensors[1].requires_grad_()
    assert not same_attributes(tensors, names, known)
    with pytest.raises(RuntimeError):
        set_attributes(tensors, "grad", [torch.ones(3), None, None])
    with pytest.raises(ValueError):
        set_attributes(tensors, "grad", [None])


def test_versions() -> None:
    tensors = made()
    versions = Versions(tensors)
    assert versions.unchanged()
    for t in tensors:
        with torch.no_grad():
            t.add_(1)
        assert not versions.unchanged()
        versions.renew()
        assert versions.unchanged()
    assert Versions([]).unchanged()


def test_reference_counts() -> None:
    held: list[object] = [things(), torch.zeros(2), Thing()]
    counts = ReferenceCounts(held)
    assert counts.unchanged()
    for k in range(len(held)):
        another = held[k]
        assert not counts.unchanged()
        del another
        assert counts.unchanged()


def test_the_same_objects() -> None:
    held: list[object] = [things(), torch.zeros(2), Thing()]
    assert same_objects(held, [*held]) and same_objects((*held,), held) and same_objects([], [])
    assert not same_objects(held, held[:2]) and not same_objects(held[:2], held)
    assert not same_objects(held, [held[0], torch.zeros(2), held[2]])


def test_as_many_references_as_the_first() -> None:
    held: list[object] = [object() for _ in range(4)]
    assert same_reference_counts(held) and same_reference_counts(held[:1])
    for k in range(4):
        another = held[k]
        assert not same_reference_counts(held)
        del another
        assert same_reference_counts(held)


def test_tensors_that_torch_holds_too() -> None:
    tensors = made()
    before = uses(tensors)
    held = held_in_torch(tensors)
    assert held is None or uses(tensors) == [n + 1 for n in before]
    del held
    assert uses(tensors) == before and held_in_torch([]) is None


def uses(tensors: list[Tensor]) -> list[int]:
    return [t._use_count() for t in tensors]  # type: ignore[attr-defined]


def test_objects_with_one_attribute() -> None:
    tensors, values = made(), [object() for _ in range(5)]
    for t, value in zip(tensors, values, strict=True):
        t.only = value  # type: ignore[attr-defined]
    assert have_only(tensors, values)
    assert not have_only(tensors, [*values[:4], object()])
    tensors[2].more = values[2]  # type: ignore[attr-defined]
    assert not have_only(tensors, values)
    vars(tensors[2]).clear()
    assert not have_only(tensors, values)
