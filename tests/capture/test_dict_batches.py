"""``example={...}``: arguments by name, or the one argument that is a dict; what is neither is told
apart by its keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.errors import UsageError
from recast.rewriter.capture.capture_model import capture
from recast.rewriter.diff.equivalence import batches_of

IDS = torch.tensor([1, 5, 5, 0, 7, 2, 9, 3])


class Two(nn.Module):
    """Several arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 4)
        self.top = nn.Linear(8, 1)

    def forward(self, user: Tensor, item: Tensor, scale: float = 1.0) -> Tensor:
        return self.top(torch.cat([self.rows(user), self.rows(item)], 1)) * scale


class ByKeyword(Two):
    def forward(self, *, user: Tensor, item: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(user, item)


class Open(Two):
    def forward(self, user: Tensor, **others: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(user, others["item"])


class One(Two):
    """One argument, a dict."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(batch["user"], batch["item"])


@pytest.mark.parametrize("model", [Two, ByKeyword, Open, One])
@pytest.mark.parametrize("names", [("user", "item"), ("item", "user")])
def test_a_dict_is_taken_as_the_model_takes_it(model: Any, names: tuple[str, str]) -> None:
    plain, given = model(), {name: IDS + k for k, name in enumerate(names[::-1])}
    given = {name: given[name].clamp(max=9) for name in names}
    fast = recast.optimize(plain, example=given)
    assert fast.report.captured == "whole"
    call = (lambda m: m(given)) if model is One else (lambda m: m(**given))
    torch.testing.assert_close(call(fast), call(plain))


@pytest.mark.parametrize("model", [Two, One])
def test_a_diff_takes_the_same_example(model: Any) -> None:
    plain, given = model(), {"item": IDS, "user": IDS.flip(0)}
    fast = recast.optimize(plain, example=given)
    assert recast.diff(plain, fast, given, steps=1).ok
    assert recast.diff(plain, fast, [given, {k: v[:3] for k, v in given.items()}], steps=1).ok


class Row(NamedTuple):
    user: Tensor
    item: Tensor


class Named(Two):
    """One argument, a named tuple."""

    def forward(self, row: Row) -> Tensor:  # type: ignore[override]
        return super().forward(row.user, row.item)


@pytest.mark.parametrize(
    ("model", "example", "batches"),
    [
        (Two(), (IDS, IDS), [(IDS, IDS)]),
        (Two(), [IDS, IDS], [(IDS, IDS, 1.0)]),
        (Two(), [(IDS, IDS), (IDS[:3], IDS[:3])], [(IDS, IDS), (IDS[:3], IDS[:3])]),
        (nn.Linear(3, 1), IDS, [(IDS,)]),
        (nn.Linear(3, 1), [IDS, IDS[:3]], [(IDS,), (IDS[:3],)]),
        (Named(), Row(IDS, IDS), [(Row(IDS, IDS),)]),
        (One(), [{"user": IDS}] * 3, [({"user": IDS},)] * 3),
    ],
)
def test_a_diff_takes_for_a_batch_what_optimize_does(
    model: nn.Module, example: Any, batches: list[Any]
) -> None:
    found = batches_of(example, model)
    assert len(found) == len(batches)
    for got, wanted in zip(found, batches, strict=True):
        assert str(got) == str(wanted)


def test_a_batch_of_a_forward_that_cannot_be_read() -> None:
    model = nn.Module()
    model.forward = torch.sigmoid  # type: ignore[method-assign]
    assert batches_of(IDS, model) == [(IDS,)]


def test_a_diff_of_arguments_by_keyword_only_is_refused() -> None:
    plain, given = ByKeyword(), {"item": IDS, "user": IDS}
    with pytest.raises(UsageError, match="user, item by keyword only"):
        recast.diff(plain, plain, given)


def test_keywords_that_have_their_defaults_are_left_out_of_batches() -> None:
    class Scaled(nn.Module):
        def forward(self, ids: Tensor, *, scale: float = 1.0) -> Tensor:
            return ids * scale

    assert batches_of(IDS, Scaled()) == batches_of({"ids": IDS}, Scaled()) == [(IDS,)]
    with pytest.raises(UsageError, match="takes scale by keyword only"):
        batches_of({"ids": IDS, "scale": 2.0}, Scaled())


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("user",), "the dict lacks 'item'"),
        (("user", "itm"), "the dict lacks 'item' and has 'itm' besides"),
        (("user", "item", "label"), "the dict has 'label' besides"),
    ],
)
def test_keys_that_do_not_fit_are_named(keys: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        capture(Two(), dict.fromkeys(keys, IDS))
    assert caught.value.what == f"example: {said}"
    assert caught.value.tries[0] == "example={'user': ..., 'item': ...}"


def test_a_dict_as_the_sole_argument_is_told_where_the_model_refuses_it() -> None:
    with pytest.raises(UsageError, match="the plain model raises on it") as caught:
        capture(nn.Embedding(10, 4), {"ids": IDS})
    told = "model(example): a dict is the argument 'input'", "example={'input': ...}"
    assert caught.value.tries == told
