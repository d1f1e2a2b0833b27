"""Cross entropy, of logits and of a layer: several pieces, no number, wrong classes, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import recast.runtime as _  # noqa: F401  (registers the ops)
from recast.errors import IdError, InputError
from recast.runtime import device, tolerances
from recast.runtime.layers import linear_cross_entropy as linear

LOGITS = torch.ops.recast.cross_entropy.default
LAYER = torch.ops.recast.linear_cross_entropy.default
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def _kernels() -> Any:
    if device.extension() is None:
        pytest.skip("without the C++ kernels")
    with device.use("fused"):
        yield


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def ids(rows: int, classes: int) -> Tensor:
    return torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(rows))


def of_all(call: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """The result of ``call`` and its gradients under a random upstream gradient."""
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, rand(*out.shape, seed=7).to(out.dtype))]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_pieces_give_the_whole(
    reduction: str, ignored: str, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """45 rows in pieces of 4: 11 and one row, or 7 and some."""
    monkeypatch.setattr(linear, "FEWEST", 4)
    monkeypatch.setattr(linear, "ROOM", 1)
    x, weight, bias, y = rand(45, 6), rand(37, 6), rand(37), ids(45, 37)
    if ignored != "none":
        y[:: 3 if ignored == "some" else 1] = -100
    setting = reduction, -100, smoothing

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.cross_entropy(
            F.linear(x, weight, bias), y, reduction=reduction, label_smoothing=smoothing
        )

    ours = of_all(lambda *args: LAYER(*args, y, *setting), [x, weight, bias])
    usual = of_all(plain, [x, weight, bias])
    truth = of_all(plain, [x.double(), weight.double(), bias.double()])
    for mine, theirs, exact in zip(ours, usual, truth, strict=True):
        assert mine.shape == theirs.shape
        assert tolerances.excess(mine, theirs, exact, scale=10.0) <= 1
        assert torch.equal(mine.isnan(), theirs.isnan())


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    x, weight, y = rand(45, 6), rand(37, 6), ids(45, 37)
    for k in range(2):
        leaves = [x.clone(), weight.clone()]
        leaves[k].requires_grad_()
        found = torch.autograd.grad(LAYER(*leaves, None, y, "mean", -100, 0.0), leaves[k])
        wanted = torch.autograd.grad(F.cross_entropy(leaves[0] @ leaves[1].t(), y), leaves[k])
        torch.testing.assert_close(found, wanted)


def test_a_second_backward_gives_the_same() -> None:
    x, weight, y = rand(45, 6).requires_grad_(), rand(37, 6).requires_grad_(), ids(45, 37)
    out = LAYER(x, weight, None, y, "mean", -100, 0.0)
    one = torch.autograd.grad(out, [x, weight], retain_graph=True)
    for grad in one:
        grad.mul_(3.0)
    two = torch.autograd.grad(out * 3.0, [x, weight])
    torch.testing.assert_close(two, one)


@pytest.mark.parametrize(
    "row",
    [[NAN, 1.0, 2.0], [-INF, -INF, -INF], [INF, 1.0, 2.0], [-INF, NAN, 2.0], [-INF, -INF, 2.0]],
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignore", [-100, 1])
def test_no_numbers_where_torch_has_none(row: list[float], smoothing: float, ignore: int) -> None:
    """At the beginning of rows of several blocks and at their ends."""
    x = rand(4, 5003)
    x[1, :3], x[2, -3:] = torch.tensor(row), torch.tensor(row)
    x[3] = row[0]
    y = torch.tensor([4, 2, 1, 1])
    ours = of_all(lambda x: LOGITS(x, y, "none", ignore, smoothing), [x])
    plain = of_all(
        lambda x: F.cross_entropy(
            x, y, reduction="none", ignore_index=ignore, label_smoothing=smoothing
        ),
        [x],
    )
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


@pytest.mark.parametrize("value", [NAN, INF])
def test_rows_without_a_class_still_hand_on_what_is_no_number(value: float) -> None:
    x, weight, y = rand(20, 6), rand(37, 6), ids(20, 37)
    y[3:9] = -100
    x[5, 2] = value
    ours = of_all(lambda x, w: LAYER(x, w, None, y, "mean", -100, 0.0), [x, weight])
    plain = of_all(lambda x, w: F.cross_entropy(x @ w.t(), y), [x, weight])
    assert plain[2].isnan().any()
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


@pytest.mark.parametrize("training", [False, True])
def test_a_class_that_there_is_not(training: bool) -> None:
    y = ids(20, 37)
    y[:4], y[11] = -100, 37
    x, weight = rand(20, 6), rand(37, 6)
    for t in (x, weight):
        t.requires_grad_(training)
    with pytest.raises(IdError, match="target 37 of row 11 is no class"):
        LAYER(x, weight, None, y, "mean", -100, 0.0)
    with pytest.raises(IndexError, match="37 of row 11"):
        LOGITS(x @ weight.t(), y, "mean", -100, 0.0)


def test_targets_written_to_unseen_are_refused() -> None:
    x, y = rand(20, 37).requires_grad_(), ids(20, 37)
    out = LOGITS(x, y, "mean", -100, 0.0)
    y.numpy()[5] = 1 << 40
    with pytest.raises(ValueError, match="the targets have changed"):
        out.backward()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"y": ids(7, 5)}, "one class for each row"),
        ({"reduction": "median"}, "one of none, mean, sum"),
        ({"smoothing": 1.5}, "between 0 and 1"),
        ({"weight": rand(5, 4)}, "rows of one width"),
        ({"bias": rand(4)}, "a bias of"),
    ],
)
def test_bad_arguments(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "x": rand(6, 3), "weight": rand(5, 3), "bias": rand(5), "y": ids(6, 5),
        "reduction": "mean", "ignored": -100, "smoothing": 0.0,
    }  # fmt: skip
    given |= change
    with pytest.raises(InputError, match=words):
        LAYER(*given.values())


def test_small_layers_are_computed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    args = rand(45, 6), rand(37, 6), rand(37), ids(45, 37), "mean", -100, 0.0
    piece = of_all(lambda *leaves: LAYER(*leaves, *args[3:]), [*args[:3]])
    monkeypatch.setattr(device, "forced", lambda: False)
    monkeypatch.setattr(linear, "_native", None)  # is not called
    monkeypatch.setattr(linear.cross_entropy, "FEW", 0)
    whole = of_all(lambda *leaves: LAYER(*leaves, *args[3:]), [*args[:3]])
    torch.testing.assert_close(whole, piece)
